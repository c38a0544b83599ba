"""Lattice codes: scale, find the nearest codeword of a book and pack its index, and back.

    encode   y    = (x - lo) * inv_step     lo, step: of the column
             code = index of the codeword nearest to a group of `dim` values y
    decode   x    = lo + y * step, y the codeword

in float32, one rounding per operation. For groups with all |y| <= FAR_OUT distances are compared in
float32: the codeword sent is the nearest, or its squared distance is larger by no more than 2**-19
of itself and 2**-19 of a step. For all others lattice_far.py finds the nearest one exactly.

Groups are consecutive values, row by row; the last one is filled up with y = 0. Eight values are
one word of 8 * bits bits: 4 codes of A2, 2 of D4, one of E8, lowest bits first, and the payload is
these words, cut to whole bytes behind the last group.

Legend: N values, C columns, T columns over and over, K values and G groups of a block, W words, B
bytes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from hpcvfl.kernels import lattice_e8
from hpcvfl.kernels.bits import word_packer, word_unpacker
from hpcvfl.kernels.compiling import BLOCK, helper, kernel, wide
from hpcvfl.kernels.lattice_book import Book
from hpcvfl.kernels.lattice_boxes import boxes_2, boxes_4, points_2, points_4
from hpcvfl.kernels.lattice_far import FAR_OUT, correct_far

_LOW, _HIGH = np.float32(-FAR_OUT), np.float32(FAR_OUT)


def code_nbytes(n: int, dim: int, bits: int) -> int:
    """Bytes of the codes of n values: whole groups, padded to a byte once."""
    return (-(-n // dim) * dim * bits + 7) // 8


def code_type(dim: int) -> Any:
    """Type of a code in scratch: wide enough for 8 bits a value."""
    return {2: np.uint16, 4: np.uint32, 8: np.uint64}[dim]


def scratch(dim: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any]:
    """(y_K, codes_G, words_W, room): scaled values of a block and up to 7 more, its codes, the same
    bytes as words, and what the kernels of `dim` need besides.
    """
    words_W = np.zeros(BLOCK // 8, np.uint64)
    room = lattice_e8.scratch() if dim == 8 else ()
    return np.zeros(BLOCK + 8, np.float32), words_W.view(code_type(dim)), words_W, room


_QUANTISERS: dict[int, Any] = {2: boxes_2, 4: boxes_4, 8: lattice_e8.boxes_8}
"""By dimension: makes the kernel (y_K, G, codes_G, room, x_N, ahead) that finds the indices of G
groups, and meanwhile fetches the block of x_N from `ahead` on.
"""

_LOCATORS: dict[int, Any] = {2: points_2, 4: points_4, 8: lattice_e8.points_8}
"""By dimension: makes the kernel (codes_G, G, y_K, room, out_N, ahead), its inverse."""


@helper
def _scale(x_N, at, n, lo_T, inv_step_T, column, y_K):  # type: ignore[no-untyped-def]
    """n values from `at` on to y; the first one is of column `column`. Whether any is far out."""
    wide()
    far = np.uint32(0)
    for i in range(np.uint64(n)):
        y = (x_N[at + i] - lo_T[column + i]) * inv_step_T[column + i]
        cut = min(max(y, _LOW), _HIGH)
        far = np.uint32(far | np.uint32(cut != y))
        y_K[i] = cut
    return far != np.uint32(0)


@helper
def _unscale(y_K, n, lo_T, step_T, column, out_N, at):  # type: ignore[no-untyped-def]
    """Inverse of `_scale`."""
    wide()
    for i in range(np.uint64(n)):
        out_N[at + i] = lo_T[column + i] + y_K[i] * step_T[column + i]


@cache
def encoder(book: Book) -> Any:
    """Kernel behind `encode_lattice`, compiled at its first call."""
    dim, bits = book.dim, book.bits
    quantise, write = _QUANTISERS[dim](book), word_packer(bits, dim)

    @kernel
    def encode(x_N, C, lo_T, inv_step_T, y_K, codes_G, words_W, room, far_J, out_B):  # type: ignore[no-untyped-def]
        N = x_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            far_J[start // BLOCK] = _scale(x_N, at, n, lo_T, inv_step_T, np.uint64(start % C), y_K)
            y_K[n : n + 7] = 0
            quantise(y_K, (n + dim - 1) // dim, codes_G, room, x_N, at + np.uint64(BLOCK))
            write(words_W, n, out_B, np.uint64(start * bits // 8))

    return encode


@cache
def decoder(book: Book) -> Any:
    """Kernel behind `decode_lattice`, compiled at its first call."""
    dim, bits = book.dim, book.bits
    locate, read = _LOCATORS[dim](book), word_unpacker(bits, dim)

    @kernel
    def decode(in_B, C, lo_T, step_T, y_K, codes_G, words_W, room, out_N):  # type: ignore[no-untyped-def]
        N = out_N.shape[0]
        for start in range(0, N, BLOCK):
            n, at = min(BLOCK, N - start), np.uint64(start)
            read(in_B, np.uint64(start * bits // 8), n, words_W)
            locate(codes_G, (n + dim - 1) // dim, y_K, room, out_N, at + np.uint64(BLOCK))
            _unscale(y_K, n, lo_T, step_T, np.uint64(start % C), out_N, at)

    return decode


def _columns(lo_C: np.ndarray, step_C: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """(C, lo_T, step_T): the columns over and over, for a block that starts at any of them.

    A loop over these has one length for a matrix of any width; one that went row by row cost a call
    a row.
    """
    times = BLOCK // len(lo_C) + 2
    return len(lo_C), np.tile(lo_C, times), np.tile(step_C, times)


def encode_lattice(
    x_N: np.ndarray, lo_C: np.ndarray, inv_step_C: np.ndarray, book: Book, out_B: np.ndarray
) -> None:
    """Quantise and pack N finite values, row by row; value n is of column n % C.

    x_N        : float32, shape (N,)   any stride
    lo_C       : float32, shape (C,)   value of the book's origin, C >= 1
    inv_step_C : float32, shape (C,)   1 / unit of length, 0 if all values of a column are equal
    out_B      : uint8, shape (code_nbytes(N, book.dim, book.bits),)   overwritten
    """
    columns, far_J = _columns(lo_C, inv_step_C), np.zeros(-(-len(x_N) // BLOCK), np.bool_)
    encoder(book)(x_N, *columns, *scratch(book.dim), far_J, out_B)
    if far_J.any():
        correct_far(x_N, far_J, columns, book, out_B)


def decode_lattice(
    in_B: np.ndarray, lo_C: np.ndarray, step_C: np.ndarray, book: Book, out_N: np.ndarray
) -> None:
    """Unpack and scale N values; inverse of `encode_lattice`.

    in_B   : uint8, shape (code_nbytes(N, book.dim, book.bits),)   any bytes decode to codewords
    lo_C   : float32, shape (C,)   value of the book's origin, C >= 1
    step_C : float32, shape (C,)   unit of length
    out_N  : float32, shape (N,)   overwritten
    """
    decoder(book)(in_B, *_columns(lo_C, step_C), *scratch(book.dim), out_N)
