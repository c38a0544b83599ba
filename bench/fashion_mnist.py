"""Do fewer bits cost accuracy? fashion-mnist, one schedule for all codecs, measured bytes.

python bench/fashion_mnist.py               run the missing cells, then the table and the verdicts
python bench/fashion_mnist.py --table       the table and the verdicts of the cells that are there
python bench/fashion_mnist.py --only B1000  only cells whose name matches this pattern
python bench/fashion_mnist.py --tune        rates and epochs on held-out training images
python bench/fashion_mnist.py --smoke       one tiny cell on digits, seconds

A cell is one training run; its result is one JSON file under bench/results/fashion-mnist/, written
at its end and never run again.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report
from hpcvfl.benchmarks.training import Cell, check_bytes, results, run_config, run_missing

CELLS = Path(__file__).parent / "results" / "fashion-mnist"
SEEDS = (0, 1, 2, 3, 4)

CODECS = {
    "float32": ("none", "none"),
    "4bit": ("scalar:bits=4", "scalar:bits=8"),
    "3bit": ("scalar:bits=3,range=gauss,scope=column", "scalar:bits=8"),
    "2bit": ("scalar:bits=2,range=gauss,scope=column", "scalar:bits=8"),
    "1bit": ("scalar:bits=1,range=gauss,scope=column", "scalar:bits=8"),
}
"""Name -> codec of the embeddings, codec of the head."""

CANDIDATES = {
    (100, 1): ((0.1, 5), (0.2, 5), (0.4, 5)),
    (1000, 1): ((0.2, 20), (0.4, 20), (0.8, 20)),
    (100, 5): ((0.05, 3), (0.1, 3)),
    (1000, 5): ((0.1, 6), (0.2, 6)),
}
"""What --tune tries, on the held-out images."""


def grid() -> list[Cell]:
    """Cells in the order in which they are worth having: the aims first."""
    paired = [
        Cell(codec, batch, 1, seed)
        for seed in SEEDS
        for batch in (1000, 100)
        for codec in ("float32", "4bit")
    ]
    low = [Cell(codec, batch, 1, 0) for batch in (1000, 100) for codec in ("2bit", "1bit", "3bit")]
    local = [Cell(codec, batch, 5, 0) for batch in (1000, 100) for codec in CODECS]
    return [*paired[:4], *low, *local, *paired[4:]]


def tune(report: Report) -> None:
    """float32 on 5,000 held-out training images for every candidate that --only names."""
    for (batch, q), schedules in CANDIDATES.items():
        cell = Cell("float32", batch, q, 0)
        for lr, epochs in schedules if re.search(report.args.only, cell.name) else ():
            summary, _ = run_config(cell.config(CODECS, (lr, epochs), held_out=5000))
            accuracy = 100 * summary["metrics"]["accuracy"]
            print(f"B={batch} Q={q} lr={lr} epochs={epochs}: {accuracy:.2f}", file=sys.stderr)
            report.row(B=batch, Q=q, lr=lr, epochs=epochs, held_out_accuracy=f"{accuracy:.2f}")


def bytes_to(result: dict[str, Any], accuracy: float) -> int | None:
    """Measured bytes at the first evaluation that reaches `accuracy`; None if none does."""
    reached = [p["wire_bytes"] for p in result["curve"] if p["test_accuracy"] >= accuracy]
    return reached[0] if reached else None


def tabulate(report: Report) -> None:
    """A row per cell and the verdicts on the aims."""
    found = results(grid(), CELLS)
    for cell, r in found.items():
        to_85 = bytes_to(r, 0.85)
        by = r["wire_bytes_by"]
        report.row(
            codec=cell.codec,
            B=cell.batch_size,
            Q=cell.local_steps,
            seed=cell.seed,
            accuracy=f"{100 * r['accuracy']:.2f}",
            wire_MB=f"{r['wire_bytes'] / 1e6:.2f}",
            ratio=f"{r['raw_bytes'] / r['wire_bytes']:.2f}",
            up_embed_MB=f"{by['uplink embed'] / 1e6:.2f}",
            down_embed_MB=f"{by['downlink embed'] / 1e6:.2f}",
            down_head_MB=f"{by['downlink head'] / 1e6:.2f}",
            MB_to_85="never" if to_85 is None else f"{to_85 / 1e6:.2f}",
        )
    for batch, due_ratio in ((100, 6.5), (1000, 7.5)):
        judge(report, found, batch, due_ratio)


def judge(report: Report, found: dict[Cell, dict[str, Any]], batch: int, due_ratio: float) -> None:
    """The aims at one batch size: float32 good enough, 4 bits as good, with fewer bytes."""
    pairs = [
        (found[full], found[few])
        for full, few in ((Cell("float32", batch, 1, s), Cell("4bit", batch, 1, s)) for s in SEEDS)
        if full in found and few in found
    ]
    if not pairs:
        return
    full = [100 * a["accuracy"] for a, _ in pairs]
    losses = [100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs]
    ratio = pairs[0][0]["wire_bytes"] / pairs[0][1]["wire_bytes"]
    where = f"at B = {batch} ({len(pairs)} seeds)"
    report.target(f"float32 accuracy {where}", statistics.mean(full), 88.5, "%")
    loss = statistics.mean(losses)
    report.target(f"4 bits, points lost {where}", loss, 0.5, "points", at_most=True)
    if len(pairs) > 1:
        error = statistics.stdev(losses) / math.sqrt(len(losses))
        report.target(f"standard error of it {where}", error, 0.15, "points", at_most=True)
    report.target(f"float32 bytes / 4-bit bytes {where}", ratio, due_ratio, "x")


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""

    def options(parser: Any) -> None:
        parser.add_argument("--table", action="store_true", help="run nothing")
        parser.add_argument("--tune", action="store_true", help="candidates on held-out images")
        parser.add_argument(
            "--only", default="", metavar="PATTERN", help="cells whose name matches"
        )

    report = Report("fashion-mnist", argv, options)
    report.command = " ".join(["python bench/fashion_mnist.py", *argv])
    if report.smoke:
        check_bytes(report, *CODECS["2bit"])
        return report.finish()
    if report.args.tune:
        tune(report)
        return report.finish()
    if not report.args.table:
        run_missing(grid(), CODECS, CELLS, report.args.only)
    tabulate(report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
