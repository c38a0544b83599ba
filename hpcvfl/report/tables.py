"""Tables of runs as text: the closing table of one run, the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = {"embed": "embeddings", "grad": "gradients", "head": "head"}
"""Kinds of a training frame, as a reader calls them."""


def closing_table(summary: dict[str, Any]) -> str:
    """Accuracy, codecs, measured bytes and seconds by phase of one run (summary.json)."""
    wire, raw = summary["wire_bytes"], summary["raw_bytes"]
    seconds, metrics, kinds = summary["seconds"], summary["metrics"], _bytes_by_kind(summary)
    rows = [
        (f"{summary['evaluated_on']} accuracy", f"{metrics['accuracy']:.4f}"),
        ("loss", f"{metrics['loss']:.4f}, {metrics['train_loss']:.4f} on the last batch"),
        ("rounds", f"{summary['rounds']}"),
        ("steps a round", steps_of(summary)),
        *([("virtual units", f"{summary['units']:g}")] if "virtual" in steps_of(summary) else []),
        ("codec", embedding_codecs(summary)),
        (f"codec of the {server_sends(summary)}", summary["codec"][0]),
        ("wire bytes, measured", f"{wire:,}"),
        *((f"  {KINDS[kind]}", f"{nbytes:,}") for kind, nbytes in kinds.items()),
        ("raw bytes", f"{raw:,}"),
        ("raw / wire", ratio(summary)),
        ("seconds, total", f"{seconds['total']:.2f}"),
        ("seconds, rounds only", f"{seconds['training']:.2f}"),
    ]
    for phase, server_s in seconds["server"].items():
        rows.append(
            (f"  {phase}", f"{server_s:.2f} server, {seconds['slowest_party'][phase]:.2f} party")
        )
    return "\n".join([aligned(rows), *(f"warning: {w}" for w in summary.get("warnings", []))])


def steps_of(summary: dict[str, Any]) -> str:
    """Local steps of a block in a round: their number, or the policy."""
    return str(summary["steps"] if "steps" in summary else summary["local_steps"])


def ratio(summary: dict[str, Any]) -> str:
    """Raw over wire bytes; "-" where nothing travelled (one party, in the server's process)."""
    wire = summary["wire_bytes"]
    return f"{summary['raw_bytes'] / wire:.2f}" if wire else "-"


def embedding_codecs(summary: dict[str, Any]) -> str:
    """Codecs of the parties, each once."""
    return "; ".join(sorted(set(summary["codec"][1:])))


def server_sends(summary: dict[str, Any]) -> str:
    """What block 0 sends: its head, or gradients where labels are private."""
    return "gradients" if "grad" in _bytes_by_kind(summary) else "head"


def _bytes_by_kind(summary: dict[str, Any]) -> dict[str, int]:
    """Wire bytes of training by kind of message, both directions."""
    out: dict[str, int] = {}
    for key, nbytes in sorted(summary["wire_bytes_by"].get("train", {}).items()):
        kind = key.split()[1]
        if kind in KINDS:
            out[kind] = out.get(kind, 0) + nbytes
    return dict(sorted(out.items()))


def comparison(summaries: Sequence[dict[str, Any]]) -> str:
    """One line a run: codec, accuracy, rounds, bytes, ratio, seconds."""
    header = (
        "run",
        "codec",
        "server",
        "steps",
        "accuracy",
        "rounds",
        "wire MB",
        "raw/wire",
        "seconds",
    )
    rows = [header]
    for s in summaries:
        rows.append(
            (
                s["folder"].rsplit("/", 1)[-1],
                embedding_codecs(s),
                f"{server_sends(s)}: {s['codec'][0]}",
                steps_of(s),
                f"{s['metrics']['accuracy']:.4f}",
                str(s["rounds"]),
                f"{s['wire_bytes'] / 1e6:.2f}",
                ratio(s),
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
