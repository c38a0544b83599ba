"""What every message of a run lost: one line a round, and means for the metrics.

Written by rank 0 from the headers that it received, so that the error of each block (E_m of the
C-VFL paper) can be plotted beside the accuracy it went with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from hpcvfl.books import open_book, settle
from hpcvfl.codecs.frame import Header

# legend: R ranks

FIELDS = ("squared_error", "energy", "bits_per_value")
"""What is told of every message."""


class MessageLog:
    """messages.jsonl, a line a round:

    {"round": r, "squared_error": [E_0, .., E_M], "energy": [..], "bits_per_value": [..]}

    squared_error, energy : sums over the values of a message, of the error and of the values;
                            0 for a block that sent none in this round
    """

    def __init__(self, num_ranks: int, path: Path | None, kept_nbytes: int = 0) -> None:
        """With `path` (rank 0) lines are written, after its first `kept_nbytes` bytes; without,
        nothing happens.
        """
        self._file: TextIO | None = open_book(path, kept_nbytes) if path else None
        self._sums_3R = np.zeros((len(FIELDS), num_ranks))
        self._counts_R = np.zeros(num_ranks, np.int64)

    def note(self, round_index: int, headers_R: Sequence[Header | None]) -> None:
        """A round is over, in which every sender's message had one of these headers;
        None: it sent nothing.
        """
        if self._file is None:
            return
        row_3R = [
            [h.squared_error if h else 0.0 for h in headers_R],
            [h.energy if h else 0.0 for h in headers_R],
            [8 * h.payload_nbytes / max(h.num_values, 1) if h else 0.0 for h in headers_R],
        ]
        self._sums_3R += row_3R
        self._counts_R += [h is not None for h in headers_R]
        lists = (", ".join(f"{value:.6g}" for value in row_R) for row_R in row_3R)
        fields = (f'"{name}": [{text}]' for name, text in zip(FIELDS, lists, strict=True))
        self._file.write(f'{{"round": {round_index}, {", ".join(fields)}}}\n')

    def means(self) -> dict[str, Any]:
        """Means over the messages since the last call, by block (0: it sent none); lists are
        empty if there were no messages at all.
        """
        came = self._counts_R.any()
        means_3R = self._sums_3R / np.maximum(self._counts_R, 1)
        self._sums_3R[:] = 0
        self._counts_R[:] = 0
        return dict(zip(FIELDS, means_3R.tolist() if came else [[] for _ in FIELDS], strict=True))

    def settle(self) -> int:
        """Bring the lines to the disk; their bytes."""
        return settle(self._file) if self._file else 0

    def state(self) -> dict[str, Any]:
        """What `means` is to be told of, as JSON values."""
        return {"sums": self._sums_3R.tolist(), "counts": self._counts_R.tolist()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._sums_3R[:] = state["sums"]
        self._counts_R[:] = state["counts"]

    def close(self) -> None:
        """Flush and close the file, if there is one."""
        if self._file:
            self._file.close()
            self._file = None
