"""Nearest codewords of groups far outside, in exact arithmetic.

A million steps out, squared distances to the two boxes of a book agree in all digits of a float32,
and further on in those of a float64. Only the sign of their difference matters,

    |y - p|^2 - |y - q|^2 = sum_i (q_i - p_i) (2 y_i - p_i - q_i)       p, q: nearest of either box

and every product here is exact in float64: y_i is a float32, codewords are multiples of 2**-12
below 2**9, and sqrt(3) of A2 comes in parts of 18 bits. The sign of their sum is then found without
rounding (Shewchuk 1997, Discrete Comput. Geom. 18, grow-expansion). Groups that are not far never
come here.

Legend: N values, J blocks, T columns over and over, D coordinates, B bytes, E terms of a sum.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, helper, kernel
from hpcvfl.kernels.lattice_book import Book

FAR_OUT = 1024.0
"""Steps from the centre beyond which a coordinate makes its group one for this file; no book
reaches further than 2**9.
"""

_LARGEST = np.finfo(np.float32).max
_TERMS = 16  # of a sum, at most: 8 coordinates, or 1 + 5 of A2, and a constant


def _parts_of_root3() -> tuple[float, ...]:
    """Five float64 of 18 bits that add up to sqrt(3) but for 2**-89.

    Enough for A2: no multiple of sqrt(3) in question is nearer to one of 1 than 2**-72 of itself.
    """
    digits, parts = math.isqrt(3 << 178), []  # sqrt(3) * 2**89, 90 bits
    for shift in (72, 54, 36, 18, 0):
        parts.append(math.ldexp(digits >> shift & (1 << 18) - 1, shift - 89))
    return tuple(parts)


@helper
def _add(sum_E, count, term):  # type: ignore[no-untyped-def]
    """The expansion of `count` terms and one term more, exactly; the new number of terms."""
    for i in range(count):
        total = term + sum_E[i]
        part = total - term
        sum_E[i] = (term - (total - part)) + (sum_E[i] - part)
        term = total
    sum_E[count] = term
    return count + 1


@helper
def _sign(sum_E, count):  # type: ignore[no-untyped-def]
    """Something of the sign of an expansion: its largest term that is not 0."""
    for i in range(count - 1, -1, -1):
        if sum_E[i] != 0.0:
            return sum_E[i]
    return 0.0


@helper
def _nearest_digit(y, start, last, gap):  # type: ignore[no-untyped-def]
    """d of 0 .. last with (start + d) * gap nearest to y. Midpoints of two are no float32 but for
    rational ones, which are exact; so their rounding never matters.
    """
    d = min(last, max(0.0, np.rint(y / gap - start)))
    if d < last and y > (start + d + 0.5) * gap:
        return d + 1.0
    if d > 0.0 and y < (start + d - 0.5) * gap:
        return d - 1.0
    return d


@helper
def _make_even(y_D, start_D, last_D, d_D, sum_E):  # type: ignore[no-untyped-def]
    """Move the coordinate of an odd sum for which that costs least.

    By w = 1 or -1 it costs 1 - 2 w (y - start - d): `high`, exact, and `low`, exact.
    """
    total = 0.0
    for i in range(len(d_D)):
        total += d_D[i]
    if total % 2.0 == 0.0:
        return
    at, way, least_high, least_low = -1, 0.0, 0.0, 0.0
    for i in range(len(d_D)):
        for w in (1.0, -1.0):
            if not 0.0 <= d_D[i] + w <= last_D[i]:
                continue
            high, low = -2.0 * w * y_D[i], 1.0 + 2.0 * w * (start_D[i] + d_D[i])
            count = _add(sum_E, 0, low - least_low)
            count = _add(sum_E, count, high)
            count = _add(sum_E, count, -least_high)
            if at < 0 or _sign(sum_E, count) < 0.0:
                at, way, least_high, least_low = i, w, high, low
    d_D[at] += way


@cache
def corrector(book: Book) -> Any:
    """Kernel behind `correct_far`, compiled at its first call."""
    dim, width, parity = book.dim, book.dim * book.bits, book.parity
    start_2D = np.array(book.first)
    last_2D = np.array(book.sides) - 1.0
    gap_D = np.array(book.spacing)
    stride_2D = np.array([_strides(side) for side in book.sides], np.uint64)
    behind = np.uint64(book.counts[0])
    root3 = _parts_of_root3()

    @helper
    def choose(y_D, d_2D, sum_E):  # type: ignore[no-untyped-def]
        """0 or 1, the nearer box; its digits and those of the other are left in d_2D."""
        for box in range(2):
            for i in range(dim):
                start, last = start_2D[box, i], last_2D[box, i]
                d_2D[box, i] = _nearest_digit(y_D[i], start, last, gap_D[i])
            if parity:
                _make_even(y_D, start_2D[box], last_2D[box], d_2D[box], sum_E)
        count, constant = 0, 0.0
        for i in range(dim):
            p, q = start_2D[0, i] + d_2D[0, i], start_2D[1, i] + d_2D[1, i]
            if gap_D[i] == 1.0:
                constant += (q - p) * (q + p)
                count = _add(sum_E, count, (q - p) * 2.0 * y_D[i])
            else:
                constant += 3.0 * ((q - p) * (q + p))
                for part in root3:
                    count = _add(sum_E, count, (q - p) * 2.0 * y_D[i] * part)
        count = _add(sum_E, count, -constant)
        return 1 if _sign(sum_E, count) > 0.0 else 0

    @helper
    def index(box, d_2D):  # type: ignore[no-untyped-def]
        code = behind if box else np.uint64(0)
        for i in range(dim):
            d = np.uint64(d_2D[box, i])
            if parity and i == dim - 1:
                d = d >> np.uint64(1)
            code += d * stride_2D[box, i]
        return code

    @helper
    def replace(out_B, at, code):  # type: ignore[no-untyped-def]
        """`width` bits from bit `at` on."""
        for k in range(width):
            byte, place = (at + k) // 8, (at + k) % 8
            bit = np.int64((code >> np.uint64(k)) & np.uint64(1))
            out_B[byte] = np.uint8((np.int64(out_B[byte]) & ~(1 << place)) | (bit << place))

    @kernel
    def correct(x_N, far_J, C, lo_T, inv_step_T, y_D, d_2D, sum_E, out_B):  # type: ignore[no-untyped-def]
        N = x_N.shape[0]
        for block in range(far_J.shape[0]):
            if not far_J[block]:
                continue
            start = block * BLOCK
            column = start % C
            for first in range(start, min(start + BLOCK, N), dim):
                farthest = 0.0
                for i in range(dim):
                    y_D[i] = 0.0
                    if first + i < N:
                        t = column + first - start + i
                        y = (x_N[first + i] - lo_T[t]) * inv_step_T[t]
                        y_D[i] = min(max(np.float64(y), -_LARGEST), _LARGEST)
                        farthest = max(farthest, abs(y_D[i]))
                if farthest > FAR_OUT:
                    box = choose(y_D, d_2D, sum_E)
                    replace(out_B, first // dim * width, index(box, d_2D))

    return correct


def _strides(side: tuple[int, ...]) -> list[int]:
    """By how much an index grows with each coordinate, first coordinate fastest."""
    return [math.prod(side[:i]) for i in range(len(side))]


def correct_far(
    x_N: np.ndarray,
    far_J: np.ndarray,
    columns: tuple[int, np.ndarray, np.ndarray],
    book: Book,
    out_B: np.ndarray,
) -> None:
    """Put the nearest codewords of groups with a coordinate beyond FAR_OUT in their places.

    x_N     : float32, shape (N,)   any stride
    far_J   : bool, shape (J,)      blocks of BLOCK values that may have such a group
    columns : (C, lo_T, inv_step_T), float32, as `encode_lattice` has them; y = (x - lo) * inv_step
              in float32, cut at the largest float32
    out_B   : uint8                 payload; the codes of other groups are left alone
    """
    room = np.zeros(book.dim), np.zeros((2, book.dim)), np.zeros(_TERMS)
    corrector(book)(x_N, far_J, *columns, *room, out_B)
