"""Nearest codeword of a book of two plain boxes (A2, D4), and the codeword of an index.

In each box a coordinate is rounded and clipped on its own. Which box is nearer is decided by the
difference of the squared distances, (e1 - e0) * (e1 + e0) summed over the coordinates: it is good
where the distances themselves are equal in float32. Farther out than FAR_OUT see lattice_far.py.

The kernels also fetch the values of the next block (x_N or out_N from `ahead` on), a few lines at a
time between parts of the work.

Legend: K values of a block, G groups of a block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import helper, prefetch_read, prefetch_write, wide
from hpcvfl.kernels.lattice_book import Book, as_float32

_ZERO = np.float32(0)
_PART = 256  # values between two requests for the next ones


@helper
def _both_boxes(y, a, b, top_a, top_b):  # type: ignore[no-untyped-def]
    """Nearest d in each box, and by how much the square of the first's distance is smaller."""
    u, v = y - a, y - b
    p = min(top_a, max(_ZERO, np.rint(u)))
    q = min(top_b, max(_ZERO, np.rint(v)))
    e, f = u - p, v - q
    return p, q, (f - e) * (f + e)


@cache
def boxes_2(book: Book) -> Any:
    """Kernel (y_K, G, codes_G, room, x_N, ahead): codes of G groups of two values."""
    (a0, a1), (b0, b1) = as_float32(book.first[0]), as_float32(book.first[1])
    (A0, A1), (B0, B1) = (as_float32([n - 1 for n in side]) for side in book.sides)
    per_gap, square = as_float32((1 / book.spacing[1], book.spacing[1] ** 2))
    row_a, row_b = as_float32((book.sides[0][0], book.sides[1][0]))
    behind = np.float32(book.counts[0])

    @helper
    def quantise(y_K, G, codes_G, room, x_N, ahead):  # type: ignore[no-untyped-def]
        wide()
        for first_g in range(0, G, _PART // 2):
            prefetch_read(x_N, ahead + np.uint64(first_g * 2), _PART)
            for g in range(np.uint64(first_g), np.uint64(min(G, first_g + _PART // 2))):
                i = g * np.uint64(2)
                p0, q0, near0 = _both_boxes(y_K[i], a0, b0, A0, B0)
                p1, q1, near1 = _both_boxes(y_K[i + np.uint64(1)] * per_gap, a1, b1, A1, B1)
                a, b = p0 + p1 * row_a, q0 + q1 * row_b + behind
                code = a if near0 + near1 * square >= _ZERO else b
                codes_G[g] = np.uint32(np.int32(code))

    return quantise


@cache
def boxes_4(book: Book) -> Any:
    """Kernel (y_K, G, codes_G, room, x_N, ahead): codes of G groups of four values."""
    (a0, a1, a2, a3), (b0, b1, b2, b3) = (as_float32(first) for first in book.first)
    (A0, A1, A2, A3), (B0, B1, B2, B3) = (as_float32([n - 1 for n in s]) for s in book.sides)
    (rowA, _, slabA, _), (rowB, _, slabB, _) = (as_float32(side) for side in book.sides)
    planeA, planeB = (np.uint32(side[0] * side[1]) for side in book.sides)
    behind = np.uint32(book.counts[0])

    @helper
    def quantise(y_K, G, codes_G, room, x_N, ahead):  # type: ignore[no-untyped-def]
        wide()
        for first_g in range(0, G, _PART // 4):
            prefetch_read(x_N, ahead + np.uint64(first_g * 4), _PART)
            for g in range(np.uint64(first_g), np.uint64(min(G, first_g + _PART // 4))):
                i = g * np.uint64(4)
                p0, q0, near0 = _both_boxes(y_K[i], a0, b0, A0, B0)
                p1, q1, near1 = _both_boxes(y_K[i + np.uint64(1)], a1, b1, A1, B1)
                p2, q2, near2 = _both_boxes(y_K[i + np.uint64(2)], a2, b2, A2, B2)
                p3, q3, near3 = _both_boxes(y_K[i + np.uint64(3)], a3, b3, A3, B3)
                first = (near0 + near1) + (near2 + near3) >= _ZERO
                low = p0 + p1 * rowA if first else q0 + q1 * rowB  # below 2**24, so exact
                high = p2 + p3 * slabA if first else q2 + q3 * slabB
                plane = planeA if first else planeB
                code = np.uint32(np.uint32(np.int32(high)) * plane)
                code = np.uint32(code + np.uint32(np.int32(low)))
                codes_G[g] = code if first else np.uint32(code + behind)

    return quantise


@cache
def points_2(book: Book) -> Any:
    """Kernel (codes_G, G, y_K, room, out_N, ahead): inverse of `boxes_2`; a code behind the last
    counts as the last.
    """
    (a0, a1), (b0, b1) = as_float32(book.first[0]), as_float32(book.first[1])
    row_a, row_b = (np.uint32(side[0]) for side in book.sides)
    gap, behind, last = np.float32(book.spacing[1]), *_limits(book)

    @helper
    def locate(codes_G, G, y_K, room, out_N, ahead):  # type: ignore[no-untyped-def]
        wide()
        for first_g in range(0, G, _PART // 2):
            prefetch_write(out_N, ahead + np.uint64(first_g * 2), _PART)
            for g in range(np.uint64(first_g), np.uint64(min(G, first_g + _PART // 2))):
                code = min(np.uint32(codes_G[g]), last)
                first = code < behind
                rest = code if first else np.uint32(code - behind)
                row = np.uint32(rest // row_a) if first else np.uint32(rest // row_b)
                column = np.uint32(rest - np.uint32(row * (row_a if first else row_b)))
                i = g * np.uint64(2)
                y_K[i] = np.float32(np.int32(column)) + (a0 if first else b0)
                y_K[i + np.uint64(1)] = (np.float32(np.int32(row)) + (a1 if first else b1)) * gap

    return locate


@cache
def points_4(book: Book) -> Any:
    """Kernel (codes_G, G, y_K, room, out_N, ahead): inverse of `boxes_4`; a code behind the last
    counts as the last.
    """
    (a0, a1, a2, a3), (b0, b1, b2, b3) = (as_float32(first) for first in book.first)
    (rowA, _, slabA, _), (rowB, _, slabB, _) = ([np.uint32(n) for n in s] for s in book.sides)
    planeA, planeB = (np.uint32(side[0] * side[1]) for side in book.sides)
    behind, last = _limits(book)

    @helper
    def locate(codes_G, G, y_K, room, out_N, ahead):  # type: ignore[no-untyped-def]
        wide()
        for first_g in range(0, G, _PART // 4):
            prefetch_write(out_N, ahead + np.uint64(first_g * 4), _PART)
            for g in range(np.uint64(first_g), np.uint64(min(G, first_g + _PART // 4))):
                code = min(np.uint32(codes_G[g]), last)
                first = code < behind
                rest = code if first else np.uint32(code - behind)
                high = np.uint32(rest // planeA) if first else np.uint32(rest // planeB)
                low = np.uint32(rest - np.uint32(high * (planeA if first else planeB)))
                d1 = np.uint32(low // rowA) if first else np.uint32(low // rowB)
                d0 = np.uint32(low - np.uint32(d1 * (rowA if first else rowB)))
                d3 = np.uint32(high // slabA) if first else np.uint32(high // slabB)
                d2 = np.uint32(high - np.uint32(d3 * (slabA if first else slabB)))
                i = g * np.uint64(4)
                y_K[i] = np.float32(np.int32(d0)) + (a0 if first else b0)
                y_K[i + np.uint64(1)] = np.float32(np.int32(d1)) + (a1 if first else b1)
                y_K[i + np.uint64(2)] = np.float32(np.int32(d2)) + (a2 if first else b2)
                y_K[i + np.uint64(3)] = np.float32(np.int32(d3)) + (a3 if first else b3)

    return locate


def _limits(book: Book) -> tuple[np.uint32, np.uint32]:
    """(first code of the second box, last code)."""
    return np.uint32(book.counts[0]), np.uint32(sum(book.counts) - 1)
