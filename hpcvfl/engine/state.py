"""What a run is between two rounds, on one rank: what a checkpoint holds.

Not in it, since all of it is drawn or measured anew from the number of the round: batches, dither,
torch's generator (keyed by round), the snapshot of the others (comes with the next exchange; only
where frames travel a round ahead it is here already, and in the checkpoint).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpcvfl.books import crc_of, settle
from hpcvfl.config import Config, all_fields, flatten
from hpcvfl.engine.blocks import Block, Party
from hpcvfl.engine.holder import Holder
from hpcvfl.engine.policies import Plan
from hpcvfl.engine.round import RoundResult
from hpcvfl.engine.sets import Part
from hpcvfl.engine.start import handshake_record
from hpcvfl.errors import DataError

if TYPE_CHECKING:
    from hpcvfl.engine.prepare import Run

FORMAT = 2
"""Of the files; one that another program wrote is refused."""


def due_of(config: Config, block: Block, plan: Plan | None) -> dict[str, Any]:
    """What a run and the checkpoint that it goes on from must have in common, by the name that an
    error shows. The pattern of the exchange is not in it: it changes no bit.
    """
    due = {"checkpoint format": FORMAT} | handshake_record(config, block.shard)
    due["digest of the steps planned"] = plan.digest if plan else "none"
    del due["transport.pattern"]
    local = [path for path, scope in all_fields() if scope == "local"]
    for part in block.blocks:
        values = dict(flatten(part.config.model_dump(mode="json", exclude={"party"})))
        due |= {f"{path} of block {part.block}": values[path] for path in local}
    return due


def part_of(run: Run) -> Part:
    """Everything that this rank needs to go on after `run.rounds` rounds; its books are on the
    disk as far as they are told of. Raises OSError.
    """
    return Part(tensors_of(run), record_of(run))


def tensors_of(run: Run) -> dict[str, torch.Tensor]:
    """Parameters, buffers, optimizer states, scores; what lasts of the messages sent here."""
    out: dict[str, torch.Tensor] = {}
    for block in run.block.blocks:
        state = dict(block.module.state_dict())
        named = {f"module.{n}": v for n, v in state.items()}
        named |= {f"head_copy.{n}": v for n, v in head_buffers(block).items()}
        named |= {f"optimizer.{n}": v for n, v in block.optimizer.state().items()}
        score_C = block.score()
        if score_C is not None:
            named["score"] = torch.from_numpy(score_C)
        out |= {f"block{block.block}.{n}": v for n, v in named.items()}
    if run.ahead:
        out |= {f"ahead.{n}": torch.from_numpy(v) for n, v in run.ahead.state(run.rounds).items()}
    own = run.exchange.own_state()
    return out | {f"stream.{n}": torch.from_numpy(v) for n, v in own.items()}


def head_buffers(block: Block) -> dict[str, torch.Tensor]:
    """Buffers of a party's copy of the head; its parameters come with every downlink."""
    if not isinstance(block, Party):
        return {}
    parameters = dict(block.head_copy.named_parameters(remove_duplicate=False))
    return {n: v for n, v in block.head_copy.state_dict().items() if n not in parameters}


def record_of(run: Run) -> dict[str, Any]:
    """Counters, logs so far and their sizes in bytes, as JSON values."""
    block = run.block
    return {
        "due": due_of(run.config, block, run.plan),
        "rounds": run.rounds,
        "units": run.units,
        "last": astuple(run.last),
        "recent": list(run.recent),
        "rates": [b.optimizer.lr for b in block.blocks],
        "holder": block.state() if isinstance(block, Holder) else None,
        "lines": run.lines,
        "warnings": run.warnings,
        "diverged": sorted(run.diverged),
        "resumed": run.resumed,
        "seconds": run.clock.seconds,
        "total_s": run.clock.total_s(),
        "bytes": run.meter.table(),
        "messages": run.messages.state(),
        "step_s": run.policy.step_s,
        "expected": list(run.expected_B),
        "books": books_of(run),
        "rank": run.transport.rank,
        "run": run.name,
    }


def books_of(run: Run) -> dict[str, tuple[int, int]]:
    """(bytes, their CRC32) of the files that this rank writes line by line; all of them are on the
    disk.
    """
    rank = run.transport.rank
    sizes = {f"ledger.rank{rank}.jsonl": run.meter.settle()}
    if rank == 0:
        sizes["messages.jsonl"] = run.messages.settle()
        sizes["steps.jsonl"] = run.steps.settle()
        sizes["metrics.jsonl"] = 0
        if run.lines:
            with (run.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
                sizes["metrics.jsonl"] = settle(file)
    for name, nbytes in sizes.items():
        known, crc = run.books.get(name, (0, 0))
        crc = crc_of(run.path / name, known, nbytes, crc) if nbytes else 0
        run.books[name] = nbytes, crc
    return run.books


def changed_books(path: Path, record: Mapping[str, Any]) -> str:
    """Which book does not begin with what a record says; empty if none."""
    for name, (nbytes, crc) in record["books"].items():
        file = path / name
        try:
            came = file.stat().st_size
            same = not nbytes or (came >= nbytes and crc_of(file, 0, nbytes) == crc)
        except FileNotFoundError:
            came, same = 0, not nbytes
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
        if came < nbytes:
            return f"{file} has {came} bytes, {nbytes} were written before the checkpoint"
        if not same:
            return f"{file} was changed: its first {nbytes} bytes are not those of the checkpoint"
    return ""


def restore(run: Run, part: Part) -> None:
    """Be what `part_of` saw, but for what others sent (`Exchange.share_state`).

    Raises DataError for a tensor that does not fit.
    """
    record, block = part.record, run.block
    for own, lr in zip(block.blocks, record["rates"], strict=True):
        restore_block(own, under(part.tensors, f"block{own.block}."), lr)
    run.exchange.restore_own({n: v.numpy() for n, v in under(part.tensors, "stream.").items()})
    if isinstance(block, Holder):
        block.restore(*record["holder"])
    run.rounds, run.units, run.name = record["rounds"], record["units"], record["run"]
    run.books = {name: tuple(book) for name, book in record["books"].items()}
    run.last = RoundResult(*record["last"])
    run.recent.extend(record["recent"])
    run.steps.go_on(run.rounds)
    if run.ahead:
        ahead = under(part.tensors, "ahead.")
        run.ahead.restore(run.rounds, {n: v.numpy() for n, v in ahead.items()})
    run.lines, run.warnings = record["lines"], record["warnings"]
    run.diverged = set(record["diverged"])
    run.resumed = [*record["resumed"], run.rounds]
    run.clock.add(record["seconds"], record["total_s"])
    run.meter.add(record["bytes"])
    run.messages.restore(record["messages"])
    run.policy.step_s = record["step_s"]
    run.expected_B = record["expected"]
    if run.steps.expected_B:
        run.steps.expected_B = run.expected_B


def restore_block(block: Block, state: Mapping[str, torch.Tensor], lr: float) -> None:
    """Module, optimizer and score of one block; `lr` is the rate of its last round."""
    try:
        block.module.load_state_dict(under(state, "module."))
        if isinstance(block, Party):
            block.head_copy.load_state_dict(under(state, "head_copy."), strict=False)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise DataError(f"block {block.block}: does not fit the checkpoint: {first}") from None
    block.optimizer.restore(under(state, "optimizer."), lr)
    block.set_score(state["score"].numpy() if "score" in state else None)


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Those whose names begin with `prefix`, without it."""
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}
