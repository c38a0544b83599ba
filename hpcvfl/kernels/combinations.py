"""Subsets of K of C places as few bits, a fixed number for each (C, K).

The cheapest of three codes, known to both sides from C and K alone:

    number   the subset's place in the list of all C(C, K), sum of C(index_i, i + 1) over the
             ascending indices (combinatorial number system): ceil(log2 C(C, K)) bits, where that
             is at most 57 and the table of binomials is small
    marks    one bit a place
    gaps     the low l bits of every index, then its high part in unary, differences of it (Elias
             1974, Fano 1971): K * (l + 1) + (C - 1 >> l) bits, l chosen for the fewest

The codes of several subsets follow each other without padding, first one in the lowest bits.
57 bits: with up to 7 bits that wait for their byte they fit a 64-bit word.

Legend: R subsets, K places of a subset, C places in all, B bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpcvfl.kernels.bitscan import lowest_one
from hpcvfl.kernels.compiling import helper, kernel

_WORD = 57
_TABLE = 1 << 16  # binomials that a table may hold
_LISTED = 1 << 11  # subsets that are kept as a list to read from


@dataclass(frozen=True)
class SubsetCode:
    """How subsets of K of C places are written.

    kind  : number, marks or gaps
    width : bits of one subset
    low   : bits of an index that gaps write as they are
    """

    C: int
    K: int
    kind: str
    width: int
    low: int = 0

    def nbytes(self, R: int) -> int:
        """Bytes of R subsets, padded to a byte once."""
        return (R * self.width + 7) // 8


@lru_cache(maxsize=256)
def cheapest(C: int, K: int) -> SubsetCode:
    """The code with the fewest bits; 1 <= K <= C < 2**31."""
    low = min(range(32), key=lambda low: K * (low + 1) + ((C - 1) >> low))
    codes = [
        SubsetCode(C, K, "marks", C),
        SubsetCode(C, K, "gaps", K * (low + 1) + ((C - 1) >> low), low),
    ]
    # Cheap tests first: binomials of large numbers are slow to compute.
    if C == K or (K * C <= _TABLE and math.comb(C, K) <= 1 << _WORD):
        codes.insert(0, SubsetCode(C, K, "number", (math.comb(C, K) - 1).bit_length()))
    return min(codes, key=lambda code: code.width)


@lru_cache(maxsize=8)
def _binomials(C: int, K: int) -> np.ndarray:
    """C(c, i + 1) at [i, c], uint64, for the c that the index number i of a subset can have,
    i <= c <= C - K + i; no entry is above C(C, K).
    """
    table_KC = np.zeros((K, C), np.uint64)
    row_C = np.ones(C, np.uint64)  # C(c, 0)
    for i in range(K):
        # C(c, i + 1) is the sum of C(j, i) over j < c
        row_C[1:] = np.cumsum(row_C[:-1])
        row_C[0] = 0
        row_C[C - K + i + 1 :] = 0
        table_KC[i] = row_C
    return table_KC


@lru_cache(maxsize=32)
def _listed(C: int, K: int, width: int) -> np.ndarray:
    """All subsets by their number, int32, shape (2**width, K), the last one repeated; none if they
    are many. To look one up is 5 times as fast as to search it.
    """
    if math.comb(C, K) > _LISTED:
        return np.empty((0, K), np.int32)
    listed = sorted(itertools.combinations(range(C), K), key=lambda subset: subset[::-1])
    return np.array(listed + listed[-1:] * (2**width - len(listed)), np.int32)


@helper
def _put(acc, held, at, code, width, out_B):  # type: ignore[no-untyped-def]
    """Append `width` <= 57 bits; returns (waiting bits, how many, next byte)."""
    acc = np.uint64(acc | np.uint64(code << np.uint64(held)))
    held += width
    while held >= 8:
        out_B[at] = np.uint8(acc)
        acc = np.uint64(acc >> np.uint64(8))
        held -= 8
        at += np.uint64(1)
    return acc, held, at


@helper
def _take(acc, held, at, width, in_B):  # type: ignore[no-untyped-def]
    """Read `width` <= 57 bits; returns (they, bits read ahead, how many, next byte)."""
    while held < width:
        acc = np.uint64(acc | np.uint64(np.uint64(in_B[at]) << np.uint64(held)))
        held += 8
        at += np.uint64(1)
    code = np.uint64(acc & np.uint64((np.uint64(1) << np.uint64(width)) - np.uint64(1)))
    return code, np.uint64(acc >> np.uint64(width)), held - width, at


@kernel
def put_numbers(indices_RK, table_KC, width, out_B):  # type: ignore[no-untyped-def]
    """Kernel behind `put_subsets` for the kind number."""
    acc, held, at = np.uint64(0), 0, np.uint64(0)
    for r in range(np.uint64(indices_RK.shape[0])):
        code = np.uint64(0)
        for i in range(np.uint64(indices_RK.shape[1])):
            code = np.uint64(code + table_KC[i, np.uint64(indices_RK[r, i])])
        acc, held, at = _put(acc, held, at, code, width, out_B)
    if held:
        out_B[at] = np.uint8(acc)


@kernel
def take_numbers(in_B, table_KC, listed_SK, width, out_RK):  # type: ignore[no-untyped-def]
    """Kernel behind `take_subsets` for the kind number; reads from the list of subsets if it holds
    any.

    Index number i is the largest c with C(c, i + 1) <= what is left, and below index i + 1; the
    search starts within its bounds, so that a number that no subset has gives a subset too.
    """
    K, C = table_KC.shape
    first = 1
    while 2 * first < C:
        first *= 2
    acc, held, at = np.uint64(0), 0, np.uint64(0)
    for r in range(np.uint64(out_RK.shape[0])):
        code, acc, held, at = _take(acc, held, at, width, in_B)
        if listed_SK.shape[0]:
            for i in range(np.uint64(K)):
                out_RK[r, i] = listed_SK[code, i]
            continue
        above = C
        for i in range(K - 1, -1, -1):
            c, step = i, first
            while step:  # no branch on data: both tests in any case, at a place in the table
                trial = c + step
                fits = table_KC[np.uint64(i), np.uint64(min(trial, C - 1))] <= code
                c = trial if (trial < above) & fits else c
                step >>= 1
            code = np.uint64(code - min(code, table_KC[np.uint64(i), np.uint64(c)]))
            out_RK[r, np.uint64(i)] = np.int32(c)
            above = c
    return 0


@kernel
def put_marks(indices_RK, low, apart, length, out_B):  # type: ignore[no-untyped-def]
    """Kernel behind `put_subsets`: the low bits, then a one at (index >> low) + i * apart.

    apart  : 1 for gaps; 0 for marks, whose low is 0
    length : bits behind the low ones
    """
    acc, held, at = np.uint64(0), 0, np.uint64(0)
    zero, mask = np.uint64(0), np.uint64((1 << low) - 1)
    for r in range(np.uint64(indices_RK.shape[0])):
        K = indices_RK.shape[1]
        if low:
            for i in range(np.uint64(K)):
                code = np.uint64(np.uint64(indices_RK[r, i]) & mask)
                acc, held, at = _put(acc, held, at, code, low, out_B)
        done = 0
        for i in range(K + 1):
            mark = length if i == K else (indices_RK[r, np.uint64(i)] >> low) + i * apart
            while mark - done > 56:
                acc, held, at = _put(acc, held, at, zero, 56, out_B)
                done += 56
            if i < K:
                one = np.uint64(np.uint64(1) << np.uint64(mark - done))
                acc, held, at = _put(acc, held, at, one, mark + 1 - done, out_B)
                done = mark + 1
            else:
                acc, held, at = _put(acc, held, at, zero, mark - done, out_B)
    if held:
        out_B[at] = np.uint8(acc)


@kernel
def take_marks(in_B, C, low, apart, length, out_RK):  # type: ignore[no-untyped-def]
    """Kernel behind `take_subsets`; returns 1 if there are not K ones, or an index is not above the
    one before it and below C.
    """
    acc, held, at = np.uint64(0), 0, np.uint64(0)
    K = out_RK.shape[1]
    for r in range(np.uint64(out_RK.shape[0])):
        for i in range(np.uint64(K)):
            if low:
                code, acc, held, at = _take(acc, held, at, low, in_B)
                out_RK[r, i] = np.int32(code)
            else:
                out_RK[r, i] = 0
        found, last = 0, -1
        for done in range(0, length, 56):
            word, acc, held, at = _take(acc, held, at, min(56, length - done), in_B)
            while word:
                if found == K:
                    return 1
                high = done + lowest_one(word) - found * apart
                index = (high << low) | np.int64(out_RK[r, np.uint64(found)])
                if index <= last or index >= C:
                    return 1
                out_RK[r, np.uint64(found)] = np.int32(index)
                found, last = found + 1, index
                word = np.uint64(word & np.uint64(word - np.uint64(1)))
        if found < K:
            return 1
    return 0


def put_subsets(code: SubsetCode, indices_RK: np.ndarray, out_B: np.ndarray) -> None:
    """Write R subsets.

    indices_RK : int32, shape (R, K)   ascending in a row, in [0, C): not checked
    out_B      : uint8, shape (code.nbytes(R),)   overwritten
    """
    if code.width and code.kind == "number":
        put_numbers(indices_RK, _binomials(code.C, code.K), code.width, out_B)
    elif code.width:
        length = code.width - code.K * code.low
        put_marks(indices_RK, code.low, int(code.kind == "gaps"), length, out_B)


def take_subsets(code: SubsetCode, in_B: np.ndarray, out_RK: np.ndarray) -> bool:
    """Read R subsets; False if the bytes cannot have come from `put_subsets`.

    in_B   : uint8, shape (code.nbytes(R),)
    out_RK : int32, shape (R, K)   overwritten; ascending and in [0, C) if the result is True
    """
    if not code.width:
        out_RK[:] = np.arange(code.K)
        return True
    if code.kind == "number":
        listed_SK = _listed(code.C, code.K, code.width)
        return not take_numbers(in_B, _binomials(code.C, code.K), listed_SK, code.width, out_RK)
    length = code.width - code.K * code.low
    return not take_marks(in_B, code.C, code.low, int(code.kind == "gaps"), length, out_RK)
