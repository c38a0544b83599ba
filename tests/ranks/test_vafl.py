"""VAFL: one party at a time, a table keyed by sample, virtual time that is exact."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run_threads, same_bits, tiny, weights
from torch.nn import functional as F

from hpcvfl import seeds
from hpcvfl.codecs.base import Message
from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.codecs.table import parse
from hpcvfl.engine.folder import read_config
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import evaluate_run, train
from hpcvfl.engine.vafl import Schedule, fill_table
from hpcvfl.errors import ConfigError, TransportTimeout, WireError
from hpcvfl.transport.base import Wrapper
from hpcvfl.transport.threads import ThreadsWorld

VAFL = {"algorithm__driver": "vafl", "labels__holder": "server"}
EXACT = {"codec": "none", "labels__gradient_codec": "none"}
SPEEDS = {"steps__policy": "virtual", "steps__speeds": (10, 2, 5, 10)}
ROUNDS = (30, 30, 30, 14)  # rows of the batches of an epoch of 104


def vafl(folder, **over):
    return tiny(folder, **(VAFL | over))


def lines(summary, name):
    return [json.loads(t) for t in (Path(summary["folder"]) / name).read_text().splitlines()]


@pytest.mark.parametrize("comm", [0, 1, 10, 0.1])
def test_v1_a_party_acts_at_multiples_of_cost_plus_communication(tmp_path, comm):
    # The fifth and sixth speeds, 12 and 0.5, have costs of 5/3 and 40 units.
    speeds = (20, 5, 10, 15, 12, 0.5, 20)
    over = {"steps__policy": "virtual", "steps__speeds": speeds, "algorithm__comm_units": comm}
    schedule = Schedule(vafl(tmp_path, num_parties=6, **over))
    events = {k: [] for k in range(1, 7)}
    before, party_before = 0.0, 0
    while before < 1000:
        party, at = schedule.next()
        assert (at, party) > (before, party_before)  # in order, ties by number, nobody twice
        before, party_before = at, party
        events[party].append(at)
    for party, times in events.items():
        period = Fraction(20) / Fraction(speeds[party]) + Fraction(str(comm))
        assert times[:-1] == [float(n * period) for n in range(1, len(times))]
        assert len(times) >= int(1000 / period) - 1


def test_v1_a_run_serves_who_is_due_and_its_clock_says_when(tmp_path):
    config = vafl(tmp_path, algorithm__comm_units=3, **SPEEDS)  # periods of 8, 5 and 4 units
    summary = run_threads(config)
    served = lines(summary, "steps.jsonl")
    due = sorted((p * n, k) for k, p in ((1, 8), (2, 5), (3, 4)) for n in range(1, 30))[:24]
    assert [(line["units"], line["party"]) for line in served] == due
    assert [line["update"] for line in served] == list(range(24))
    for k in (1, 2, 3):  # the upload's messages are 0 to 3
        own = [line["message"] for line in served if line["party"] == k]
        assert own == list(range(4, 4 + len(own)))
    metrics = lines(summary, "metrics.jsonl")
    assert [line["round"] for line in metrics] == [12, 24]
    assert [line["epoch"] for line in metrics] == [1, 2]
    assert [line["units"] for line in metrics] == [due[11][0], due[23][0]]


def test_equal_speeds_are_served_in_turn(tmp_path):
    served = lines(run_threads(vafl(tmp_path)), "steps.jsonl")
    assert [line["party"] for line in served] == [1, 2, 3] * 8
    assert [line["units"] for line in served] == [2.0 * (1 + u // 3) for u in range(24)]


class Recording(Wrapper):
    """Keeps the frames that this rank receives by itself."""

    def __init__(self, inner, into):
        super().__init__(inner)
        self.into = into

    def receive(self, out_B, source=None, kind="MESSAGE"):
        peer, nbytes = super().receive(out_B, source, kind)
        self.into.append((peer, kind, out_B[:nbytes].copy()))
        return peer, nbytes


@pytest.mark.parametrize("codec", ["none", "scalar:bits=3"])
def test_v1_an_update_changes_exactly_the_rows_of_its_samples(tmp_path, codec):
    config = vafl(tmp_path, codec=codec, algorithm__epochs=4, **SPEEDS)
    frames, tables = [], []

    def keep(run, result):
        if run.transport.rank == 0:
            tables.append([table.copy() for table in run.exchange.table_M])

    def work(transport):
        return train(
            config, Recording(transport, frames if transport.rank == 0 else []), after_round=keep
        )

    summary = ThreadsWorld(4).run(work)[0]
    served = lines(summary, "steps.jsonl")
    assert len(tables) == len(served) == 48
    epochs = set()
    of_party = {k: [f for peer, _, f in frames if peer == k] for k in (1, 2, 3)}
    for update, line in enumerate(served):
        k, number = line["party"], line["message"]
        epoch, at = divmod(number, 4)
        epochs.add(epoch)
        order = seeds.generator(0, "batches", epoch).permutation(104)
        rows = order[30 * at : 30 * at + 30]
        layout = Message(parse(codec), [(len(rows), 4)], np.dtype("float32"))
        decoded = np.empty((len(rows), 4), np.float32)
        key = seeds.key64(0, "dither", number, k)
        layout.decode(of_party[k][number - 4][HEADER_NBYTES:], key, [decoded])
        assert np.array_equal(tables[update][k - 1][rows], decoded)
        if update:
            others = np.setdiff1d(np.arange(104), rows)
            for party in (1, 2, 3):
                same = others if party == k else np.arange(104)
                before, after = tables[update - 1][party - 1], tables[update][party - 1]
                assert np.array_equal(before[same], after[same])
            if number > 4:  # before its first step a party repeats what it uploaded
                assert not np.array_equal(tables[update - 1][k - 1], tables[update][k - 1])
    assert len(epochs) > 3  # the order was drawn anew several times


def test_the_table_starts_with_everybodys_embeddings(tmp_path):
    def work(transport):
        run = prepare(vafl(tmp_path, **EXACT), transport)
        run.meter.phase = "train"
        fill_table(run)
        if transport.rank:
            with torch.no_grad():
                return run.block.module(run.block.shard.train_x).numpy()
        return run.exchange.table_M

    table, *towers = ThreadsWorld(4).run(work)
    for known, tower in zip(table, towers, strict=True):
        assert known == pytest.approx(tower, abs=1e-6)


@pytest.mark.parametrize("codec", ["none", "scalar:bits=4", "ef(scalar:bits=2,range=gauss)"])
def test_every_block_moves_and_learns(tmp_path, codec):
    over = {"codec": codec, "labels__gradient_codec": codec, "algorithm__epochs": 20, **SPEEDS}
    start = weights(run_threads(vafl(tmp_path, **over, optimizer__lr=1e-12)))
    end = run_threads(vafl(tmp_path, **over, optimizer__lr=0.3))
    for name, value in weights(end).items():
        assert not np.array_equal(value, start[name]), name
    assert end["metrics"]["accuracy"] > 0.75


def test_bytes_are_those_of_the_frames_both_ways(tmp_path):
    over = {"codec": "scalar:bits=4", "labels__gradient_codec": "scalar:bits=2", **SPEEDS}
    summary = run_threads(vafl(tmp_path, **over))

    def embed(rows):
        return HEADER_NBYTES + 8 + rows * 4 * 4 // 8

    def grad(rows):
        return HEADER_NBYTES + 8 + rows * 4 * 2 // 8

    served = lines(summary, "steps.jsonl")
    sizes = [ROUNDS[line["message"] % 4] for line in served]
    counts = [sum(line["party"] == k for line in served) for k in (1, 2, 3)]
    # At the end the two parties that were not served last have sent one more, in vain.
    in_vain = [ROUNDS[counts[k - 1] % 4] for k in (1, 2, 3) if k != served[-1]["party"]]
    up = sum(map(embed, ROUNDS)) * 3 + sum(map(embed, sizes + in_vain))
    notes = 2 * 2 * HEADER_NBYTES  # two evaluations, two parties called besides the one served
    down = sum(map(grad, sizes)) + notes
    assert summary["wire_bytes_by"]["train"] == {"uplink embed": up, "downlink grad": down}
    assert summary["wire_bytes"] == up + down
    raw = 4 * 4 * (104 * 3 + 2 * sum(sizes) + sum(in_vain))
    assert summary["raw_bytes"] == raw
    ledger = lines(summary, "ledger.rank0.jsonl")
    assert [line["round"] for line in ledger] == list(range(-1, 24))
    assert sum(line["in.embed"] for line in ledger if "in.embed" in line) == up
    assert sum(line.get("out.grad", 0) for line in ledger) == down
    errors = lines(summary, "messages.jsonl")
    for line, who in zip(errors, served, strict=True):
        assert [e > 0 for e in line["squared_error"]] == [k in (0, who["party"]) for k in range(4)]
    bits = lines(summary, "metrics.jsonl")[-1]["bits_per_value"]
    assert bits[1] == pytest.approx(np.mean([4 + 64 / (4 * r) for r in ROUNDS]), rel=0.05)


def test_one_party_is_sequential_training(tmp_path):
    over = EXACT | {"num_parties": 1, "dtype": "float64", "algorithm__epochs": 5}
    over |= {"optimizer__lr": 0.2, "model__head": "linear"}
    kept = {}

    def work(transport):
        config = vafl(tmp_path, **over)
        shard = prepare(config, transport).block.shard
        kept[transport.rank] = shard
        return train(config, transport)

    summary = ThreadsWorld(2).run(work)[0]
    first = weights(run_threads(vafl(tmp_path, **(over | {"optimizer__lr": 1e-300}))))
    x, y = kept[1].train_x, kept[0].train_y
    names = sorted(first)
    theta = {n: torch.tensor(first[n], requires_grad=True) for n in names}
    head = [n for n in names if n.startswith("rank0")]
    tower = [n for n in names if n.startswith("rank1")]
    assert len(head) == 2
    assert len(tower) == 4

    def by(prefix, name, suffix):
        return theta[next(n for n in prefix if n.endswith(f"{name}{suffix}"))]

    layers = sorted({n.rsplit(".", 1)[0] for n in tower})
    for update in range(20):
        epoch, at = divmod(update + 4, 4)
        order = seeds.generator(0, "batches", epoch).permutation(104)
        rows = torch.from_numpy(order[30 * at : 30 * at + 30])
        h = x[rows].flatten(1)
        h = torch.relu(h @ theta[f"{layers[0]}.weight"].T + theta[f"{layers[0]}.bias"])
        h = h @ theta[f"{layers[1]}.weight"].T + theta[f"{layers[1]}.bias"]
        logits = h @ by(head, "weight", "").T + by(head, "bias", "")
        gradients = torch.autograd.grad(F.cross_entropy(logits, y[rows]), list(theta.values()))
        with torch.no_grad():
            for value, gradient in zip(theta.values(), gradients, strict=True):
                value -= 0.2 * gradient
    for name, value in weights(summary).items():
        assert value == pytest.approx(theta[name].detach().numpy(), abs=1e-12), name
        assert not np.allclose(value, first[name], atol=1e-4), name


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (2, 3, 1, 0)])
def test_the_order_in_which_ranks_run_changes_no_bit(tmp_path, order):
    over = SPEEDS | {"codec": "scalar:bits=2", "optimizer__momentum": 0.5}
    first, second = (run_threads(vafl(tmp_path, **over), order=o) for o in (None, order))
    assert same_bits(weights(first), weights(second))
    assert first["wire_bytes"] == second["wire_bytes"]


def test_rates_follow_the_updates_of_the_server(tmp_path):
    rates = {k: [] for k in range(4)}

    def keep(run, result):
        rates[run.transport.rank].append(run.block.optimizer._lr)

    over = {"optimizer__schedule": "milestones", "optimizer__milestones": (1,), **SPEEDS}
    summary = run_threads(vafl(tmp_path, **over), after_round=keep)
    served = [line["party"] for line in lines(summary, "steps.jsonl")]
    assert rates[0] == pytest.approx([0.1] * 12 + [0.01] * 12)
    for k in (1, 2, 3):  # a message's rate is that of the answer before it
        own = [u for u, party in enumerate(served) if party == k]
        due = [0.01 if known >= 12 else 0.1 for known in [0] + [u + 1 for u in own[:-1]]]
        assert rates[k] == pytest.approx(due)


def test_the_target_ends_a_run_on_all_ranks(tmp_path):
    over = {"algorithm__epochs": 30, "algorithm__target_accuracy": 0.5, "optimizer__lr": 0.3}
    summary = run_threads(vafl(tmp_path, **over, **SPEEDS))
    assert summary["metrics"]["accuracy"] >= 0.5
    assert summary["rounds"] < 360
    assert summary["rounds"] % 12 == 0
    assert [line["test_accuracy"] >= 0.5 for line in lines(summary, "metrics.jsonl")][:-1] == [
        False
    ] * (summary["rounds"] // 12 - 1)


def test_rounds_end_inside_an_epoch(tmp_path):
    summary = run_threads(vafl(tmp_path, algorithm__rounds=5, **SPEEDS))
    assert summary["rounds"] == 15
    assert [line["round"] for line in lines(summary, "metrics.jsonl")] == [12, 15]
    assert summary["driver"] == "vafl"
    path = Path(summary["folder"])
    again = ThreadsWorld(4).run(lambda t: evaluate_run(path, read_config(path), t))
    assert again == [{k: summary["metrics"][k] for k in ("loss", "accuracy")}] * 4


class Spoiling(Wrapper):
    """Changes what rank 1 sends, or the server sends to it, from the third frame on."""

    def __init__(self, inner, how):
        super().__init__(inner)
        self.how, self.sent = how, 0

    def send(self, data_B, dest, kind):
        self.sent += 1
        if self.sent > 2:
            data_B = self.how(data_B.copy())
        super().send(data_B, dest, kind)


def shorten(frame_B):
    return frame_B[:-5]


def header_alone(frame_B):
    return frame_B[:HEADER_NBYTES]


def no_magic(frame_B):
    frame_B[0] = 0
    return frame_B


@pytest.mark.parametrize(
    ("spoiler", "how", "words"),
    [
        (1, shorten, r"rank 0, round 6: embed from rank 1 has \d+ bytes, due"),
        (1, no_magic, "rank 0, round 6: embed from rank 1 starts with"),
        (0, shorten, r"rank \d, round \d: grad from rank 0 has \d+ bytes, due"),
        (0, no_magic, r"rank \d, round \d: grad from rank 0 starts with"),
        (0, header_alone, r"rank \d, round \d: grad from rank 0: count is"),
    ],
)
def test_a_wrong_frame_is_named(tmp_path, spoiler, how, words):
    def work(transport):
        spoiled = transport.rank == spoiler
        return train(vafl(tmp_path), Spoiling(transport, how) if spoiled else transport)

    with pytest.raises(WireError, match=words):
        ThreadsWorld(4).run(work)


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        (2, "rank 0, round 8: embed from rank 2: round is 7, due 8"),
        (3, "rank 0, update 11: rank 2 sent a second embed before its first was answered"),
    ],
)
def test_a_party_that_repeats_itself_is_named(tmp_path, copies, words):
    class Repeating(Wrapper):
        sent = 0

        def send(self, data_B, dest, kind):
            self.sent += 1  # the fourth is the last one before the evaluation after update 12
            for _ in range(copies if self.sent == 4 else 1):
                super().send(data_B, dest, kind)

    def work(transport):
        return train(vafl(tmp_path), Repeating(transport) if transport.rank == 2 else transport)

    with pytest.raises(WireError, match=words):
        ThreadsWorld(4).run(work)


def test_a_party_that_stays_silent_is_named(tmp_path):
    class Silent(Wrapper):
        def send(self, data_B, dest, kind):
            pass

    def work(transport):
        return train(vafl(tmp_path), Silent(transport) if transport.rank == 2 else transport)

    words = "rank 0, round 1: receive of embed from rank 2: rank 2 did not post"
    with pytest.raises(TransportTimeout, match=words):
        ThreadsWorld(4).run(work)


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"labels__holder": "all"}, "'vafl' needs labels.holder = 'server'"),
        ({"algorithm__local_steps": 2}, "'vafl' takes one step a message"),
        ({"steps__policy": "virtual", "steps__trace": "ar1"}, "'vafl' needs steps.policy fixed"),
        ({"steps__policy": "script", "steps__replay": "x"}, "'vafl' needs steps.policy fixed"),
        (SPEEDS | {"steps__sync": "min"}, "'vafl' waits for nobody"),
        ({"steps__policy": "wall-clock", "steps__timeout_s": 1}, "leave steps.timeout_s out"),
        ({"steps__policy": "wall-clock"}, "in one process ranks take turns"),
        ({"optimizer__schedule": "adaptive"}, "'adaptive' has nothing to adapt to"),
        ({"party": {"2": {"optimizer.schedule": "adaptive"}}}, "has nothing to adapt to"),
        ({"codec": "auto:error=0.1"}, "codec auto tells all ranks of its sizes"),
        ({"transport__pattern": "allgather"}, "each party gets a frame of its own"),
        (SPEEDS | {"steps__speeds": (1, 2)}, "steps.speeds: 2 numbers, due are 4"),
        ({"algorithm__comm_units": -1}, "comm_units = -1"),
        ({"algorithm__driver": "async"}, "'rounds' or 'vafl'"),
    ],
)
def test_what_vafl_does_not_have_is_refused_in_one_line(tmp_path, over, words):
    with pytest.raises(ConfigError, match=words) as caught:
        run_threads(vafl(tmp_path, **over))
    assert "\n" not in str(caught.value)
