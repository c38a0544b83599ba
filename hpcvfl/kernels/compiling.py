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
from llvmlite import ir
from numba import types
from numba.core import cgutils
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


def _prefetch_intrinsic(write: int) -> Any:
    @intrinsic
    def prefetch_line(context, array, index):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
            call = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
            address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
            builder.call(call, [address, word(write), word(3), word(1)])  # keep, data cache
            return context.get_dummy_value()

        return types.void(array, types.uint64), codegen

    return prefetch_line


_READ_LINE, _WRITE_LINE = _prefetch_intrinsic(0), _prefetch_intrinsic(1)


def prefetch_read(array_N: Any, first: Any, count: Any = BLOCK) -> None:
    """Ask for the `count` 4-byte values from `first` on, to be read soon; only a hint.

    More than a few lines at once make a core wait for them; a long computation does better to ask
    for some between its steps (bench/LOG.md).
    """


def prefetch_write(array_N: Any, first: Any, count: Any = BLOCK) -> None:
    """Like `prefetch_read`, for values to be written soon."""


def _prefetcher(fetch: Any) -> Any:
    def implement(array_N, first, count=BLOCK):  # type: ignore[no-untyped-def]
        if array_N.layout != "C":
            return lambda array_N, first, count=BLOCK: None

        def lines(array_N, first, count=BLOCK):  # type: ignore[no-untyped-def]
            for j in range(np.uint64(count // 16)):
                fetch(array_N, first + j * np.uint64(16))

        return lines

    return implement


overload(prefetch_read)(_prefetcher(_READ_LINE))
overload(prefetch_write)(_prefetcher(_WRITE_LINE))


def prefetch_row(array_RC: Any, row: Any) -> None:
    """Ask for row `row` (uint64) of a matrix, to be read and written soon; only a hint."""


@overload(prefetch_row)
def _row_prefetcher(array_RC, row):  # type: ignore[no-untyped-def]
    if array_RC.layout != "C":
        return lambda array_RC, row: None
    step = 64 // (array_RC.dtype.bitwidth // 8)  # values of a cache line

    def lines(array_RC, row):  # type: ignore[no-untyped-def]
        C = array_RC.shape[1]
        for c in range(np.uint64(0), np.uint64(C), np.uint64(step)):
            _WRITE_LINE(array_RC, row * np.uint64(C) + c)

    return lines


FAR = 1 << 19
"""Values from which on a message does not stay in a second-level cache, so that blocks are fetched
one ahead: 30-40 % faster at 64 MiB, 20-25 % slower where all is near (bench/LOG.md)."""

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
