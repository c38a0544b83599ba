"""What our transport adds to MPI, and what a waiting rank costs a computing one.

It launches mpiexec itself, at 2 and 5 ranks. Both sides of a comparison wait with the same loop and
the same settings and alternate in one run; exchange_worker.py is what the ranks do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hpcvfl.benchmarks.common import Report
from hpcvfl.benchmarks.launching import measured_by_ranks

WORKER = "hpcvfl.benchmarks.exchange_worker"
RANKS = (2, 5)
SMALL_NBYTES = 888  # 100 x 16 values at 4 bits, and a header
SIZES = (SMALL_NBYTES, 2**13, 2**15, 2**17, 2**20, 2**22, 2**24)
SMOKE_SIZES = (SMALL_NBYTES, 2**13)
RATIO, MORE_US = 1.2, 50.0
LOSS_PERCENT, LATE_US = 10.0, 500.0
TIMEOUT_S = 600


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; see the module. Returns 0 if every target passed."""
    report = Report("exchange", argv, options)
    for size in RANKS:
        sizes = SMOKE_SIZES if report.smoke else SIZES
        words = [0 if report.smoke else report.args.seconds, *sizes]
        result = measured_by_ranks(size, WORKER, words, TIMEOUT_S)
        for row in result["exchange"]:
            judge_exchange(report, size, row)
        if "wait" in result:
            judge_wait(report, size, result["wait"])
    return report.finish()


def options(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told besides the common options."""
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="time for each frame size and rank count"
    )


def judge_exchange(report: Report, size: int, row: dict[str, Any]) -> None:
    """One frame size: a line of the table and its targets."""
    nbytes = row["nbytes"]
    where = f"{size} ranks, {nbytes} B"
    more_us = row["ours_us"] - row["raw_us"]
    report.row(
        ranks=size,
        **{"frame bytes": nbytes, "raw us": row["raw_us"], "ours us": row["ours_us"]},
        **{"ratio": row["ratio"], "more us": more_us, "turns": row["turns"]},
    )
    wrong, off = row["wrong_bytes"], row["off_bytes"]
    report.target(f"wrong bytes, {where}", wrong, 0, "bytes", at_most=True, any_size=True)
    report.target(f"booked wrongly, {where}", off, 0, "bytes", at_most=True, any_size=True)
    if nbytes == SMALL_NBYTES:
        report.target(f"more than raw, {where}", more_us, MORE_US, "us", at_most=True)
    else:
        report.target(f"ratio to raw, {where}", row["ratio"], RATIO, "x", at_most=True)


def judge_wait(report: Report, size: int, wait: dict[str, float]) -> None:
    """The cost of waiting: a line of the table and its targets."""
    report.row(
        ranks=size,
        **{"computing ms alone": wait["alone_ms"], "with others waiting": wait["beside_ms"]},
        **{"all on after us": wait["late_us"], "turns": wait["turns"]},
    )
    for name, value, bound, unit in (
        ("loss of a computing rank", wait["loss_percent"], LOSS_PERCENT, "%"),
        ("all on after a wait of 10 ms", wait["late_us"], LATE_US, "us"),
    ):
        report.target(f"{name}, {size} ranks", value, bound, unit, at_most=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
