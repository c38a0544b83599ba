"""One level; with contract, one shorter level and the part of the value that is taken away."""

import numpy as np


def bound(codec, x):
    if not x.size:
        return 0.0
    flat, s = x.reshape(-1).astype(np.float64), 2 ** (codec.bits - 1) - 1
    size = min(codec.bucket or flat.size, flat.size)
    worst = 0.0
    for start in range(0, flat.size, size):
        part = flat[start : start + size]
        norm = np.sqrt((part**2).sum()) if codec.norm == "l2" else np.abs(part).max()
        n = part.size
        tau = 1 + min(n / s**2, np.sqrt(n) / s) if codec.contract else 1.0
        worst = max(worst, norm / s / tau + np.abs(part).max() * (1 - 1 / tau))
    return worst * 1.00001 + 1e-25
