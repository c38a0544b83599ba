"""The K largest magnitudes of every row, or of a line; ties go to the lowest index.

The kernels see floats as their bit patterns: without the sign, patterns are ordered by magnitude,
and NaN and Inf lie above all others. The K-th largest pattern is found exactly, then what is
above it is written out in order of index.

Rows are searched many at a time, one a lane: the threshold of each grows bit by bit from the
highest, and a step counts for all lanes how many patterns reach it. A line is searched by three
histograms (12, 10 and 10 bits).

Legend: R rows, C columns, K kept, L lanes (rows searched side by side), N values.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bitscan import lowest_one
from hpcvfl.kernels.compiling import helper, kernel, status_of, wide
from hpcvfl.kernels.dither import mix, split_key

_ABS = np.uint32(0x7FFFFFFF)
_WIDE = 4096  # rows of more columns than this are searched as lines
_DIGITS = (21, 11), (10, 11), (0, 10)  # (shift, width) of the digits that histograms count


@helper
def _load(bits_RC, r, rows, keys_CL):  # type: ignore[no-untyped-def]
    """Patterns of `rows` rows from r on, a row a lane; lanes without a row keep what they had.

    Returns the largest pattern.
    """
    wide()
    worst = np.int32(0)
    for c in range(np.uint64(bits_RC.shape[1])):
        for i in range(np.uint64(rows)):
            k = np.int32(bits_RC[r + i, c] & _ABS)
            keys_CL[c, i] = k
            worst = max(worst, k)
    return np.uint32(worst)


@helper
def _count(keys_CL, step, least_L, count_L):  # type: ignore[no-untyped-def]
    """How many patterns of each lane reach its trial value least + step; four columns at a time,
    so that counts are read and written once for four.
    """
    wide()
    C, L = keys_CL.shape
    count_L[:] = 0
    for c in range(np.uint64(0), np.uint64(C - C % 4), np.uint64(4)):
        d, e, f = c + np.uint64(1), c + np.uint64(2), c + np.uint64(3)
        for i in range(np.uint64(L)):
            t = np.int32(least_L[i] | step)
            low = np.int32(np.int32(keys_CL[c, i] >= t) + np.int32(keys_CL[d, i] >= t))
            high = np.int32(np.int32(keys_CL[e, i] >= t) + np.int32(keys_CL[f, i] >= t))
            count_L[i] = np.int32(count_L[i] + np.int32(low + high))
    for c in range(np.uint64(C - C % 4), np.uint64(C)):
        for i in range(np.uint64(L)):
            t = np.int32(least_L[i] | step)
            count_L[i] = np.int32(count_L[i] + np.int32(keys_CL[c, i] >= t))


@helper
def _raise_thresholds(K, step, count_L, least_L, held_L):  # type: ignore[no-untyped-def]
    """Add `step` to the threshold of each lane where at least K patterns reach the sum.

    Returns the largest number of patterns that reach a threshold; K: all lanes are done.
    """
    wide()
    most = np.int32(0)
    for i in range(np.uint64(count_L.shape[0])):
        count, held, least = count_L[i], held_L[i], least_L[i]  # read in any case: no branch
        raised = np.int32(least | step)
        least_L[i] = raised if count >= K else least
        held = count if count >= K else held
        held_L[i] = held
        most = max(most, held)
    return most


@helper
def _search(keys_CL, K, count_L, least_L, held_L):  # type: ignore[no-untyped-def]
    """least_L: a value that exactly K patterns of the lane reach, or, with ties, the K-th largest.

    held_L : how many patterns reach it
    """
    least_L[:] = 0
    held_L[:] = keys_CL.shape[0]
    for bit in range(30, -1, -1):
        step = np.int32(np.int32(1) << np.int32(bit))
        _count(keys_CL, step, least_L, count_L)
        if _raise_thresholds(np.int32(K), step, count_L, least_L, held_L) == K:
            break


@helper
def _reach(keys_CL, first, n, least_L, mask_L):  # type: ignore[no-untyped-def]
    """Bit j of a lane's mask: column first + j reaches the threshold; n <= 32."""
    wide()
    mask_L[:] = 0
    for j in range(np.uint64(n)):
        shift = np.uint32(j)
        for i in range(np.uint64(mask_L.shape[0])):
            one = np.uint32(keys_CL[first + j, i] >= least_L[i])
            mask_L[i] = np.uint32(mask_L[i] | np.uint32(one << shift))


