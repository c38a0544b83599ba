"""Files that a run writes line by line, and that a resumed run goes on with."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TextIO

PIECE_NBYTES = 1 << 20
"""Read at once, at most."""


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


def crc_of(path: Path, begin: int, end: int, crc: int = 0) -> int:
    """CRC32 of the bytes `begin` to `end` of a file, going on from the `crc` of those before."""
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (chunk := file.read(min(PIECE_NBYTES, end - begin))):
            crc = zlib.crc32(chunk, crc)
            begin += len(chunk)
    return crc
