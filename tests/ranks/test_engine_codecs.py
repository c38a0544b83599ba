"""Codecs that remember or choose, inside a run: the same in any pattern, and what is written of
it.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.faulty import Fault, Faulty
from support.runs import run_threads, same_bits, tiny, weights

from hpcvfl.cli import main
from hpcvfl.codecs import table
from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.engine.checkpoint import stream_path
from hpcvfl.engine.observer import Silent
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import train
from hpcvfl.errors import ConfigError, WireError
from hpcvfl.report.plots import draw
from hpcvfl.report.tables import closing_table
from hpcvfl.transport.threads import ThreadsWorld

GAUSS = "scalar:bits=1,range=gauss,scope=column"
AUTO = "auto:error=0.02,horizon=3,codec=scalar"
REMEMBERING = [f"ef({GAUSS})", "ef16(scalar:bits=2)", AUTO, f"ef({AUTO})", "topk:k=2"]


def lines(summary, name):
    return [json.loads(t) for t in (Path(summary["folder"]) / name).read_text().splitlines()]


@pytest.mark.parametrize("spec", REMEMBERING)
def test_hub_and_allgather_give_the_same_bits(tmp_path, spec):
    hub, spread = (
        run_threads(tiny(tmp_path, codec=spec, head_codec=spec, transport__pattern=pattern))
        for pattern in ("hub", "allgather")
    )
    assert same_bits(weights(hub), weights(spread))
    assert lines(hub, "messages.jsonl") == lines(spread, "messages.jsonl")


@pytest.mark.parametrize("spec", REMEMBERING)
def test_memories_in_files_change_no_bit(tmp_path, spec):
    alone = run_threads(tiny(tmp_path, codec=spec))
    filed = run_threads(tiny(tmp_path, codec=spec, run__memory_folder=str(tmp_path / "memories")))
    assert same_bits(weights(alone), weights(filed))


def test_all_ranks_hold_the_same_memories(tmp_path):
    held = {}

    def keep(run, result):
        held[run.transport.rank, run.rounds] = [
            m.state_SP.tobytes() for s in run.exchange.streams_R for m in s.memories
        ]

    spec = f"ef({GAUSS})"
    run_threads(tiny(tmp_path, codec=spec, head_codec=spec), after_round=keep)
    for r in range(1, 9):
        assert len(held[0, r]) == 5  # weight and bias of the head, three embeddings
        assert held[0, r] == held[1, r] == held[2, r] == held[3, r]
    assert held[0, 1] != held[0, 8]


def test_a_memory_of_exact_messages_trains_like_no_codec(tmp_path):
    plain, fed = (run_threads(tiny(tmp_path, codec=c)) for c in ("none", "ef(none)"))
    ours, theirs = weights(fed), weights(plain)
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, abs=1e-5)


def test_messages_of_every_round_stand_in_the_log_and_their_means_in_the_metrics(tmp_path):
    summary = run_threads(tiny(tmp_path, codec="scalar:bits=3", head_codec="none"))
    log = lines(summary, "messages.jsonl")
    assert [line["round"] for line in log] == list(range(8))
    for line in log:
        assert line["squared_error"][0] == line["energy"][0] == 0  # exact, so not measured
        lost = zip(line["squared_error"][1:], line["energy"][1:], strict=True)
        assert all(0 < 4 * error < energy for error, energy in lost)
        assert min(line["squared_error"][1:]) > 0
        assert line["bits_per_value"][0] == 32
    first, second = lines(summary, "metrics.jsonl")
    for metrics, part in ((first, log[:4]), (second, log[4:])):
        due = np.mean([line["squared_error"] for line in part], axis=0)
        assert metrics["squared_error"] == pytest.approx(due, rel=1e-5)
    sizes = {8 * table.parse("scalar:bits=3").nbytes((n, 4), 4) / (4 * n) for n in (30, 14)}
    assert {round(b, 4) for line in log for b in line["bits_per_value"][1:]} == {
        round(s, 4) for s in sizes
    }


def test_auto_changes_the_sizes_of_frames_and_the_ledger_follows(tmp_path):
    summary = run_threads(tiny(tmp_path, codec=AUTO, head_codec="none", algorithm__epochs=6))
    bits = [line["bits_per_value"][1:] for line in lines(summary, "messages.jsonl")]
    assert len({round(b) for party in bits for b in party}) > 1
    head = HEADER_NBYTES + 4 * (3 * 12 + 3)
    ledger = lines(summary, "ledger.rank0.jsonl")
    for r, line in enumerate(ledger):
        rows = 14 if r % 4 == 3 else 30
        embeds = sum(HEADER_NBYTES + round(b * rows * 4 / 8) for b in bits[r])
        assert line["in.embed"] == embeds
        assert line["out.head"] == 3 * head


def test_the_schedule_of_auto_can_be_checked_from_the_log(tmp_path):
    summary = run_threads(tiny(tmp_path, codec=AUTO, head_codec="none", algorithm__epochs=12))
    log = lines(summary, "messages.jsonl")
    due = sum(0.02 / np.sqrt(1 + r / 3) for r in range(len(log)))
    shares = np.array([line["squared_error"] for line in log])[:, 1:]
    shares /= np.array([line["energy"] for line in log])[:, 1:]
    assert (shares.sum(axis=0) < 1.05 * due).all()
    assert (shares.sum(axis=0) > 0.3 * due).all()  # no more bits than it takes


@pytest.mark.parametrize(
    ("codec", "words"),
    [
        ("ef(randomk:k=2,per=column,scale=on)", "error feedback diverges"),
        ("randomk:k=1,per=column,scale=on", "loses more than it sends"),
    ],
)
def test_messages_that_lose_more_than_they_hold_are_told_once(tmp_path, codec, words):
    told = []

    class Watcher(Silent):
        def warning(self, text):
            told.append(text)

    config = tiny(tmp_path, codec=codec, algorithm__epochs=3, optimizer__lr=1e-3)
    world = ThreadsWorld(config.num_parties + 1)
    summary = world.run(lambda transport: train(config, transport, Watcher()))[0]
    assert len(told) == len(set(told)) == 3
    assert all(words in text and codec in text for text in told)
    assert summary["warnings"] == told
    assert told[0] in closing_table(summary)


@pytest.mark.parametrize(
    "codec",
    ["topk:ratio=0.2,per=tensor", "ef(topk:k=3,per=row,values=(scalar:bits=1,range=gauss))"],
)
def test_wide_embeddings_train_through_sparse_codecs(tmp_path, codec):
    shape = {"model__embedding_dim": 130, "algorithm__epochs": 4}
    dense = run_threads(tiny(tmp_path, codec="none", **shape))
    sparse = run_threads(tiny(tmp_path, codec=codec, **shape))
    assert sparse["metrics"]["accuracy"] > dense["metrics"]["accuracy"] - 0.1
    assert sparse["wire_bytes"] < dense["wire_bytes"]
    assert not sparse["warnings"]


def test_a_level_that_does_not_exist_is_refused(tmp_path):
    config = tiny(tmp_path, codec=AUTO)

    def work(transport):
        if transport.rank != 2:
            return train(config, transport)
        next_level = Fault("lie", "gather", call=1, at=11, value=200)
        return train(config, Faulty(transport, next_level))

    with pytest.raises(WireError, match=r"next_level from rank 2 is 200, .* has 8 rates"):
        ThreadsWorld(config.num_parties + 1).run(work)


def test_top_k_is_told_the_gradient_of_the_last_local_step(tmp_path):
    checked = []

    def check(run, result):
        if run.transport.rank != 1:
            return
        block, labels_N = run.block, run.block._labels_N
        parts = [block.module(block._x), *block._embeddings(len(labels_N))[1:]]
        logits = block.head_copy(torch.cat(parts, dim=1))
        # Linear head, mean cross-entropy: dL/dh = (softmax - one hot) / N @ W.
        slope = (logits.softmax(1) - torch.eye(3)[labels_N]) / len(labels_N)
        due_P = (slope @ block.head_copy.weight)[:, :4].sum(0).abs().detach().numpy()
        assert block.score() == pytest.approx(due_P, rel=1e-3, abs=1e-7)
        checked.append(due_P)

    # So small a rate that the tower after the step is the tower before it.
    config = tiny(tmp_path, codec="topk:k=2", optimizer__lr=1e-9, algorithm__rounds=3)
    run_threads(config, after_round=check)
    assert len(checked) == 3


def test_a_memory_folder_that_is_a_file_ends_the_run_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    config = tiny(tmp_path, codec="ef(none)", run__memory_folder=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"run\.memory_folder"):
        run_threads(config)


def test_the_doctor_tells_the_memory_that_feedback_takes(capsys):
    asked = ["synthetic", "--data.num-samples", "1000", "--codec", "ef(scalar:bits=1)"]
    assert main(["doctor", *asked, "--head-codec", "ef16(none)"]) == 0
    shown = capsys.readouterr().out
    # 800 of 1000 rows are for training: 4 parties x 800 x 16 x 4 bytes, and a head of 2 bytes each.
    assert "memory     0.2 MB of error feedback on every rank (4 parties x 800 rows" in shown
    assert main(["doctor", "synthetic"]) == 0
    assert "no error feedback" in capsys.readouterr().out


def test_errors_are_drawn_beside_the_accuracy(tmp_path):
    lossy, exact = (
        run_threads(tiny(tmp_path, codec=c, head_codec="none")) for c in ("scalar:bits=2", "none")
    )
    drawn = {
        len(runs): draw([(s["folder"], lines(s, "metrics.jsonl")) for s in runs], tmp_path)
        for runs in ([lossy], [lossy, exact])
    }
    assert [path.name for path in drawn[1]][-1] == "error-rounds.png"
    assert len(drawn[2]) == 4
    assert len(draw([("exact", lines(exact, "metrics.jsonl"))], tmp_path)) == 3


def test_a_stream_is_saved_by_its_sender_and_comes_back_to_all(tmp_path):
    config = tiny(
        tmp_path,
        codec="ef16(scalar:bits=2)",
        head_codec=f"ef({AUTO})",
        party={2: {"codec": "none"}, 3: {"codec": "topk:k=2"}},
    )
    held = {}

    def keep(run, result):
        held[run.transport.rank] = states(run)

    summary = run_threads(config, after_round=keep)
    folder = Path(summary["folder"])
    files = {p.name for p in (folder / "checkpoints" / "final").iterdir()}
    assert {n for n in files if "stream" in n} == {f"stream.rank{k}.safetensors" for k in (0, 1, 3)}

    def again(transport):
        run = prepare(config, transport)
        path = stream_path(folder, transport.rank)
        if path.exists():
            state = {name: value.numpy() for name, value in load_file(path).items()}
            run.exchange.restore_own(state)
            run.block.set_score(state.get("score"))
        run.exchange.share_state()
        run.meter.close()
        run.messages.close()
        return states(run)

    came = ThreadsWorld(config.num_parties + 1).run(again)
    assert came == [held[rank] for rank in range(4)]
    assert held[0][0]["control.left"] != held[1][0]["control.left"]  # the sender's alone
    assert held[0][0]["memory.0"] == held[1][0]["memory.0"]
    assert held[3]["score"] is not None


def states(run):
    """All that a rank remembers of every stream, as bytes."""
    out = {
        rank: {name: value.tobytes() for name, value in stream.state().items()}
        for rank, stream in enumerate(run.exchange.streams_R)
    }
    score_P = run.block.score()
    return out | {"score": None if score_P is None else score_P.tobytes()}
