"""The K largest magnitudes of every row; ties go to the lowest index.

The kernels see floats as their bit patterns: without the sign, patterns are ordered by magnitude,
and NaN and Inf lie above all others. Rows are searched many at a time, one a lane: the threshold of
a lane grows bit by bit from the highest, and a step counts for all lanes how many patterns reach
it, until exactly K do. Rows of very many columns are searched as lines (topk_line.py).

Searching on the high 15 bits first is 1.3 times as fast and takes a second more to compile.

Legend: R rows, C columns (in scratch: filled up to a multiple of 4), K kept, L lanes (rows that are
searched side by side).
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.bitscan import highest_one
from hpcvfl.kernels.compiling import BLOCK, FAR, helper, kernel, prefetch_read, status_of, wide
from hpcvfl.kernels.topk_line import select_line

_ABS = np.uint32(0x7FFFFFFF)
_WIDE = 4096  # rows of more columns than this are searched as lines
_TILE = 16


@helper
def _load(bits_RC, r, keys_CL):  # type: ignore[no-untyped-def]
    """Patterns of the rows from r on, a row a lane; returns the largest.

    Sixteen rows at a time, as many as the lines that hold a column of them stay near, and no
    maximum in the same loop: that is 4 times as fast as the plain loop.
    """
    wide()
    C, L = np.uint64(bits_RC.shape[1]), np.uint64(keys_CL.shape[1])
    for first in range(np.uint64(0), L, np.uint64(_TILE)):
        for c in range(C):
            for j in range(np.uint64(_TILE)):
                keys_CL[c, first + j] = np.int32(bits_RC[r + first + j, c] & _ABS)
    worst = np.int32(0)
    for c in range(C):
        for i in range(L):
            worst = max(worst, keys_CL[c, i])
    return np.uint32(worst)


@helper
def _count(keys_CL, step, least_L, count_L):  # type: ignore[no-untyped-def]
    """How many patterns of each lane reach its threshold plus `step`; four columns at a time, so
    that counts are read and written once for four.
    """
    wide()
    count_L[:] = 0
    for c in range(np.uint64(0), np.uint64(keys_CL.shape[0]), np.uint64(4)):
        d, e, f = c + np.uint64(1), c + np.uint64(2), c + np.uint64(3)
        for i in range(np.uint64(count_L.shape[0])):
            t = np.int32(least_L[i] | step)
            low = np.int32(np.int32(keys_CL[c, i] >= t) + np.int32(keys_CL[d, i] >= t))
            high = np.int32(np.int32(keys_CL[e, i] >= t) + np.int32(keys_CL[f, i] >= t))
            count_L[i] = np.int32(count_L[i] + np.int32(low + high))


@helper
def _raise_thresholds(K, step, count_L, least_L, held_L):  # type: ignore[no-untyped-def]
    """Add `step` to the threshold of each lane where at least K patterns reach the sum.

    held_L : how many patterns reach the threshold
    Returns the largest of them; K: all lanes are done.
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
def _drop_ties(keys_CL, first, n, i, least, excess, mask):  # type: ignore[no-untyped-def]
    """The mask of lane i without the patterns equal to the threshold, from the last one on, of
    which `excess` are too many; and how many are still too many.

    Chunks are taken from the last columns to the first, so that the first of equal ones stay.
    """
    for back in range(n):
        j = n - 1 - back
        if excess > 0 and keys_CL[np.uint64(first + j), i] == least:
            mask = np.uint32(mask & ~np.uint32(np.uint32(1) << np.uint32(j)))
            excess -= 1
    return mask, excess


@kernel
def rows_selector(x_RC, bits_RC, K, keys_CL, lanes, mask_L, out_RK, kept_RK):  # type: ignore[no-untyped-def]
    """Kernel behind `select_rows` for rows that are not too wide; returns the status.

    bits_RC : at least L rows; the last rows are searched twice where R is no multiple of L
    lanes   : three arrays int32, shape (L,)
    """
    (R, C), L = x_RC.shape, keys_CL.shape[1]
    count_L, least_L, held_L = lanes
    worst = np.uint32(0)
    for start in range(0, R, L):
        r, rows = np.uint64(max(0, min(start, R - L))), min(L, R)
        worst = max(worst, _load(bits_RC, r, keys_CL))
        least_L[:] = 0
        held_L[:] = C
        ahead = (start + L) * C if R * C > FAR else R * C  # values from here on are fetched
        for bit in range(30, -1, -1):
            if ahead < min(R, start + 2 * L) * C:
                prefetch_read(bits_RC, np.uint64(ahead))
                ahead += BLOCK
            step = np.int32(1 << bit)
            _count(keys_CL, step, least_L, count_L)
            if _raise_thresholds(np.int32(K), step, count_L, least_L, held_L) == K:
                break
        count_L[:] = K  # from here on: how many indices are still to be written
        for first in range((C - 1) // 32 * 32, -1, -32):
            n = min(32, C - first)
            _reach(keys_CL, np.uint64(first), n, least_L, mask_L)
            for i in range(np.uint64(rows)):
                mask, to = mask_L[i], np.int64(count_L[i])
                if held_L[i] > K:
                    excess = np.int64(held_L[i]) - K
                    mask, excess = _drop_ties(keys_CL, first, n, i, least_L[i], excess, mask)
                    held_L[i] = np.int32(K + excess)
                while mask:
                    j = highest_one(mask)
                    to -= 1
                    c, k = np.uint64(first + j), np.uint64(to)
                    out_RK[r + i, k] = np.int32(c)
                    kept_RK[r + i, k] = x_RC[r + i, c]
                    mask = np.uint32(mask ^ np.uint32(np.uint32(1) << np.uint32(j)))
                count_L[i] = np.int32(to)
    return status_of(worst)


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


def select_rows(x_RC: np.ndarray, y_RC: np.ndarray, out_RK: np.ndarray, kept_RK: np.ndarray) -> int:
    """The K largest magnitudes of each row of x, of equal ones the first, in order of column.

    x_RC    : float32, shape (R, C)   what is compared
    y_RC    : any dtype, shape (R, C)   what is kept: x, or the float64 it was rounded from
    out_RK  : int32, shape (R, K), 1 <= K <= C   columns, ascending; overwritten
    kept_RK : dtype of y, shape (R, K)   values of y there; overwritten
    Returns 0 if all of x is finite, 1 for a NaN, 2 for an infinity and no NaN; the outputs are no
    selection then.
    """
    (R, C), K = x_RC.shape, out_RK.shape[1]
    if C > _WIDE:
        seen = [select_line(x_RC[r], out_RK[r]) for r in range(R)]
        gather_rows(y_RC, out_RK, kept_RK)
        return next((status for status in (1, 2) if status in seen), 0)
    L = min(256, max(_TILE, (1 << 13) // C // _TILE * _TILE))  # patterns of 32 KiB, or of 16 rows
    bits_RC = x_RC.view(np.uint32)
    if R < L:
        L = (max(R, 1) + _TILE - 1) // _TILE * _TILE
        bits_RC = np.concatenate([bits_RC, np.zeros((L - R, C), np.uint32)])
    keys_CL = np.full(((C + 3) // 4 * 4, L), -1, np.int32)  # -1: reached by no trial
    lanes, mask_L = tuple(np.empty((3, L), np.int32)), np.empty(L, np.uint32)
    return int(rows_selector(y_RC, bits_RC, K, keys_CL, lanes, mask_L, out_RK, kept_RK))
