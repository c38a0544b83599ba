"""Progress of a run on rank 0: a bar, and a line for each evaluation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

MEGA = 1e6


class Progress:
    """tqdm bar with rounds/s, loss, accuracy and measured wire MB (1e6 bytes); stderr."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._shown: dict[str, str] = {}

    def preparing(self, text: str) -> None:
        """Say what is done before the first round."""
        print(text, file=sys.stderr, flush=True)

    def begin(self, total_rounds: int, path: Path, done_rounds: int = 0) -> None:
        """Show the folder and start the bar."""
        after = f", resumed after round {done_rounds}" if done_rounds else ""
        print(f"run folder {path}{after}", file=sys.stderr, flush=True)
        # disable=None: a log file gets the lines of the evaluations, not a redrawn bar.
        self._bar = tqdm(
            total=total_rounds, initial=done_rounds, unit="round", dynamic_ncols=True,
            leave=False, disable=None,
        )  # fmt: skip

    def round(self, loss: float) -> None:
        """Advance the bar by one round."""
        if self._bar is not None:
            self._shown["loss"] = f"{loss:.3f}"
            self._bar.set_postfix(self._shown, refresh=False)
            self._bar.update()

    def evaluation(self, line: dict[str, Any]) -> None:
        """Print the evaluation above the bar."""
        self._shown["accuracy"] = f"{line['test_accuracy']:.4f}"
        self._shown["wire"] = f"{line['wire_bytes'] / MEGA:.2f} MB"
        text = (
            f"epoch {line['epoch']:g}  round {line['round']}  train loss {line['train_loss']:.4f}"
            f"  test accuracy {line['test_accuracy']:.4f}  wire {line['wire_bytes'] / MEGA:.2f} MB"
            f"  {line['seconds']:.1f} s"
        )
        if self._bar is not None:
            self._bar.set_postfix(self._shown, refresh=False)
        tqdm.write(text, file=sys.stderr)

    def warning(self, text: str) -> None:
        """Print a line above the bar."""
        tqdm.write(f"hpcvfl: warning: {text}", file=sys.stderr)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
