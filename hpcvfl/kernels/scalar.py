"""Uniform scalar quantiser: normalise, dither, round, clip and pack in one pass, and back.

    encode   q    = (x - lo) * inv_step
             code = clip(rint(q), 0, 2**bits - 1)                                   without dither
             code = clip(floor(rint((q + 1/2) * 2**F) / 2**F + u), 0, 2**bits - 1)  with
    decode   y    = lo + (code - u) * step

in float32, one rounding per operation, in this order; u is the dither of dither.py in F binary
places. Adding 1.5 * 2**(23 - F) to q leaves q, rounded to F places, in the low bits of the sum, and
bit patterns of floats are ordered, so that the rest is integer work: add k = u * 2**F, clip, shift.
The patterns also show whether a NaN or an infinity may be there; only then the input is looked at
again, for the exact status.

Legend: N values, B bytes, R rows, C columns, W words of scratch, K values of a block.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bits import block_packer, block_unpacker, scratch
from hpcvfl.kernels.compiling import (
    BLOCK,
    FAR,
    FINITE,
    helper,
    kernel,
    prefetch_read,
    prefetch_write,
    wide,
)
from hpcvfl.kernels.dither import block_filler, places, split_key
from hpcvfl.kernels.scan import status_columns, status_line

_NO_KEY = np.uint32(0)
_SUSPECT = 0x7F800000  # from here on: +Inf, NaN, or negative as an unsigned pattern


def rounding(bits: int, dither: bool) -> tuple[np.float32, np.int32, np.int32]:
    """(added, base, top): what is added to q, and the patterns of the lowest and highest code.

    The bits of `base` below those of the code are 0, so that a pattern's low bits are the code.
    """
    F = places(bits) if dither else 0
    magic = np.float32(1.5 * 2.0 ** (23 - F))
    base = magic.view(np.int32)
    top = np.int32(int(base) + (1 << (bits + F)) - 1)
    return np.float32(magic + np.float32(0.5)) if dither else magic, base, top


@cache
def _quantiser(F: int, clip: bool) -> Any:
    """Kernel: n values of a line to codes. F = 0: no dither.

    Returns (spread, worst): the bits in which a pattern differed from `base`, more than top - base
    if any value was out of the range; and, only where it clips, the largest pattern met.
    """
    dither, shift = F > 0, np.int32(F)

    @helper
    def quantise(x_N, at, n, lo, inv_step, added, base, top, k_K, codes_W, to):  # type: ignore[no-untyped-def]
        wide()
        spread, worst = np.uint32(0), np.uint32(0)
        for i in range(np.uint64(n)):
            q = (x_N[at + i] - lo) * inv_step
            p = np.float32(q + added).view(np.int32)
            if clip:
                worst = max(worst, np.uint32(p))
            if dither:
                p = np.int32(p + k_K[i])
            spread = np.uint32(spread | np.uint32(p ^ base))
            if clip:
                p = min(top, max(base, p))
            codes_W[to + i] = np.int32(p >> shift) if dither else p  # its low bits are the code
        return spread, worst

    return quantise


@cache
def _row_quantiser(F: int, clip: bool) -> Any:
    """Like `_quantiser` for n values of row r from column c on, a range per column."""
    dither, shift = F > 0, np.int32(F)

    @helper
    def quantise(x_RC, r, c, n, lo_C, inv_step_C, added, base, top, k_K, codes_W, to):  # type: ignore[no-untyped-def]
        wide()
        spread, worst = np.uint32(0), np.uint32(0)
        for i in range(np.uint64(n)):
            q = (x_RC[r, c + i] - lo_C[c + i]) * inv_step_C[c + i]
            p = np.float32(q + added).view(np.int32)
            if clip:
                worst = max(worst, np.uint32(p))
            if dither:
                p = np.int32(p + k_K[to + i])
            spread = np.uint32(spread | np.uint32(p ^ base))
            if clip:
                p = min(top, max(base, p))
            codes_W[to + i] = np.int32(p >> shift) if dither else p
        return spread, worst

    return quantise


@cache
def encoder(bits: int, dither: bool) -> Any:
    """Kernel behind `encode_uniform`; returns the largest pattern met where it had to clip.

    A block is first tried without clipping, which is 10-30 % faster (bench/LOG.md); after a
    block with values out of the range, blocks are clipped until one is inside again.
    """
    F = places(bits) if dither else 0
    added, base, top = rounding(bits, dither)
    bare, clipped = _quantiser(F, False), _quantiser(F, True)
    pack_block, fill_block = block_packer(bits), block_filler(F)

    @kernel
    def encode(x_N, lo, inv_step, k0, k1, k_K, codes_K, words_W, out_B):  # type: ignore[no-untyped-def]
        worst, inside, limit = np.uint32(0), True, np.uint32(top - base)
        N = x_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            if N > FAR:
                prefetch_read(x_N, at + np.uint64(BLOCK))
            if dither:
                fill_block(k0, k1, start // BLOCK, k_K)
            codes, to = (
                (out_B, at) if bits == 8 else (codes_K, np.uint64(0))
            )  # 8 bits: bytes already
            if inside:
                spread, _ = bare(x_N, at, n, lo, inv_step, added, base, top, k_K, codes, to)
                inside = spread <= limit
            if not inside:
                spread, met = clipped(x_N, at, n, lo, inv_step, added, base, top, k_K, codes, to)
                worst, inside = max(worst, met), spread <= limit
            if bits != 8:
                codes_K[n : n + 7] = 0
                pack_block(words_W, n, out_B, np.uint64(start * bits // 8))
        return worst

    return encode


@cache
def column_encoder(bits: int, dither: bool) -> Any:
    """Kernel behind `encode_uniform_columns`; like `encoder`, with a part of a row as the unit."""
    F = places(bits) if dither else 0
    added, base, top = rounding(bits, dither)
    bare, clipped = _row_quantiser(F, False), _row_quantiser(F, True)
    pack_block, fill_block = block_packer(bits), block_filler(F)

    @kernel
    def encode(x_RC, lo_C, inv_C, k0, k1, k_K, codes_K, words_W, out_B):  # type: ignore[no-untyped-def]
        R, C = x_RC.shape
        worst, inside, limit = np.uint32(0), True, np.uint32(top - base)
        r, c = np.uint64(0), 0
        for start in range(0, R * C, BLOCK):
            n, done = min(BLOCK, R * C - start), 0
            if dither:
                fill_block(k0, k1, start // BLOCK, k_K)
            while done < n:  # the rest of a row, or as much of it as the block takes
                m, col, to = min(C - c, n - done), np.uint64(c), np.uint64(done)
                if inside:
                    spread, _ = bare(
                        x_RC, r, col, m, lo_C, inv_C, added, base, top, k_K, codes_K, to
                    )
                    inside = spread <= limit
                if not inside:
                    spread, met = clipped(
                        x_RC, r, col, m, lo_C, inv_C, added, base, top, k_K, codes_K, to
                    )
                    worst, inside = max(worst, met), spread <= limit
                done += m
                c += m
                if c == C:
                    r, c = r + np.uint64(1), 0
            codes_K[n : n + 7] = 0
            pack_block(words_W, n, out_B, np.uint64(start * bits // 8))
        return worst

    return encode


@cache
def _dequantiser(F: int) -> Any:
    """Kernel: n codes to values of a line; factor = step / 2**F. F = 0: no dither."""
    dither, shift = F > 0, np.int32(F)

    @helper
    def dequantise(codes_W, skip, n, lo, factor, k_K, out_N, at):  # type: ignore[no-untyped-def]
        wide()
        for i in range(np.uint64(n)):
            c = np.int32(codes_W[skip + i])
            if dither:
                c = np.int32(np.int32(c << shift) - k_K[i])
            out_N[at + i] = lo + np.float32(c) * factor

    return dequantise


@cache
def _row_dequantiser(F: int) -> Any:
    """Like `_dequantiser` for n values of row r from column c on, a range per column."""
    dither, shift, unit = F > 0, np.int32(F), np.float32(2.0**-F)

    @helper
    def dequantise(codes_K, done, n, lo_C, step_C, k_K, out_RC, r, c):  # type: ignore[no-untyped-def]
        wide()
        for i in range(np.uint64(n)):
            p = np.int32(codes_K[done + i])
            if dither:
                p = np.int32(np.int32(p << shift) - k_K[done + i])
            out_RC[r, c + i] = lo_C[c + i] + np.float32(p) * (step_C[c + i] * unit)

    return dequantise


@cache
def decoder(bits: int, dither: bool) -> Any:
    """Kernel behind `decode_uniform`, compiled at its first call."""
    F = places(bits) if dither else 0
    dequantise, unpack_block, fill_block = _dequantiser(F), block_unpacker(bits), block_filler(F)

    @kernel
    def decode(in_B, lo, factor, k0, k1, k_K, codes_K, words_W, out_N):  # type: ignore[no-untyped-def]
        N = out_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            if N > FAR:
                prefetch_write(out_N, at + np.uint64(BLOCK))
            if dither:
                fill_block(k0, k1, start // BLOCK, k_K)
            if bits == 8:
                dequantise(in_B, at, n, lo, factor, k_K, out_N, at)
            else:
                unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
                dequantise(codes_K, np.uint64(0), n, lo, factor, k_K, out_N, at)

    return decode


@cache
def column_decoder(bits: int, dither: bool) -> Any:
    """Kernel behind `decode_uniform_columns`, compiled at its first call."""
    F = places(bits) if dither else 0
    dequantise, unpack_block = _row_dequantiser(F), block_unpacker(bits)
    fill_block = block_filler(F)

    @kernel
    def decode(in_B, lo_C, step_C, k0, k1, k_K, codes_K, words_W, out_RC):  # type: ignore[no-untyped-def]
        R, C = out_RC.shape
        r, c = 0, 0
        for start in range(0, R * C, BLOCK):
            n = min(BLOCK, R * C - start)
            if dither:
                fill_block(k0, k1, start // BLOCK, k_K)
            unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
            done = 0
            while done < n:
                m = min(C - c, n - done)
                at = np.uint64(done)
                dequantise(codes_K, at, m, lo_C, step_C, k_K, out_RC, np.uint64(r), np.uint64(c))
                done += m
                c += m
                if c == C:
                    r, c = r + 1, 0

    return decode


_NO_DITHER = np.empty(0, np.int32)  # stands for k_K where nothing reads it


def _scratch(bits: int, dither: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(k_K, codes_K, words_W): dither and codes of one block, and the same codes as words."""
    return np.empty(BLOCK, np.int32) if dither else _NO_DITHER, *scratch(bits)


