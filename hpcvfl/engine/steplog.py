"""steps.jsonl: how many local steps each block took in each round, and how long it computed.

The numbers of a round arrive with the headers of the next one, those of the last round with the
report at the end, so that no message is sent for them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from hpcvfl.books import open_book, settle
from hpcvfl.codecs.frame import Header


class StepLog:
    """Lines {"round": r, "tau": [tau_0, .., tau_M], "w_bar": [..], "seconds": [..]}; that of round
    0 may have "expected": [..], the steps that adaptive rates began with.

    Of an asynchronous run (vafl.py), where every block takes one step an update: lines of `served`.
    """

    def __init__(self, path: Path | None, kept_nbytes: int = 0) -> None:
        """With `path` (rank 0) lines are written, after its first `kept_nbytes` bytes; without,
        nothing happens.
        """
        self.expected_B: Sequence[int] = ()
        self._next_round = 0
        self._file: TextIO | None = open_book(path, kept_nbytes) if path else None

    def note(self, round_index: int, headers_B: Sequence[Header | None]) -> None:
        """The headers of round `round_index` tell of the round before."""
        if self._file and round_index > 0:
            told = [h for h in headers_B if h]
            self.write(
                round_index - 1,
                [h.tau for h in told],
                [h.w_bar for h in told],
                [h.seconds for h in told],
            )

    def write(
        self,
        round_index: int,
        tau_B: Sequence[int],
        w_bar_B: Sequence[float],
        seconds_B: Sequence[float],
    ) -> None:
        """The line of one round."""
        self._next_round = round_index + 1
        if self._file:
            line: dict[str, Any] = {
                "round": round_index,
                "tau": list(tau_B),
                "w_bar": list(w_bar_B),
                "seconds": [round(s, 6) for s in seconds_B],
            }
            if self.expected_B and round_index == 0:
                line["expected"] = list(self.expected_B)
            self._file.write(json.dumps(line) + "\n")

    def write_if_due(
        self,
        round_index: int,
        tau_B: Sequence[int],
        w_bar_B: Sequence[float],
        seconds_B: Sequence[float],
    ) -> None:
        """The line of one of the last rounds, unless headers have told of it already."""
        if round_index == self._next_round:
            self.write(round_index, tau_B, w_bar_B, seconds_B)

    def served(
        self, update: int, party: int, message: int, seconds: float, units: float | None
    ) -> None:
        """Line {"update": u, "party": k, "message": c, "seconds": s, "units": t} of an asynchronous
        run: which party the server served, with which of that party's messages, when.

        seconds : of training so far at the server; units : virtual time, None: there is none
        """
        if self._file:
            line = {"update": update, "party": party, "message": message}
            clocks = {"seconds": round(seconds, 6)} | ({} if units is None else {"units": units})
            self._file.write(json.dumps(line | clocks) + "\n")

    def go_on(self, num_rounds: int) -> None:
        """Be as after so many rounds: no header has told of the last of them yet."""
        self._next_round = max(0, num_rounds - 1)

    def settle(self) -> int:
        """Bring the lines to the disk; their bytes."""
        return settle(self._file) if self._file else 0

    def close(self) -> None:
        """Flush and close the file, if there is one."""
        if self._file:
            self._file.close()
            self._file = None
