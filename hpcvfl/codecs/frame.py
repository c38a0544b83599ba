"""The wire: a frame is a 64-byte little-endian header and a payload.

offset size field
 0      4   magic "HVFL"
 4      1   wire version
 5      1   kind (KINDS)
 6      1   codec: index in the table agreed at the handshake
 7      1   flags: bit 0 = payload_crc is set; bit 1 = the sender was asked to stop; bit 2, of the
           server's frames = all write a checkpoint after this round
 8      2   sender: block, which is its rank but where a party is with the server
10      1   level: which rate of an `auto` codec this message has; 0 for any other
11      1   next_level: the same for the sender's next message
12      4   tau: local steps the sender took in the previous round; in an answer of the asynchronous
           driver (engine/vafl.py), those that the server took so far
16      4   round
20      4   squared_error: of this message, summed over its values (float32); its E_m
24      4   count: elements in the message
28      4   energy: sum of squares of the message (float32); 0 from a codec that loses nothing
32      8   payload_nbytes
40      8   w_bar: largest weight of the sender's local optimizer in the previous round (float64)
48      4   seconds the sender computed in the previous round (float32)
52      4   batch_hash: CRC32 of the rows of this round
56      4   payload_crc: CRC32 of the payload, or 0
60      4   header_crc: CRC32 of bytes 0..59
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple

import numpy as np

from hpcvfl.codecs.base import Bytes
from hpcvfl.errors import WireError

WIRE_VERSION = 4
MAGIC = b"HVFL"
MAX_ROUNDS = 1 << 32
"""Rounds a run may have: what the header can count."""
MAX_VALUES = (1 << 32) - 1
"""Elements a message may have."""
KINDS = ("head", "embed", "grad", "eval")
HEADER_NBYTES = 64

_HEADER = struct.Struct("<4sBBBBHBBIIfIfQdfIII")
_CRC = struct.Struct("<I")
_HAS_PAYLOAD_CRC, _STOP, _SAVE = 1, 2, 4
_FLOAT32_MAX = 3.4e38
assert _HEADER.size == HEADER_NBYTES


class Header(NamedTuple):
    """What a frame says of itself; the fields are those of the table above."""

    kind: str
    codec: int
    sender: int
    round_index: int
    num_values: int
    payload_nbytes: int
    tau: int = 0
    w_bar: float = 0.0
    seconds: float = 0.0
    batch_hash: int = 0
    level: int = 0
    next_level: int = 0
    squared_error: float = 0.0
    energy: float = 0.0
    stop: bool = False
    save: bool = False


def write_header(frame_B: Bytes, header: Header, checksum_payload: bool = False) -> None:
    """Fill the first 64 bytes of `frame_B`, whose payload must be in place if it is to be
    summed.
    """
    crc = zlib.crc32(frame_B.data[HEADER_NBYTES:]) if checksum_payload else 0
    _HEADER.pack_into(
        frame_B.data,
        0,
        MAGIC,
        WIRE_VERSION,
        KINDS.index(header.kind),
        header.codec,
        _HAS_PAYLOAD_CRC * checksum_payload | _STOP * header.stop | _SAVE * header.save,
        header.sender,
        header.level,
        header.next_level,
        header.tau,
        header.round_index,
        min(header.squared_error, _FLOAT32_MAX),
        header.num_values,
        min(header.energy, _FLOAT32_MAX),
        header.payload_nbytes,
        header.w_bar,
        header.seconds,
        header.batch_hash,
        crc,
        0,
    )
    _CRC.pack_into(frame_B.data, 60, zlib.crc32(frame_B.data[:60]))


def read_header(frame_B: Bytes, due: Header, checksum_payload: bool = False) -> Header:
    """The header of `frame_B`, checked against what was due; every length before it is used.

    due : kind, codec, sender, round, count, payload_nbytes, batch_hash, level that must be there
    Raises WireError that says who, round, what came and what was due.
    """

    def where() -> str:
        return f"round {due.round_index}: {due.kind} from rank {due.sender}"

    if frame_B.size < HEADER_NBYTES:
        raise WireError(
            f"{where()} has {frame_B.size} bytes, a header needs {HEADER_NBYTES}; cut short"
        )
    fields = _HEADER.unpack_from(frame_B.data, 0)
    magic, version, kind, codec, flags, sender, level, next_level, tau, round_index = fields[:10]
    squared_error, count, energy, payload_nbytes, w_bar, seconds, batch_hash = fields[10:17]
    payload_crc, header_crc = fields[17:]
    if magic != MAGIC:
        raise WireError(
            f"{where()} starts with {magic!r}, due {MAGIC!r}; not a frame, or none arrived"
        )
    if header_crc != zlib.crc32(frame_B.data[:60]):
        raise WireError(
            f"{where()}: header checksum does not match; the frame was corrupted on its way"
        )
    if version != WIRE_VERSION:
        raise WireError(
            f"{where()} has wire version {version}, here {WIRE_VERSION}; install one version"
        )
    kind_name = KINDS[kind] if kind < len(KINDS) else f"kind {kind}"
    came = (kind_name, codec, sender, round_index, count, payload_nbytes, batch_hash, level)
    want = (*due[:6], due.batch_hash, due.level)
    if came != want:
        name, got, expected = next(
            x for x in zip(_CHECKED, came, want, strict=True) if x[1] != x[2]
        )
        raise WireError(f"{where()}: {name} is {got}, due {expected}; {_ADVICE[name]}")
    if frame_B.size != HEADER_NBYTES + payload_nbytes:
        raise WireError(
            f"{where()} has {frame_B.size} bytes, due {HEADER_NBYTES + payload_nbytes}; cut short"
        )
    for name, value in (("squared_error", squared_error), ("energy", energy)):
        if not 0 <= value < math.inf:
            raise WireError(f"{where()}: {name} is {value}, due a sum of squares")
    for name, value in (("w_bar", w_bar), ("seconds", seconds)):
        if not 0 <= value < math.inf:
            raise WireError(f"{where()}: {name} is {value}, due a number that is not negative")
    summed = bool(flags & _HAS_PAYLOAD_CRC)
    if summed != checksum_payload:
        word = "unexpected" if summed else "expected"
        raise WireError(f"{where()}: payload checksum {word}; wire.checksum differs")
    if checksum_payload and payload_crc != zlib.crc32(frame_B.data[HEADER_NBYTES:]):
        raise WireError(f"{where()}: payload checksum does not match; corrupted on its way")
    return due._replace(
        tau=tau,
        w_bar=w_bar,
        seconds=seconds,
        next_level=next_level,
        squared_error=squared_error,
        energy=energy,
        stop=bool(flags & _STOP),
        save=bool(flags & _SAVE),
    )


_CHECKED = ("kind", "codec", "sender", "round", "count", "payload_nbytes", "batch_hash", "level")
_ADVICE = {
    "kind": "the ranks are at different phases",
    "codec": "codecs differ; start all ranks with one config",
    "sender": "frames were mixed up",
    "round": "the ranks are at different rounds, or nothing new arrived",
    "count": "batch sizes or shapes differ; start all ranks with one config",
    "payload_nbytes": "codecs differ; start all ranks with one config",
    "batch_hash": "the ranks drew different rows; seeds or sample ids differ",
    "level": "the ranks disagree about the rate of auto; a header was missed",
}


def rows_hash(rows_N: np.ndarray) -> int:
    """CRC32 of the row numbers (int64) of a round."""
    return zlib.crc32(np.ascontiguousarray(rows_N, dtype="<i8").tobytes())