@helper
def _write_tied(keys_CL, i, K, least, out_RK, r):  # type: ignore[no-untyped-def]
    """Indices of lane i where more than K patterns reach the threshold: the lowest of the tied."""
    spare = K
    for c in range(np.uint64(keys_CL.shape[0])):
        spare -= keys_CL[c, i] > least
    to = np.uint64(0)
    for c in range(np.uint64(keys_CL.shape[0])):
        k = keys_CL[c, i]
        if k > least or (k == least and spare > 0):
            spare -= k == least
            out_RK[r, to] = np.int32(c)
            to += np.uint64(1)


@helper
def _write(keys_CL, rows, K, least_L, held_L, mask_L, to_L, out_RK, r):  # type: ignore[no-untyped-def]
    """Indices of the kept columns of every lane, in ascending order."""
    C = keys_CL.shape[0]
    to_L[:] = 0
    for first in range(0, C, 32):
        _reach(keys_CL, np.uint64(first), min(32, C - first), least_L, mask_L)
        for i in range(np.uint64(rows)):
            mask = mask_L[i]
            if held_L[i] == K and mask:
                to = np.uint64(to_L[i])
                while mask:
                    out_RK[r + i, to] = np.int32(first + lowest_one(mask))
                    mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
                    to += np.uint64(1)
                to_L[i] = np.int32(to)
    for i in range(np.uint64(rows)):
        if held_L[i] != K:
            _write_tied(keys_CL, i, K, least_L[i], out_RK, r + i)


@kernel
def rows_selector(bits_RC, K, keys_CL, count_L, least_L, held_L, mask_L, out_RK):  # type: ignore[no-untyped-def]
    """Kernel behind `select_rows` for rows that are not too wide; returns the status."""
    R, L = bits_RC.shape[0], keys_CL.shape[1]
    worst = np.uint32(0)
    for start in range(0, R, L):
        r, rows = np.uint64(start), min(L, R - start)
        worst = max(worst, _load(bits_RC, r, rows, keys_CL))
        _search(keys_CL, K, count_L, least_L, held_L)
        _write(keys_CL, rows, K, least_L, held_L, mask_L, count_L, out_RK, r)
    return status_of(worst)


@cache
def line_selector(hashed: bool) -> Any:
    """Kernel behind `select_rows` for wide rows, and (hashed) behind `select_random`.

    hashed : the patterns are mix(k0 + n * step), all different, instead of those of the values
    """

    @helper
    def pattern(bits_N, k0, step, n):  # type: ignore[no-untyped-def]
        if hashed:
            return mix(np.uint32(k0 + np.uint32(np.uint32(n) * step)))
        return np.uint32(bits_N[n] & _ABS)

    @helper
    def count(bits_N, N, k0, step, prefix, shift, width, counts_4D):  # type: ignore[no-untyped-def]
        """Histogram of a digit over the patterns that start with `prefix`; four of them, since
        equal digits in a row would wait for each other.
        """
        counts_4D[:] = 0
        mask, above = np.uint32((1 << width) - 1), np.uint64(shift + width)
        for n in range(np.uint64(N)):
            p = pattern(bits_N, k0, step, n)
            if np.uint64(p) >> above == prefix:
                counts_4D[n & np.uint64(3), np.uint64(np.uint32(p >> np.uint32(shift)) & mask)] += 1

    @helper
    def reach(bits_N, k0, step, first, n, least):  # type: ignore[no-untyped-def]
        """(bits of the values that reach the threshold, of those equal to it, largest pattern)."""
        wide()
        mask, equal, worst = np.uint32(0), np.uint32(0), np.uint32(0)
        for j in range(np.uint64(n)):
            p = pattern(bits_N, k0, step, first + j)
            worst = max(worst, p)
            mask = np.uint32(mask | np.uint32(np.uint32(p >= least) << np.uint32(j)))
            equal = np.uint32(equal | np.uint32(np.uint32(p == least) << np.uint32(j)))
        return mask, equal, worst

    @kernel
    def select(bits_N, N, k0, step, K, counts_4D, out_K):  # type: ignore[no-untyped-def]
        prefix, wanted, spare = np.uint64(0), K, 0
        least = np.uint32(0)
        for shift, width in _DIGITS:
            count(bits_N, N, k0, step, prefix, shift, width, counts_4D)
            digit = 1 << width
            held = 0
            while held < wanted:  # from the largest digit down
                wanted -= held
                digit -= 1
                held = 0
                for i in range(4):
                    held += counts_4D[i, digit]
            prefix = np.uint64((prefix << np.uint64(width)) | np.uint64(digit))
            least, spare = np.uint32(prefix << np.uint64(shift)), wanted
            if held == wanted:
                spare = N  # no ties: all that reach the threshold are kept
                break
        worst, to = np.uint32(0), np.uint64(0)
        for first in range(0, N, 32):
            n = min(32, N - first)
            mask, equal, met = reach(bits_N, k0, step, np.uint64(first), n, least)
            worst = max(worst, met)
            while mask:
                lowest = np.uint32(mask & np.uint32(~mask + np.uint32(1)))
                mask = np.uint32(mask ^ lowest)
                if equal & lowest:
                    if spare == 0:
                        continue
                    spare -= 1
                out_K[to] = np.int32(first + lowest_one(lowest))
                to += np.uint64(1)
        return status_of(worst)

    return select


