"""Nearest points of the whole lattices A2, D4 and E8.

    A2   i (1, 0) + j (1/2, sqrt(3)/2)         minimum distance 1
    D4   integers with an even sum             minimum distance sqrt(2)
    E8   D8, and D8 + (1/2, .., 1/2)           minimum distance sqrt(2)

Conway & Sloane 1982, IEEE T-IT 28(2). All arithmetic is float64. A tie goes to some nearest point,
always the same one. Codes of a few bits are in lattice_code.py.

Legend: G groups, D coordinates.
"""

from __future__ import annotations

import math

import numpy as np

from hpcvfl.kernels.compiling import helper, kernel

_ROOT3 = math.sqrt(3)


@helper
def _rectangle(x, y, shift):  # type: ignore[no-untyped-def]
    """Nearest point of Z x sqrt(3) Z, moved by shift * (1, sqrt(3)), and its squared distance."""
    u = np.rint(x - shift) + shift
    v = (np.rint(y / _ROOT3 - shift) + shift) * _ROOT3
    return u, v, (x - u) * (x - u) + (y - v) * (y - v)


@kernel
def nearest_a2(x_GD, out_GD):  # type: ignore[no-untyped-def]
    """Nearest point of A2 to each row.

    x_GD   : float32 or float64, shape (G, 2)   below 2**22, or 2**50; any strides
    out_GD : float32 or float64, shape (G, 2)   overwritten; may be x_GD
    """
    for g in range(x_GD.shape[0]):
        x, y = np.float64(x_GD[g, 0]), np.float64(x_GD[g, 1])
        u, v, near = _rectangle(x, y, 0.0)
        s, t, other = _rectangle(x, y, 0.5)
        if other < near:
            u, v = s, t
        out_GD[g, 0], out_GD[g, 1] = u, v


@helper
def _even_sum(x_GD, g, shift):  # type: ignore[no-untyped-def]
    """(squared distance, coordinate, its way) of the nearest point of D_n + shift to row g.

    Every coordinate is rounded; if the sum is odd, `coordinate`, the one rounded by most, goes one
    way further (algorithm 2). The way is 0 if none has to move.
    """
    square, worst, at, way, total = 0.0, -1.0, 0, 0.0, 0.0
    for i in range(x_GD.shape[1]):
        u = np.float64(x_GD[g, i]) - shift
        d = np.rint(u)
        e = u - d
        square += e * e
        total += d
        if abs(e) > worst:
            worst, at, way = abs(e), i, 1.0 if e > 0.0 else -1.0
    if np.floor(total * 0.5) * 2.0 == total:
        return square, at, 0.0
    return square + 1.0 - 2.0 * worst, at, way


@helper
def _write(x_GD, g, shift, at, way, out_GD):  # type: ignore[no-untyped-def]
    for i in range(x_GD.shape[1]):
        d = np.rint(np.float64(x_GD[g, i]) - shift) + shift
        out_GD[g, i] = d + way if i == at else d


@kernel
def nearest_d4(x_GD, out_GD):  # type: ignore[no-untyped-def]
    """Nearest point of D4 to each row.

    x_GD   : float32 or float64, shape (G, 4)   below 2**22, or 2**50; any strides
    out_GD : float32 or float64, shape (G, 4)   overwritten; may be x_GD
    """
    for g in range(x_GD.shape[0]):
        _, at, way = _even_sum(x_GD, g, 0.0)
        _write(x_GD, g, 0.0, at, way, out_GD)


@kernel
def nearest_e8(x_GD, out_GD):  # type: ignore[no-untyped-def]
    """Nearest point of E8 to each row.

    x_GD   : float32 or float64, shape (G, 8)   below 2**21, or 2**49; any strides
    out_GD : float32 or float64, shape (G, 8)   overwritten; may be x_GD
    """
    for g in range(x_GD.shape[0]):
        near, at, way = _even_sum(x_GD, g, 0.0)
        other, at_half, way_half = _even_sum(x_GD, g, 0.5)
        if other < near:
            _write(x_GD, g, 0.5, at_half, way_half, out_GD)
        else:
            _write(x_GD, g, 0.0, at, way, out_GD)
