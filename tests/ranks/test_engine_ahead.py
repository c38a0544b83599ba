"""algorithm.pipeline = 1: the next round's frames travel while this round's local steps run."""

import copy
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.runs import run_threads, same_bits, tiny, weights
from torch.nn import functional as F

from hpcvfl.clock import PhaseClock
from hpcvfl.engine.ahead import Ahead
from hpcvfl.engine.prepare import prepare
from hpcvfl.engine.run import train
from hpcvfl.errors import ConfigError, TransportTimeout
from hpcvfl.transport.threads import ThreadsWorld

EXACT = {"codec": "none", "head_codec": "none"}
AHEAD = {"algorithm__pipeline": 1}


def lines(summary, name):
    return [json.loads(t) for t in (Path(summary["folder"]) / name).read_text().splitlines()]


@pytest.mark.parametrize("tower", ["mlp", "support.modules:DropoutTower"])
def test_the_first_round_is_that_of_the_plain_loop_bit_for_bit(tmp_path, tower):
    over = {"algorithm__rounds": 1, "algorithm__local_steps": 3, "model__tower": tower}
    plain, ahead = (run_threads(tiny(tmp_path, **over, **more)) for more in ({}, AHEAD))
    assert same_bits(weights(plain), weights(ahead))


def test_it_equals_the_algorithm_written_out(tmp_path):
    """Snapshots of round r are of the parameters before round r - 1."""
    steps, rate, num_rounds = 2, 0.1, 7
    config = tiny(
        tmp_path, dtype="float64", algorithm__rounds=num_rounds, algorithm__local_steps=steps,
        optimizer__lr=rate, **EXACT, **AHEAD,
    )  # fmt: skip
    start = {}

    def begin(transport):
        run = prepare(config, transport)
        shard = run.block.shard
        rows = [run.batches.rows(r) for r in range(num_rounds)]
        start[transport.rank] = copy.deepcopy(run.block.module), shard, rows

    ThreadsWorld(4).run(begin)
    modules = [start[k][0] for k in range(4)]
    x = [None, *(start[k][1].train_x for k in (1, 2, 3))]
    y, rows = start[0][1].train_y, start[0][2]

    def snapshot(r):
        with torch.no_grad():
            embeddings = [modules[k](x[k][rows[r]]) for k in (1, 2, 3)]
        return copy.deepcopy(modules[0]), embeddings

    here = snapshot(0)
    for r in range(num_rounds):
        following = snapshot(min(r + 1, num_rounds - 1))
        head, embeddings = here
        for k in range(4):
            for _ in range(steps):
                parts = list(embeddings)
                if k:
                    parts[k - 1] = modules[k](x[k][rows[r]])
                logits = (head if k else modules[0])(torch.cat(parts, dim=1))
                loss = F.cross_entropy(logits, y[rows[r]])
                grads = torch.autograd.grad(loss, list(modules[k].parameters()))
                with torch.no_grad():
                    for p, g in zip(modules[k].parameters(), grads, strict=True):
                        p -= rate * g
        here = following
    came = weights(run_threads(config))
    for k, module in enumerate(modules):
        for name, value in module.state_dict().items():
            np.testing.assert_allclose(came[f"rank{k}.{name}"], value.numpy(), atol=1e-12)


@pytest.mark.parametrize("codec", ["none", "ef(scalar:bits=2,range=gauss)", "topk:k=2"])
def test_patterns_and_the_order_of_ranks_change_no_bit(tmp_path, codec):
    over = {"codec": codec, "model__tower": "support.modules:DropoutTower", **AHEAD}
    hub = run_threads(tiny(tmp_path, **over))
    for order, pattern in ((None, "allgather"), ((2, 0, 3, 1), "hub")):
        other = run_threads(tiny(tmp_path, **over, transport__pattern=pattern), order=order)
        assert same_bits(weights(hub), weights(other))
        assert hub["metrics"] == other["metrics"]


def test_the_books_are_whole_and_bytes_those_of_the_plain_loop(tmp_path):
    over = {"steps__policy": "virtual", "steps__trace": "ar1", "steps__trace_rule": "int10"}
    plain, ahead = (run_threads(tiny(tmp_path, **over, **more)) for more in ({}, AHEAD))
    assert plain["wire_bytes"] == ahead["wire_bytes"]
    for name in ("steps.jsonl", "messages.jsonl"):
        assert [line["round"] for line in lines(ahead, name)] == list(range(8))
    taus = [[line["tau"] for line in lines(s, "steps.jsonl")] for s in (plain, ahead)]
    assert taus[0] == taus[1]
    assert not same_bits(weights(plain), weights(ahead))


