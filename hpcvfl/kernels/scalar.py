"""Uniform scalar quantiser: normalise, dither, round, clip and pack in one pass, and back.

    encode   q    = (x - lo) * inv_step
             code = clip(rint(q), 0, 2**bits - 1)                                   without dither
             code = clip(floor(rint((q + 1/2) * 2**14) / 2**14 + u), 0, 2**bits - 1)     with
    decode   y    = lo + (code - u) * step

in float32, one rounding per operation, in this order; u as in dither.py, 0 without. Adding
MAGIC = 1.5 * 2**m to q leaves q, rounded to some binary places, in the low bits of the sum, and bit
patterns of floats are ordered, so that the rest is integer work: add k, clip, shift. The patterns
also show whether a NaN or an infinity may be there; only then the input is looked at again, for the
exact status. 16-bit codes leave a float32 no places for a fraction: code = clip(rint(q + u)) there.

Legend: N values, B bytes, R rows, C columns, W words of scratch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bits import block_packer, block_unpacker, code_type, word_type
from hpcvfl.kernels.compiling import BLOCK, FINITE, kernel
from hpcvfl.kernels.dither import DITHER_BITS, fill_block, split_key
from hpcvfl.kernels.scan import status_columns, status_line

_SUSPECT = np.uint32(0x7F800000)  # from here on: +Inf, NaN, or negative as an unsigned pattern
_SHIFT = np.int32(DITHER_BITS)
_UNIT = np.float32(1 / (1 << DITHER_BITS))


@cache
def _rounder(bits: int, dither: bool) -> tuple[Any, Any]:
    """Two kernels: (q, k) -> bit pattern (int32) that holds q rounded; (pattern, k) -> code.

    k : int32, dither of the element times 2**14; not used without dither
    """
    code: Any = code_type(bits)
    fine = dither and bits <= 8  # the pattern keeps 14 binary places, for the dither
    places = DITHER_BITS if fine else 0
    magic = np.float32(1.5 * 2.0 ** (23 - places))
    added = np.float32(magic + np.float32(0.5)) if fine else magic
    base = magic.view(np.int32)  # pattern of code 0; its bits under the code are 0
    top = np.int32(int(base) + (1 << (bits + places)) - 1)

    @kernel
    def pattern(q, k):  # type: ignore[no-untyped-def]
        if dither and not fine:
            q = q + np.float32(k) * _UNIT
        return np.float32(q + added).view(np.int32)

    @kernel
    def finish(p, k):  # type: ignore[no-untyped-def]
        if fine:
            p = np.int32(p + k)
        p = min(top, max(base, p))
        if fine:
            p = np.int32(p >> _SHIFT)
        return code(p)

    return pattern, finish


@cache
def _scaler(dither: bool) -> Any:
    """Kernel (code, k) -> float32 to be multiplied by step, or by step / 2**14 with dither."""

    @kernel
    def scaled(code, k):  # type: ignore[no-untyped-def]
        if dither:
            return np.float32(np.int32(np.int32(np.int32(code) << _SHIFT) - k))
        return np.float32(code)

    return scaled


@cache
def encoder(bits: int, dither: bool) -> Any:
    """Kernel (x_N, lo, inv_step, k0, k1, out_B) -> status, compiled at its first call."""
    pattern, finish = _rounder(bits, dither)
    pack_block = block_packer(bits)
    code: Any = code_type(bits)
    word: Any = word_type(bits)

    @kernel
    def quantise(x_N, at, n, lo, inv_step, k_W, codes_N, to):  # type: ignore[no-untyped-def]
        worst = np.uint32(0)
        for i in range(np.uint64(n)):
            k = k_W[i]
            p = pattern((x_N[at + i] - lo) * inv_step, k)
            worst = max(worst, np.uint32(p))
            codes_N[to + i] = finish(p, k)
        return worst

    @kernel
    def encode(x_N, lo, inv_step, k0, k1, out_B):  # type: ignore[no-untyped-def]
        scratch_W = np.zeros(BLOCK // 4, np.uint64)
        held, words_W = scratch_W.view(code), scratch_W.view(word)
        k_W = np.empty(BLOCK, np.int32)
        worst = np.uint32(0)
        N = x_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            if dither:
                fill_block(k0, k1, start // BLOCK, k_W)
            if bits == 8:  # codes are bytes already
                found = quantise(x_N, at, n, lo, inv_step, k_W, out_B, at)
            else:
                found = quantise(x_N, at, n, lo, inv_step, k_W, held, np.uint64(0))
                for i in range(n, min(n + 7, BLOCK)):
                    held[i] = code(0)
                pack_block(words_W, n, out_B, np.uint64(start * bits // 8))
            worst = max(worst, found)
        return status_line(x_N) if worst >= _SUSPECT else FINITE

    return encode


@cache
def column_encoder(bits: int, dither: bool) -> Any:
    """Kernel (x_RC, lo_C, inv_step_C, k0, k1, out_B) -> status, compiled at its first call."""
    pattern, finish = _rounder(bits, dither)
    pack_block = block_packer(bits)
    code: Any = code_type(bits)
    word: Any = word_type(bits)

    @kernel
    def quantise(x_RC, r, c, n, lo_C, inv_C, k_W, codes_W, to):  # type: ignore[no-untyped-def]
        worst = np.uint32(0)
        for i in range(np.uint64(n)):
            k = k_W[to + i]
            p = pattern((x_RC[r, c + i] - lo_C[c + i]) * inv_C[c + i], k)
            worst = max(worst, np.uint32(p))
            codes_W[to + i] = finish(p, k)
        return worst

    @kernel
    def encode(x_RC, lo_C, inv_step_C, k0, k1, out_B):  # type: ignore[no-untyped-def]
        C = x_RC.shape[1]
        N = x_RC.shape[0] * C
        scratch_W = np.zeros(BLOCK // 4, np.uint64)
        held, words_W = scratch_W.view(code), scratch_W.view(word)
        k_W = np.empty(BLOCK, np.int32)
        worst = np.uint32(0)
        r, c = 0, 0
        for start in range(0, N, BLOCK):
            n = min(BLOCK, N - start)
            if dither:
                fill_block(k0, k1, start // BLOCK, k_W)
            done = 0
            while done < n:  # the rest of a row, as much of it as the block takes
                m = min(C - c, n - done)
                found = quantise(
                    x_RC,
                    np.uint64(r),
                    np.uint64(c),
                    m,
                    lo_C,
                    inv_step_C,
                    k_W,
                    held,
                    np.uint64(done),
                )
                worst = max(worst, found)
                done += m
                c += m
                if c == C:
                    r, c = r + 1, 0
            for i in range(n, min(n + 7, BLOCK)):
                held[i] = code(0)
            pack_block(words_W, n, out_B, np.uint64(start * bits // 8))
        return status_columns(x_RC) if worst >= _SUSPECT else FINITE

    return encode


@cache
def decoder(bits: int, dither: bool) -> Any:
    """Kernel (in_B, lo, step, k0, k1, out_N), compiled at its first call."""
    scaled = _scaler(dither)
    unpack_block = block_unpacker(bits)
    code: Any = code_type(bits)
    word: Any = word_type(bits)

    @kernel
    def dequantise(codes_W, start, n, lo, factor, k_W, out_N, at):  # type: ignore[no-untyped-def]
        for i in range(np.uint64(n)):
            out_N[at + i] = lo + scaled(codes_W[start + i], k_W[i]) * factor

    @kernel
    def decode(in_B, lo, step, k0, k1, out_N):  # type: ignore[no-untyped-def]
        scratch_W = np.empty(BLOCK // 4, np.uint64)
        held, words_W = scratch_W.view(code), scratch_W.view(word)
        k_W = np.empty(BLOCK, np.int32)
        factor = step * _UNIT if dither else step
        N = out_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            if dither:
                fill_block(k0, k1, start // BLOCK, k_W)
            if bits == 8:
                dequantise(in_B, at, n, lo, factor, k_W, out_N, at)
            else:
                unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
                dequantise(held, np.uint64(0), n, lo, factor, k_W, out_N, at)

    return decode


@cache
def column_decoder(bits: int, dither: bool) -> Any:
    """Kernel (in_B, lo_C, step_C, k0, k1, out_RC), compiled at its first call."""
    scaled = _scaler(dither)
    unpack_block = block_unpacker(bits)
    code: Any = code_type(bits)
    word: Any = word_type(bits)
    unit = _UNIT if dither else np.float32(1)

    @kernel
    def dequantise(held, done, n, lo_C, step_C, k_W, out_RC, r, c):  # type: ignore[no-untyped-def]
        for i in range(np.uint64(n)):
            factor = step_C[c + i] * unit
            out_RC[r, c + i] = lo_C[c + i] + scaled(held[done + i], k_W[done + i]) * factor

    @kernel
    def decode(in_B, lo_C, step_C, k0, k1, out_RC):  # type: ignore[no-untyped-def]
        C = out_RC.shape[1]
        N = out_RC.shape[0] * C
        scratch_W = np.empty(BLOCK // 4, np.uint64)
        held, words_W = scratch_W.view(code), scratch_W.view(word)
        k_W = np.empty(BLOCK, np.int32)
        r, c = 0, 0
        for start in range(0, N, BLOCK):
            n = min(BLOCK, N - start)
            if dither:
                fill_block(k0, k1, start // BLOCK, k_W)
            unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
            done = 0
            while done < n:
                m = min(C - c, n - done)
                at = np.uint64(done)
                dequantise(held, at, m, lo_C, step_C, k_W, out_RC, np.uint64(r), np.uint64(c))
                done += m
                c += m
                if c == C:
                    r, c = r + 1, 0

    return decode


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
    k0, k1 = split_key(key)
    run = encoder(bits, bool(dither))
    return int(run(x_N, np.float32(lo), np.float32(inv_step), k0, k1, out_B))


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
    k0, k1 = split_key(key)
    return int(column_encoder(bits, bool(dither))(x_RC, lo_C, inv_step_C, k0, k1, out_B))


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
    k0, k1 = split_key(key)
    decoder(bits, bool(dither))(in_B, np.float32(lo), np.float32(step), k0, k1, out_N)


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
    k0, k1 = split_key(key)
    column_decoder(bits, bool(dither))(in_B, lo_C, step_C, k0, k1, out_RC)
