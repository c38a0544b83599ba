"""Counter-based dither: the value for an element depends on the key and the index alone.

    w    = index of the 32-bit word: elements i and i + HALF of a block of BLOCK share one
    h    = w ^ k0;  h *= C1;  h ^= h >> 15;  h += k1;  h *= C2;  h ^= h >> 16       (uint32)
    k    = low 16 bits of h for the first half of the block, high 16 bits for the second
    u    = (k + 1/2) / 65536 - 1/2          in (-1/2, 1/2), mean exactly 0 over all k

(k0, k1) are the two halves of the key after splitmix64's finaliser, a bijection, so keys that
differ in one bit share nothing. C1, C2 are the multipliers of the low-bias 32-bit hash of
C. Wellons, https://nullprogram.com/blog/2018/07/31/. The sequence repeats after 2**33 elements
(32 GiB of float32). Only uint32 operations, so that a GPU kernel can draw the same numbers.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, HALF, kernel

_C1, _C2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S7, _S9, _S15, _S16 = np.uint32(7), np.uint32(9), np.uint32(15), np.uint32(16)
_ONE = np.uint32(0x3F800040)  # float32 bits of 1 + 2**-17: k << 7 goes into the mantissa
_MANTISSA = np.uint32(0x007FFF80)
_MASK64 = (1 << 64) - 1


def split_key(key: int) -> tuple[np.uint32, np.uint32]:
    """(k0, k1) of a key in [0, 2**64): splitmix64's finaliser, cut in two."""
    z = (int(key) + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    z ^= z >> 31
    return np.uint32(z & 0xFFFFFFFF), np.uint32(z >> 32)


@kernel
def mix(word, k0, k1):  # type: ignore[no-untyped-def]
    """The 32-bit hash of a word index; every operation is cut back to uint32 (numba widens)."""
    h = np.uint32(word ^ k0)
    h = np.uint32(h * _C1)
    h = np.uint32(h ^ np.uint32(h >> _S15))
    h = np.uint32(h + k1)
    h = np.uint32(h * _C2)
    return np.uint32(h ^ np.uint32(h >> _S16))


@kernel
def fill_block(k0, k1, block, out_W):  # type: ignore[no-untyped-def]
    """Write 1.5 + u, as float32 bit patterns in [1, 2), for the BLOCK elements of block `block`.

    out_W : uint32, shape (BLOCK,)   overwritten
    """
    first = np.uint32(np.uint32(block) * np.uint32(HALF))
    low_H = out_W[:HALF]
    high_H = out_W[HALF:BLOCK]
    for j in range(HALF):
        h = mix(np.uint32(first + np.uint32(j)), k0, k1)
        low_H[j] = np.uint32(np.uint32(np.uint32(h << _S7) & _MANTISSA) | _ONE)
        high_H[j] = np.uint32(np.uint32(np.uint32(h >> _S9) & _MANTISSA) | _ONE)


@kernel
def _dither_fill(k0, k1, start, out_N):  # type: ignore[no-untyped-def]
    for n in range(out_N.shape[0]):
        i = start + n
        word = np.uint32((i // BLOCK) * HALF + i % HALF)
        h = mix(word, k0, k1)
        k = np.uint32(h >> _S16) if i % BLOCK >= HALF else np.uint32(h & np.uint32(0xFFFF))
        scaled = np.float32(np.float32(k) + np.float32(0.5)) * np.float32(1.0 / 65536)
        out_N[n] = np.float32(scaled - np.float32(0.5))


def dither_fill(key: int, start: int, out_N: np.ndarray) -> None:
    """Write u of elements start .. start + N - 1, one by one (slow: for tests, other back ends).

    key   : int in [0, 2**64)
    start : int, index of the first element
    out_N : float32, shape (N,)   overwritten; values in (-0.5, 0.5)
    """
    k0, k1 = split_key(key)
    _dither_fill(k0, k1, start, out_N)