@kernel
def gather_rows(x_RC, indices_RK, out_RK):  # type: ignore[no-untyped-def]
    """out_RK[r, k] = x_RC[r, indices_RK[r, k]].

    x_RC       : any dtype, shape (R, C)
    indices_RK : int32, shape (R, K)   in [0, C): not checked
    out_RK     : dtype of x, shape (R, K)   overwritten
    """
    for r in range(np.uint64(out_RK.shape[0])):
        for k in range(np.uint64(out_RK.shape[1])):
            out_RK[r, k] = x_RC[r, np.uint64(indices_RK[r, k])]


@kernel
def scatter_rows(kept_RK, indices_RK, out_RC):  # type: ignore[no-untyped-def]
    """Inverse of `gather_rows`: what was not kept is 0.

    kept_RK    : any dtype, shape (R, K)
    indices_RK : int32, shape (R, K)   in [0, C): not checked
    out_RC     : dtype of kept, shape (R, C)   overwritten
    """
    for r in range(np.uint64(out_RC.shape[0])):
        for c in range(np.uint64(out_RC.shape[1])):
            out_RC[r, c] = 0
        for k in range(np.uint64(kept_RK.shape[1])):
            out_RC[r, np.uint64(indices_RK[r, k])] = kept_RK[r, k]


@kernel
def magnitude_sums(x_RC, out_C):  # type: ignore[no-untyped-def]
    """Sum of |x| of each column, row by row.

    x_RC  : float32 or float64, shape (R, C)
    out_C : float64, shape (C,)   overwritten
    """
    wide()
    out_C[:] = 0
    for r in range(np.uint64(x_RC.shape[0])):
        for c in range(np.uint64(x_RC.shape[1])):
            out_C[c] += abs(np.float64(x_RC[r, c]))


def select_rows(x_RC: np.ndarray, K: int, out_RK: np.ndarray) -> int:
    """Columns of the K largest magnitudes of each row, ascending; of equal ones the first.

    x_RC   : float32, shape (R, C)   any strides
    K      : int, 1..C
    out_RK : int32, shape (R, K)   overwritten; holds no selection if the status is not 0
    Returns 0 if all values are finite, 1 for a NaN, 2 for an infinity and no NaN.
    """
    C, bits_RC = x_RC.shape[1], x_RC.view(np.uint32)
    if C > _WIDE:
        counts_4D, zero = np.empty((4, 1 << 11), np.int32), np.uint32(0)
        select = line_selector(False)
        seen = [
            select(b_N, C, zero, zero, K, counts_4D, out_K)
            for b_N, out_K in zip(bits_RC, out_RK, strict=True)
        ]
        return next((status for status in (1, 2) if status in seen), 0)
    L = min(256, max(16, (1 << 13) // C // 16 * 16))  # patterns of 32 KiB, or of 16 rows
    keys_CL, lanes_3L = np.zeros((C, L), np.int32), np.empty((3, L), np.int32)
    return int(rows_selector(bits_RC, K, keys_CL, *lanes_3L, np.empty(L, np.uint32), out_RK))


def select_random(key: int, N: int, out_K: np.ndarray) -> None:
    """K of N places, ascending, all subsets equally likely over the keys: those of the largest
    hashes, which are all different (dither.py).

    key   : int in [0, 2**64)
    N     : int, below 2**31
    out_K : int32, shape (K,), K in 1..N   overwritten
    """
    k0, k1 = split_key(key)
    step, counts_4D = np.uint32(k1 | np.uint32(1)), np.empty((4, 1 << 11), np.int32)
    line_selector(True)(np.empty(0, np.uint32), N, k0, step, len(out_K), counts_4D, out_K)
