"""Private labels: the server alone holds them, and a party gets one gradient a round, no more."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run_threads, same_bits, tiny, weights
from torch.nn import functional as F

from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.engine.blocks import PrivateParty, Server
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import evaluate_run, one_round, train
from hpcvfl.errors import ConfigError
from hpcvfl.report.tables import closing_table, comparison
from hpcvfl.transport.base import Wrapper
from hpcvfl.transport.threads import ThreadsWorld

EXACT = {"codec": "none", "head_codec": "none", "labels__gradient_codec": "none"}
PRIVATE = {"labels__holder": "server"}


def lines(summary, name):
    return [json.loads(t) for t in (Path(summary["folder"]) / name).read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_e4_one_step_without_compression_is_the_shared_step_bit_for_bit(tmp_path, dtype):
    shared = run_threads(tiny(tmp_path, dtype=dtype, **EXACT))
    private = run_threads(tiny(tmp_path, dtype=dtype, **EXACT, **PRIVATE))
    assert same_bits(weights(shared), weights(private))
    assert shared["metrics"] == private["metrics"]
    assert shared["wire_bytes"] != private["wire_bytes"]


def test_e4_steps_of_a_linear_tower_are_one_step_of_their_sum(tmp_path):
    linear = {"model__tower": "support.modules:LinearTower", "dtype": "float64"}
    tables = []
    for steps, lr in ((4, 0.05), (1, 0.2)):
        over = {"algorithm__local_steps": steps, "algorithm__rounds": 1, "optimizer__lr": lr}
        tables.append(weights(run_threads(tiny(tmp_path, **over, **linear, **EXACT, **PRIVATE))))
    for name, value in tables[0].items():
        if not name.startswith("rank0"):  # the head's steps see their own gradient each
            assert value == pytest.approx(tables[1][name], abs=1e-12)


def test_the_gradient_is_that_of_the_loss_at_what_the_server_received(tmp_path):
    config = tiny(tmp_path, codec="scalar:bits=3", labels__gradient_codec="none", **PRIVATE)
    seen = {}

    def work(transport):
        run = prepare(config, transport)
        block = run.block
        if isinstance(block, Server):
            before = [p.detach().clone() for p in block.module.parameters()]
        one_round(run, 0)
        if isinstance(block, PrivateParty):
            seen[transport.rank] = block._gradient_NP.clone()
            return
        weight, bias = before
        parts = [e.clone().requires_grad_() for e in block._embeddings(30)]
        logits = torch.cat(parts, dim=1) @ weight.T + bias
        F.cross_entropy(logits, block._labels_N).backward()
        seen[0] = [p.grad for p in parts]

    ThreadsWorld(4).run(work)
    for k in (1, 2, 3):
        assert seen[k].numpy() == pytest.approx(seen[0][k - 1].numpy(), abs=1e-7)


@pytest.mark.parametrize("codec", ["scalar:bits=2", "ef(scalar:bits=2,range=gauss)", "best:bits=2"])
def test_every_block_moves_and_learns_with_many_steps_and_few_bits(tmp_path, codec):
    over = {"algorithm__local_steps": 5, "algorithm__epochs": 30, **PRIVATE}
    over |= {"codec": codec, "labels__gradient_codec": codec}
    start = weights(run_threads(tiny(tmp_path, **over, optimizer__lr=1e-12)))
    end = run_threads(tiny(tmp_path, **over, optimizer__lr=0.1))
    for name, value in weights(end).items():
        assert not np.array_equal(value, start[name]), name
    assert end["metrics"]["accuracy"] > 0.6


class Recording(Wrapper):
    """Keeps a copy of all bytes that reach a rank."""

    def __init__(self, inner, into):
        super().__init__(inner)
        self.into = into

    def _keep(self, verb, slots):
        self.into.append((verb, slots.kinds_R, [slots[k].tobytes() for k in range(self.size)]))

    def gather(self, slots, root=0):
        before = [slots[k].tobytes() for k in range(self.size)]
        super().gather(slots, root)
        if self.rank != root:  # nothing comes to the others
            assert [slots[k].tobytes() for k in range(self.size)] == before

    def broadcast(self, slots, root=0):
        super().broadcast(slots, root)
        self._keep("broadcast", slots)

    def scatter(self, slots, root=0):
        before = [slots[k].tobytes() for k in range(self.size)]
        super().scatter(slots, root)
        for k in range(self.size):
            if k != self.rank and self.rank != root:
                assert slots[k].tobytes() == before[k]
        self.into.append(("scatter", slots.kinds_R, [slots[self.rank].tobytes()]))


def test_no_label_and_no_head_byte_reaches_a_party(tmp_path):
    config = tiny(tmp_path, **EXACT, **PRIVATE)
    received, held = {}, {}

    def work(transport):
        into = received[transport.rank] = []
        kept = []

        def keep(run, result):
            if transport.rank == 0:
                kept.append([p.detach().numpy().tobytes() for p in run.block.module.parameters()])
                kept[-1].append(run.block._labels_N.numpy().tobytes())

        train(config, Recording(transport, into), after_round=keep)
        held[transport.rank] = kept

    ThreadsWorld(4).run(work)
    for rank in (1, 2, 3):
        frames = [(verb, kinds, data) for verb, kinds, data in received[rank]]
        assert {verb for verb, _, _ in frames} == {"scatter"}
        assert len(frames) == 8
        for _, kinds, (frame,) in frames:
            assert kinds[rank] == "grad"
            rows = (len(frame) - HEADER_NBYTES) // 16
            assert len(frame) == HEADER_NBYTES + 16 * rows  # one (N, 4) float32 and a header
            for secrets in held[0]:
                assert all(secret not in frame for secret in secrets)


def test_a_party_holds_neither_labels_nor_head_nor_the_number_of_classes(tmp_path):
    def work(transport):
        run = prepare(tiny(tmp_path, **PRIVATE), transport)
        if transport.rank:
            shard = run.block.shard
            assert shard.train_y is None
            assert shard.test_y is None
            assert shard.num_classes == 1
            assert not hasattr(run.block, "head_copy")
            assert [s is not None for s in run.exchange.streams_R] == [
                k == transport.rank for k in range(4)
            ]

    ThreadsWorld(4).run(work)


def test_bytes_are_those_of_the_frames_both_ways(tmp_path):
    over = {"codec": "scalar:bits=4", "labels__gradient_codec": "scalar:bits=2"}
    summary = run_threads(tiny(tmp_path, **over, **PRIVATE))
    embeds = sum(HEADER_NBYTES + 8 + n * 4 * 4 // 8 for n in (30, 30, 30, 14)) * 2 * 3
    grads = sum(HEADER_NBYTES + 8 + n * 4 * 2 // 8 for n in (30, 30, 30, 14)) * 2 * 3
    assert summary["wire_bytes_by"]["train"] == {"uplink embed": embeds, "downlink grad": grads}
    assert summary["wire_bytes"] == embeds + grads
    errors = [line["squared_error"] for line in lines(summary, "messages.jsonl")]
    assert len(errors) == 8
    assert min(min(e) for e in errors) > 0


def test_top_k_per_column_is_told_the_gradient_that_came(tmp_path):
    over = {"codec": "topk:k=2", "labels__gradient_codec": "none"}
    scores = []

    def look(run, result):
        if run.transport.rank == 1:
            scores.append(
                run.block.score() == pytest.approx(run.block._gradient_NP.sum(dim=0).abs().numpy())
            )

    run_threads(tiny(tmp_path, **over, **PRIVATE), after_round=look)
    assert len(scores) == 8
    assert all(scores)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"transport__pattern": "allgather"}, "with private labels each party gets a frame"),
        ({"codec": "auto:error=0.1"}, "a party's headers reach the server alone"),
        ({"labels__gradient_codec": "scalar"}, "bits is missing"),
    ],
)
def test_what_private_labels_do_not_have_is_refused(tmp_path, over, words):
    with pytest.raises(ConfigError, match=words):
        run_threads(tiny(tmp_path, **over, **PRIVATE))


def test_a_label_policy_that_differs_is_named(tmp_path):
    def work(transport):
        over = PRIVATE if transport.rank == 2 else {}
        train(tiny(tmp_path, **over), transport)

    with pytest.raises(ConfigError, match=r"rank 2: label policy: server, rank 0 has all"):
        ThreadsWorld(4).run(work)


def on_ranks(config, work):
    return ThreadsWorld(len(config.block_of_rank)).run(work)


@pytest.mark.parametrize("party", [1, 2, 3])
@pytest.mark.parametrize("tower", ["mlp", "support.modules:DropoutTower"])
def test_a_server_in_the_process_of_a_party_gives_the_same_bits(tmp_path, party, tower):
    over = EXACT | {
        "model__tower": tower,
        "algorithm__local_steps": 2,
        "party": {"2": {"optimizer.momentum": 0.5, "optimizer.lr": 0.03}},
    }
    alone = run_threads(tiny(tmp_path, **over, **PRIVATE))
    config = tiny(tmp_path, **over, labels__holder=f"party:{party}")
    assert config.block_of_rank == [k for k in range(4) if k != party]
    beside = on_ranks(config, lambda t: train(config, t))[0]
    assert same_bits(weights(alone), weights(beside))
    assert alone["metrics"] == beside["metrics"]
    assert beside["wire_bytes"] * 3 == alone["wire_bytes"] * 2  # two parties in place of three
    steps = [
        [line[f] for line in lines(s, "steps.jsonl")]
        for s in (alone, beside)
        for f in ("tau", "w_bar")
    ]
    assert steps[:2] == steps[2:]


def test_the_embedding_of_a_holder_is_neither_sent_nor_compressed(tmp_path):
    config = tiny(tmp_path, codec="scalar:bits=2", labels__holder="party:2")

    def work(transport):
        run = prepare(config, transport)
        if transport.rank == 0:
            x, tower = run.block.own.shard.train_x[run.batches.rows(0)], run.block.own.module
            due = tower(x).detach().clone()
        else:
            x = run.block.shard.train_x[run.batches.rows(0)]
            exact[transport.rank] = run.block.module(x).detach().clone()
        one_round(run, 0)
        if transport.rank == 0:
            assert torch.equal(run.block._embeddings(30)[1], due)
            received[1], received[2] = (run.block._embeddings(30)[k].clone() for k in (0, 2))

    exact, received = {}, {}
    on_ranks(config, work)
    for rank in (1, 2):  # parties 1 and 3
        assert 0 < float((received[rank] - exact[rank]).abs().max()) < 3
    summary = on_ranks(config, lambda t: train(config, t))[0]
    assert {len(line["squared_error"]) for line in lines(summary, "messages.jsonl")} == {4}
    assert all(line["squared_error"][2] == 0 for line in lines(summary, "messages.jsonl"))
    again = on_ranks(config, lambda t: evaluate_run(Path(summary["folder"]), config, t))[0]
    assert again["accuracy"] == summary["metrics"]["accuracy"]


def test_a_holder_adapts_each_of_its_rates(tmp_path):
    over = {"optimizer__schedule": "adaptive", "optimizer__lr": 0.4, "labels__holder": "party:1"}
    config = tiny(
        tmp_path, **over, algorithm__local_steps=4, party={"1": {"optimizer.momentum": 0.9}}
    )
    rates = []

    def keep(run, result):
        if run.transport.rank == 0:
            rates.append([b.optimizer._lr for b in run.block.blocks])

    summary = on_ranks(config, lambda t: train(config, t, after_round=keep))[0]
    w_bar = (1 - 0.9**4) / 0.1
    for server, party in rates:
        assert server == 0.1
        assert party == pytest.approx(0.1 / w_bar)
    assert lines(summary, "steps.jsonl")[-1]["w_bar"] == pytest.approx([1, w_bar, 1, 1])


@pytest.mark.parametrize(
    ("holder", "words"),
    [("party:4", "parties are 1 to 3"), ("party:0", "labels.holder = 'party:0'"), ("me", "'me'")],
)
def test_a_holder_that_is_none_is_refused(tmp_path, holder, words):
    with pytest.raises(ConfigError, match=words):
        tiny(tmp_path, labels__holder=holder)


def test_ranks_of_a_holder_are_one_fewer(tmp_path):
    config = tiny(tmp_path, labels__holder="party:1")
    with pytest.raises(ConfigError, match=r"4 ranks came.*needs 3 \(the server is with a party"):
        ThreadsWorld(4).run(lambda t: train(config, t))


def test_one_party_with_the_server_trains_without_a_message(tmp_path):
    config = tiny(tmp_path, num_parties=1, labels__holder="party:1", algorithm__epochs=10)
    summary = on_ranks(config, lambda t: train(config, t))[0]
    assert summary["wire_bytes"] == 0
    assert summary["metrics"]["accuracy"] > 0.5
    assert "raw / wire            -" in closing_table(summary)
    assert comparison([summary, summary])
