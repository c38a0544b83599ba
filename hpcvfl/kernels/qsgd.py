"""QSGD: each value as a level of its bucket's norm, up or down at random with the right mean.

    encode   t    = rint(x * (s / norm) * 2**F)        in float32, F = 24 binary places
             code = floor((t + h) / 2**F) + s          h: F random bits of the element, s levels
    decode   y    = (code - s) * factor                factor = norm / s, or less

The integer t keeps every place of a float32 that is not far below one level; floor of a uniform sum
is the upper level with probability frac(t / 2**F), exactly. h is the hash of dither.py, one word an
element: only the sender draws it.

Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, QSGD (NeurIPS 30), where sign and level are separate;
rounding the signed value has the same mean and error.

Legend: N values, G buckets of D consecutive values (the last one may be shorter), B bytes,
W words of scratch, K codes of a block, L lanes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bits import block_packer, block_unpacker, scratch
from hpcvfl.kernels.compiling import BLOCK, helper, kernel, status_of, wide
from hpcvfl.kernels.dither import mix, split_key

F = 24
"""Binary places of a code: with 7 bits of level and a sign, 32 bits."""

_ABS = np.uint32(0x7FFFFFFF)
_LANES = 64  # of a sum of squares


@helper
def _square(x_N, n):  # type: ignore[no-untyped-def]
    v = np.float64(x_N[n])
    return v * v


@helper
def _square_sum(x_N, at, n, sums_L):  # type: ignore[no-untyped-def]
    """Sum of squares of n values in float64, in an order that depends on n alone: groups of four
    rows of lanes, then pairs, so that additions need not wait in turn.
    """
    wide()
    total, done = 0.0, np.uint64(0)
    L, group = np.uint64(_LANES), np.uint64(4 * _LANES)
    if n >= group:
        sums_L[:] = 0
        while done + group <= n:
            first = at + done
            for j in range(L):
                low = _square(x_N, first + j) + _square(x_N, first + L + j)
                second = first + L + L
                sums_L[j] += low + (_square(x_N, second + j) + _square(x_N, second + L + j))
            done += group
        for j in range(L):
            total += sums_L[j]
    even, odd = 0.0, 0.0
    for j in range(at + done, at + np.uint64(n) - np.uint64(1), np.uint64(2)):
        even += _square(x_N, j)
        odd += _square(x_N, j + np.uint64(1))
    if n % 2:
        even += _square(x_N, at + np.uint64(n - 1))
    return total + (even + odd)


@helper
def _largest(bits_N, at, n):  # type: ignore[no-untyped-def]
    """Largest pattern of |x|."""
    wide()
    worst = np.int32(0)
    for i in range(np.uint64(n)):
        worst = max(worst, np.int32(bits_N[at + i] & _ABS))
    return np.uint32(worst)


@kernel
def square_sums(x_N, bits_N, D, sums_L, out_G):  # type: ignore[no-untyped-def]
    """Sum of squares of each bucket: float64, shape (G,), overwritten; returns the status."""
    N, worst = x_N.shape[0], np.uint32(0)
    for g in range(np.uint64(out_G.shape[0])):
        total = 0.0
        first = np.int64(g) * D
        for start in range(first, min(first + D, N), BLOCK):  # a block at a time: near for both
            n = min(BLOCK, min(first + D, N) - start)
            worst = max(worst, _largest(bits_N, np.uint64(start), n))
            total += _square_sum(x_N, np.uint64(start), n, sums_L)
        out_G[g] = total
    return status_of(worst)


@kernel
def largest_magnitudes(bits_N, D, out_G):  # type: ignore[no-untyped-def]
    """Pattern of the largest |x| of each bucket: uint32, shape (G,), overwritten; returns the
    status.
    """
    N, worst = bits_N.shape[0], np.uint32(0)
    for g in range(np.uint64(out_G.shape[0])):
        first = np.int64(g) * D
        top = _largest(bits_N, np.uint64(first), min(D, N - first))
        out_G[g], worst = top, max(worst, top)
    return status_of(worst)


@helper
def _spread(of_G, D, start, n, out_K):  # type: ignore[no-untyped-def]
    """Write the number of its bucket for each of the n values from `start` on.

    So the loops over values run over whole blocks, however short the buckets are.
    """
    wide()
    first, g = 0, start // D
    last = (g + 1) * D - start
    while first < n:  # the rest of a bucket, or as much of it as the block takes
        of_bucket = of_G[np.uint64(g)]
        for i in range(np.uint64(first), np.uint64(min(last, n))):
            out_K[i] = of_bucket
        first, last, g = last, last + D, g + 1


@cache
def encoder(bits: int) -> Any:
    """Kernel behind `encode_levels`, compiled at its first call."""
    s = (1 << (bits - 1)) - 1
    pack_block = block_packer(bits)
    one, levels, places = np.float32(1 << F), np.int32(s), np.int32(F)
    top = np.float32(s << F)

    @helper
    def quantise(x_N, at, n, scale_K, h0, step, codes_K):  # type: ignore[no-untyped-def]
        wide()
        for i in range(np.uint64(n)):
            t = np.float32(np.float32(x_N[at + i] * scale_K[i]) * one)
            t = min(top, max(-top, np.float32(np.rint(t))))
            h = mix(np.uint32(h0 + np.uint32(np.uint32(i) * step)))
            p = np.int32(np.int32(t) + np.int32(np.uint32(h >> np.uint32(32 - F))))
            codes_K[i] = np.uint8(np.int32(p >> places) + levels)

    @kernel
    def encode(x_N, D, scale_G, k0, step, scale_K, codes_K, words_W, out_B):  # type: ignore[no-untyped-def]
        N = x_N.shape[0]
        for start in range(0, N, BLOCK):
            n = min(BLOCK, N - start)
            _spread(scale_G, D, start, n, scale_K)
            h0 = np.uint32(k0 + np.uint32(np.uint32(start) * step))
            quantise(x_N, np.uint64(start), n, scale_K, h0, step, codes_K)
            codes_K[n : n + 7] = 0
            pack_block(words_W, n, out_B, np.uint64(start * bits // 8))

    return encode


@cache
def decoder(bits: int) -> Any:
    """Kernel behind `decode_levels`, compiled at its first call."""
    unpack_block = block_unpacker(bits)
    levels = np.int32((1 << (bits - 1)) - 1)

    @helper
    def dequantise(codes_K, n, factor_K, out_N, at):  # type: ignore[no-untyped-def]
        wide()
        for i in range(np.uint64(n)):
            level = min(levels, np.int32(np.int32(codes_K[i]) - levels))
            out_N[at + i] = np.float32(level) * factor_K[i]

    @kernel
    def decode(in_B, D, factor_G, factor_K, codes_K, words_W, out_N):  # type: ignore[no-untyped-def]
        N = out_N.shape[0]
        for start in range(0, N, BLOCK):
            n = min(BLOCK, N - start)
            _spread(factor_G, D, start, n, factor_K)
            unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
            dequantise(codes_K, n, factor_K, out_N, np.uint64(start))

    return decode


def norms(x_N: np.ndarray, D: int, kind: str, out_G: np.ndarray) -> int:
    """Norm of each bucket; 0 if all values are finite, 1 for a NaN, 2 for an Inf and no NaN.

    x_N   : float32, shape (N,), N > 0
    D     : int, values of a bucket
    kind  : l2 (square root of the sum of squares, in float64) or max (largest |x|)
    out_G : float32, shape (ceil(N / D),)   overwritten; Inf where the norm overflows
    """
    bits_N = x_N.view(np.uint32)
    if kind == "max":
        return int(largest_magnitudes(bits_N, D, out_G.view(np.uint32)))
    squares_G = np.empty(len(out_G))
    status = int(square_sums(x_N, bits_N, D, np.empty(_LANES), squares_G))
    with np.errstate(over="ignore", invalid="ignore"):
        out_G[:] = np.sqrt(squares_G)
    return status


def encode_levels(
    x_N: np.ndarray, D: int, scale_G: np.ndarray, bits: int, key: int, out_B: np.ndarray
) -> None:
    """Round N finite values to levels at random, and pack them.

    x_N     : float32, shape (N,)
    scale_G : float32, shape (ceil(N / D),)   s / norm of each bucket, 0 for zeros; finite
    bits    : int, 2..8; s = 2**(bits - 1) - 1
    key     : int in [0, 2**64)
    out_B   : uint8, shape (packed_nbytes(N, bits),)   overwritten
    """
    k0, k1 = split_key(key)
    scale_K = np.empty(BLOCK, np.float32)
    step = np.uint32(k1 | np.uint32(1))
    encoder(bits)(x_N, D, scale_G, k0, step, scale_K, *scratch(bits), out_B)


def decode_levels(
    in_B: np.ndarray, D: int, factor_G: np.ndarray, bits: int, out_N: np.ndarray
) -> None:
    """Unpack N levels and scale them.

    in_B     : uint8, shape (packed_nbytes(N, bits),)   any bytes decode: the one code that no
               encoder writes counts as the highest level
    factor_G : float32, shape (ceil(N / D),)   value of level 1
    out_N    : float32, shape (N,)   overwritten; within s * factor
    """
    decoder(bits)(in_B, D, factor_G, np.empty(BLOCK, np.float32), *scratch(bits), out_N)
