"""How every kernel is compiled, and the block that all of them work in.

Serial, without the GIL, without fastmath (the same bits on every CPU) and without a cache on disk
(processes of one run would share it). Nothing is compiled before its first call.
"""

from __future__ import annotations

import numba
import numpy as np

kernel = numba.njit(nogil=True)

BLOCK = 1024
"""Values that a kernel handles at a time: its scratch (8 KiB) stays in the first-level cache."""

HALF = BLOCK // 2
"""One 32-bit hash dithers two values of a block that are HALF apart (see dither.py)."""

FINITE, IS_NAN, IS_INF = 0, 1, 2
"""Status of a scan: all finite, a NaN is there, an infinity (and no NaN) is there."""

_INF_BITS = np.uint32(0x7F800000)  # of +Inf; every NaN lies above, every finite |x| below


@kernel
def status_of(worst):  # type: ignore[no-untyped-def]
    """Status from the largest bit pattern of |x| (uint32) that was seen."""
    if worst > _INF_BITS:
        return IS_NAN
    if worst == _INF_BITS:
        return IS_INF
    return FINITE
