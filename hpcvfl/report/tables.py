"""Tables of runs as text: the closing table of one run, the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def closing_table(summary: dict[str, Any]) -> str:
    """Accuracy, rounds, measured bytes and seconds by phase of one run (summary.json)."""
    wire, raw = summary["wire_bytes"], summary["raw_bytes"]
    seconds = summary["seconds"]
    rows = [
        (f"{summary['evaluated_on']} accuracy", f"{summary['metrics']['accuracy']:.4f}"),
        ("rounds", f"{summary['rounds']}"),
        ("wire bytes, measured", f"{wire:,}"),
        ("raw bytes", f"{raw:,}"),
        ("raw / wire", f"{raw / wire:.2f}"),
        ("seconds, total", f"{seconds['total']:.2f}"),
        ("seconds, rounds only", f"{seconds['training']:.2f}"),
    ]
    for phase, server_s in seconds["server"].items():
        rows.append(
            (f"  {phase}", f"{server_s:.2f} server, {seconds['slowest_party'][phase]:.2f} party")
        )
    return aligned(rows)


def comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """One line a run: codec, accuracy, rounds, bytes, ratio, seconds."""
    header = ("run", "codec", "head", "Q", "accuracy", "rounds", "wire MB", "raw/wire", "seconds")
    rows = [header]
    for s in summaries:
        codecs = sorted(set(s["codec"][1:]))
        rows.append(
            (
                s["folder"].rsplit("/", 1)[-1],
                "; ".join(codecs),
                s["codec"][0],
                str(s["local_steps"]),
                f"{s['metrics']['accuracy']:.4f}",
                str(s["rounds"]),
                f"{s['wire_bytes'] / 1e6:.2f}",
                f"{s['raw_bytes'] / s['wire_bytes']:.2f}",
                f"{s['seconds']['training']:.1f}",
            )
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as columns of equal width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