def _keys(dither: bool, key: int) -> tuple[np.uint32, np.uint32]:
    return split_key(key) if dither else (_NO_KEY, _NO_KEY)


def encode_uniform(
    x_N: np.ndarray,
    lo: float,
    inv_step: float,
    bits: int,
    dither: bool,
    key: int,
    out_B: np.ndarray,
) -> int:
    """Quantise and pack N values with one range; status 0 if all are finite, 1 NaN, 2 Inf.

    x_N      : float32, shape (N,)   any stride
    lo       : float                 value of code 0; used as float32
    inv_step : float                 1 / distance of two levels, 0 if all are equal; as float32
    bits     : int, 1..8 or 16
    key      : int in [0, 2**64)     of the dither; not used without
    out_B    : uint8, shape (packed_nbytes(N, bits),)   overwritten, a valid payload in any case
    """
    worst = encoder(bits, bool(dither))(
        x_N,
        np.float32(lo),
        np.float32(inv_step),
        *_keys(dither, key),
        *_scratch(bits, dither),
        out_B,
    )
    return status_line(x_N.view(np.uint32)) if worst >= _SUSPECT else FINITE


def encode_uniform_columns(
    x_RC: np.ndarray,
    lo_C: np.ndarray,
    inv_step_C: np.ndarray,
    bits: int,
    dither: bool,
    key: int,
    out_B: np.ndarray,
) -> int:
    """Like `encode_uniform` with one range per column; codes in row-major order.

    x_RC             : float32, shape (R, C)   any strides
    lo_C, inv_step_C : float32, shape (C,), contiguous
    out_B            : uint8, shape (packed_nbytes(R * C, bits),)   overwritten
    """
    worst = column_encoder(bits, bool(dither))(
        x_RC,
        lo_C,
        inv_step_C,
        *_keys(dither, key),
        *_scratch(bits, dither),
        out_B,
    )
    return status_columns(x_RC.view(np.uint32)) if worst >= _SUSPECT else FINITE


