"""What a run tells whoever watches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class Observer(Protocol):
    """Told on rank 0 how a run goes; the progress bar is one."""

    def preparing(self, text: str) -> None:
        """What happens before the first round that may take its time."""

    def begin(self, total_rounds: int, path: Path, done_rounds: int = 0) -> None:
        """The run starts: how many rounds at most, which folder, rounds it did before it was
        resumed.
        """

    def round(self, loss: float) -> None:
        """A round ended."""

    def evaluation(self, line: dict[str, Any]) -> None:
        """An evaluation ended; `line` as in metrics.jsonl."""

    def warning(self, text: str) -> None:
        """Something that the user should know while the run goes on."""

    def end(self) -> None:
        """The run ended, well or not."""


class Silent:
    """Shows nothing."""

    def preparing(self, text: str) -> None:
        """See Observer."""

    def begin(self, total_rounds: int, path: Path, done_rounds: int = 0) -> None:
        """See Observer."""

    def round(self, loss: float) -> None:
        """See Observer."""

    def evaluation(self, line: dict[str, Any]) -> None:
        """See Observer."""

    def warning(self, text: str) -> None:
        """See Observer."""

    def end(self) -> None:
        """See Observer."""
