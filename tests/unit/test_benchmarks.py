"""What the benchmarks work out themselves, without ranks: byte formulas and verdicts."""

import pytest

from hpcvfl.benchmarks import round as bench_round
from hpcvfl.clock import PHASES

HEAD = 64 + 4 * (10 * 16 + 10)  # frame of a float32 head of 16 x 10 weights and 10 offsets
EMBED = 64 + 8 + 64 * 8 // 2  # header, range, 4 bits a value
DUE = {"hub": 2 * EMBED + 2 * (HEAD + 2 * EMBED), "allgather": 2 * (HEAD + 2 * EMBED)}


def result_of(pattern: str, more_received: int = 0, more_sent: int = 0) -> dict:
    phases = dict.fromkeys(PHASES, 1.0)
    return {
        "round_ms": 1.0,
        "server": phases,
        "party": phases,
        "booked": [7 * DUE[pattern] + more_received, 7 * DUE[pattern] + more_sent],
        "booked_rounds": 7,
        "head_codec": "none",
        "head_shapes": [[10, 16], [10]],
    }


@pytest.mark.parametrize("pattern", DUE)
def test_the_formula_is_the_sum_of_the_frames_that_travel(pattern: str) -> None:
    due = bench_round.due_nbytes(2, 64, 8, pattern, "none", [[10, 16], [10]])
    assert due == DUE[pattern]


@pytest.mark.parametrize(("more", "status"), [((0, 0), 0), ((1, 0), 1), ((0, -1), 1), ((1, -1), 1)])
def test_the_smoke_run_fails_on_a_single_byte(
    more: tuple[int, int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker(m, b, p, pattern, rounds, compare):
        assert (m, b, p) == (2, 64, 8)
        return result_of(pattern, *more)

    monkeypatch.setattr(bench_round, "worker", worker)
    assert bench_round.main(["--smoke"]) == status