def decode_uniform(
    in_B: np.ndarray,
    lo: float,
    step: float,
    bits: int,
    dither: bool,
    key: int,
    out_N: np.ndarray,
) -> None:
    """Unpack and scale N values; `bits`, `dither`, `key` as they were encoded.

    in_B  : uint8, shape (packed_nbytes(N, bits),)   any bytes decode, inside the range
    lo    : float                value of code 0; used as float32
    step  : float                distance of two levels; used as float32
    out_N : float32, shape (N,)  overwritten
    """
    factor = np.float32(step) * np.float32(2.0 ** -places(bits) if dither else 1)
    run = decoder(bits, bool(dither))
    run(in_B, np.float32(lo), factor, *_keys(dither, key), *_scratch(bits, dither), out_N)


def decode_uniform_columns(
    in_B: np.ndarray,
    lo_C: np.ndarray,
    step_C: np.ndarray,
    bits: int,
    dither: bool,
    key: int,
    out_RC: np.ndarray,
) -> None:
    """Like `decode_uniform` with one range per column.

    lo_C, step_C : float32, shape (C,), contiguous
    out_RC       : float32, shape (R, C)   overwritten
    """
    run = column_decoder(bits, bool(dither))
    run(in_B, lo_C, step_C, *_keys(dither, key), *_scratch(bits, dither), out_RC)
