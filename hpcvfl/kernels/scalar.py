"""Uniform scalar quantiser: normalise, dither, round, clip and pack in one pass, and back.

    encode   t = (x - lo) * inv_step + (u + 0.5);  code = floor(clip(t, 0, 2**bits - 1))
    decode   y = lo + (code - u) * step                           all in float32, in this order

u is the dither of dither.py, 0 without. A block of values is handled at a time: dither into
scratch, codes into scratch (both in the first-level cache), packed bytes out. Ranges
may come from a scan (scan.py) or be fixed; encoders report NaN and Inf in any case and write a
valid payload even then.

Legend: N values, B bytes, R rows, C columns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.bits import block_packer, block_unpacker
from hpcvfl.kernels.compiling import BLOCK, kernel, status_of
from hpcvfl.kernels.dither import fill_block, split_key

_ABS = np.uint32(0x7FFFFFFF)
_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_ONE_AND_HALF = np.float32(1.5)


@cache
def _quantiser(bits: int, dither: bool, columns: bool) -> Any:
    """Kernel: n values to codes in scratch; returns the largest bit pattern of |x|."""
    code_type: Any = np.uint16 if bits == 16 else np.uint8
    top = np.float32(2**bits - 1)

    @kernel
    def quantise(x, lo, inv_step, noise, codes):  # type: ignore[no-untyped-def]
        bits_x = x.view(np.uint32)
        worst = np.uint32(0)
        for i in range(x.shape[0]):
            worst = max(worst, np.uint32(bits_x[i] & _ABS))
            q = (x[i] - lo[i]) * inv_step[i] if columns else (x[i] - lo) * inv_step
            t = q + (noise[i] - _ONE) if dither else q + _HALF
            t = t if t > _ZERO else _ZERO  # also sends NaN to 0
            t = t if t < top else top
            codes[i] = code_type(np.int32(t))
        return worst

    return quantise


@cache
def _dequantiser(bits: int, dither: bool, columns: bool) -> Any:
    """Kernel: n codes in scratch to values."""

    @kernel
    def dequantise(codes, lo, step, noise, out):  # type: ignore[no-untyped-def]
        for i in range(out.shape[0]):
            c = np.float32(codes[i])
            if dither:
                c = c - (noise[i] - _ONE_AND_HALF)
            out[i] = lo[i] + c * step[i] if columns else lo + c * step

    return dequantise


@cache
def encoder(bits: int, dither: bool) -> Any:
    """Kernel (x_N, lo, inv_step, k0, k1, out_B) -> status, compiled at its first call."""
    quantise, pack_block = _quantiser(bits, dither, False), block_packer(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def encode(x_N, lo, inv_step, k0, k1, out_B):  # type: ignore[no-untyped-def]
        scratch_W = np.zeros(BLOCK // 4, np.uint64)
        noise_W = np.empty(BLOCK, np.uint32)
        codes, noise = scratch_W.view(code_type), noise_W.view(np.float32)
        worst = np.uint32(0)
        for at in range(0, x_N.shape[0], BLOCK):
            m = min(BLOCK, x_N.shape[0] - at)
            if dither:
                fill_block(k0, k1, at // BLOCK, noise_W)
            worst = max(worst, quantise(x_N[at : at + m], lo, inv_step, noise, codes))
            for i in range(m, min(m + 7, BLOCK)):
                codes[i] = code_type(0)
            pack_block(scratch_W, m, out_B[at * bits // 8 : ((at + m) * bits + 7) // 8])
        return status_of(worst)

    return encode


@cache
def column_encoder(bits: int, dither: bool) -> Any:
    """Kernel (x_RC, lo_C, inv_step_C, k0, k1, out_B) -> status, compiled at its first call."""
    quantise, pack_block = _quantiser(bits, dither, True), block_packer(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def encode(x_RC, lo_C, inv_step_C, k0, k1, out_B):  # type: ignore[no-untyped-def]
        C = x_RC.shape[1]
        N = x_RC.shape[0] * C
        scratch_W = np.zeros(BLOCK // 4, np.uint64)
        noise_W = np.empty(BLOCK, np.uint32)
        codes, noise = scratch_W.view(code_type), noise_W.view(np.float32)
        worst = np.uint32(0)
        r, c = 0, 0
        for at in range(0, N, BLOCK):
            m = min(BLOCK, N - at)
            if dither:
                fill_block(k0, k1, at // BLOCK, noise_W)
            done = 0
            while done < m:
                end = min(C, c + m - done)
                n = end - c
                x, u = x_RC[r, c:end], noise[done : done + n]
                found = quantise(x, lo_C[c:end], inv_step_C[c:end], u, codes[done : done + n])
                worst = max(worst, found)
                done += n
                r, c = (r + 1, 0) if end == C else (r, end)
            for i in range(m, min(m + 7, BLOCK)):
                codes[i] = code_type(0)
            pack_block(scratch_W, m, out_B[at * bits // 8 : ((at + m) * bits + 7) // 8])
        return status_of(worst)

    return encode


@cache
def decoder(bits: int, dither: bool) -> Any:
    """Kernel (in_B, lo, step, k0, k1, out_N), compiled at its first call."""
    dequantise, unpack_block = _dequantiser(bits, dither, False), block_unpacker(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def decode(in_B, lo, step, k0, k1, out_N):  # type: ignore[no-untyped-def]
        scratch_W = np.empty(BLOCK // 4, np.uint64)
        noise_W = np.empty(BLOCK, np.uint32)
        codes, noise = scratch_W.view(code_type), noise_W.view(np.float32)
        for at in range(0, out_N.shape[0], BLOCK):
            m = min(BLOCK, out_N.shape[0] - at)
            if dither:
                fill_block(k0, k1, at // BLOCK, noise_W)
            unpack_block(in_B[at * bits // 8 : ((at + m) * bits + 7) // 8], m, scratch_W)
            dequantise(codes, lo, step, noise, out_N[at : at + m])

    return decode


@cache
def column_decoder(bits: int, dither: bool) -> Any:
    """Kernel (in_B, lo_C, step_C, k0, k1, out_RC), compiled at its first call."""
    dequantise, unpack_block = _dequantiser(bits, dither, True), block_unpacker(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def decode(in_B, lo_C, step_C, k0, k1, out_RC):  # type: ignore[no-untyped-def]
        C = out_RC.shape[1]
        N = out_RC.shape[0] * C
        scratch_W = np.empty(BLOCK // 4, np.uint64)
        noise_W = np.empty(BLOCK, np.uint32)
        codes, noise = scratch_W.view(code_type), noise_W.view(np.float32)
        r, c = 0, 0
        for at in range(0, N, BLOCK):
            m = min(BLOCK, N - at)
            if dither:
                fill_block(k0, k1, at // BLOCK, noise_W)
            unpack_block(in_B[at * bits // 8 : ((at + m) * bits + 7) // 8], m, scratch_W)
            done = 0
            while done < m:
                end = min(C, c + m - done)
                n = end - c
                held, u = codes[done : done + n], noise[done : done + n]
                dequantise(held, lo_C[c:end], step_C[c:end], u, out_RC[r, c:end])
                done += n
                r, c = (r + 1, 0) if end == C else (r, end)

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
