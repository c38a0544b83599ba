"""`lattice-paper`: the published maths of C-VFL's vector compressor, honestly charged.

The published code (github.com/timcast725/C-VFL, quant.py) divides by the largest value, adds a
dither from a square, replaces each pair of columns by the nearest point of a hexagonal lattice of
fixed scale, and takes the dither off again. It never clips, so a pair can meet any point of the
plane, yet it is charged `bits` bits a value. Here the points that values in [-1, 1] times the
maximum can meet are numbered, which takes 7, 8 and 10 bits a pair, and pairs farther out are
listed.

Lattice, scale and dither are the published ones, with three differences: the scale is the smallest
value if no value is positive (the published code divides by the largest one, however small it
is); the dither comes from a keyed generator that the receiver has too; and a message with more
pairs outside the numbered points than its list has room for is refused with a ConfigError, since
a payload has a size that is known beforehand.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcvfl.codecs.base import Array, Bytes, Codec, as_float32, check_status, choice, known_options
from hpcvfl.codecs.ranges import FLOAT32_MAX, TOO_WIDE
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import lattice_paper, scan
from hpcvfl.kernels.dither import split_key

# legend: R rows, C columns, P pairs, E escapes, B bytes


@dataclass(frozen=True, eq=False)
class LatticePaperCodec(Codec):
    """Unbounded hexagonal lattice with square dither.

    bits    : 2, 3 or 4, the name of the lattice; a pair costs 7, 8 or 10 bits and its share of the
              list
    escapes : percent of the pairs that the list has room for, and 16 at least (or all, if there are
              fewer). Rows of normal values needed 5 entries of 800 pairs at most, but those
              whose largest value is small beside the lowest (1.5 minus a gamma variable of shape
              4) up to 96 percent.
    Payload: scale (float32), number of escapes (uint32), the list (uint32 pair, int16 i, int16 j;
    unused entries 0), then the low 8 bits of the codes, then the others.
    """

    bits: int
    escapes: int = 1

    name = "lattice-paper"
    examples = (
        *(f"lattice-paper:bits={b}" for b in (2, 3, 4)),
        "lattice-paper:bits=2,escapes=100",
    )

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], parse: Callable[[str], Codec]
    ) -> LatticePaperCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits", "escapes"))
        if "bits" not in options:
            raise ConfigError(
                "codec lattice-paper: bits is missing; possible: 2, 3, 4, e.g. lattice-paper:bits=4"
            )
        bits = choice(cls.name, "bits", options["bits"], ("2", "3", "4"))
        escapes = options.get("escapes", "1")
        if not (escapes.isascii() and escapes.isdigit() and int(escapes) <= 100):
            raise ConfigError(
                f"codec lattice-paper: escapes = {escapes!r}; possible: 0 to 100 (percent of the "
                "pairs)"
            )
        return cls(int(bits), int(escapes))

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        return f"lattice-paper:bits={self.bits}" + (
            f",escapes={self.escapes}" if self.escapes != 1 else ""
        )

    @property
    def book(self) -> lattice_paper.PaperBook:
        """Lattice and numbered points."""
        return lattice_paper.BOOKS[self.bits]

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Scale and count, the list as a whole, and the codes."""
        if 0 in shape:
            return 0
        pairs = _num_pairs(shape)
        codes = sum(bit_kernels.packed_nbytes(pairs, width) for width in self._widths())
        return _HEAD.size + _ESCAPE.itemsize * self._capacity(pairs) + codes

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Two passes over the tensor: its largest value, then the points."""
        if x.size == 0:
            return
        x_RC = as_float32(x).reshape(-1, _width(x.shape))
        bounds_2 = np.empty(2, np.float32)
        check_status(scan.minmax(x_RC.reshape(-1), bounds_2))
        low, high = bounds_2.tolist()
        scale = high if high > 0 else low
        pairs = _num_pairs(x.shape)
        codes_P = np.empty(pairs, np.uint16)
        escapes_E = np.zeros(self._capacity(pairs), _ESCAPE)
        found, beyond = lattice_paper.encode_paper(
            x_RC,
            scale or 1.0,
            self.book,
            split_key(key),
            codes_P,
            escapes_E["pair"],
            escapes_E["point"],
        )
        self._check_room(found, beyond, len(escapes_E), pairs, low, high)
        if not self._is_finite(scale, escapes_E):
            raise NonFiniteError(TOO_WIDE)
        _HEAD.pack_into(out_B.data, 0, scale, found)
        codes_B = out_B[_HEAD.size + escapes_E.nbytes :]
        out_B[_HEAD.size : _HEAD.size + escapes_E.nbytes] = escapes_E.view(np.uint8)
        for width, shift, part in self._parts(pairs):
            bit_kernels.pack_bits(codes_P >> shift & (1 << width) - 1, width, codes_B[part])

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Unpack the codes, then points, dither and scale in one pass."""
        if out.size == 0:
            return
        pairs = _num_pairs(out.shape)
        scale, found = _HEAD.unpack_from(payload_B.data)
        end = _HEAD.size + _ESCAPE.itemsize * self._capacity(pairs)
        escapes_E = payload_B[_HEAD.size : end].copy().view(_ESCAPE)
        if found > len(escapes_E):
            raise WireError(f"{found} escapes in a payload that has room for {len(escapes_E)}")
        escapes_E = escapes_E[:found]
        places, points = escapes_E["pair"].astype(np.int64), escapes_E["point"]
        if found and not (
            (np.diff(places) > 0).all()
            and places[-1] < pairs
            and (points[:, 0] % 2 == points[:, 1] % 2).all()
        ):
            raise WireError(
                "the escapes of a payload are no lattice points in order; it is corrupt"
            )
        if not self._is_finite(scale, escapes_E):
            raise WireError("the scale in a payload is not finite; the payload is corrupt")
        codes_P, part_P = np.zeros(pairs, np.uint16), np.empty(pairs, np.uint16)
        for width, shift, part in self._parts(pairs):
            bit_kernels.unpack_bits(payload_B[end:][part], width, part_P)
            codes_P |= part_P << shift
        to = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        lattice_paper.decode_paper(
            codes_P,
            escapes_E["pair"],
            points,
            scale,
            self.book,
            split_key(key),
            to.reshape(-1, _width(out.shape)),
        )
        if to is not out:
            out[...] = to

    def _capacity(self, pairs: int) -> int:
        return min(pairs, max(16, pairs * self.escapes // 100))

    def _widths(self) -> tuple[int, ...]:
        """Bits of a code in each part of the payload: those that can be packed are 1 to 8."""
        width = self.book.width
        return (8, width - 8) if width > 8 else (width,)

    def _parts(self, pairs: int) -> list[tuple[int, int, slice]]:
        """(bits, place of the lowest bit, bytes) of each part of the codes."""
        parts, shift, start = [], 0, 0
        for width in self._widths():
            end = start + bit_kernels.packed_nbytes(pairs, width)
            parts.append((width, shift, slice(start, end)))
            shift, start = shift + width, end
        return parts

    def _check_room(
        self, found: int, beyond: int, room: int, pairs: int, low: float, high: float
    ) -> None:
        """Raise ConfigError if a point has no place in the payload."""
        span = f"values from {low:.4g} to {high:.4g}, divided by the largest"
        if beyond:
            raise ConfigError(
                f"codec {self.spec}: {beyond} pairs of {pairs} are more than "
                f"{lattice_paper.FARTHEST} half steps from 0 ({span}), no list holds them; use "
                f"lattice:dim=2,bits={self.bits}"
            )
        if found > room:
            due = -(-100 * found // pairs)
            raise ConfigError(
                f"codec {self.spec}: {found} pairs of {pairs} have no number ({span}), due: at "
                f"most {room}, the room of the list; raise escapes (percent of the pairs) from "
                f"{self.escapes} to {due} or more, or use lattice:dim=2,bits={self.bits}"
            )

    def _is_finite(self, scale: float, escapes_E: Any) -> bool:
        """Whether every point of the book and of the list decodes to a finite value."""
        farthest = max(int(np.abs(escapes_E["point"].astype(np.int64)).max(initial=0)), 30)
        return abs(scale) * (farthest * self.book.gap + 1) < FLOAT32_MAX


_HEAD = struct.Struct("<fI")
_ESCAPE = np.dtype([("pair", "<u4"), ("point", "<i2", 2)])


def _num_pairs(shape: tuple[int, ...]) -> int:
    return math.prod(shape[:-1]) * -(-_width(shape) // 2)


def _width(shape: tuple[int, ...]) -> int:
    """Values of a row; a single number is a row of one."""
    return shape[-1] if shape else 1
