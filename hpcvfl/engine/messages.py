"""What every message of a run lost: one line a round, and means for the metrics.

Written by rank 0 from the headers that it received, so that the error of each block (E_m of the
C-VFL paper) can be plotted beside the accuracy it went with.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from hpcvfl.codecs.frame import Header

# legend: R ranks


class MessageLog:
    """messages.jsonl: {"round": r, "squared_error": [E_0, .., E_M], "bits_per_value": [..]}."""

    def __init__(self, num_ranks: int, path: Path | None) -> None:
        """With `path` (rank 0) lines are written; without, nothing happens."""
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path else None
        self._sums_2R = np.zeros((2, num_ranks))
        self._rounds = 0

    def note(self, round_index: int, headers_R: Sequence[Header | None]) -> None:
        """A round is over, in which every sender's message had one of these headers."""
        if self._file is None:
            return
        errors_R = [h.squared_error if h else 0.0 for h in headers_R]
        bits_R = [8 * h.payload_nbytes / max(h.num_values, 1) if h else 0.0 for h in headers_R]
        self._sums_2R += (errors_R, bits_R)
        self._rounds += 1
        errors, bits = (", ".join(f"{v:.6g}" for v in values) for values in (errors_R, bits_R))
        self._file.write(
            f'{{"round": {round_index}, "squared_error": [{errors}], "bits_per_value": [{bits}]}}\n'
        )

    def means(self) -> dict[str, Any]:
        """Means over the rounds since the last call, by block; both lists empty if there were
        none.
        """
        means_2R = (self._sums_2R / self._rounds).tolist() if self._rounds else [[], []]
        self._sums_2R[:] = 0
        self._rounds = 0
        return {"squared_error": means_2R[0], "bits_per_value": means_2R[1]}

    def close(self) -> None:
        """Flush and close the file, if there is one."""
        if self._file:
            self._file.close()
            self._file = None
