"""Ranges and moments of a message, and whether a NaN or an infinity is in it, in one pass.

Legend: N values, R rows, C columns.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import kernel, status_of

_ABS = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)


@kernel
def _range_from_bits(top, umin, umax, out_2):  # type: ignore[no-untyped-def]
    """Smallest and largest float32 from three extremes of the bit patterns.

    top : largest pattern as int32; umin, umax : smallest and largest as uint32. Bit patterns of
    floats of one sign are ordered by magnitude, so the most negative value is umax and, if all are
    negative, the one nearest to 0 is umin: three extremes and nothing else to do per value.
    """
    bits_2 = out_2.view(np.uint32)
    bits_2[0] = umax if umax >= _SIGN else umin
    bits_2[1] = np.uint32(top) if top >= 0 else umin
    out_2[0] += np.float32(0)  # -0.0 becomes 0.0
    out_2[1] += np.float32(0)
    worst = np.uint32(np.uint32(top) & _ABS) if top >= 0 else np.uint32(0)
    low = np.uint32(umax & _ABS) if umax >= _SIGN else np.uint32(0)
    return status_of(max(worst, low))


@kernel
def status_line(x_N):  # type: ignore[no-untyped-def]
    """Status of a message alone; x_N as in `minmax`."""
    bits_N = x_N.view(np.uint32)
    worst = np.uint32(0)
    for i in range(np.uint64(bits_N.shape[0])):
        worst = max(worst, np.uint32(bits_N[i] & _ABS))
    return status_of(worst)


@kernel
def status_columns(x_RC):  # type: ignore[no-untyped-def]
    """Status of a matrix alone; x_RC as in `minmax_columns`."""
    bits_RC = x_RC.view(np.uint32)
    worst = np.uint32(0)
    for r in range(np.uint64(bits_RC.shape[0])):
        for c in range(np.uint64(bits_RC.shape[1])):
            worst = max(worst, np.uint32(bits_RC[r, c] & _ABS))
    return status_of(worst)


@kernel
def minmax(x_N, out_2):  # type: ignore[no-untyped-def]
    """Smallest and largest value; status 0 if all are finite, 1 for a NaN, 2 for an infinity.

    x_N   : float32, shape (N,)   any stride; N = 0 gives the range (0, 0)
    out_2 : float32, shape (2,), contiguous   overwritten; holds no range if the status is not 0
    """
    if x_N.shape[0] == 0:
        out_2[:] = 0
        return 0
    bits_N = x_N.view(np.uint32)
    first = bits_N[0]
    top, umin, umax = np.int32(first), first, first
    for i in range(bits_N.shape[0]):
        b = bits_N[i]
        top = max(top, np.int32(b))
        umin = min(umin, b)
        umax = max(umax, b)
    return _range_from_bits(top, umin, umax, out_2)


@kernel
def minmax_columns(x_RC, out_C2):  # type: ignore[no-untyped-def]
    """Smallest and largest value of each column; status as in `minmax`, over all columns.

    x_RC   : float32, shape (R, C)   any strides; R = 0 gives the ranges (0, 0)
    out_C2 : float32, shape (C, 2), contiguous   overwritten; holds no ranges if the status is not 0
    """
    R, C = x_RC.shape
    out_C2[:] = 0
    status = 0
    if R == 0:
        return status
    for c in range(C):
        got = minmax(x_RC[:, c], out_C2[c])
        if got == 1 or status == 0:
            status = got
    return status


@kernel
def moments_columns(x_RC, out_C2):  # type: ignore[no-untyped-def]
    """Mean and population standard deviation of each column; status as in `minmax`.

    Sums run over rows in order, in float64, of the distance from the column's first value: a
    constant column has deviation 0 exactly.

    x_RC   : float32, shape (R, C)   any strides; R = 0 gives (0, 0)
    out_C2 : float32, shape (C, 2)   overwritten
    """
    R, C = x_RC.shape
    out_C2[:] = 0
    if R == 0:
        return 0
    sums_2C = np.zeros((2, C), np.float64)
    worst = np.uint32(0)
    for r in range(R):
        row = x_RC[r]
        bits = row.view(np.uint32)
        for c in range(C):
            worst = max(worst, np.uint32(bits[c] & _ABS))
            d = np.float64(row[c]) - np.float64(x_RC[0, c])
            sums_2C[0, c] += d
            sums_2C[1, c] += d * d
    for c in range(C):
        shift = sums_2C[0, c] / R
        variance = sums_2C[1, c] / R - shift * shift
        out_C2[c, 0] = np.float32(np.float64(x_RC[0, c]) + shift)
        out_C2[c, 1] = np.float32(np.sqrt(max(variance, 0.0)))
    return status_of(worst)
