"""Flex-VFL in one process: unlike numbers of steps, rates that follow them, logs that replay."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.runs import run_threads, same_bits, tiny, weights
from torch.nn import functional as F

from hpcvfl.engine.observer import Silent
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import one_round, train
from hpcvfl.engine.weights import weights_of
from hpcvfl.errors import ConfigError
from hpcvfl.report.tables import closing_table
from hpcvfl.transport.base import Wrapper
from hpcvfl.transport.threads import ThreadsWorld

SPEEDS = (5, 1, 3, 2)
FLEX = {"steps__policy": "virtual", "steps__speeds": SPEEDS}


def lines(summary, name):
    return [json.loads(t) for t in (Path(summary["folder"]) / name).read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_e1_equal_speeds_without_compression_are_c_vfl_bit_for_bit(tmp_path, dtype):
    over = {"codec": "none", "head_codec": "none", "dtype": dtype}
    fixed = run_threads(tiny(tmp_path, algorithm__local_steps=3, **over))
    flex = run_threads(tiny(tmp_path, steps__policy="virtual", steps__speeds=(3, 3, 3, 3), **over))
    assert same_bits(weights(fixed), weights(flex))


def test_every_block_takes_its_own_number_of_steps_and_the_log_says_so(tmp_path):
    counted = {}

    def count(run, result):
        counted.setdefault(run.transport.rank, []).append(result.tau)

    summary = run_threads(tiny(tmp_path, **FLEX), after_round=count)
    assert counted == {k: [tau] * 8 for k, tau in enumerate(SPEEDS)}
    log = lines(summary, "steps.jsonl")
    assert [line["round"] for line in log] == list(range(8))
    assert all(line["tau"] == list(SPEEDS) for line in log)
    assert all(line["w_bar"] == [1.0] * 4 for line in log)
    assert [line["units"] for line in lines(summary, "metrics.jsonl")] == [20, 40]


@pytest.mark.parametrize("order", [(3, 1, 0, 2), (2, 3, 1, 0)])
def test_p1_the_order_in_which_blocks_run_changes_no_bit(tmp_path, order):
    over = FLEX | {"optimizer__momentum": 0.5, "codec": "scalar:bits=2"}
    assert same_bits(
        weights(run_threads(tiny(tmp_path, **over))),
        weights(run_threads(tiny(tmp_path, **over), order=order)),
    )


def test_p3_random_numbers_of_a_round_depend_on_seed_round_and_block_alone(tmp_path):
    drawn = {}

    def work(transport, seed, order):
        run = prepare(tiny(tmp_path, seed=seed), transport)
        for r in order:
            run.block.begin_round(r, run.batches.rows(r), 0.1)
            torch.rand(r)  # whatever a round draws, the next does not notice
            run.block.begin_round(r, run.batches.rows(r), 0.1)
            drawn.setdefault((seed, r, transport.rank), set()).add(float(torch.rand(1)))

    for seed, order in ((0, (0, 1, 2)), (0, (2, 0)), (7, (1, 2))):
        ThreadsWorld(4).run(partial(work, seed=seed, order=order))
    values = [value for found in drawn.values() for value in found]
    assert {len(found) for found in drawn.values()} == {1}
    assert len(drawn) == 3 * 4 + 2 * 4 == len(set(values))


def test_p2_steps_leave_all_other_blocks_alone(tmp_path):
    seen = {}

    def work(transport):
        run = prepare(tiny(tmp_path, codec="none", head_codec="none", **FLEX), transport)
        block = run.block
        step = block.step

        def watched(round_index, t):
            frozen = block.head_copy.parameters() if transport.rank else block._embeddings(30)
            before = [p.detach().numpy().copy() for p in frozen]
            own = [p.detach().numpy().copy() for p in block.module.parameters()]
            value = step(round_index, t)
            frozen = block.head_copy.parameters() if transport.rank else block._embeddings(30)
            for kept, p in zip(before, frozen, strict=True):
                assert kept.tobytes() == p.detach().numpy().tobytes()
                assert p.grad is None
            moved = [
                kept.tobytes() != p.detach().numpy().tobytes()
                for kept, p in zip(own, block.module.parameters(), strict=True)
            ]
            seen.setdefault(transport.rank, []).append(any(moved))
            return value

        block.step = watched
        for r in range(2):
            one_round(run, r)

    ThreadsWorld(4).run(work)
    assert {rank: len(steps) for rank, steps in seen.items()} == {
        rank: 2 * tau for rank, tau in enumerate(SPEEDS)
    }
    assert all(all(steps) for steps in seen.values())


@pytest.mark.parametrize("policy", ["virtual", "trace"])
def test_t3_a_recorded_run_replays_bit_for_bit(tmp_path, policy):
    over = {"codec": "ef(scalar:bits=2,range=gauss)", "optimizer__momentum": 0.3}
    steps = FLEX if policy == "virtual" else {"steps__policy": "virtual", "steps__trace": "ar1"}
    first = run_threads(tiny(tmp_path, **steps, **over))
    again = run_threads(
        tiny(tmp_path, steps__policy="script", steps__replay=first["folder"], **over)
    )
    assert same_bits(weights(first), weights(again))
    assert lines(first, "messages.jsonl") == lines(again, "messages.jsonl")
    taus = [[line["tau"] for line in lines(s, "steps.jsonl")] for s in (first, again)]
    assert taus[0] == taus[1]


def test_t3_a_replay_of_a_replay_replays_too(tmp_path):
    log = tmp_path / "steps.jsonl"
    rows = [{"round": r, "tau": [5, 1, 3, 2]} for r in range(8)]
    rows[0]["expected"] = [9, 4, 7, 6]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    over = {"steps__policy": "script", "optimizer__schedule": "adaptive", "optimizer__lr": 0.4}
    first = run_threads(tiny(tmp_path, steps__replay=str(log), **over))
    second = run_threads(tiny(tmp_path, steps__replay=first["folder"], **over))
    assert lines(first, "steps.jsonl")[0]["expected"] == [9, 4, 7, 6]
    assert same_bits(weights(first), weights(second))


def test_an_adaptive_rate_begins_with_the_weights_of_a_rate_near_its_own(tmp_path):
    over = {"optimizer__schedule": "adaptive", "optimizer__lr": 3.0, "optimizer__proximal": 1.0}
    rates = []

    def keep(run, result):
        if run.transport.rank == 1:
            rates.append(run.block.optimizer.lr)

    run_threads(tiny(tmp_path, algorithm__local_steps=100, **over), after_round=keep)
    assert rates == pytest.approx([0.03] * 8)  # A / tau: w_bar of the proximal rule is 1


def test_a_proximal_term_is_judged_by_the_adaptive_rate_not_by_a(tmp_path):
    pulled = {"optimizer__schedule": "adaptive", "optimizer__proximal": 0.6}
    summary = run_threads(tiny(tmp_path, algorithm__local_steps=10, optimizer__lr=2.0, **pulled))
    assert summary["rounds"] == 8
    with pytest.raises(ConfigError, match=r"block \d, round 0: optimizer.proximal = 0.6: .*is 2,"):
        run_threads(tiny(tmp_path, algorithm__local_steps=1, optimizer__lr=2.0, **pulled))


def test_a_log_that_is_too_short_ends_the_run_with_a_line(tmp_path):
    first = run_threads(tiny(tmp_path, algorithm__rounds=3))
    with pytest.raises(ConfigError, match=r"steps\.replay: 3 rounds are on record, 8 are due"):
        run_threads(tiny(tmp_path, steps__policy="script", steps__replay=first["folder"]))


def test_a2_an_adaptive_rate_at_constant_steps_is_a_fixed_rate(tmp_path):
    # A / tau with tau = 4 for all: powers of two, so that the division is exact.
    over = {"steps__policy": "virtual", "steps__speeds": (4, 4, 4, 4)}
    adaptive = {"optimizer__schedule": "adaptive", "optimizer__lr": 0.5}
    assert same_bits(
        weights(run_threads(tiny(tmp_path, optimizer__lr=0.125, **over))),
        weights(run_threads(tiny(tmp_path, **adaptive, **over))),
    )


@pytest.mark.parametrize("schedule", ["adaptive", "adaptive-sum"])
def test_x2_the_rate_of_a_round_is_what_the_headers_of_the_next_would_give(tmp_path, schedule):
    trace = np.random.default_rng(1).uniform(0, 1, (4, 50))
    np.save(tmp_path / "u.npy", trace)
    over = {"steps__policy": "virtual", "steps__trace": str(tmp_path / "u.npy")}
    over |= {"optimizer__schedule": schedule, "optimizer__lr": 0.3, "optimizer__momentum": 0.7}
    rates = {}

    def keep(run, result):
        rates[run.transport.rank, run.rounds - 1] = run.block.optimizer._lr

    summary = run_threads(tiny(tmp_path, **over), after_round=keep)
    log = lines(summary, "steps.jsonl")
    config = tiny(tmp_path, **over).optimizer
    for r in range(1, 8):
        for k in range(4):
            tau, w_bar = log[r - 1]["tau"][k], log[r - 1]["w_bar"][k]
            told = weights_of(config, rates[k, r - 1], tau)
            assert w_bar == told.w_bar
            due = 0.3 / (tau * w_bar) if schedule == "adaptive" else 0.3 / told.total
            assert rates[k, r] == due
    first = weights_of(config, 0.3, log[0]["tau"][2])
    assert rates[2, 0] == 0.3 / (
        first.total if "sum" in schedule else log[0]["tau"][2] * first.w_bar
    )


def test_any_codec_any_steps_any_rate_in_one_config(tmp_path):
    over = FLEX | {
        "codec": "ef(topk:k=2,per=row,values=(scalar:bits=2,range=gauss))",
        "head_codec": "ef(scalar:bits=2,range=gauss)",
        "optimizer__schedule": "adaptive",
        "optimizer__lr": 0.4,
        "algorithm__epochs": 25,
        "party": {"2": {"optimizer.momentum": 0.5}, "3": {"optimizer.proximal": 0.5}},
    }
    summary = run_threads(tiny(tmp_path, **over))
    assert summary["metrics"]["accuracy"] > 0.8
    last = lines(summary, "steps.jsonl")[-1]
    assert last["tau"] == list(SPEEDS)
    assert last["w_bar"] == pytest.approx([1, 1, 1 + 0.5 + 0.25, 1])


def test_an_optimizer_outside_the_theory_trains_and_is_told_of(tmp_path):
    told = []

    class Watcher(Silent):
        def warning(self, text):
            told.append(text)

    config = tiny(
        tmp_path, algorithm__epochs=20, party={"2": {"optimizer": {"name": "Adam", "lr": 0.01}}}
    )
    summary = ThreadsWorld(4).run(lambda t: train(config, t, Watcher()))[0]
    assert len(told) == 1
    assert told[0].startswith("block 2: optimizer.name = 'Adam'")
    assert summary["warnings"] == told
    assert summary["metrics"]["accuracy"] > 0.7


def test_the_wall_clock_is_refused_in_one_process(tmp_path):
    with pytest.raises(ConfigError, match="a timeout means nothing; start it with mpiexec"):
        run_threads(tiny(tmp_path, steps__policy="wall-clock", steps__timeout_s=1.0))


def test_plans_that_differ_between_ranks_are_refused(tmp_path, monkeypatch):
    read = []  # a file that changes while the ranks read it, one after the other

    def read_trace(name, num_blocks):
        read.append(name)
        return np.full((4, 3), 0.5 if len(read) == 4 else 0.0)

    monkeypatch.setattr("hpcvfl.engine.traces.read_trace", read_trace)
    with pytest.raises(ConfigError, match="digest of the steps planned"):
        run_threads(tiny(tmp_path, steps__policy="virtual", steps__trace="u.npy"))


def test_e6_unlike_steps_and_optimizers_end_at_the_joint_minimum(tmp_path):
    # Full batch and a small rate: fixed points are those of the joint loss, whatever tau.
    over = {
        "dtype": "float64",
        "codec": "none",
        "head_codec": "none",
        "model__tower": "support.modules:LinearTower",
        "data__batch_size": 104,
        "optimizer__lr": 0.5,
        "algorithm__epochs": 300,
        "algorithm__evaluate_every": 300,
    }
    mixed = {"2": {"optimizer.momentum": 0.5}, "3": {"optimizer.proximal": 0.2}}
    norms = []

    def gradient_of(config):
        def work(transport):
            run = prepare(config, transport)
            first = last = 0.0
            for r in range(300):
                one_round(run, r)
                if r in (0, 299):
                    loss = run.block._loss(1)
                    parameters = list(run.block.module.parameters())
                    grads = torch.autograd.grad(loss, parameters)
                    last = float(sum(g.square().sum() for g in grads))
                    first = first or last
            return first, last

        return ThreadsWorld(4).run(work)

    for first, last in gradient_of(tiny(tmp_path, **over, **FLEX, party=mixed)):
        norms.append(last / first)
    assert max(norms) < 1e-3


def test_b1_all_ranks_draw_the_same_rows_in_every_round(tmp_path):
    hashes = {}

    def keep(run, result):
        own = run.exchange.headers_R[run.transport.rank]
        hashes.setdefault(run.rounds, []).append((own.batch_hash, tuple(run.block._rows.tolist())))

    run_threads(tiny(tmp_path, **FLEX), after_round=keep)  # the fourth round is a short batch
    assert len(hashes) == 8
    assert all(len(set(seen)) == 1 and len(seen) == 4 for seen in hashes.values())
    assert len({seen[0] for seen in hashes.values()}) == 8


def test_e2_the_server_relays_payloads_unchanged(tmp_path):
    up, down = {}, {}

    class Recording(Wrapper):
        def gather(self, slots, root=0):
            if "embed" in slots.kinds_R:  # not an evaluation
                up[self.rank, self.round_index] = slots[self.rank].tobytes()
            super().gather(slots, root)

        def broadcast(self, slots, root=0):
            super().broadcast(slots, root)
            frames = [slots[k].tobytes() for k in range(self.size)]
            down[self.rank, self.round_index] = frames

    config = tiny(tmp_path, codec="ef(scalar:bits=2,range=gauss)", algorithm__rounds=4)
    ThreadsWorld(4).run(lambda t: train(config, Recording(t)))
    for r in range(4):
        for rank in range(4):
            assert down[rank, r][1:] == [up[k, r] for k in (1, 2, 3)]


def test_c2_measured_errors_are_within_the_bound_and_the_own_block_is_exact(tmp_path):
    codec = "scalar:bits=3"
    checked = []

    def check(run, result):
        rank = run.transport.rank
        if rank == 0:
            return
        block = run.block
        header = run.exchange.headers_R[rank]
        # The message was the embedding before the round's one step: bound it by its levels.
        assert header.squared_error > 0
        step = run.widest / (2**3 - 1)
        assert header.squared_error <= header.num_values * (step / 2) ** 2 * (1 + 1e-4)
        parts = list(block._embeddings(len(block._rows)))
        parts[rank - 1] = run.own
        logits = block.head_copy(torch.cat(parts, dim=1))
        assert float(F.cross_entropy(logits, block._labels_N)) == result.loss
        checked.append(rank)

    def work(transport):
        run = prepare(tiny(tmp_path, codec=codec), transport)
        message = run.block.message

        def keep():
            sent = message()
            if transport.rank:
                run.own = torch.from_numpy(sent[0].copy())
                run.widest = float(run.own.max() - run.own.min())
            return sent

        run.block.message = keep
        for r in range(3):
            check(run, one_round(run, r))

    ThreadsWorld(4).run(work)
    assert sorted(checked) == sorted([1, 2, 3] * 3)


def test_c1_bytes_of_a_round_are_those_of_the_formula_and_headers(tmp_path):
    # Way up: B P of each party; way down: to each party the head and all embeddings, its own too.
    summary = run_threads(tiny(tmp_path, codec="none", head_codec="none", algorithm__rounds=1))
    rows, width, parties, head, header = 30, 4, 3, 3 * 12 + 3, 64
    up = parties * (4 * rows * width + header)
    down = parties * (4 * head + header + parties * (4 * rows * width + header))
    assert summary["wire_bytes"] == up + down
    assert summary["raw_bytes"] == summary["wire_bytes"] - header * (parties + parties * 4)


def test_an_adaptive_sum_is_the_one_that_the_proof_needs(tmp_path):
    # With a proximal term the weights of earlier prefixes are larger: their sum is tau, not W.
    over = {"optimizer__schedule": "adaptive-sum", "optimizer__lr": 0.4, "optimizer__proximal": 1.5}
    rates = []

    def keep(run, result):
        if run.transport.rank == 1:
            rates.append(run.block.optimizer.lr)

    run_threads(tiny(tmp_path, algorithm__local_steps=5, **over), after_round=keep)
    assert rates == pytest.approx([0.4 / 5] * 8)


def test_the_summary_says_how_steps_were_chosen_and_what_time_it_is(tmp_path):
    virtual = run_threads(tiny(tmp_path, **FLEX, steps__sync="max"))
    assert virtual["steps"] == "virtual, sync max"
    assert virtual["units"] == 8 * 25  # five steps of a block that takes one in a timeout of five
    fixed = run_threads(tiny(tmp_path, algorithm__local_steps=3))
    assert (fixed["steps"], fixed["units"]) == ("3", 24)
    table = closing_table(fixed)
    assert "codec of the head" in table
    assert "  gradients" not in table
    private = run_threads(tiny(tmp_path, labels__holder="server"))
    table = closing_table(private)
    assert "codec of the gradients" in table
    assert "  head" not in table
