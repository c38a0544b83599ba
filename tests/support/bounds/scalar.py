"""Half a step, a whole one if dithered; beyond the range, the distance to it as well."""

import numpy as np

from hpcvfl.codecs.scalar import GAUSS_STEP


def bound(codec, x):
    levels = 2**codec.bits - 1
    if codec.fixed:
        lo, hi = codec.fixed
        outside = np.maximum(np.maximum(lo - x, x - hi), 0).max(initial=0)
        return outside + (hi - lo) / levels * (1 if codec.dither else 0.5) + 1e-5
    spread = x.max(initial=0) - x.min(initial=0)
    if codec.kind == "gauss":
        if not x.size:
            return 0.0
        grouped = x.reshape(-1, x.shape[-1] if codec.scope == "column" and x.ndim > 1 else 1)
        step = GAUSS_STEP[codec.bits] * grouped.std(axis=0)
        reach = levels / 2 * step
        outside = np.maximum(np.abs(grouped - grouped.mean(axis=0)) - reach, 0)
        return float((outside + step * (1 if codec.dither else 0.5)).max()) * 1.001 + 1e-5
    return spread / levels * (1 if codec.dither else 0.5) * 1.001 + 1e-5
