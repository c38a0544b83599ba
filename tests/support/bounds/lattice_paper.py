"""Radius of a cell of the lattice, 1/sqrt(3) of its minimum distance, times the scale."""

import numpy as np

GAP = {2: np.sqrt(2) / 4, 3: np.sqrt(2) / 8.5, 4: np.sqrt(2) / 19}


def bound(codec, x):
    if not x.size:
        return 0.0
    scale = x.max() if x.max() > 0 else x.min()
    return abs(float(scale)) * GAP[codec.bits] / np.sqrt(3) * 1.001 + 1e-5 * np.abs(x).max() + 1e-6
