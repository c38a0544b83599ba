"""Codes of a few bits to bytes and back: first code in the lowest bits, padded to a byte once.

A block of codes lies as one byte each in scratch; a word of 8 of them (of 2 or 4 for widths that
divide a byte) is squeezed with a few shifts. 16-bit codes are two bytes each, low byte first.

Legend: N codes, B bytes, W words of scratch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, kernel

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Widths that can be packed."""


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of n codes of `bits` bits each, padded to a byte once."""
    return (n * bits + 7) // 8


def _joins(bits: int) -> tuple[tuple[np.uint64, np.uint64, np.uint64], ...]:
    """(shift, low, high) of three joins that squeeze 8 bytes of `bits` bits into 8 * bits bits.

    A join halves the number of lanes of a uint64: (w & low) | ((w & high) >> shift).
    """
    joins = []
    for span in (8, 16, 32):  # width of the lanes that are joined in pairs
        held = bits * span // 8  # bits in use of a lane
        low = sum(((1 << held) - 1) << at for at in range(0, 64, 2 * span))
        joins.append((np.uint64(span - held), np.uint64(low), np.uint64(low << span)))
    return tuple(joins)


def _divisor_packer(bits: int) -> Any:
    """Widths that divide a byte: a word of 8 / bits codes becomes one byte."""
    word_type: Any = {4: np.uint16, 2: np.uint32, 1: np.uint64}[bits]
    s1, s2, s3 = (word_type(k * (8 - bits)) for k in (1, 2, 4))
    per_byte = 8 // bits

    @kernel
    def pack_block(scratch_W, n, out_B):  # type: ignore[no-untyped-def]
        words = scratch_W.view(word_type)
        for j in range((n + per_byte - 1) // per_byte):
            w = words[j]
            w = word_type(w | word_type(w >> s1))
            if bits <= 2:
                w = word_type(w | word_type(w >> s2))
            if bits == 1:
                w = word_type(w | word_type(w >> s3))
            out_B[j] = np.uint8(w)

    return pack_block


def _odd_packer(bits: int) -> Any:
    """3, 5, 6, 7 bits: a word of 8 codes becomes `bits` bytes."""
    (s1, low1, high1), (s2, low2, high2), (s3, low3, high3) = _joins(bits)

    @kernel
    def pack_block(scratch_W, n, out_B):  # type: ignore[no-untyped-def]
        for j in range((n + 7) // 8):
            w = scratch_W[j]
            w = np.uint64(np.uint64(w & low1) | np.uint64(np.uint64(w & high1) >> s1))
            w = np.uint64(np.uint64(w & low2) | np.uint64(np.uint64(w & high2) >> s2))
            w = np.uint64(np.uint64(w & low3) | np.uint64(np.uint64(w & high3) >> s3))
            at = j * bits
            for k in range(min(bits, out_B.shape[0] - at)):
                out_B[at + k] = np.uint8(w >> np.uint64(8 * k))

    return pack_block


def _byte_packer(bits: int) -> Any:
    """8 and 16 bits: the scratch holds the payload already."""

    @kernel
    def pack_block(scratch_W, n, out_B):  # type: ignore[no-untyped-def]
        bytes_ = scratch_W.view(np.uint8)
        for j in range(n * bits // 8):
            out_B[j] = bytes_[j]

    return pack_block


@cache
def block_packer(bits: int) -> Any:
    """Kernel (scratch_W, n, out_B): pack the first n <= BLOCK codes of the scratch.

    scratch_W : uint64, holds the codes as uint8 (16 bits: uint16), 0 from n to a multiple of 8
    out_B     : uint8, exactly packed_nbytes(n, bits) long, overwritten
    """
    if bits in (8, 16):
        return _byte_packer(bits)
    return _divisor_packer(bits) if 8 % bits == 0 else _odd_packer(bits)


def _divisor_unpacker(bits: int) -> Any:
    word_type: Any = {4: np.uint16, 2: np.uint32, 1: np.uint64}[bits]
    s1, s2, s3 = (word_type(k * (8 - bits)) for k in (1, 2, 4))
    size = np.dtype(word_type).itemsize * 8
    m1 = word_type(sum(((1 << bits) - 1) << at for at in range(0, size, 8)))
    m2 = word_type(sum(((1 << 2 * bits) - 1) << at for at in range(0, size, 16)))
    m3 = word_type(sum(((1 << 4 * bits) - 1) << at for at in range(0, size, 32)))
    per_byte = 8 // bits

    @kernel
    def unpack_block(in_B, n, scratch_W):  # type: ignore[no-untyped-def]
        words = scratch_W.view(word_type)
        for j in range((n + per_byte - 1) // per_byte):
            w = word_type(in_B[j])
            if bits == 1:
                w = word_type(word_type(w | word_type(w << s3)) & m3)
            if bits <= 2:
                w = word_type(word_type(w | word_type(w << s2)) & m2)
            words[j] = word_type(word_type(w | word_type(w << s1)) & m1)

    return unpack_block


def _odd_unpacker(bits: int) -> Any:
    (s1, low1, high1), (s2, low2, high2), (s3, low3, high3) = _joins(bits)

    @kernel
    def unpack_block(in_B, n, scratch_W):  # type: ignore[no-untyped-def]
        for j in range((n + 7) // 8):
            at = j * bits
            w = np.uint64(0)
            for k in range(min(bits, in_B.shape[0] - at)):
                w = np.uint64(w | np.uint64(np.uint64(in_B[at + k]) << np.uint64(8 * k)))
            w = np.uint64(np.uint64(w & low3) | np.uint64(np.uint64(w << s3) & high3))
            w = np.uint64(np.uint64(w & low2) | np.uint64(np.uint64(w << s2) & high2))
            scratch_W[j] = np.uint64(np.uint64(w & low1) | np.uint64(np.uint64(w << s1) & high1))

    return unpack_block


def _byte_unpacker(bits: int) -> Any:
    @kernel
    def unpack_block(in_B, n, scratch_W):  # type: ignore[no-untyped-def]
        bytes_ = scratch_W.view(np.uint8)
        for j in range(n * bits // 8):
            bytes_[j] = in_B[j]

    return unpack_block


@cache
def block_unpacker(bits: int) -> Any:
    """Kernel (in_B, n, scratch_W): inverse of `block_packer(bits)`, in_B as long as its out_B."""
    if bits in (8, 16):
        return _byte_unpacker(bits)
    return _divisor_unpacker(bits) if 8 % bits == 0 else _odd_unpacker(bits)


@cache
def packer(bits: int) -> Any:
    """Kernel (codes_N, out_B) behind `pack_bits`, compiled at its first call."""
    pack_block = block_packer(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def pack(codes_N, out_B):  # type: ignore[no-untyped-def]
        scratch_W = np.zeros(BLOCK // 4, np.uint64)
        held = scratch_W.view(code_type)
        for at in range(0, codes_N.shape[0], BLOCK):
            m = min(BLOCK, codes_N.shape[0] - at)
            codes = codes_N[at : at + m]
            for i in range(m):
                held[i] = code_type(codes[i])
            for i in range(m, min(m + 7, BLOCK)):
                held[i] = code_type(0)
            pack_block(scratch_W, m, out_B[at * bits // 8 : ((at + m) * bits + 7) // 8])

    return pack


@cache
def unpacker(bits: int) -> Any:
    """Kernel (in_B, out_N) behind `unpack_bits`, compiled at its first call."""
    unpack_block = block_unpacker(bits)
    code_type: Any = np.uint16 if bits == 16 else np.uint8

    @kernel
    def unpack(in_B, out_N):  # type: ignore[no-untyped-def]
        scratch_W = np.empty(BLOCK // 4, np.uint64)
        held = scratch_W.view(code_type)
        for at in range(0, out_N.shape[0], BLOCK):
            m = min(BLOCK, out_N.shape[0] - at)
            unpack_block(in_B[at * bits // 8 : ((at + m) * bits + 7) // 8], m, scratch_W)
            out = out_N[at : at + m]
            for i in range(m):
                out[i] = np.uint16(held[i])

    return unpack


def pack_bits(codes_N: np.ndarray, bits: int, out_B: np.ndarray) -> None:
    """Write N codes of `bits` bits each, first code in the lowest bits, last byte padded with 0.

    codes_N : uint16, shape (N,)   every code < 2**bits; any stride
    bits    : int, 1..8 or 16
    out_B   : uint8, shape (B,)    B = packed_nbytes(N, bits); overwritten
    """
    packer(bits)(codes_N, out_B)


def unpack_bits(in_B: np.ndarray, bits: int, out_N: np.ndarray) -> None:
    """Read N codes of `bits` bits each; inverse of `pack_bits`.

    in_B  : uint8, shape (B,)    B = packed_nbytes(N, bits); any stride
    bits  : int, 1..8 or 16
    out_N : uint16, shape (N,)   overwritten
    """
    unpacker(bits)(in_B, out_N)
