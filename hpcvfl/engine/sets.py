"""Checkpoints on disk: a set is one file a rank, and a word of rank 0 that all of them are there.

    checkpoints/round-00000123/rank0.safetensors ..      the state after 123 rounds
                               complete.json             written last, when every rank has its file

A set without complete.json is no checkpoint. Every file is written aside, brought to the disk and
renamed, and carries a checksum of all it holds. On hosts without a shared folder each has its own
ranks' files; what counts there is which sets every rank has.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hpcvfl.engine import folder
from hpcvfl.engine.tensors import KEY, as_bytes, write_tensors
from hpcvfl.errors import DataError


class Part(NamedTuple):
    """What one rank has in a set: tensors by name, and plain values."""

    tensors: dict[str, torch.Tensor]
    record: dict[str, Any]


def set_path(path: Path, rounds: int) -> Path:
    """Where the set after `rounds` rounds lies in run folder `path`."""
    return path / "checkpoints" / f"round-{rounds:08d}"


def part_path(path: Path, rounds: int, rank: int) -> Path:
    """The file of one rank in a set."""
    return set_path(path, rounds) / f"rank{rank}.safetensors"


def write_part(path: Path, rounds: int, rank: int, part: Part) -> int:
    """Write the file of one rank, in whole or not at all; its bytes. Raises OSError."""
    target = part_path(path, rounds, rank)
    folder.make_folder(target.parent, 2)  # in checkpoints/, in the run folder
    text = json.dumps(part.record)
    return write_tensors(target, part.tensors, f"{checksum(text, part.tensors):08x} {text}")


def seal(path: Path, rounds: int, said: Mapping[str, Any]) -> None:
    """Declare the set complete, at rank 0 after every rank has written; `said` is for people."""
    folder.write_whole(set_path(path, rounds) / "complete.json", json.dumps(said, indent=1) + "\n")


def read_part(path: Path, rounds: int, rank: int) -> Part:
    """Read what `write_part` wrote; DataError if it is missing, cut short or changed."""
    source = part_path(path, rounds, rank)
    try:
        with safe_open(source, framework="pt") as file:
            said = (file.metadata() or {}).get(KEY, "")
            # Copies in memory: pages of a file on a network must not come and go in a round.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        due, _, text = said.partition(" ")
        record = json.loads(text)
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise DataError(f"{source}: cannot be read ({error})") from None
    came = f"{checksum(text, tensors):08x}"
    if came != due:
        raise DataError(f"{source}: its checksum is {came}, due {due}; it was changed")
    return Part(tensors, record)


def checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """CRC32 of a record and of names, types, shapes and values of tensors."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        value = tensors[name]
        crc = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode(), crc)
        crc = zlib.crc32(as_bytes(value), crc)
    return crc


def rounds_here(path: Path, rank: int) -> list[int]:
    """The sets that this rank can go on from, newest first: its file is there, and at rank 0 the
    word that the others' are.
    """
    return [r for r in all_rounds(path) if _is_here(path, r, rank)]


def _is_here(path: Path, rounds: int, rank: int) -> bool:
    sealed = rank > 0 or folder.is_file(set_path(path, rounds) / "complete.json")
    return sealed and folder.is_file(part_path(path, rounds, rank))


def all_rounds(path: Path) -> list[int]:
    """The rounds of all sets in a run folder, whole or not, newest first."""
    try:
        names = [p.name for p in (path / "checkpoints").glob("round-*")]
    except OSError:  # a folder that this user may not read
        return []
    found = [re.fullmatch(r"round-(\d+)", name) for name in names]
    return sorted((int(m[1]) for m in found if m), reverse=True)


def drop_part(path: Path, rounds: int, rank: int) -> None:
    """Remove this rank's share of a set; of rank 0 that is the word that it is complete, first."""
    place = set_path(path, rounds)
    with suppress(OSError):  # what cannot be removed takes room and does no harm
        if rank == 0:
            (place / "complete.json").unlink(missing_ok=True)
            (place / "complete.json.tmp").unlink(missing_ok=True)
        target = part_path(path, rounds, rank)
        target.unlink(missing_ok=True)
        target.with_suffix(".tmp").unlink(missing_ok=True)
        place.rmdir()  # the last rank's succeeds, unless there is what we did not write


def to_keep(path: Path, rounds: int, keep: int) -> list[int]:
    """The newest `keep` sets up to `rounds` that are complete, at rank 0. What lies there of later
    rounds is none of them: a killed job may have left it.
    """
    return [r for r in rounds_here(path, 0) if r <= rounds][:keep]


def drop_older(path: Path, rounds: int, rank: int, kept: Sequence[int]) -> None:
    """Remove this rank's share of all sets up to `rounds` but those kept."""
    for older in all_rounds(path):
        if older <= rounds and older not in kept:
            drop_part(path, older, rank)
