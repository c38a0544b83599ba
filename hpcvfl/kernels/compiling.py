"""How every kernel is compiled, and the block that all of them work in.

Serial, without the GIL, without fastmath (the same bits on every CPU) and without a cache on disk
(processes of one run would share it). Nothing is compiled before its first call.

Three habits keep the loops vectorised (each was worth a factor of 2 or more, bench/LOG.md):
every operation on 32-bit integers is cast back to 32 bits, because numba widens to 64; an inner
loop indexes a whole array with `at + i`, both unsigned, because a slice costs two atomic reference
counts and a signed index a test for negative ones; a clip is min(max()), because
`a if a > b else b` becomes masks.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload

# The wrapper switches are options of numba that its type stubs leave out.
kernel: Any = numba.njit(nogil=True, no_cfunc_wrapper=True)  # type: ignore[call-overload]

helper: Any = numba.njit(  # type: ignore[call-overload]
    nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True
)
"""For functions that only kernels call: no entry from Python, half the time to compile."""


@intrinsic
def _prefer_512_bits(context):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite's own `add` knows no attribute with a value
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), codegen


def wide() -> None:
    """Called in a loop's function: use 512-bit vectors where the processor has them.

    LLVM stops at 256 bits on most processors with AVX-512; these loops gain 20-35 % from wider ones
    (bench/LOG.md). The numbers are the same, and other processors ignore it.
    """


@overload(wide, inline="always")
def _wide() -> Any:
    return lambda: _prefer_512_bits()  # type: ignore[call-arg]


BLOCK = 2048
"""Values that a kernel handles at a time; scratch for them stays in the first-level cache."""

FINITE, IS_NAN, IS_INF = 0, 1, 2
"""Status of a scan: all finite, a NaN is there, an infinity (and no NaN) is there."""

_INF_BITS = np.uint32(0x7F800000)  # of +Inf; every NaN lies above, every finite |x| below


@helper
def status_of(worst):  # type: ignore[no-untyped-def]
    """Status from the largest bit pattern of |x| (uint32) that was seen."""
    if worst > _INF_BITS:
        return IS_NAN
    if worst == _INF_BITS:
        return IS_INF
    return FINITE
