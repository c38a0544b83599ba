"""Bits and numbers one behind the other in bytes: the lowest bit of a byte comes first.

Numbers are in exponential Golomb codes (Teuhola 1978): v >= 0 of order m is v + 2**m, with as many
zeros before its leading one as there are binary places above m; the places follow, lowest first.

Legend: B bytes, R rows, C columns.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.kernels.compiling import helper, kernel

_U = np.uint64
_ONE = np.int64(1)  # a bare 1 would be a type of its own, and compiled apart


@helper
def put_bits(raw_B, at, value, n):  # type: ignore[no-untyped-def]
    """Write the low n <= 62 bits of `value` at bit `at` of bytes that are 0 from there on."""
    while n > 0:
        shift = at & 7
        raw_B[_U(at >> 3)] |= np.uint8(((value & ((1 << n) - 1)) << shift) & 255)
        done = min(8 - shift, n)
        value >>= done
        at += done
        n -= done
    return at


@helper
def get_bits(raw_B, at, n):  # type: ignore[no-untyped-def]
    """Read n <= 32 bits at bit `at`; 0 where the bytes end."""
    value, got = 0, 0
    if at + n > 8 * raw_B.shape[0]:
        return 0
    while got < n:
        shift = at & 7
        value |= (np.int64(raw_B[_U(at >> 3)]) >> shift) << got
        got += 8 - shift
        at += 8 - shift
    return value & ((1 << n) - 1)


@kernel
def put_number(raw_B, at, value, order):  # type: ignore[no-untyped-def]
    """Write value >= 0 in the exponential Golomb code of `order`; returns the bit after it.

    value < 2**31 - 2**order
    """
    value += 1 << order
    n = 0
    while value >> (n + 1):
        n += 1
    places = value & ((1 << n) - 1)
    return put_bits(raw_B, at, (1 | places << 1) << (n - order), 2 * n - order + 1)


@kernel
def get_number(raw_B, at, order):  # type: ignore[no-untyped-def]
    """(value, the bit after it) of an exponential Golomb code; at most 2**31, whatever is there."""
    zeros = 0
    while zeros + order < 30 and at < 8 * raw_B.shape[0] and not get_bits(raw_B, at, _ONE):
        zeros += 1
        at += 1
    n = zeros + order
    value = get_bits(raw_B, at + 1, n) | (1 << n)
    return value - (1 << order), at + 1 + n


@kernel
def put_rows(value_RC, order_R, raw_B, at):  # type: ignore[no-untyped-def]
    """Write signed numbers, 0, -1, 1, -2, .. as 0, 1, 2, 3, ..; returns the bit after them.

    value_RC : int64, |value| < 2**30
    order_R  : int64, order of the code of each row
    raw_B    : uint8, zeros from bit `at` on, long enough for 64 bits a number
    """
    for r in range(value_RC.shape[0]):
        for c in range(value_RC.shape[1]):
            v = value_RC[r, c]
            at = put_number(raw_B, at, 2 * v if v >= 0 else -2 * v - 1, order_R[r])
    return at


@kernel
def get_rows(raw_B, at, order_R, out_RC):  # type: ignore[no-untyped-def]
    """Read what `put_rows` wrote into out_RC (int64); any bytes give numbers within 2**30."""
    for r in range(out_RC.shape[0]):
        for c in range(out_RC.shape[1]):
            v, at = get_number(raw_B, at, order_R[r])
            out_RC[r, c] = (v >> 1) ^ -(v & 1)
    return at
