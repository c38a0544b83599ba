"""VAFL over MPI, on any number of ranks: virtual order as in one process, and for real."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI
from support.over_mpi import everywhere_equal, over_mpi
from support.runs import run_threads, same_bits, tiny, weights

WORLD = MPI.COMM_WORLD
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120)]


def served(summary):
    """steps.jsonl without seconds."""
    text = (Path(summary["folder"]) / "steps.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def vafl(folder, **over):
    always = {"algorithm__driver": "vafl", "labels__holder": "server"}
    return tiny(folder, num_parties=WORLD.size - 1, **always, **over)


SPEEDS = (10, 3, 7, 10, 5)[: WORLD.size]
VIRTUAL = {"steps__policy": "virtual", "steps__speeds": SPEEDS, "steps__timeout_units": 10}
EF = "ef(scalar:bits=2,range=gauss)"


@pytest.mark.parametrize(
    "over",
    [
        {},
        VIRTUAL,
        VIRTUAL | {"codec": EF, "labels__gradient_codec": EF, "algorithm__rounds": 5},
        # Messages too long for MPI to take them before the server asks.
        VIRTUAL | {"codec": "none", "model__embedding_dim": 6000, "algorithm__rounds": 5},
    ],
    ids=["in-turn", "speeds", "feedback", "long"],
)
def test_virtual_order_equals_one_process_bit_for_bit(folder, over):
    config = vafl(folder, **over)
    summary = over_mpi(config)
    ok = True
    if WORLD.rank == 0:
        alone = run_threads(config)
        ok = same_bits(weights(alone), weights(summary))
        ok = ok and alone["wire_bytes_by"]["train"] == summary["wire_bytes_by"]["train"]
        ok = ok and alone["metrics"] == summary["metrics"] and served(alone) == served(summary)
    assert everywhere_equal(ok)


def test_a_really_asynchronous_run_serves_all_and_the_slow_one_less_often(folder):
    last = WORLD.size - 1
    over = {"steps__policy": "wall-clock", "algorithm__epochs": 10, "codec": "none"}
    over |= {"party": {str(last): {"steps": {"slow_factor": 100.0}}}}
    numbers = []

    def keep(run, result):
        numbers.append((run.rounds, result.loss))

    summary = over_mpi(vafl(folder, **over), after_round=keep)
    parties = [line["party"] for line in served(summary)]
    counts = [parties.count(k) for k in range(1, WORLD.size)]
    # An update of every party's own is one of the server's; each knew of more than before.
    assert len(numbers) == (counts[WORLD.rank - 1] if WORLD.rank else len(parties))
    assert [n for n, _ in numbers] == sorted({n for n, _ in numbers})
    ok = len(parties) == summary["rounds"] == 40 * (WORLD.size - 1)
    ok = ok and min(counts) > 0
    if last > 1:
        ok = ok and counts[-1] < min(counts[:-1]) and summary["metrics"]["accuracy"] > 0.5
    assert everywhere_equal(ok)
