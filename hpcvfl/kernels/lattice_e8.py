"""Nearest codeword of the book of E8, and the codeword of an index.

Both boxes are cubes of 2**bits points a side, of which those with an even sum count (D8; Conway &
Sloane 1982, IEEE T-IT 28(2), in a box): every coordinate is rounded and clipped, and if the sum is
then odd, one coordinate goes to its second-best point, the one for which that costs least. Second
best is the neighbour on the side of y, or the inner one where y is outside; moving costs 1 - 2 t,

    t = min(|e|, u, top - u)       u: y from the first point, e: u from the nearest point

because outside t is minus the distance to the box. The costs add up over the coordinates and are
convex in each, so no other moves do better.

An index is, lowest bits first, the digits of 7 coordinates of `bits` bits each, the eighth without
its lowest bit, which the parity tells, and the number of the box. Lanes of the loops are groups, so
the values of a block are transposed first. Lines of the next block are fetched between the steps.

Legend: K values of a block, G groups of a block, D coordinates.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, helper, prefetch_read, prefetch_write, wide
from hpcvfl.kernels.lattice_book import Book

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_NEVER = np.float32(2)  # no coordinate has this t, they are at most 1/2
_LEAST = np.float32(-(2.0**30))  # less than any t
_PART = BLOCK // 12 // 16 * 16 + 16  # values to fetch between two of 12 steps


def scratch() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(y_DG, start_G, most_G): a block transposed, first point of the box taken, largest t."""
    groups = BLOCK // 8
    return (
        np.zeros((8, groups), np.float32),
        np.zeros(groups, np.float32),
        np.zeros(groups, np.float32),
    )


@helper
def _transpose(y_K, G, y_DG):  # type: ignore[no-untyped-def]
    wide()
    for g in range(np.uint64(G)):
        at = g * np.uint64(8)
        y_DG[np.uint64(0), g] = y_K[at]
        y_DG[np.uint64(1), g] = y_K[at + np.uint64(1)]
        y_DG[np.uint64(2), g] = y_K[at + np.uint64(2)]
        y_DG[np.uint64(3), g] = y_K[at + np.uint64(3)]
        y_DG[np.uint64(4), g] = y_K[at + np.uint64(4)]
        y_DG[np.uint64(5), g] = y_K[at + np.uint64(5)]
        y_DG[np.uint64(6), g] = y_K[at + np.uint64(6)]
        y_DG[np.uint64(7), g] = y_K[at + np.uint64(7)]


@helper
def _transpose_back(y_DG, G, y_K):  # type: ignore[no-untyped-def]
    wide()
    for g in range(np.uint64(G)):
        at = g * np.uint64(8)
        y_K[at] = y_DG[np.uint64(0), g]
        y_K[at + np.uint64(1)] = y_DG[np.uint64(1), g]
        y_K[at + np.uint64(2)] = y_DG[np.uint64(2), g]
        y_K[at + np.uint64(3)] = y_DG[np.uint64(3), g]
        y_K[at + np.uint64(4)] = y_DG[np.uint64(4), g]
        y_K[at + np.uint64(5)] = y_DG[np.uint64(5), g]
        y_K[at + np.uint64(6)] = y_DG[np.uint64(6), g]
        y_K[at + np.uint64(7)] = y_DG[np.uint64(7), g]


@helper
def _rounded(u, top):  # type: ignore[no-untyped-def]
    """(digit, e, t) of a coordinate u from the first of top + 1 points."""
    d = min(top, max(_ZERO, np.rint(u)))
    e = u - d
    return d, e, min(abs(e), min(u, top - u))


@helper
def _take_in(y, a, b, top, sums):  # type: ignore[no-untyped-def]
    """One coordinate more: sums of e_b^2 - e_a^2 and of the digits, largest t, of both boxes."""
    near, sum_a, sum_b, most_a, most_b = sums
    d, e, t = _rounded(y - a, top)
    c, f, s = _rounded(y - b, top)
    return near + (f - e) * (f + e), sum_a + d, sum_b + c, max(most_a, t), max(most_b, s)


@helper
def _odd(total):  # type: ignore[no-untyped-def]
    """1 or 0, of a sum of digits."""
    return np.float32(np.int32(np.int32(total) & np.int32(1)))


