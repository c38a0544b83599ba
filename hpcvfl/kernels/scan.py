"""Ranges and moments of a message, and whether a NaN or an infinity is in it, in one pass.

The kernels see floats as their bit patterns: those of one sign are ordered by magnitude, and NaN
and Inf lie above all others, so integer extremes find the range and the status together.

Legend: N values, R rows, C columns.
"""

from __future__ import annotations

import math

import numpy as np

from hpcvfl.kernels.compiling import (
    BLOCK,
    FAR,
    FINITE,
    IS_NAN,
    helper,
    kernel,
    prefetch_read,
    status_of,
    wide,
)

_ABS = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)


@kernel
def status_line(bits_N):  # type: ignore[no-untyped-def]
    """Status of a message given as bit patterns (uint32, shape (N,))."""
    wide()
    worst = np.uint32(0)
    for i in range(np.uint64(bits_N.shape[0])):
        worst = max(worst, np.uint32(bits_N[i] & _ABS))
    return status_of(worst)


@kernel
def status_columns(bits_RC):  # type: ignore[no-untyped-def]
    """Status of a matrix given as bit patterns (uint32, shape (R, C))."""
    worst = np.uint32(0)
    for r in range(np.uint64(bits_RC.shape[0])):
        for c in range(np.uint64(bits_RC.shape[1])):
            worst = max(worst, np.uint32(bits_RC[r, c] & _ABS))
    return status_of(worst)


@helper
def positive_zero(b):  # type: ignore[no-untyped-def]
    """The pattern b, or that of 0.0 for -0.0."""
    return np.uint32(0) if b == _SIGN else b


@helper
def _block_extremes(bits_N, at, n, top, umin, umax):  # type: ignore[no-untyped-def]
    wide()
    for i in range(np.uint64(n)):
        b = bits_N[at + i]
        top = max(top, np.int32(b))
        umin = min(umin, b)
        umax = max(umax, b)
    return top, umin, umax


@kernel
def range_line(bits_N, out_2):  # type: ignore[no-untyped-def]
    """Kernel behind `minmax`, on bit patterns; N > 0.

    The most negative value is the largest unsigned pattern, the most positive one the largest
    signed pattern; the smallest unsigned pattern is the minimum if no value is negative, the
    maximum if all are. Three extremes, and nothing else to do per value.
    """
    N = bits_N.shape[0]
    first = bits_N[0]
    top, umin, umax = np.int32(first), first, first
    if N > FAR:
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            prefetch_read(bits_N, at + np.uint64(BLOCK))
            top, umin, umax = _block_extremes(bits_N, at, n, top, umin, umax)
    else:
        top, umin, umax = _block_extremes(bits_N, np.uint64(0), N, top, umin, umax)
    out_2[0] = positive_zero(umax if umax >= _SIGN else umin)
    out_2[1] = positive_zero(np.uint32(top) if top >= 0 else umin)
    return status_of(max(np.uint32(out_2[0] & _ABS), np.uint32(out_2[1] & _ABS)))


def minmax(x_N: np.ndarray, out_2: np.ndarray) -> int:
    """Smallest and largest value; status 0 if all are finite, 1 for a NaN, 2 for an infinity.

    x_N   : float32, shape (N,)   any stride; N = 0 gives the range (0, 0)
    out_2 : float32, shape (2,)   overwritten; holds no range if the status is not 0
    """
    if len(x_N) == 0:
        out_2[:] = 0
        return FINITE
    return range_line(x_N.view(np.uint32), out_2.view(np.uint32))


@helper
def _row_extremes(bits_RC, r, top_C, umin_C, umax_C):  # type: ignore[no-untyped-def]
    wide()
    for c in range(np.uint64(bits_RC.shape[1])):
        b = bits_RC[r, c]
        top_C[c] = max(top_C[c], np.int32(b))
        umin_C[c] = min(umin_C[c], b)
        umax_C[c] = max(umax_C[c], b)


@helper
def _four_row_extremes(bits_RC, r, top_C, umin_C, umax_C):  # type: ignore[no-untyped-def]
    """Like `_row_extremes` for rows r .. r + 3: the extremes are read and written once for four."""
    wide()
    s, t, u = r + np.uint64(1), r + np.uint64(2), r + np.uint64(3)
    for c in range(np.uint64(bits_RC.shape[1])):
        i, j, k, m = bits_RC[r, c], bits_RC[s, c], bits_RC[t, c], bits_RC[u, c]
        high = max(max(np.int32(i), np.int32(j)), max(np.int32(k), np.int32(m)))
        top_C[c] = max(top_C[c], high)
        umin_C[c] = min(umin_C[c], min(min(i, j), min(k, m)))
        umax_C[c] = max(umax_C[c], max(max(i, j), max(k, m)))


