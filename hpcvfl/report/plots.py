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
    """Write accuracy-rounds.png, -bytes.png, -seconds.png, and error-rounds.png.

    error-rounds.png has the mean squared error of a message of each block (E_m of the C-VFL paper)
    between two evaluations; of several runs, that of the parties together.

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
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    if _draw_errors(figure.add_subplot(), runs):
        paths.append(folder / "error-rounds.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _draw_errors(axes: Any, runs: Sequence[tuple[str, list[dict[str, Any]]]]) -> bool:
    """Errors of messages against rounds; False if no message of any run lost anything."""
    shown = False
    for run, lines in runs:
        x = [line["round"] for line in lines]
        by_block = list(zip(*(line.get("squared_error", []) for line in lines), strict=True))
        if len(runs) > 1:
            by_block = [tuple(sum(e) for e in zip(*by_block[1:], strict=True))] if by_block else []
        for block, errors in enumerate(by_block):
            if max(errors, default=0) > 0:
                party = "head" if block == 0 else f"party {block}"
                axes.plot(x, errors, marker=".", label=run if len(runs) > 1 else party)
                shown = True
    if shown:
        axes.set_yscale("log")
        axes.set_xlabel("rounds")
        axes.set_ylabel("squared error of a message")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return shown
