"""What a bit of an index costs in the path of `best`: parabolas through the bits of its tables.

Legend: K columns, X tables (2 * column + quantiser), E entries of a table, F frequencies.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import kernel
from hpcvfl.kernels.counts import NUM_SYMBOLS, PLACES, ZERO
from hpcvfl.kernels.trellis import PRICES

_BITS_F = PLACES - np.log2(np.maximum(np.arange(2**PLACES + 1), 1))
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
    out_P = np.empty(PRICES * len(low_K), np.float32)
    _fit(table_XE, low_K, _BITS_F, float(factor), out_P)
    return out_P


@kernel
def _fit(table_XE, low_K, bits_F, factor, out_P):  # type: ignore[no-untyped-def]
    """The fit of every table: four prices of table x in out_P[4 x ..], PRICES a column."""
    # In numpy this took a quarter of the encoder's time (bench/LOG.md): the arrays are small.
    for x in range(table_XE.shape[0]):
        low = low_K[x >> 1]
        wide = np.float64(1 << low)
        s0 = s1 = s2 = v0 = 0.0
        for e in range(1, NUM_SYMBOLS):
            share = np.int64(table_XE[x, e + 1]) - np.int64(table_XE[x, e])
            w = 0.0 if low == 0 and e == ZERO else np.float64(share)
            m = abs((e - ZERO) * wide + (wide - 1) / 2)
            s0 += w
            s1 += w * m
            s2 += w * m * m
            v0 += w * (bits_F[share] + low)
        m1, m2, v0 = s1 / s0, s2 / s0, v0 / s0
        a = b = c = w1 = w2 = 0.0
        for e in range(1, NUM_SYMBOLS):
            share = np.int64(table_XE[x, e + 1]) - np.int64(table_XE[x, e])
            w = 0.0 if low == 0 and e == ZERO else np.float64(share)
            m = abs((e - ZERO) * wide + (wide - 1) / 2)
            d1, d2, dv = m - m1, m * m - m2, bits_F[share] + low - v0
            a += w * d1 * d1
            b += w * d1 * d2
            c += w * d2 * d2
            w1 += w * d1 * dv
            w2 += w * d2 * dv
        bend = max(0.0, (w2 - w1 * b / a) / (c - b * b / a))
        slope = (w1 - bend * b) / a
        if slope < 0 and bend == 0:
            slope = 0.0
        base = v0 - slope * m1 - bend * m2
        zero = bits_F[np.int64(table_XE[x, ZERO + 1]) - np.int64(table_XE[x, ZERO])]
        out_P[4 * x] = factor * (zero if low == 0 else base)
        out_P[4 * x + 1] = factor * base
        out_P[4 * x + 2] = factor * slope
        out_P[4 * x + 3] = factor * bend
