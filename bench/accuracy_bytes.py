"""Which codec gives the best accuracy for its measured bytes? fashion-mnist, one schedule for all.

python bench/accuracy_bytes.py               run the missing cells, then table, plot and verdicts
python bench/accuracy_bytes.py --table       table, plot and verdicts of the cells that are there
python bench/accuracy_bytes.py --only ef-    only cells whose name matches this pattern
python bench/accuracy_bytes.py --smoke       one tiny cell on digits, seconds

A cell is one training run; its result is one JSON file under bench/results/accuracy-bytes/, written
at its end and never run again. Codecs of the aims were chosen by their seed 0, so the verdicts give
the mean of the other four as well. With error feedback the head has it too, at 2 bits in place of
8, but for the cells whose name ends in -head8. float32, and scalar codecs without error feedback,
are the cells of bench/fashion_mnist.py. Last epoch, test set, no best epoch picked; losses are
paired by seed.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

from hpcvfl.benchmarks.common import Report
from hpcvfl.benchmarks.training import Cell, check_bytes, results, run_missing
from hpcvfl.codecs.frame import HEADER_NBYTES

RESULTS = Path(__file__).parent / "results"
CELLS = RESULTS / "accuracy-bytes"
SEEDS = (0, 1, 2, 3, 4)

HEAD_8 = "scalar:bits=8"
HEAD_2 = "ef(scalar:bits=2,range=gauss)"
GAUSS = "range=gauss,scope=column"
ONE_BIT = "values=(scalar:bits=1,range=gauss)"
TWO_BITS = "values=(scalar:bits=2,range=gauss)"

SCALAR = {f"scalar{b}": f"scalar:bits={b}" + (f",{GAUSS}" if b < 4 else "") for b in (1, 2, 3, 4)}
PLAIN = SCALAR | {
    "lattice8d-1": "lattice:dim=8,bits=1,scope=column",
    "lattice8d-2": "lattice:dim=8,bits=2,scope=column",
    "lattice8d-4": "lattice:dim=8,bits=4,scope=column",
    "topk1": "topk:k=1",
    "topk4-1bit": f"topk:k=4,values=(scalar:bits=1,{GAUSS})",
    "toprow1-1bit": f"topk:k=1,per=row,{ONE_BIT}",
    "toprow1-2bit": f"topk:k=1,per=row,{TWO_BITS}",
    "toprow2-1bit": f"topk:k=2,per=row,{ONE_BIT}",
    "qsgd2": "qsgd:bits=2,norm=max,bucket=64",
    "qsgd4": "qsgd:bits=4,norm=max,bucket=64",
    "best0.25": "best:bits=0.25",
    "best0.5": "best:bits=0.5",
    "best1": "best:bits=1",
    "best2": "best:bits=2",
    "best4": "best:bits=4",
}
"""Codecs of the embeddings by name."""

PLAIN_ONLY = ("scalar3", "scalar4", "lattice8d-4", "qsgd2", "best4")
"""Not tried with error feedback: fine enough without, or (qsgd at 2 bits) no contraction."""

CODECS = {
    "float32": ("none", "none"),
    **{name: (spec, HEAD_8) for name, spec in PLAIN.items()},
    **{f"ef-{n}": (f"ef({spec})", HEAD_2) for n, spec in PLAIN.items() if n not in PLAIN_ONLY},
    "ef-scalar1-head8": (f"ef({PLAIN['scalar1']})", HEAD_8),
    "ef-toprow2-1bit-head8": (f"ef({PLAIN['toprow2-1bit']})", HEAD_8),
    "auto": (f"auto:error=0.3,horizon=300,codec=(scalar:{GAUSS})", HEAD_8),
}
"""Name -> codec of the embeddings, codec of the head. With error feedback both have it."""

ELSEWHERE = {
    "float32": "float32",
    "scalar1": "1bit",
    "scalar2": "2bit",
    "scalar3": "3bit",
    "scalar4": "4bit",
}
"""Cells of bench/fashion_mnist.py by the names of this grid: the same codecs and schedules."""

AIMS = (
    ("ef-scalar2", 14.0, 0.3),
    ("ef-scalar1", 24.0, 0.5),
    ("ef-toprow2-1bit", 40.0, 1.0),
    ("ef-toprow1-2bit", 60.0, 1.0),
)
"""(codec, float32 bytes / its bytes at B = 1000, points it may lose)."""


def grid() -> list[Cell]:
    """Cells in the order in which they are worth having: the aims first, seed by seed."""
    aims = [Cell(name, 1000, 1, seed) for seed in SEEDS for name, _, _ in AIMS]
    small = [Cell(name, 100, 1, seed) for seed in SEEDS for name, _, _ in AIMS]
    wide = [Cell(name, 1000, 1, 0) for name in CODECS]
    local = [Cell(name, batch, 5, 0) for batch in (1000, 100) for name, _, _ in AIMS]
    cells = [*aims[:8], *wide, *aims[8:], *local, *small]
    return [cell for cell in dict.fromkeys(cells) if cell.codec not in ELSEWHERE]


def found() -> dict[Cell, dict[str, Any]]:
    """All results that are there, this grid's and those of bench/fashion_mnist.py."""
    other = [
        Cell(name, batch, q, seed)
        for name in ELSEWHERE.values()
        for batch in (100, 1000)
        for q in (1, 5)
        for seed in SEEDS
    ]
    ours = {there: here for here, there in ELSEWHERE.items()}
    borrowed = {
        Cell(ours[cell.codec], cell.batch_size, cell.local_steps, cell.seed): result
        for cell, result in results(other, RESULTS / "fashion-mnist").items()
    }
    return borrowed | results(grid(), CELLS)


