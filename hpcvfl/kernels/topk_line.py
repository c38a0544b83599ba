"""The K largest patterns of a line: magnitudes, or hashes of the place for a random subset.

A bracket [lo, hi] around the K-th largest pattern is known first: for magnitudes from a histogram
of their high bits, for hashes from their number, since they are spread evenly. One pass then writes
the places of what is above the bracket and of what is in it; the threshold is searched among the
latter alone, and the two ascending lists are merged.

Legend: N values, K kept, M room for places in the bracket, D digits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bitscan import lowest_one
from hpcvfl.kernels.compiling import FINITE, helper, kernel, status_of, wide
from hpcvfl.kernels.dither import mix, split_key

_ABS = np.uint32(0x7FFFFFFF)
_DIGIT = 11  # bits that the histogram counts: the exponent and the first places after the point
_SHIFT = np.uint32(31 - _DIGIT)
_FAILED = -1  # status: the K-th largest pattern is not in the bracket
_DEVIATIONS = 8  # of a bracket of hashes; a wider one is tried if the K-th is not in it


@kernel
def count_digits(bits_N, counts_4D):  # type: ignore[no-untyped-def]
    """Histogram of the high _DIGIT bits of the magnitudes; four of them, since equal digits in a
    row would wait for each other. Their sum counts; overwritten.
    """
    counts_4D[:] = 0
    for n in range(np.uint64(bits_N.shape[0])):
        digit = np.uint32(np.uint32(bits_N[n] & _ABS) >> _SHIFT)
        counts_4D[n & np.uint64(3), np.uint64(digit)] += np.int32(1)


@helper
def _settle(near_M, places_M, m, wanted, lo, hi):  # type: ignore[no-untyped-def]
    """Keep the first m places whose patterns are the `wanted` largest, of equal ones the first."""
    wide()
    least, reaching = lo, m
    for bit in range(31, -1, -1):
        if reaching == wanted:
            break
        raised, count = np.uint64(np.uint64(least) + np.uint64(1 << bit)), 0
        if raised > np.uint64(hi):
            continue
        trial = np.uint32(raised)
        for i in range(np.uint64(m)):
            count += np.int64(near_M[i] >= trial)
        if count >= wanted:
            least, reaching = trial, count
    spare = wanted
    for i in range(np.uint64(m)):
        spare -= np.int64(near_M[i] > least)
    to = np.uint64(0)
    for i in range(np.uint64(m)):
        tied = near_M[i] == least
        if near_M[i] > least or (tied and spare > 0):
            spare -= np.int64(tied)
            places_M[to] = places_M[i]
            to += np.uint64(1)


@helper
def _merge(places_M, wanted, out_K):  # type: ignore[no-untyped-def]
    """Merge `wanted` ascending places into out_K, which holds K - wanted; from the end."""
    i, j = out_K.shape[0] - wanted - 1, wanted - 1
    for to in range(out_K.shape[0] - 1, -1, -1):
        if j < 0:
            break
        if i >= 0 and out_K[np.uint64(i)] > places_M[np.uint64(j)]:
            out_K[np.uint64(to)] = out_K[np.uint64(i)]
            i -= 1
        else:
            out_K[np.uint64(to)] = places_M[np.uint64(j)]
            j -= 1


@cache
def line_selector(hashed: bool) -> Any:
    """Kernel behind `select_line` and (hashed) `select_random`, compiled at its first call.

    hashed : the patterns are mix(k0 + n * step), all different, instead of those of the values
    """

    @helper
    def pattern(bits_N, k0, step, n):  # type: ignore[no-untyped-def]
        if hashed:
            return mix(np.uint32(k0 + np.uint32(np.uint32(n) * step)))
        return np.uint32(bits_N[n] & _ABS)

    @helper
    def reach(bits_N, k0, step, first, n, lo, hi):  # type: ignore[no-untyped-def]
        """(mask of the patterns from lo on, of those above hi, largest pattern); n <= 32."""
        wide()
        mask, above, worst = np.uint32(0), np.uint32(0), np.uint32(0)
        for j in range(np.uint64(n)):
            p = pattern(bits_N, k0, step, first + j)
            worst = max(worst, p)
            mask = np.uint32(mask | np.uint32(np.uint32(p >= lo) << np.uint32(j)))
            above = np.uint32(above | np.uint32(np.uint32(p > hi) << np.uint32(j)))
        return mask, above, worst

    @kernel
    def select(bits_N, N, k0, step, lo, hi, near_M, places_M, out_K):  # type: ignore[no-untyped-def]
        K, M = out_K.shape[0], near_M.shape[0]
        worst, to, m = np.uint32(0), 0, 0
        for first in range(0, N, 32):
            mask, above, met = reach(bits_N, k0, step, np.uint64(first), min(32, N - first), lo, hi)
            worst = max(worst, met)
            while mask:
                n = np.uint64(first + lowest_one(mask))
                lowest = np.uint32(mask & np.uint32(~mask + np.uint32(1)))
                mask = np.uint32(mask ^ lowest)
                if above & lowest:
                    if to == K:
                        return _FAILED
                    out_K[np.uint64(to)] = np.int32(n)
                    to += 1
                else:
                    if m == M:
                        return _FAILED
                    near_M[np.uint64(m)] = pattern(bits_N, k0, step, n)
                    places_M[np.uint64(m)] = np.int32(n)
                    m += 1
        if m < K - to:
            return _FAILED
        _settle(near_M, places_M, m, K - to, lo, hi)
        _merge(places_M, K - to, out_K)
        return FINITE if hashed else status_of(worst)

    return select


def _run(hashed: bool, bits_N: np.ndarray, N: int, key: int, bracket: Any, out_K: Any) -> int:
    """Select within `bracket`, (lo, hi, M)."""
    k0, k1 = split_key(key)
    lo, hi, M = bracket
    near_M, places_M = np.empty(M, np.uint32), np.empty(M, np.int32)
    step = np.uint32(k1 | np.uint32(1))
    select = line_selector(hashed)
    return int(select(bits_N, N, k0, step, np.uint32(lo), np.uint32(hi), near_M, places_M, out_K))


def select_line(x_N: np.ndarray, out_K: np.ndarray) -> int:
    """Places of the K largest magnitudes, ascending; of equal ones the first.

    x_N   : float32, shape (N,), N < 2**31
    out_K : int32, shape (K,), 1 <= K <= N   overwritten; no selection if the status is not 0
    Returns 0 if all values are finite, 1 for a NaN, 2 for an infinity and no NaN.
    """
    bits_N, counts_4D = x_N.view(np.uint32), np.empty((4, 1 << _DIGIT), np.int32)
    count_digits(bits_N, counts_4D)
    counts_D = counts_4D.sum(axis=0, dtype=np.int64)
    reaching_D = counts_D[::-1].cumsum()[::-1]  # how many have this digit or a larger one
    digit = int(np.flatnonzero(reaching_D >= len(out_K))[-1])
    lo, hi = digit << int(_SHIFT), ((digit + 1) << int(_SHIFT)) - 1
    return _run(False, bits_N, len(x_N), 0, (lo, hi, int(counts_D[digit])), out_K)


def select_random(key: int, N: int, out_K: np.ndarray) -> None:
    """K of N places, ascending, all subsets equally likely over the keys: those of the largest
    hashes, which are all different (dither.py).

    key   : int in [0, 2**64)
    N     : int, below 2**31
    out_K : int32, shape (K,), 1 <= K <= N   overwritten
    """
    no_values = np.empty(0, np.uint32)
    share = len(out_K) / N
    around = _DEVIATIONS * math.sqrt(len(out_K) * (1 - share)) + 8  # places on either side of K
    lo = max(0, int((1 - share - around / N) * 2**32))
    hi = min(2**32 - 1, int((1 - share + around / N) * 2**32))
    room = min(N, 4 * math.ceil(around))
    if _run(True, no_values, N, key, (lo, hi, room), out_K) == _FAILED:
        _run(True, no_values, N, key, (0, 2**32 - 1, N), out_K)
