"""Position of the lowest and of the highest set bit of a word, one instruction each."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic, overload


def _zeros_intrinsic(instruction: str) -> Any:
    """Zeros behind the lowest set bit ("cttz") or before the highest one ("ctlz")."""

    @intrinsic
    def count_zeros(context, word):  # type: ignore[no-untyped-def]
        def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
            zeros = getattr(builder, instruction)(
                args[0], context.get_constant(types.boolean, False)
            )
            wide = context.get_value_type(types.int64)
            return zeros if zeros.type == wide else builder.zext(zeros, wide)

        return types.int64(word), codegen

    return count_zeros


_trailing_zeros, _leading_zeros = _zeros_intrinsic("cttz"), _zeros_intrinsic("ctlz")


def lowest_one(word: Any) -> int:
    """Index of the lowest set bit of a uint32 or uint64 that is not 0."""
    return (int(word) & -int(word)).bit_length() - 1


@overload(lowest_one, inline="always")
def _lowest_one(word):  # type: ignore[no-untyped-def]
    return lambda word: _trailing_zeros(word)


def highest_one(word: Any) -> int:
    """Index of the highest set bit of a uint32 or uint64 that is not 0."""
    return int(word).bit_length() - 1


@overload(highest_one, inline="always")
def _highest_one(word):  # type: ignore[no-untyped-def]
    last = word.bitwidth - 1
    return lambda word: last - _leading_zeros(word)