@kernel
def range_columns(bits_RC, top_C, umin_C, umax_C, out_C2):  # type: ignore[no-untyped-def]
    """Kernel behind `minmax_columns`, on bit patterns; the three extremes start as row 0."""
    R, C = bits_RC.shape
    for r in range(0, R - R % 4, 4):
        _four_row_extremes(bits_RC, np.uint64(r), top_C, umin_C, umax_C)
    for r in range(R - R % 4, R):
        _row_extremes(bits_RC, np.uint64(r), top_C, umin_C, umax_C)
    worst = np.uint32(0)
    for c in range(C):
        low = umax_C[c] if umax_C[c] >= _SIGN else umin_C[c]
        high = np.uint32(top_C[c]) if top_C[c] >= 0 else umin_C[c]
        out_C2[c, 0], out_C2[c, 1] = positive_zero(low), positive_zero(high)
        worst = max(worst, max(np.uint32(low & _ABS), np.uint32(high & _ABS)))
    return status_of(worst)


def minmax_columns(x_RC: np.ndarray, out_C2: np.ndarray) -> int:
    """Smallest and largest value of each column; status as in `minmax`, over all columns.

    x_RC   : float32, shape (R, C)   any strides; R = 0 gives the ranges (0, 0)
    out_C2 : float32, shape (C, 2)   overwritten; holds no ranges if the status is not 0
    """
    if x_RC.size == 0:
        out_C2[:] = 0
        return FINITE
    bits_RC = x_RC.view(np.uint32)
    first_C = bits_RC[0].copy()
    top_C, umin_C, umax_C = first_C.view(np.int32).copy(), first_C.copy(), first_C
    return range_columns(bits_RC, top_C, umin_C, umax_C, out_C2.view(np.uint32))


@kernel
def sum_columns(x_RC, bits_RC, shift_C, sums_C, squares_C):  # type: ignore[no-untyped-def]
    """Kernel behind `moments_columns`: add x - shift and its square, row by row, in float64."""
    wide()
    worst, C = np.uint32(0), np.uint64(x_RC.shape[1])
    far = x_RC.size > FAR
    for r in range(np.uint64(x_RC.shape[0])):
        if far:
            prefetch_read(x_RC, r * C + np.uint64(BLOCK), C)
        for c in range(C):
            worst = max(worst, np.uint32(bits_RC[r, c] & _ABS))
            d = np.float64(x_RC[r, c]) - shift_C[c]
            sums_C[c] += d
            squares_C[c] += d * d
    return status_of(worst)


_LANES = 64  # a single column is summed in this many lanes, so that additions need not wait in turn


def moments_columns(x_RC: np.ndarray, out_C2: np.ndarray) -> int:
    """Mean and population standard deviation of each column; status as in `minmax`.

    Sums run in float64 in an order that depends on the shape alone, over the distance from the
    column's first value: a constant column has deviation 0 exactly. One column alone (a whole
    message as (N, 1)) is as fast as many if it is contiguous.

    x_RC   : float32, shape (R, C)   any strides; R = 0 gives (0, 0)
    out_C2 : float32, shape (C, 2)   overwritten; holds no moments if the status is not 0
    """
    R, C = x_RC.shape
    out_C2[:] = 0
    if R == 0 or C == 0:
        return FINITE
    first_C = x_RC[0].astype(np.float64)
    if C == 1:
        status, sum_C, square_C = _sum_line(x_RC[:, 0], first_C[0])
    else:
        sum_C, square_C = np.zeros(C), np.zeros(C)
        status = int(sum_columns(x_RC, x_RC.view(np.uint32), first_C, sum_C, square_C))
    if status == FINITE:
        mean_C = sum_C / R
        out_C2[:, 0] = first_C + mean_C
        out_C2[:, 1] = np.sqrt(np.maximum(square_C / R - mean_C * mean_C, 0))
    return status


def _sum_line(x_N: np.ndarray, first: float) -> tuple[int, np.ndarray, np.ndarray]:
    """(status, [sum], [sum of squares]) of x - first: value n is added in lane n % _LANES."""
    shift, sums, squares = np.full(_LANES, first), np.zeros(_LANES), np.zeros(_LANES)
    whole = len(x_N) // _LANES * _LANES
    worst = FINITE
    for part in (x_N[:whole].reshape(-1, _LANES), x_N[whole:].reshape(1, -1)):
        status = int(sum_columns(part, part.view(np.uint32), shift, sums, squares))
        worst = status if worst == FINITE or status == IS_NAN else worst
    return worst, np.array([math.fsum(sums)]), np.array([math.fsum(squares)])
