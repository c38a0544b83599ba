"""Flex-VFL over MPI: step policies, the wall clock, private labels, on any number of ranks."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI
from support.over_mpi import everywhere_equal, over_mpi
from support.runs import run_threads, same_bits, tiny, weights

from hpcvfl.engine.run import train
from hpcvfl.transport.threads import ThreadsWorld

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def steps_of(summary):
    text = (Path(summary["folder"]) / "steps.jsonl").read_text()
    return [json.loads(line)["tau"] for line in text.splitlines()]


def flex(folder, **over):
    return tiny(folder, num_parties=WORLD.size - 1, **over)


VIRTUAL = {"steps__policy": "virtual", "steps__trace": "ar1", "steps__trace_rule": "int10"}
PRIVATE = {"labels__holder": "server", "labels__gradient_codec": "ef(scalar:bits=2,range=gauss)"}


@pytest.mark.parametrize(
    "over",
    [
        VIRTUAL,
        VIRTUAL | {"optimizer__schedule": "adaptive", "optimizer__momentum": 0.9},
        VIRTUAL | {"steps__sync": "min", "codec": "ef(scalar:bits=2,range=gauss)"},
        VIRTUAL | PRIVATE,
        PRIVATE | {"codec": "best:bits=2"},
        {"algorithm__pipeline": 1, "model__tower": "support.modules:DropoutTower"},
        VIRTUAL | {"algorithm__pipeline": 1, "codec": "ef(scalar:bits=2,range=gauss)"},
    ],
    ids=["trace", "adaptive", "sync-min", "private-trace", "private-best", "ahead", "ahead-trace"],
)
def test_x1_mpi_equals_one_process_bit_for_bit(folder, over):
    config = flex(folder, algorithm__local_steps=2, **over)
    summary = over_mpi(config)
    ok = True
    if WORLD.rank == 0:
        alone = run_threads(config)
        ok = same_bits(weights(alone), weights(summary))
        ok = ok and alone["wire_bytes"] == summary["wire_bytes"]
        ok = ok and steps_of(alone) == steps_of(summary)
    assert everywhere_equal(ok)


def test_the_server_beside_a_party_gives_over_mpi_what_it_gives_in_one_process(folder):
    holder = {"labels__holder": f"party:{WORLD.size}", "codec": "scalar:bits=2"}
    config = tiny(folder, num_parties=WORLD.size, algorithm__local_steps=2, **VIRTUAL, **holder)
    summary = over_mpi(config)
    ok = True
    if WORLD.rank == 0:
        alone = ThreadsWorld(WORLD.size).run(lambda transport: train(config, transport))[0]
        ok = same_bits(weights(alone), weights(summary))
        ok = ok and alone["wire_bytes"] == summary["wire_bytes"]
        ok = ok and steps_of(alone) == steps_of(summary)
    assert everywhere_equal(ok)


def test_t2_t3_a_wall_clock_run_takes_a_step_at_least_and_replays_bit_for_bit(folder):
    last = WORLD.size - 1
    # A slow party of which one step takes longer than the timeout of the others' many.
    clocked = {"steps__policy": "wall-clock", "steps__timeout_s": 0.02}
    slow = {"party": {str(last): {"steps": {"slow_factor": 50.0}}}}
    over = {"codec": "scalar:bits=2", "optimizer__schedule": "adaptive", "optimizer__lr": 0.2}
    summary = over_mpi(flex(folder, **clocked, **over, **slow))
    taus = steps_of(summary)
    assert len(taus) == summary["rounds"] == 8
    assert all(tau >= 1 for row in taus for tau in row)
    assert sum(row[last] for row in taus) < sum(row[0] for row in taus)
    replayed = over_mpi(
        flex(folder, steps__policy="script", steps__replay=summary["folder"], **over)
    )
    ok = True
    if WORLD.rank == 0:
        # The rate of round 0 followed an estimate, which is on record.
        ok = taus == steps_of(replayed) and same_bits(weights(summary), weights(replayed))
    assert everywhere_equal(ok)


@pytest.mark.parametrize(
    "more",
    # Many steps down one frozen gradient: a small rate, whatever the machine makes of 10 ms.
    [{}, {"optimizer__schedule": "cosine"}, PRIVATE | {"optimizer__lr": 1e-4}],
    ids=["shared", "cosine", "private"],
)
def test_t3_a_wall_clock_run_replays_bit_for_bit(folder, more):
    over = {"codec": "ef(scalar:bits=2,range=gauss)"} | more
    clocked = {"steps__policy": "wall-clock", "steps__timeout_s": 0.01}
    summary = over_mpi(flex(folder, **clocked, **over))
    scripted = {"steps__policy": "script", "steps__replay": summary["folder"]}
    replayed = over_mpi(flex(folder, **scripted, **over))
    ok = True
    if WORLD.rank == 0:
        alone = run_threads(flex(folder, **scripted, **over))
        ok = same_bits(weights(summary), weights(replayed))
        ok = ok and same_bits(weights(summary), weights(alone))
        ok = ok and steps_of(summary) == steps_of(alone)
    assert everywhere_equal(ok)


def test_a_timeout_shorter_than_a_step_means_one_step_and_is_said_once(folder):
    clocked = {"steps__policy": "wall-clock", "steps__timeout_s": 1e-7}
    summary = over_mpi(flex(folder, **clocked, algorithm__evaluate_every=1))
    assert {tau for row in steps_of(summary) for tau in row} == {1}
    said = [text for text in summary["warnings"] if "steps.timeout_s" in text]
    assert len(said) == len(set(said)) == WORLD.size
    assert (
        "block 0: in most rounds the first local step takes longer than steps.timeout_s = 1e-07 s"
        in said[0]
    )
