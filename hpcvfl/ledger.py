"""Bytes that moved, booked by the calls that moved them.

`Meter.record` is called by the metered transport for every buffer of every verb. What is booked:
phase ("train", "eval", "setup"), kind of message ("head", "embed", ...), direction, peer.
wire_bytes of a run = sum over ranks of the training bytes that each rank received.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from hpcvfl.books import open_book, settle

Record = tuple[int, str, str, int, int]
"""(peer rank, kind, direction "in" or "out", wire bytes, 4 x elements before encoding)"""
Key = tuple[str, str, str, int]
"""(phase, kind, direction, peer rank)"""


class Meter:
    """Counts bytes of one rank; with a file it also writes one line a round.

    A call repeated every round hands over the same list of records, so a round only counts how
    often (0.2 us); the sums are made when somebody asks.
    """

    def __init__(self) -> None:
        self.phase = "setup"
        self._counts: dict[tuple[str, int], list[Any]] = {}  # -> [records, how often]
        self._single: dict[Record, list[Record]] = {}
        self._before: dict[Key, tuple[int, int, int]] = {}  # of the parts of a resumed run
        self._round: list[int] = []  # ids of the lists of this round
        self._lines: dict[tuple[int, ...], str] = {}
        self._file: TextIO | None = None

    def record(self, peer: int, kind: str, direction: str, nbytes: int, raw_bytes: int) -> None:
        """Book one message: `nbytes` on the wire, `raw_bytes` = 4 x elements before encoding."""
        args = (peer, kind, direction, nbytes, raw_bytes)
        self.record_all(self._single.setdefault(args, [args]))

    def record_all(self, records: list[Record]) -> None:
        """Book what one call moved; the list must not change afterwards."""
        entry = self._counts.setdefault((self.phase, id(records)), [records, 0])
        entry[1] += 1
        if self.phase == "train":
            self._round.append(id(records))

    def open(self, path: Path, kept_nbytes: int = 0) -> None:
        """Write a line a round to `path` from now on, after its first `kept_nbytes` bytes."""
        self._file = open_book(path, kept_nbytes)

    def settle(self) -> int:
        """Bring the lines to the disk; their bytes."""
        return settle(self._file) if self._file else 0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count also what `table` gave: the bookings of a run before it was resumed."""
        for r in rows:
            key = (r["phase"], r["kind"], r["direction"], r["peer"])
            self._before[key] = (r["wire_bytes"], r["raw_bytes"], r["messages"])

    def end_round(self, round_index: int) -> None:
        """Close the books of a round: bytes by direction and kind."""
        if self._file:
            key = tuple(self._round)
            if key not in self._lines:
                self._lines[key] = self._spell(key)
            self._file.write(f'{{"round": {round_index}{self._lines[key]}}}\n')
        self._round.clear()

    def _spell(self, ids: tuple[int, ...]) -> str:
        """Sums of one round as the rest of a JSON object."""
        sums: dict[str, int] = {}
        for number in ids:
            for _, kind, direction, nbytes, _ in self._counts["train", number][0]:
                name = f"{direction}.{kind}"
                sums[name] = sums.get(name, 0) + nbytes
        return "".join(f', "{name}": {nbytes}' for name, nbytes in sums.items())

    def totals(self) -> dict[Key, tuple[int, int, int]]:
        """(wire bytes, raw bytes, records) of everything booked so far."""
        out = dict(self._before)
        for (phase, _), (records, times) in self._counts.items():
            for peer, kind, direction, nbytes, raw_bytes in records:
                key = (phase, kind, direction, peer)
                wire, raw, number = out.get(key, (0, 0, 0))
                out[key] = (wire + times * nbytes, raw + times * raw_bytes, number + times)
        return out

    def received(self, phase: str = "train") -> tuple[int, int]:
        """(wire_bytes, raw_bytes) that this rank received in `phase`."""
        rows = [v for (p, _, d, _), v in self.totals().items() if p == phase and d == "in"]
        return sum(v[0] for v in rows), sum(v[1] for v in rows)

    def table(self) -> list[dict[str, int | str]]:
        """Every booking, one row per (phase, kind, direction, peer)."""
        return [
            {
                "phase": phase,
                "kind": kind,
                "direction": direction,
                "peer": peer,
                "wire_bytes": wire_bytes,
                "raw_bytes": raw_bytes,
                "messages": number,
            }
            for (phase, kind, direction, peer), (wire_bytes, raw_bytes, number) in sorted(
                self.totals().items()
            )
        ]

    def close(self) -> None:
        """Flush and close the file, if one is open."""
        if self._file:
            self._file.close()
            self._file = None


def paper_bytes(
    bits: float, batch_size: int, embedding_dim: int, num_parties: int, head_size: int
) -> float:
    """Bytes a round by the formula of the plots published with C-VFL: b (2 P B M^2 + S M) / 8.

    It charges the way up M times too often and no header, scale or index. For comparison with
    printed tables only; results of this program report measured bytes.
    """
    m = num_parties
    return bits * (2 * embedding_dim * batch_size * m * m + head_size * m) / 8
