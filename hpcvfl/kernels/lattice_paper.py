"""The hexagonal quantiser of C-VFL's published code: dither, nearest point of A2, no clipping.

    y  = x / scale + u * width           u: dither of dither.py, width = 1 / (2**bits - 1)
    (i, j) = the point of A2 nearest to a pair y, at (i * gap / 2, j * gap * sqrt(3) / 2)
    x' = ((i * gap / 2, j * gap * sqrt(3) / 2) - u * width) * scale

in float32, one rounding per operation; i and j are both even or both odd. Pairs are columns (0, 1),
(2, 3), .. of each row; a last column alone is paired with 0. The dither of pair p is that of
elements 2 p and 2 p + 1. Pairs whose point has a number in the book get it as their code, the
others go to a list.

Legend: R rows, C columns, P pairs, E escapes, K values of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, helper, kernel
from hpcvfl.kernels.dither import DITHER_BITS, block_filler

FARTHEST = 32767
"""Largest |i| and |j| that an escape holds."""

_fill_block = block_filler(DITHER_BITS)
_HALF, _TWO, _THREE = np.float32(0.5), np.float32(2), np.float32(3)


@dataclass(frozen=True)
class PaperBook:
    """Lattice and numbered points for 2, 3 or 4 bits.

    gap   : minimum distance sqrt(2) / 4, / 8.5, / 19 (the published scales)
    even  : largest |i|, |j| of the points with even i and j that have a number
    odd   : the same of the others
    width : bits of a number. The published code charges 2 * bits, but values in [-1, 1] with their
            dither meet 67, 229 and 941 points.
    """

    bits: int
    gap: float
    even: tuple[int, int]
    odd: tuple[int, int]
    width: int

    @property
    def counts(self) -> tuple[int, int]:
        """Even and odd points with a number."""
        even = (self.even[0] + 1) * (self.even[1] + 1)
        return even, (self.odd[0] + 1) * (self.odd[1] + 1)

    @property
    def numbers(self) -> tuple[np.float32, ...]:
        """(gap / 2, gap * sqrt(3) / 2, dither of one place) as float32."""
        place = 2.0**-DITHER_BITS / (2**self.bits - 1)
        return tuple(np.float32(v) for v in (self.gap / 2, self.gap * math.sqrt(3) / 2, place))

    @property
    def limits(self) -> np.ndarray:
        """The four largest |i|, |j| as a kernel takes them."""
        return np.array([*self.even, *self.odd], np.int32)


BOOKS = {
    2: PaperBook(2, math.sqrt(2) / 4, (8, 6), (9, 5), 7),
    3: PaperBook(3, math.sqrt(2) / 8.5, (12, 8), (13, 7), 8),
    4: PaperBook(4, math.sqrt(2) / 19, (28, 16), (27, 15), 10),
}
"""By bits; that of 2 bits has room for 56 points around those that [-1, 1] needs."""


@helper
def _nearest(u, v):  # type: ignore[no-untyped-def]
    """(i, j) as floats of the nearest point; u in units of the gap, v in units of gap * sqrt(3)."""
    a, b = np.rint(u), np.rint(v)
    c, d = np.rint(u - _HALF), np.rint(v - _HALF)
    e, f = u - a, v - b
    s, t = (u - _HALF) - c, (v - _HALF) - d
    if (s - e) * (s + e) + _THREE * ((t - f) * (t + f)) < np.float32(0):
        return np.float32(_TWO * c + np.float32(1)), np.float32(_TWO * d + np.float32(1))
    return np.float32(_TWO * a), np.float32(_TWO * b)


@helper
def _number(i, j, limits):  # type: ignore[no-untyped-def]
    """Number of the point, or -1 if it has none."""
    first = (limits[0] + 1) * (limits[1] + 1)
    if i % 2 == 0:
        if abs(i) > limits[0] or abs(j) > limits[1]:
            return -1
        return (i + limits[0]) // 2 + (j + limits[1]) // 2 * (limits[0] + 1)
    if abs(i) > limits[2] or abs(j) > limits[3]:
        return -1
    return first + (i + limits[2]) // 2 + (j + limits[3]) // 2 * (limits[2] + 1)


@helper
def _point(code, limits):  # type: ignore[no-untyped-def]
    """(i, j) of a number; those behind the last are the last."""
    first = (limits[0] + 1) * (limits[1] + 1)
    code = min(code, first + (limits[2] + 1) * (limits[3] + 1) - 1)
    if code < first:
        row = code // (limits[0] + 1)
        return 2 * (code - row * (limits[0] + 1)) - limits[0], 2 * row - limits[1]
    code -= first
    row = code // (limits[2] + 1)
    return 2 * (code - row * (limits[2] + 1)) - limits[2], 2 * row - limits[3]


@kernel
def encode_pairs(x_RC, scale, half, rise, place, limits, k0, k1, k_K, codes_P, at_E, point_E2):  # type: ignore[no-untyped-def]
    """Kernel behind `encode_paper`."""
    R, C = x_RC.shape
    escapes, beyond, p = 0, 0, 0
    for r in range(R):
        for c in range(0, C, 2):
            k = 2 * p % BLOCK
            if k == 0:
                _fill_block(k0, k1, 2 * p // BLOCK, k_K)
            second = x_RC[r, c + 1] if c + 1 < C else np.float32(0)
            y = x_RC[r, c] / scale + np.float32(k_K[k]) * place
            z = second / scale + np.float32(k_K[k + 1]) * place
            i, j = _nearest(y / (half * _TWO), z / (rise * _TWO))
            codes_P[p] = 0
            if not (abs(i) <= FARTHEST and abs(j) <= FARTHEST):  # or NaN
                beyond += 1
            else:
                code = _number(np.int64(i), np.int64(j), limits)
                if code >= 0:
                    codes_P[p] = code
                else:
                    if escapes < at_E.shape[0]:
                        at_E[escapes] = p
                        point_E2[escapes, 0], point_E2[escapes, 1] = np.int16(i), np.int16(j)
                    escapes += 1
            p += 1
    return escapes, beyond


@kernel
def decode_pairs(codes_P, at_E, point_E2, scale, half, rise, place, limits, k0, k1, k_K, out_RC):  # type: ignore[no-untyped-def]
    """Kernel behind `decode_paper`."""
    R, C = out_RC.shape
    escape, p = 0, 0
    for r in range(R):
        for c in range(0, C, 2):
            k = 2 * p % BLOCK
            if k == 0:
                _fill_block(k0, k1, 2 * p // BLOCK, k_K)
            i, j = _point(np.int64(codes_P[p]), limits)
            if escape < at_E.shape[0] and at_E[escape] == p:
                i, j = np.int64(point_E2[escape, 0]), np.int64(point_E2[escape, 1])
                escape += 1
            y = np.float32(i) * half - np.float32(k_K[k]) * place
            out_RC[r, c] = y * scale
            if c + 1 < C:
                z = np.float32(j) * rise - np.float32(k_K[k + 1]) * place
                out_RC[r, c + 1] = z * scale
            p += 1


def encode_paper(
    x_RC: np.ndarray,
    scale: float,
    book: PaperBook,
    keys: tuple[Any, Any],
    codes_P: np.ndarray,
    at_E: np.ndarray,
    point_E2: np.ndarray,
) -> tuple[int, int]:
    """Number the points of all pairs; (points without a number, points beyond FARTHEST).

    x_RC     : float32, shape (R, C)   finite; any strides
    scale    : float                   not 0; used as float32
    keys     : split_key of the key of the dither
    codes_P  : uint16, shape (P,)      P = R * ceil(C / 2); overwritten, 0 where there is no number
    at_E     : uint32, shape (E,)      pairs of the first E points without a number; overwritten
    point_E2 : int16, shape (E, 2)     their (i, j); overwritten
    """
    k_K = np.empty(BLOCK, np.int32)
    found = encode_pairs(
        x_RC, np.float32(scale), *book.numbers, book.limits, *keys, k_K, codes_P, at_E, point_E2
    )
    return int(found[0]), int(found[1])


def decode_paper(
    codes_P: np.ndarray,
    at_E: np.ndarray,
    point_E2: np.ndarray,
    scale: float,
    book: PaperBook,
    keys: tuple[Any, Any],
    out_RC: np.ndarray,
) -> None:
    """Inverse of `encode_paper`; any codes decode to points of the book.

    at_E     : uint32, shape (E,)      rising, those in use alone
    point_E2 : int16, shape (E, 2)     both even or both odd
    out_RC   : float32, shape (R, C)   overwritten
    """
    k_K = np.empty(BLOCK, np.int32)
    decode_pairs(
        codes_P, at_E, point_E2, np.float32(scale), *book.numbers, book.limits, *keys, k_K, out_RC
    )
