"""Accuracy against rounds, against measured bytes and against seconds, for one or several runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

AXES = {
    "rounds": ("round", 1.0, "rounds"),
    "bytes": ("wire_bytes", 1e6, "measured wire bytes (MB = 1e6 bytes)"),
    "seconds": ("seconds", 1.0, "seconds in rounds (wall time)"),
}
"""Plot name -> (field of a metrics line, divisor, label)."""


def draw(runs: Sequence[tuple[str, list[dict[str, Any]]]], folder: Path) -> list[Path]:
    """Write accuracy-rounds.png, accuracy-bytes.png and accuracy-seconds.png.

    runs   : (label, lines of metrics.jsonl) of each run
    folder : where the pictures go
    Returns the paths; an empty list where matplotlib is not installed (extra "plot").
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return []
    paths = []
    for name, (field, divisor, label) in AXES.items():
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for run, lines in runs:
            x = [line[field] / divisor for line in lines]
            y = [100 * line["test_accuracy"] for line in lines]
            axes.plot(x, y, marker=".", label=run)
        axes.set_xlabel(label)
        axes.set_ylabel("test accuracy (%)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        path = folder / f"accuracy-{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths
