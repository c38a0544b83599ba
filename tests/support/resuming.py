"""Runs that are cut off and go on: what must be the same as without the cut."""

import errno
import json
from pathlib import Path

import pytest
from support.runs import same_bits, weights

from hpcvfl.engine import sets
from hpcvfl.engine.run import train
from hpcvfl.transport.threads import ThreadsWorld

UNTIMED = ("metrics.jsonl", "messages.jsonl", "steps.jsonl")
"""Books of rank 0; all but the seconds in them must be the same."""


class Cut(Exception):
    """What ends a run in the middle, as a kill would: nothing is written after it."""


def cut_at(rounds, rank=0):
    """An after_round that ends the run at `rank` after so many rounds."""

    def after_round(run, result):
        if run.rounds == rounds and run.transport.rank == rank:
            raise Cut

    return after_round


def resumed(config, folder="auto"):
    """The same run, to go on with what is there."""
    run = config.run.model_copy(update={"resume": str(folder)})
    return config.model_copy(update={"run": run})


def books(folder):
    """Every line that a run wrote, without seconds; ledgers as they are."""
    folder = Path(folder)
    out = {p.name: p.read_text() for p in sorted(folder.glob("ledger.rank*.jsonl"))}
    for name in UNTIMED:
        lines = [json.loads(text) for text in (folder / name).read_text().splitlines()]
        out[name] = [{k: v for k, v in line.items() if k != "seconds"} for line in lines]
    return out


def same_run(a, b):
    """Whether two runs came to the same: weights and books bit for bit, bytes, metrics."""
    kept = ("metrics", "rounds", "epochs", "wire_bytes", "raw_bytes")
    assert {k: a[k] for k in kept} == {k: b[k] for k in kept}
    ours, theirs = a["wire_bytes_by"], b["wire_bytes_by"]
    assert ours["train"] == theirs["train"]
    # A report's length depends on the seconds in it.
    evals = ({k: v for k, v in x["eval"].items() if "control" not in k} for x in (ours, theirs))
    assert next(evals) == next(evals)
    assert books(a["folder"]) == books(b["folder"])
    return same_bits(weights(a), weights(b))


def interrupted(config, rounds, rank=0, order=None):
    """Run until the cut; the newest run folder."""
    world = ThreadsWorld(len(config.block_of_rank), order=order)
    with pytest.raises(Cut):
        world.run(lambda t: train(config, t, after_round=cut_at(rounds, rank)))
    return max(Path(config.run.folder).glob(f"{config.name}-*"))


def full_disk(monkeypatch, rank, rounds):
    """The disk of `rank` is full while checkpoints of `rounds` are written."""
    real = sets.write_tensors

    def write_tensors(path, tensors, said):
        if f"rank{rank}." in path.name and int(path.parent.name[6:]) in rounds:
            path.with_suffix(".tmp").write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, tensors, said)

    monkeypatch.setattr(sets, "write_tensors", write_tensors)