def tabulate(report: Report) -> None:
    """A row per codec, batch size and Q; then the verdicts on the aims."""
    cells = found()
    groups = dict.fromkeys((c.codec, c.batch_size, c.local_steps) for c in cells)
    for codec, batch, q in sorted(groups, key=lambda g: (g[2], -g[1])):
        runs = [
            r
            for c, r in cells.items()
            if (c.codec, c.batch_size, c.local_steps) == (codec, batch, q)
        ]
        accuracy = [100 * r["accuracy"] for r in runs]
        losses = paired_losses(cells, codec, batch, q)
        report.row(
            codec=codec,
            B=batch,
            Q=q,
            bits_per_value=f"{bits_per_value(runs[0], codec, batch):.3f}",
            ratio=f"{ratio(cells, codec, batch, q):.1f}",
            MB=f"{runs[0]['wire_bytes'] / 1e6:.2f}",
            seeds=len(runs),
            accuracy=spell(accuracy),
            points_lost=spell(losses) if codec != "float32" else "",
        )
    for codec, due_ratio, due_loss in AIMS:
        judge(report, cells, codec, due_ratio, due_loss)


def bits_per_value(result: dict[str, Any], codec: str, batch: int) -> float:
    """Payload bits a value of an embedding, from the bytes that the server received."""
    frames = 4 * result["rounds"]
    payload = result["wire_bytes_by"]["uplink embed"] - HEADER_NBYTES * frames
    return 8 * payload / (4 * 16 * 60_000 * result["schedule"]["epochs"])


def ratio(cells: dict[Cell, dict[str, Any]], codec: str, batch: int, q: int) -> float:
    """Measured bytes of float32 over those of the codec, same rounds."""
    full = cells[Cell("float32", batch, q, 0)]
    one = next(
        r for c, r in cells.items() if (c.codec, c.batch_size, c.local_steps) == (codec, batch, q)
    )
    assert full["rounds"] == one["rounds"]
    return full["wire_bytes"] / one["wire_bytes"]


def paired_losses(cells: dict[Cell, dict[str, Any]], codec: str, batch: int, q: int) -> list[float]:
    """Points lost against float32 with the same seed, for every seed that both have."""
    pairs = [(Cell("float32", batch, q, s), Cell(codec, batch, q, s)) for s in SEEDS]
    return [
        100 * (cells[full]["accuracy"] - cells[few]["accuracy"])
        for full, few in pairs
        if full in cells and few in cells
    ]


def spell(values: list[float]) -> str:
    """Mean, with its standard error where there are several."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} +- {statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def judge(
    report: Report, cells: dict[Cell, dict[str, Any]], codec: str, due_ratio: float, due_loss: float
) -> None:
    """One aim at B = 1000, Q = 1, all five seeds."""
    losses = paired_losses(cells, codec, 1000, 1)
    if not losses:
        return
    where = f"{codec}, B = 1000 ({len(losses)} seeds)"
    report.target(
        f"{where}: float32 bytes / its bytes", ratio(cells, codec, 1000, 1), due_ratio, "x"
    )
    loss = statistics.mean(losses)
    report.target(f"{where}: points lost", loss, due_loss, "points", at_most=True)
    if len(losses) > 1:
        error = statistics.stdev(losses) / math.sqrt(len(losses))
        report.target(f"{where}: standard error of it", error, 0.15, "points", at_most=True)
        fresh = statistics.mean(losses[1:])
        name = f"{codec}, B = 1000: points lost by seeds that it was not chosen by"
        report.target(name, fresh, due_loss, "points", at_most=True)


def draw(path: Path) -> None:
    """Accuracy against measured bytes at B = 1000, Q = 1, seed 0: one line a family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {
        c: r for c, r in found().items() if (c.batch_size, c.local_steps, c.seed) == (1000, 1, 0)
    }
    figure = Figure(figsize=(7.4, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    families = ("scalar", "lattice8d", "topk1", "topk4", "toprow", "qsgd", "best", "auto")
    for color, family in enumerate(families):
        for prefix, style in (("", "--"), ("ef-", "-")):
            runs = [r for c, r in cells.items() if c.codec.startswith(prefix + family)]
            points = sorted((r["wire_bytes"] / 1e6, 100 * r["accuracy"]) for r in runs)
            if points:
                x, y = zip(*points, strict=True)
                axes.plot(x, y, style, marker="o", ms=4, color=f"C{color}", label=prefix + family)
    full = cells.get(Cell("float32", 1000, 1, 0))
    if full:
        label = f"float32 ({full['wire_bytes'] / 1e6:.0f} MB)"
        axes.axhline(100 * full["accuracy"], color="black", lw=0.8, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("measured wire bytes of the whole run (MB = 1e6 bytes)")
    axes.set_ylabel("test accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> int:
    """Run what is missing, then report."""

    def options(parser: Any) -> None:
        parser.add_argument("--table", action="store_true", help="run nothing")
        parser.add_argument(
            "--only", default="", metavar="PATTERN", help="cells whose name matches"
        )

    report = Report("accuracy-bytes", argv, options)
    report.command = " ".join(["python bench/accuracy_bytes.py", *argv])
    if report.smoke:
        check_bytes(report, *CODECS["ef-toprow2-1bit"])
        return report.finish()
    if not report.args.table:
        run_missing(grid(), CODECS, CELLS, report.args.only)
    tabulate(report)
    draw(RESULTS / "accuracy_bytes.png")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
