"""Counter-based dither: the value for an element depends on the key and the index alone.

    w = index of the 32-bit word: elements i and i + HALF of a block of BLOCK share one
    h = k0 + w * (k1 | 1);  h ^= h >> 16;  h *= C1;  h ^= h >> 15;  h *= C2;  h ^= h >> 16  (uint32)
    k = low 14 bits of h for the first half of the block, high 14 bits for the second, signed
    u = k / 2**14                                in [-1/2, 1/2), mean -2**-15 over all k

(k0, k1) are the two halves of the key after splitmix64's finaliser, so keys that differ in one bit
share nothing; each key walks the 32-bit numbers from its own start with its own odd step, as
SplitMix does (Steele, Lea, Flood 2014). C1, C2 and the shifts are the low-bias 32-bit hash of
C. Wellons, https://nullprogram.com/blog/2018/07/31/. A cheaper mix with the key added half-way
failed the tests of correlation between keys at all lags (bench/LOG.md). 14 bits are what a float32
has left beside a code of 8 bits (scalar.py); wider codes use the highest bits of k. The sequence
repeats after 2**33 elements (32 GiB of float32). Only uint32 operations, so that a GPU kernel can
draw the same.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, helper, kernel, wide

DITHER_BITS = 14
"""Binary places of u."""

HALF = BLOCK // 2
"""One 32-bit hash serves two elements of a block that are HALF apart."""

_C1, _C2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S15, _S16, _UP = np.uint32(15), np.uint32(16), np.uint32(32 - DITHER_BITS)
_MASK64 = (1 << 64) - 1


def places(bits: int) -> int:
    """Binary places of u that codes of `bits` bits use, the highest ones.

    A float32 holds 23 bits below the leading one; the code and a sign need bits + 1 of them.
    """
    return min(DITHER_BITS, 22 - bits)


def split_key(key: int) -> tuple[np.uint32, np.uint32]:
    """(k0, k1) of a key in [0, 2**64): splitmix64's finaliser, cut in two."""
    z = (int(key) + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return np.uint32(z & 0xFFFFFFFF), np.uint32(z >> 32)


@helper
def mix(h):  # type: ignore[no-untyped-def]
    """A bijection of 32-bit words in which every input bit flips every output bit half the time."""
    h = np.uint32(h ^ np.uint32(h >> _S16))
    h = np.uint32(h * _C1)
    h = np.uint32(h ^ np.uint32(h >> _S15))
    h = np.uint32(h * _C2)
    return np.uint32(h ^ np.uint32(h >> _S16))


@cache
def block_filler(F: int) -> Any:
    """Kernel (k0, k1, block, out_K): write k = floor(u * 2**F) of the elements of block `block`.

    out_K : int32, shape (BLOCK,)   overwritten; values in [-2**(F - 1), 2**(F - 1))
    """
    cut = np.int32(32 - F)  # arithmetic shift: the top F bits, signed

    @helper
    def fill_block(k0, k1, block, out_K):  # type: ignore[no-untyped-def]
        wide()
        step = np.uint32(k1 | np.uint32(1))
        h0 = np.uint32(k0 + np.uint32(np.uint32(np.uint32(block) * np.uint32(HALF)) * step))
        for j in range(np.uint64(HALF)):
            h = mix(h0)
            h0 = np.uint32(h0 + step)
            out_K[j] = np.int32(np.int32(np.uint32(h << _UP)) >> cut)
            out_K[j + np.uint64(HALF)] = np.int32(np.int32(h) >> cut)

    return fill_block


@kernel
def fill_line(k0, k1, start, out_N):  # type: ignore[no-untyped-def]
    """Kernel behind `dither_fill`."""
    for n in range(out_N.shape[0]):
        i = start + n
        w = np.uint32((i // BLOCK) * HALF + i % HALF)
        h = mix(np.uint32(k0 + np.uint32(w * np.uint32(k1 | np.uint32(1)))))
        if i % BLOCK < HALF:
            h = np.uint32(h << _UP)
        k = np.int32(np.int32(h) >> np.int32(32 - DITHER_BITS))
        out_N[n] = np.float32(k) * np.float32(1 / (1 << DITHER_BITS))


def dither_fill(key: int, start: int, out_N: np.ndarray) -> None:
    """Write u of elements start .. start + N - 1, one by one (slow: for tests, other back ends).

    key   : int in [0, 2**64)
    start : int, index of the first element
    out_N : float32, shape (N,)   overwritten; values in [-0.5, 0.5)
    """
    fill_line(*split_key(key), start, out_N)