def test_it_learns(tmp_path):
    summary = run_threads(tiny(tmp_path, algorithm__epochs=30, **AHEAD))
    assert summary["metrics"]["accuracy"] > 0.8


def test_a_run_that_reaches_its_target_early_has_whole_books(tmp_path):
    over = {"algorithm__epochs": 40, "algorithm__target_accuracy": 0.5, **AHEAD}
    summary = run_threads(tiny(tmp_path, **over))
    assert summary["rounds"] < 160
    assert [line["round"] for line in lines(summary, "steps.jsonl")] == list(
        range(summary["rounds"])
    )


def test_statistics_of_a_tower_move_once_a_round(tmp_path):
    over = {"model__tower": "support.modules:BatchNormTower", "algorithm__local_steps": 3, **AHEAD}
    counted = []

    def count(run, result):
        if run.transport.rank == 1:
            (norm,) = run.block._norms
            counted.append(int(norm.num_batches_tracked))

    run_threads(tiny(tmp_path, **over), after_round=count)
    assert counted == list(range(1, 9))


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"labels__holder": "server"}, "pipeline = 1 needs labels.holder = 'all'"),
        ({"labels__holder": "server", "algorithm__driver": "vafl"}, "leave algorithm.pipeline"),
        ({"algorithm__pipeline": 2}, "algorithm.pipeline = 2"),
    ],
)
def test_what_it_does_not_go_with_is_refused_in_one_line(tmp_path, over, words):
    with pytest.raises(ConfigError, match=words) as caught:
        tiny(tmp_path, **(AHEAD | over))
    assert "\n" not in str(caught.value)


def fake_ahead(swap):
    """An Ahead whose frames move by `swap` as between processes, and the names of its calls."""
    calls = []
    exchange = SimpleNamespace(
        transport=SimpleNamespace(name="mpi", round_index=-1, threaded=True, waited_s=0.0),
        encode=lambda *a: calls.append("encode"),
        swap=swap,
        decode=lambda *a: calls.append("decode"),
    )
    block = SimpleNamespace(
        message_ahead=lambda r, rows: [rows], score=lambda: None, targets=lambda n: []
    )
    batches = SimpleNamespace(rows=lambda r: np.arange(3))
    return Ahead(block, exchange, batches, 2, PhaseClock()), calls


def test_frames_move_while_the_rank_goes_on(tmp_path):
    go, moved = threading.Event(), []

    def swap(batch_size):
        assert go.wait(30)
        moved.append(batch_size)

    ahead, calls = fake_ahead(swap)
    ahead.begin(1, 1, 1.0, 0.0)
    assert calls == ["encode"]
    assert not moved  # `begin` came back before the frames had moved
    go.set()
    assert ahead.end(1)
    assert (moved, calls) == ([3], ["encode", "decode"])
    ahead.begin(2, 1, 1.0, 0.0)
    assert not ahead.end(2)  # there is no round 2


def test_what_the_rank_waits_for_a_late_peer_is_no_time_on_the_wire(tmp_path):
    def swap(batch_size):
        time.sleep(0.3)
        ahead._exchange.transport.waited_s += 0.2

    ahead, _ = fake_ahead(swap)
    ahead.begin(1, 1, 1.0, 0.0)
    assert ahead.end(1)
    assert 0.0 < ahead._clock.seconds["wait"] <= 0.2
    assert 0.0 <= ahead._clock.seconds["wire"] < 0.3


def test_what_goes_wrong_on_the_way_is_raised_where_it_is_waited_for(tmp_path):
    def swap(batch_size):
        raise TransportTimeout("rank 0, round 1: gather: rank 1 did not post", [1])

    ahead, calls = fake_ahead(swap)
    ahead.begin(1, 1, 1.0, 0.0)
    with pytest.raises(TransportTimeout, match="rank 1 did not post") as caught:
        ahead.end(1)
    assert caught.value.missing == (1,)
    assert calls == ["encode"]


def test_an_error_of_a_local_step_ends_the_run(tmp_path):
    over = {"party": {"2": {"model": {"tower": "support.modules:ExplodingTower"}}}}
    with pytest.raises(Exception, match="block 2, round"):
        ThreadsWorld(4).run(lambda t: train(tiny(tmp_path, **over, **AHEAD), t))


def test_an_mpi_that_lets_one_thread_alone_call_it_is_refused():
    exchange = SimpleNamespace(transport=SimpleNamespace(threaded=False))
    with pytest.raises(
        ConfigError, match=r"algorithm.pipeline = 1: this MPI lets one thread alone"
    ):
        Ahead(None, exchange, None, 1, PhaseClock())
