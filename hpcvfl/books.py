"""Files that a run writes line by line, and that a resumed run goes on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO


def open_book(path: Path, kept_nbytes: int = 0) -> TextIO:
    """Open a file for more lines after its first `kept_nbytes` bytes; what follows them is cut."""
    file = path.open("a", encoding="utf-8")
    file.truncate(kept_nbytes)
    return file


def settle(file: TextIO) -> int:
    """Bring all lines to the disk; the size of the file in bytes."""
    file.flush()
    os.fsync(file.fileno())
    return os.fstat(file.fileno()).st_size