@helper
def _choose_box(y_DG, G, a, b, top, start_G, most_G):  # type: ignore[no-untyped-def]
    """First point of the nearer box, and its largest t if a coordinate has to move, else _NEVER."""
    wide()
    for g in range(np.uint64(G)):
        sums = (_ZERO, _ZERO, _ZERO, _LEAST, _LEAST)
        sums = _take_in(y_DG[np.uint64(0), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(1), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(2), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(3), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(4), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(5), g], a, b, top, sums)
        sums = _take_in(y_DG[np.uint64(6), g], a, b, top, sums)
        near, sum_a, sum_b, most_a, most_b = _take_in(y_DG[np.uint64(7), g], a, b, top, sums)
        odd_a, odd_b = _odd(sum_a), _odd(sum_b)
        near += odd_b * (_ONE - _TWO * most_b)
        near -= odd_a * (_ONE - _TWO * most_a)
        first = near >= _ZERO
        start_G[g] = a if first else b
        moves = (odd_a if first else odd_b) > _ZERO
        most = most_a if first else most_b
        most_G[g] = most if moves else _NEVER


@helper
def _settle(i, G, top, start_G, most_G, y_DG):  # type: ignore[no-untyped-def]
    """Replace coordinate i by its digit; the first one with the largest t moves."""
    wide()
    for g in range(np.uint64(G)):
        u = y_DG[i, g] - start_G[g]
        d, e, t = _rounded(u, top)
        hit = t == most_G[g]
        up = (d == _ZERO) | ((e > _ZERO) & (d < top))
        moved = d + (_ONE if up else -_ONE)
        y_DG[i, g] = moved if hit else d
        most_G[g] = _NEVER if hit else most_G[g]


@cache
def boxes_8(book: Book) -> Any:
    """Kernel (y_K, G, codes_G, room, x_N, ahead): the indices of the nearest codewords."""
    a, b = np.float32(book.first[0][0]), np.float32(book.first[1][0])
    bits, top = book.bits, np.float32(2**book.bits - 1)
    second = np.uint64(1 << (8 * bits - 1))

    @helper
    def join(y_DG, G, start_G, codes_G):  # type: ignore[no-untyped-def]
        wide()
        for g in range(np.uint64(G)):
            w = np.uint64(0)
            for i in range(8):
                d = np.uint64(np.uint32(np.int32(y_DG[i, g])))
                w |= (d >> np.uint64(1) if i == 7 else d) << np.uint64(i * bits)
            codes_G[g] = w if start_G[g] == a else w | second

    @helper
    def quantise(y_K, G, codes_G, room, x_N, ahead):  # type: ignore[no-untyped-def]
        y_DG, start_G, most_G = room
        prefetch_read(x_N, ahead, 2 * _PART)
        _transpose(y_K, G, y_DG)
        prefetch_read(x_N, ahead + np.uint64(2 * _PART), 2 * _PART)
        _choose_box(y_DG, G, a, b, top, start_G, most_G)
        for i in range(np.uint64(8)):
            prefetch_read(x_N, ahead + (np.uint64(4) + i) * np.uint64(_PART), _PART)
            _settle(i, G, top, start_G, most_G, y_DG)
        join(y_DG, G, start_G, codes_G)

    return quantise


@cache
def points_8(book: Book) -> Any:
    """Kernel (codes_G, G, y_K, room, out_N, ahead): inverse of `boxes_8`."""
    a, b = np.float32(book.first[0][0]), np.float32(book.first[1][0])
    bits, mask, one = book.bits, np.uint64(2**book.bits - 1), np.uint64(1)
    box = np.uint64(8 * bits - 1)

    @helper
    def split(codes_G, G, y_DG):  # type: ignore[no-untyped-def]
        wide()
        for g in range(np.uint64(G)):
            w, total = codes_G[g], np.uint64(0)
            start = a if w >> box == np.uint64(0) else b
            for i in range(7):
                d = (w >> np.uint64(i * bits)) & mask
                total ^= d
                y_DG[i, g] = np.float32(np.int32(d)) + start
            d = ((w >> np.uint64(7 * bits)) << one) & mask
            y_DG[7, g] = np.float32(np.int32(d | (total & one))) + start

    @helper
    def locate(codes_G, G, y_K, room, out_N, ahead):  # type: ignore[no-untyped-def]
        y_DG, _, _ = room
        prefetch_write(out_N, ahead, BLOCK // 2)
        split(codes_G, G, y_DG)
        prefetch_write(out_N, ahead + np.uint64(BLOCK // 2), BLOCK // 2)
        _transpose_back(y_DG, G, y_K)

    return locate
