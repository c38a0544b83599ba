"""The shipped benchmarks, launched as they are: what their workers measure and count."""

from pathlib import Path

import pytest

from hpcvfl.benchmarks import round as bench_round
from hpcvfl.benchmarks.launching import measured_by_ranks
from hpcvfl.clock import PHASES

pytestmark = pytest.mark.timeout(180)


def test_the_start_ends_with_the_first_round_and_before_the_evaluation(tmp_path: Path) -> None:
    told = measured_by_ranks(5, bench_round.START_WORKER, [tmp_path], 120)
    (run,) = tmp_path.iterdir()
    made_s, evaluated_s = ((run / f).stat().st_mtime for f in ("config.toml", "metrics.jsonl"))
    assert made_s < told["first_round_s"] < evaluated_s


@pytest.mark.parametrize("pattern", ["hub", "allgather"])
def test_a_round_of_the_bench_books_what_the_formula_says(pattern: str) -> None:
    result = bench_round.worker(2, 64, 8, pattern, 5, compare=False)
    assert result["booked_rounds"] == 5 + 10  # ten to warm up
    assert bench_round.off_nbytes(result, 2, 64, 8, pattern) == 0
    assert bench_round.off_nbytes(result, 2, 64, 9, pattern) > 0
    assert set(PHASES) == set(result["server"]) == set(result["party"])
