"""What a bit of an index costs in the path of `best`: parabolas through the bits of its tables.

Legend: K columns, X tables (2 * column + quantiser), E entries of a table.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.counts import NUM_SYMBOLS, PLACES, ZERO

_BITS = PLACES - np.log2(np.maximum(np.arange(2**PLACES + 1), 1))
"""Bits of a frequency."""


def prices_of(table_XE: np.ndarray, low_K: np.ndarray, factor: float) -> np.ndarray:
    """Prices for trellis.find_path, float32, by least squares weighted by frequency.

    table_XE : uint16, as in counts.Model
    low_K    : int32, low bits of each column
    factor   : price of a bit, in squared steps

    Bits of symbols 1..15 against |k| in the middle of what a symbol stands for. Index 0 has a price
    of its own where it is a symbol. A parabola that bends down would make the farthest index the
    cheapest: then it is a line, and a line that falls is flat.
    """
    share = np.diff(table_XE[:, : NUM_SYMBOLS + 1].astype(np.int64))[:, 1:]
    low_X1 = np.repeat(low_K, 2)[:, None]
    wide = 2.0**low_X1
    m = np.abs(np.arange(1 - ZERO, NUM_SYMBOLS - ZERO) * wide + (wide - 1) / 2)
    bits = _BITS[share] + low_X1
    zero = bits[:, ZERO - 1].copy()
    weight = share.astype(np.float64)
    weight[:, ZERO - 1][low_X1[:, 0] == 0] = 0
    s0 = weight.sum(axis=1)
    m1, m2 = (weight * m).sum(axis=1) / s0, (weight * m * m).sum(axis=1) / s0
    v0 = (weight * bits).sum(axis=1) / s0
    d1, d2, dv = m - m1[:, None], m * m - m2[:, None], bits - v0[:, None]
    a, b, c = ((weight * p).sum(axis=1) for p in (d1 * d1, d1 * d2, d2 * d2))
    w1, w2 = (weight * d1 * dv).sum(axis=1), (weight * d2 * dv).sum(axis=1)
    bend = np.maximum(0, (w2 - w1 * b / a) / (c - b * b / a))
    slope = (w1 - bend * b) / a
    slope = np.where((slope < 0) & (bend == 0), 0, slope)
    base = v0 - slope * m1 - bend * m2
    first = np.where(low_X1[:, 0] == 0, zero, base)
    return (factor * np.stack([first, base, slope, bend], axis=1)).astype(np.float32).reshape(-1)
