"""Bytes that moved, booked by the calls that moved them.

`Meter.record` is called by the metered transport for every buffer of every verb. What is booked:
phase ("train", "eval", "setup"), kind of message ("head", "embed", ...), direction, peer.
wire_bytes of a run = sum over ranks of the training bytes each rank received (DESIGN: section 5).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

Key = tuple[str, str, str, int]
"""(phase, kind, direction "in" or "out", peer rank)"""


class Meter:
    """Counts bytes of one rank; with a file it also writes one line a round."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.totals: dict[Key, list[int]] = {}
        self._round: dict[tuple[str, str], int] = {}
        self._file: TextIO | None = None

    def record(self, peer: int, kind: str, direction: str, nbytes: int, raw_bytes: int) -> None:
        """Book one message: `nbytes` on the wire, `raw_bytes` = 4 x elements before encoding."""
        entry = self.totals.setdefault((self.phase, kind, direction, peer), [0, 0, 0])
        entry[0] += nbytes
        entry[1] += raw_bytes
        entry[2] += 1
        if self.phase == "train":
            slot = (direction, kind)
            self._round[slot] = self._round.get(slot, 0) + nbytes

    def open(self, path: Path) -> None:
        """Write a line a round to `path` from now on."""
        self._file = path.open("w", encoding="utf-8")

    def end_round(self, round_index: int) -> None:
        """Close the books of a round: bytes by direction and kind."""
        if self._file:
            line: dict[str, object] = {"round": round_index}
            for (direction, kind), nbytes in self._round.items():
                line[f"{direction}.{kind}"] = nbytes
            self._file.write(json.dumps(line) + "\n")
        self._round.clear()

    def received(self, phase: str = "train") -> tuple[int, int]:
        """(wire_bytes, raw_bytes) that this rank received in `phase`."""
        rows = [v for (p, _, d, _), v in self.totals.items() if p == phase and d == "in"]
        return sum(v[0] for v in rows), sum(v[1] for v in rows)

    def table(self) -> list[dict[str, int | str]]:
        """Every booking, one row per (phase, kind, direction, peer)."""
        return [
            {
                "phase": phase,
                "kind": kind,
                "direction": direction,
                "peer": peer,
                "wire_bytes": v[0],
                "raw_bytes": v[1],
                "messages": v[2],
            }
            for (phase, kind, direction, peer), v in sorted(self.totals.items())
        ]

    def close(self) -> None:
        """Flush and close the file, if one is open."""
        if self._file:
            self._file.close()
            self._file = None


def paper_bytes(
    bits: float, batch_size: int, embedding_dim: int, num_parties: int, head_size: int
) -> float:
    """Bytes a round by the formula of the C-VFL plots (facts: section 3): b (2 P B M^2 + S M) / 8.

    It charges the way up M times too often and no header, scale or index. For comparison with
    printed tables only; results of this program report measured bytes.
    """
    m = num_parties
    return bits * (2 * embedding_dim * batch_size * m * m + head_size * m) / 8
