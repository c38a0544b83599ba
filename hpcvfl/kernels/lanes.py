"""Rows of a message to the lanes of a block of the trellis, and back; and a change of basis.

A block takes `num_rows` rows of K columns; lane i has rows i * depth .. (i + 1) * depth - 1 of
them, one behind the other, where depth = ceil(num_rows / LANES). Value t * LANES + i of a block is
step t of lane i, which is column t % K of its row t // K.

Products and sums of float32, one rounding each, in the order of the code: the same everywhere.

Legend: R rows, C columns of a message, K columns that are coded, N values of a block.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import helper, kernel, wide
from hpcvfl.kernels.trellis import LANES

_F, _U = np.float32, np.uint64
_REACH = _F(2.0**20)  # farthest value in steps; exact as float32, with room for two quantisers


@kernel
def load_block(x_RC, first, num_rows, column_K, centre_K, inverse, u_N):  # type: ignore[no-untyped-def]
    """Write (x - centre) * inverse of some rows and columns, 0 where a lane has no row.

    x_RC     : float32, C-contiguous
    first    : first of the num_rows rows
    column_K : int64, columns that are coded; centre_K : float32
    inverse  : float32, 1 / D
    u_N      : float32, overwritten, within 2**20; N = depth * K * LANES
    """
    K = column_K.shape[0]
    depth = u_N.shape[0] // (K * LANES)
    for i in range(LANES):
        rows = min(max(num_rows - i * depth, 0), depth)
        if K == 1:  # a third of the time of the loops below
            column, centre = _U(column_K[0]), centre_K[0]
            for r in range(rows):
                u = _F(_F(x_RC[_U(first + i * depth + r), column] - centre) * inverse)
                u_N[_U(r * LANES + i)] = min(max(u, -_REACH), _REACH)
            for r in range(rows, depth):
                u_N[_U(r * LANES + i)] = _F(0)
            continue
        for r in range(depth):
            row = i * depth + r
            at = r * K * LANES + i
            if r < rows:
                for j in range(K):
                    u = _F(_F(x_RC[_U(first + row), _U(column_K[j])] - centre_K[j]) * inverse)
                    u_N[_U(at)] = min(max(u, -_REACH), _REACH)
                    at += LANES
            else:
                for _ in range(K):
                    u_N[_U(at)] = _F(0)
                    at += LANES


@kernel
def store_block(level_N, first, num_rows, step, column_K, centre_K, out_RC):  # type: ignore[no-untyped-def]
    """Write centre + level * step of the columns that are coded; inverse of `load_block`.

    level_N : int32
    step    : float32, D
    out_RC  : float32, C-contiguous; only the coded columns of the block's rows are overwritten
    """
    K = column_K.shape[0]
    depth = level_N.shape[0] // (K * LANES)
    for i in range(LANES):
        for r in range(depth):
            row = i * depth + r
            if row < num_rows:
                at = r * K * LANES + i
                for j in range(K):
                    value = _F(_F(level_N[_U(at)]) * step)
                    out_RC[_U(first + row), _U(column_K[j])] = _F(centre_K[j] + value)
                    at += LANES


@helper
def _add_four(y_RK, r, basis_KC, j, out_RC):  # type: ignore[no-untyped-def]
    """Rows j .. j + 3 of the basis at once: a row of the result is read and written once for them,
    which takes a third of the time.
    """
    wide()
    y0, y1 = y_RK[r, j], y_RK[r, j + _U(1)]
    y2, y3 = y_RK[r, j + _U(2)], y_RK[r, j + _U(3)]
    for c in range(_U(out_RC.shape[1])):
        sum1 = _F(out_RC[r, c] + _F(y0 * basis_KC[j, c]))
        sum2 = _F(sum1 + _F(y1 * basis_KC[j + _U(1), c]))
        sum3 = _F(sum2 + _F(y2 * basis_KC[j + _U(2), c]))
        out_RC[r, c] = _F(sum3 + _F(y3 * basis_KC[j + _U(3), c]))


@helper
def _add_one(y_RK, r, basis_KC, j, out_RC):  # type: ignore[no-untyped-def]
    wide()
    y = y_RK[r, j]
    for c in range(_U(out_RC.shape[1])):
        out_RC[r, c] = _F(out_RC[r, c] + _F(y * basis_KC[j, c]))


@kernel
def expand_rows(y_RK, basis_KC, out_RC):  # type: ignore[no-untyped-def]
    """Add sum_j y_j * basis_j to each row, j upwards.

    y_RK, basis_KC : float32
    out_RC         : float32, C-contiguous; added to
    """
    K = y_RK.shape[1]
    for r in range(_U(y_RK.shape[0])):
        for j in range(0, K - K % 4, 4):
            _add_four(y_RK, r, basis_KC, _U(j), out_RC)
        for j in range(K - K % 4, K):
            _add_one(y_RK, r, basis_KC, _U(j), out_RC)
