"""The shipped benchmarks, launched as they are: what their workers measure and count."""

from pathlib import Path

import pytest

from hpcvfl.benchmarks import round as bench_round
from hpcvfl.benchmarks.launching import measured_by_ranks

pytestmark = pytest.mark.timeout(180)


def test_the_start_ends_with_the_first_round_and_before_the_evaluation(tmp_path: Path) -> None:
    told = measured_by_ranks(5, bench_round.START_WORKER, [tmp_path], 120)
    (run,) = tmp_path.iterdir()
    made_s, evaluated_s = ((run / f).stat().st_mtime for f in ("config.toml", "metrics.jsonl"))
    assert made_s < told["first_round_s"] < evaluated_s
