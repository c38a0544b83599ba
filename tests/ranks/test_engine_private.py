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
from hpcvfl.errors import ConfigError, NonFiniteError
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
    """Keeps (verb, kind, bytes) of everything that reaches a rank, by any verb."""

    def __init__(self, inner, into):
        super().__init__(inner)
        self.into = into

    def _deliver(self, verb, slots, here):
        """Call a verb; what it changes is kept, and must be in the frames `here`."""
        before = [slots[k].tobytes() for k in range(self.size)]
        getattr(self.inner, verb)(*((slots,) if verb == "allgather" else (slots, 0)))
        for k in range(self.size):
            if k in here:
                self.into.append((verb, slots.kinds_R[k], slots[k].tobytes()))
            else:
                assert slots[k].tobytes() == before[k], (verb, k)

    def gather(self, slots, root=0):
        self._deliver("gather", slots, range(self.size) if self.rank == root else ())

    def broadcast(self, slots, root=0):
        self._deliver("broadcast", slots, range(self.size))

    def scatter(self, slots, root=0):
        self._deliver("scatter", slots, range(self.size) if self.rank == root else (self.rank,))

    def allgather(self, slots):
        self._deliver("allgather", slots, range(self.size))

    def receive(self, out_B, source=None, kind="MESSAGE"):
        peer, nbytes = self.inner.receive(out_B, source, kind)
        self.into.append(("receive", kind, out_B[:nbytes].tobytes()))
        return peer, nbytes


ENCODINGS = ("<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "u1")


def spellings(values):
    """The bytes of an array in every type that holds its values."""
    kinds = ENCODINGS if values.dtype.kind == "i" else ENCODINGS[:3]
    return {values.astype(kind).tobytes() for kind in kinds}


def secrets_of(run):
    """What no party may get: labels of the batch, rows of the head, its embeddings' rows of others
    than the party itself; by the party that may not (None: no party).
    """
    block = run.block
    out = {(None, text) for text in spellings(block._labels_N.numpy())}
    for parameter in block.module.parameters():
        table = parameter.detach().numpy()
        for row in [table, *(table if table.ndim > 1 else ())]:
            out |= {(None, text) for text in spellings(row)}
    for k, embedding in enumerate(block._embeddings(len(block._rows)), 1):
        out |= {(k, row.tobytes()) for row in embedding.numpy()}
    return out


def recorded(config):
    """({rank: all that reached it}, secrets of every round) of a run."""
    received, secrets = {}, set()

    def work(transport):
        into = received[transport.rank] = []

        def keep(run, result):
            if transport.rank == 0:
                secrets.update(secrets_of(run))

        train(config, Recording(transport, into), after_round=keep)

    ThreadsWorld(len(config.block_of_rank)).run(work)
    return received, secrets


WAYS = {
    "server": (PRIVATE, {"grad"}),
    "holder": ({"labels__holder": "party:2"}, {"grad"}),
    "vafl": (PRIVATE | {"algorithm__driver": "vafl"}, {"grad"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_label_and_no_head_byte_reaches_a_party(tmp_path, way):
    over, training_kinds = WAYS[way]
    config = tiny(tmp_path, **EXACT, **over)
    received, secrets = recorded(config)
    ranks = len(config.block_of_rank)
    assert len(secrets) > 300
    for rank in range(1, ranks):
        party = config.block_of_rank[rank]
        frames = [text for _, kind, text in received[rank] if kind in training_kinds]
        assert len(frames) >= 8
        assert all((len(f) - HEADER_NBYTES) % 16 == 0 for f in frames)  # rows of 4 float32
        kinds = {kind for _, kind, _ in received[rank]}
        assert kinds <= training_kinds | {"control", "eval"}, kinds
        everything = b"|".join(text for _, _, text in received[rank])
        for owner, secret in secrets:
            assert owner == party or secret not in everything, (owner, secret.hex())


def test_the_search_for_secrets_finds_them_where_labels_are_shared(tmp_path):
    received, secrets = recorded(tiny(tmp_path, **EXACT))
    everything = b"|".join(text for _, _, text in received[1])
    found = {owner for owner, secret in secrets if secret in everything}
    assert found == {None, 1, 2, 3}  # the head, and everybody's embeddings


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


def state_of(block):
    """Everything that a look at a block must leave alone."""
    tensors = [*block.module.state_dict().values(), torch.default_generator.get_state()]
    return [t.clone() for t in tensors] + [p.grad for p in block.module.parameters()]


def equal(a, b):
    return all(
        x is y if x is None or y is None else torch.equal(x, y) for x, y in zip(a, b, strict=True)
    )


def test_gradients_and_trial_steps_disturb_neither_random_numbers_nor_statistics(tmp_path):
    towers = {"1": "support.modules:DropoutTower", "2": "support.modules:BatchNormTower"}
    config = tiny(
        tmp_path, model__head="support.modules:DropoutHead", **PRIVATE,
        party={k: {"model.tower": tower} for k, tower in towers.items()},
    )  # fmt: skip
    spent = {}

    def work(transport):
        run = prepare(config, transport)
        one_round(run, 0)
        block = run.block
        block.begin_round(1, run.batches.rows(1), 0.1)
        before = state_of(block)
        spent[transport.rank] = block.trial_step_s(run.batches.rows(1))
        assert equal(before, state_of(block))
        if transport.rank == 0:
            gradients = block.embedding_gradients()
            assert all(np.abs(g).max() > 0 for g in gradients)
            assert equal(before, state_of(block))
            block.step(1, 0)
            assert not equal(before, state_of(block))

    ThreadsWorld(4).run(work)
    assert min(spent.values()) > 0


def test_nan_in_the_embedding_of_a_holder_names_its_block(tmp_path):
    config = tiny(
        tmp_path, labels__holder="party:2",
        party={"2": {"model.tower": "support.modules:ExplodingTower"}},
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=r"block 2, round \d: NaN or Inf in its embedding"):
        on_ranks(config, lambda t: train(config, t))
