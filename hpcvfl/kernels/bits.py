"""Codes of a few bits to bytes and back: first code in the lowest bits, padded to a byte once.

A block of codes lies in scratch, one byte each (16 bits: two). A word of 8 of them, or of 2 or 4
for widths that divide a byte, is squeezed with a few shifts; no lane is shuffled that way.

Legend: N codes, K codes of a block, B bytes, W words of scratch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels.compiling import BLOCK, helper, kernel, wide

BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
"""Widths that can be packed."""


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of n codes of `bits` bits each, padded to a byte once."""
    return (n * bits + 7) // 8


_WORDS: dict[int, Any] = {1: np.uint64, 2: np.uint32, 4: np.uint16, 8: np.uint8, 16: np.uint8}


def word_type(bits: int) -> Any:
    """Type as which the packers of `bits` bits see the codes of a block."""
    return _WORDS.get(bits, np.uint64)


def scratch(bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes_K, words_W): room for the codes of a block and 8 more, and the same bytes as words."""
    codes_K = np.empty(BLOCK + 8, np.uint16 if bits == 16 else np.uint8)
    return codes_K, codes_K.view(word_type(bits))


def _joins(bits: int, dim: int) -> tuple[tuple[np.uint64, np.uint64, np.uint64], ...]:
    """(shift, low, high) of three joins that squeeze a word of 8 / dim codes to 8 * bits bits.

    A join halves the number of lanes of a uint64: (w & low) | ((w & high) >> shift). One that finds
    a code which fills the word leaves it as it is.
    """
    joins = []
    for span in (8, 16, 32):  # width of the lanes that are joined in pairs
        held = bits * span // 8  # bits in use of a lane
        low = sum(((1 << held) - 1) << at for at in range(0, 64, 2 * span))
        shift, high = span - held, low << span
        if span < 8 * dim:
            shift, low, high = 0, (1 << 64) - 1, 0
        joins.append((np.uint64(shift), np.uint64(low), np.uint64(high)))
    return tuple(joins)


def _divisor_packer(bits: int) -> Any:
    """1, 2, 4 bits: a word of 8 / bits codes becomes one byte."""
    word: Any = word_type(bits)
    s1, s2, s3 = (word(k * (8 - bits)) for k in (1, 2, 4))
    per_byte = 8 // bits

    @helper
    def pack_block(words_W, n, out_B, at):  # type: ignore[no-untyped-def]
        wide()
        for j in range(np.uint64((n + per_byte - 1) // per_byte)):
            w = words_W[j]
            w = word(w | word(w >> s1))
            if bits <= 2:
                w = word(w | word(w >> s2))
            if bits == 1:
                w = word(w | word(w >> s3))
            out_B[at + j] = np.uint8(w)

    return pack_block


@cache
def word_packer(bits: int, dim: int = 1) -> Any:
    """Kernel (words_W, n, out_B, at): words of 8 values to packed bytes from `at` (uint64) on.

    A word is 8 / dim codes of dim * bits bits in lanes of 8 * dim bits; it becomes `bits` bytes.
    The last code is written whole. What is in a lane above its code must be 0.
    """
    (s1, low1, high1), (s2, low2, high2), (s3, low3, high3) = _joins(bits, dim)

    @helper
    def squeeze(w):  # type: ignore[no-untyped-def]
        w = np.uint64((w & low1) | ((w & high1) >> s1))
        w = np.uint64((w & low2) | ((w & high2) >> s2))
        return np.uint64((w & low3) | ((w & high3) >> s3))

    @helper
    def pack_block(words_W, n, out_B, at):  # type: ignore[no-untyped-def]
        wide()
        full = n // 8
        for j in range(np.uint64(full)):
            w = squeeze(words_W[j])
            for k in range(bits):
                out_B[at + j * np.uint64(bits) + np.uint64(k)] = np.uint8(w >> np.uint64(8 * k))
        if n % 8:
            w = squeeze(words_W[full])
            groups = (n % 8 + dim - 1) // dim
            for k in range((groups * dim * bits + 7) // 8):
                out_B[at + np.uint64(full * bits + k)] = np.uint8(w >> np.uint64(8 * k))

    return pack_block


def _byte_packer(bits: int) -> Any:
    """8 and 16 bits: the scratch holds the payload already."""

    @helper
    def pack_block(words_W, n, out_B, at):  # type: ignore[no-untyped-def]
        wide()
        for j in range(np.uint64(n * bits // 8)):
            out_B[at + j] = words_W[j]

    return pack_block


@cache
def block_packer(bits: int) -> Any:
    """Kernel (words_W, n, out_B, at): pack the first n <= BLOCK codes of the scratch.

    words_W : scratch seen as word_type(bits); codes from n to the next multiple of 8 are 0
    out_B   : uint8; packed_nbytes(n, bits) bytes from `at` (uint64) are overwritten
    """
    if bits in (8, 16):
        return _byte_packer(bits)
    return _divisor_packer(bits) if 8 % bits == 0 else word_packer(bits)


def _divisor_unpacker(bits: int) -> Any:
    word: Any = word_type(bits)
    s1, s2, s3 = (word(k * (8 - bits)) for k in (1, 2, 4))
    size = np.dtype(word).itemsize * 8
    m1, m2, m3 = (
        word(sum(((1 << bits * span // 8) - 1) << at for at in range(0, size, span)))
        for span in (8, 16, 32)
    )
    per_byte = 8 // bits

    @helper
    def unpack_block(in_B, at, n, words_W):  # type: ignore[no-untyped-def]
        wide()
        for j in range(np.uint64((n + per_byte - 1) // per_byte)):
            w = word(in_B[at + j])
            if bits == 1:
                w = word(word(w | word(w << s3)) & m3)
            if bits <= 2:
                w = word(word(w | word(w << s2)) & m2)
            words_W[j] = word(word(w | word(w << s1)) & m1)

    return unpack_block


@cache
def word_unpacker(bits: int, dim: int = 1) -> Any:
    """Kernel (in_B, at, n, words_W): inverse of `word_packer`."""
    (s1, low1, high1), (s2, low2, high2), (s3, low3, high3) = _joins(bits, dim)

    @helper
    def spread(w):  # type: ignore[no-untyped-def]
        w = np.uint64((w & low3) | ((w << s3) & high3))
        w = np.uint64((w & low2) | ((w << s2) & high2))
        return np.uint64((w & low1) | ((w << s1) & high1))

    @helper
    def unpack_block(in_B, at, n, words_W):  # type: ignore[no-untyped-def]
        wide()
        full = n // 8
        for j in range(np.uint64(full)):
            w = np.uint64(0)
            for k in range(bits):
                byte = in_B[at + j * np.uint64(bits) + np.uint64(k)]
                w = np.uint64(w | np.uint64(np.uint64(byte) << np.uint64(8 * k)))
            words_W[j] = spread(w)
        if n % 8:
            w = np.uint64(0)
            groups = (n % 8 + dim - 1) // dim
            for k in range((groups * dim * bits + 7) // 8):
                byte = in_B[at + np.uint64(full * bits + k)]
                w = np.uint64(w | np.uint64(np.uint64(byte) << np.uint64(8 * k)))
            words_W[full] = spread(w)

    return unpack_block


def _byte_unpacker(bits: int) -> Any:
    @helper
    def unpack_block(in_B, at, n, words_W):  # type: ignore[no-untyped-def]
        wide()
        for j in range(np.uint64(n * bits // 8)):
            words_W[j] = in_B[at + j]

    return unpack_block


@cache
def block_unpacker(bits: int) -> Any:
    """Kernel (in_B, at, n, words_W): inverse of `block_packer(bits)`."""
    if bits in (8, 16):
        return _byte_unpacker(bits)
    return _divisor_unpacker(bits) if 8 % bits == 0 else word_unpacker(bits)


@cache
def packer(bits: int) -> Any:
    """Kernel behind `pack_bits`, compiled at its first call."""
    pack_block = block_packer(bits)

    @kernel
    def pack(codes_N, codes_K, words_W, out_B):  # type: ignore[no-untyped-def]
        wide()
        N = codes_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            for i in range(np.uint64(n)):
                codes_K[i] = codes_N[at + i]
            codes_K[n : n + 7] = 0
            pack_block(words_W, n, out_B, np.uint64(start * bits // 8))

    return pack


@cache
def unpacker(bits: int) -> Any:
    """Kernel behind `unpack_bits`, compiled at its first call."""
    unpack_block = block_unpacker(bits)

    @kernel
    def unpack(in_B, codes_K, words_W, out_N):  # type: ignore[no-untyped-def]
        wide()
        N = out_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            unpack_block(in_B, np.uint64(start * bits // 8), n, words_W)
            for i in range(np.uint64(n)):
                out_N[at + i] = codes_K[i]

    return unpack


def pack_bits(codes_N: np.ndarray, bits: int, out_B: np.ndarray) -> None:
    """Write N codes of `bits` bits each, first code in the lowest bits, last byte padded with 0.

    codes_N : uint16, shape (N,)   every code < 2**bits; any stride
    bits    : int, 1..8 or 16
    out_B   : uint8, shape (B,)    B = packed_nbytes(N, bits); overwritten
    """
    packer(bits)(codes_N, *scratch(bits), out_B)


def unpack_bits(in_B: np.ndarray, bits: int, out_N: np.ndarray) -> None:
    """Read N codes of `bits` bits each; inverse of `pack_bits`.

    in_B  : uint8, shape (B,)    B = packed_nbytes(N, bits); any stride
    bits  : int, 1..8 or 16
    out_N : uint16, shape (N,)   overwritten
    """
    unpacker(bits)(in_B, *scratch(bits), out_N)
