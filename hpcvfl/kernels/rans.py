"""Entropy coder of trellis indices: asymmetric numeral systems with counted frequencies.

Symbols (counts.py) go through rANS (Duda 2013, arXiv 1311.2540): states of 32 bits, renewed 16 bits
at a time, frequencies in 2**14ths, lane i in state i % num_states. Words stand so that the decoder
reads backwards from the end of the payload; low bits, and what follows an escape, stand in front
(golomb.py). What lies between is zero.

Legend: N values of a block, L lanes, K columns, B bytes, W words, S states, X and Y tables.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from hpcvfl.kernels.compiling import helper, kernel
from hpcvfl.kernels.counts import (
    ESCAPE,
    NUM_SYMBOLS,
    PLACES,
    PLOTS,
    TOTAL,
    WIDTH,
    ZERO,
    count_fine,
    make_coarse,
    next_plot,
    tick,
)
from hpcvfl.kernels.golomb import get_bits, get_number, put_bits, put_number
from hpcvfl.kernels.trellis import LANES, level, next_state

LARGEST = 1 << 22
"""No index is decoded beyond this."""

_LOWEST = 1 << 16  # of a state between two symbols
_I, _U, _W = np.int32, np.uint64, np.uint32
_ONE, _TWO = np.int64(1), np.int64(2)  # a bare 1 would be a type of its own, and compiled apart


@kernel
def model_block(k_N, path_N, num_rows, model, plot_L, op_N, raw_B, raw_at):  # type: ignore[no-untyped-def]
    """First pass over a block: count, and write down what the coder does with each symbol.

    k_N, path_N : as find_path left them; step r * K + j is column j of the lanes' row r
    num_rows    : rows of the block; lane i has rows i * depth .. (i + 1) * depth - 1, the last
                  lanes fewer, where depth = N / (K * LANES)
    model       : Model, overwritten
    plot_L      : int64, shape (LANES,), scratch
    op_N        : uint32, overwritten: below | frequency << 16; 0 where a lane has no row
    raw_B       : uint8, zeros from bit raw_at on, long enough for 64 bits a value
    Returns the bit after the last one written.
    """
    # Reaching into a tuple for an array counts references, which costs more than all else here.
    low_K, axis_2, prior_X16, count_X16, table_XE, clock_2, fine_Y16, fine_YE = model
    K = low_K.shape[0]
    depth = k_N.shape[0] // (K * LANES)
    plots = fine_YE.shape[0] > 0
    for r in range(depth):
        lanes = min(LANES, (num_rows - r + depth - 1) // depth)
        for j in range(K):
            at = (r * K + j) * LANES
            low = np.int64(low_K[j])
            for i in range(lanes):
                k = k_N[_U(at + i)]
                x = _U(2 * j + (path_N[_U(at + i)] & 1))
                e = k >> low
                symbol = _U(e + ZERO) if -ZERO < e < ZERO else _U(ESCAPE)
                below, above = table_XE[x, symbol], table_XE[x, symbol + _U(1)]
                count_X16[x, symbol] += _I(1)
                if plots:
                    plot = plot_L[i]
                    if j > 0:
                        y = _U(x * _U(PLOTS) + _U(plot))
                        if fine_Y16[y, NUM_SYMBOLS - 1] > 0:
                            below = fine_YE[y, symbol]
                            above = fine_YE[y, symbol + _U(1)]
                        count_fine(fine_Y16, fine_YE, y, table_XE, x, symbol)
                    plot_L[i] = next_plot(j, k, plot, axis_2)
                op_N[_U(at + i)] = _W(_W(below) | _W(_W(_W(above) - _W(below)) << _W(16)))
                if low > 0:
                    raw_at = put_bits(raw_B, raw_at, np.int64(k), low)
                if symbol == _U(ESCAPE):
                    raw_at = put_bits(raw_B, raw_at, np.int64(e < 0), _ONE)
                    raw_at = put_number(raw_B, raw_at, np.int64(abs(e) - ZERO), _TWO)
            for i in range(lanes, LANES):
                op_N[_U(at + i)] = _W(0)
        if tick(clock_2):
            make_coarse(count_X16, prior_X16, table_XE)
    return raw_at


@kernel
def code_block(op_N, num_states, state_S, word_W):  # type: ignore[no-untyped-def]
    """Second pass, backwards: symbols to words; returns how many.

    op_N    : uint32, as model_block left it
    state_S : uint32, shape (4,), scratch; num_states is 1, 2 or 4
    word_W  : uint16, at least N + 8 long; overwritten, the last word to be read first
    """
    mask = num_states - 1
    n = 0
    for i in range(num_states):
        state_S[i] = _W(_LOWEST)
    for i in range(op_N.shape[0] - 1, -1, -1):
        op = op_N[_U(i)]
        if op:
            below, share = _W(op & _W(0xFFFF)), _W(op >> _W(16))
            x = state_S[_U(i & mask)]
            long = np.int64(_U(x) >= _U(share) << _U(32 - PLACES))
            word_W[_U(n)] = np.uint16(x)
            x = _W(x >> _W(16)) if long else x
            n += long
            whole = _W(x // share)
            state_S[_U(i & mask)] = _W(
                _W(_W(whole << _W(PLACES)) + _W(x - _W(whole * share))) + below
            )
    for i in range(num_states - 1, -1, -1):
        word_W[n] = np.uint16(state_S[i])
        word_W[n + 1] = np.uint16(state_S[i] >> _W(16))
        n += 2
    return n


@helper
def _next_word(payload_B, at):  # type: ignore[no-untyped-def]
    """The word that ends before byte `at`, or the first one; payloads have at least 2 bytes."""
    at = max(at, 2)
    return _W(_W(payload_B[_U(at - 2)]) | _W(_W(payload_B[_U(at - 1)]) << _W(8)))


def symbol_of(table_XE: np.ndarray, x: int, slot: int) -> int:
    """How many of entries 1..16 of table x are not above `slot`: the symbol that has it."""
    return int((table_XE[x, 1 : NUM_SYMBOLS + 1] <= slot).sum())


@intrinsic
def _symbol(context, table_XE, x, slot):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        vector = ir.VectorType(ir.IntType(16), NUM_SYMBOLS)
        start = builder.add(builder.mul(args[1], args[1].type(WIDTH)), args[1].type(1))
        load = builder.load(builder.bitcast(builder.gep(data, [start]), vector.as_pointer()))
        load.align = 2
        slots = ir.Constant(vector, ir.Undefined)
        for i in range(NUM_SYMBOLS):
            slots = builder.insert_element(slots, args[2], ir.IntType(32)(i))
        mask = builder.bitcast(builder.icmp_signed("<=", load, slots), ir.IntType(16))
        return builder.zext(builder.ctpop(mask), ir.IntType(64))

    return types.uint64(table_XE, types.uint64, types.uint16), codegen


@overload(symbol_of, inline="always")
def _symbol_of(table_XE, x, slot):  # type: ignore[no-untyped-def]
    """One comparison of 16 entries at once: LLVM makes 15 of the loop. TOTAL fits into int16."""
    return lambda table_XE, x, slot: _symbol(table_XE, x, slot)  # type: ignore[call-arg]


@kernel
def decode_block(  # type: ignore[no-untyped-def]
    payload_B,
    word_at,
    raw_at,
    num_rows,
    model,
    halves,
    num_states,
    state_S,
    path_L,
    plot_L,
    level_N,
):
    """Inverse of find_path, model_block and code_block: levels of a block in steps D.

    payload_B : uint8, any bytes
    word_at   : byte before which the next word ends
    raw_at    : next of the bits that stand in front
    model     : Model, overwritten as by model_block
    halves    : bool, inverse of find_halves
    state_S   : uint32, shape (4,), scratch
    path_L    : int32, shape (LANES,), scratch; plot_L: int64, the same
    level_N   : int32, overwritten, 0 where a lane has no row, |level| <= 2 * LARGEST
    Returns (word_at, raw_at) after the block; negative, or past the end, if the payload was cut.
    """
    # Reaching into a tuple for an array counts references, which costs more than all else here.
    low_K, axis_2, prior_X16, count_X16, table_XE, clock_2, fine_Y16, fine_YE = model
    K = low_K.shape[0]
    depth = level_N.shape[0] // (K * LANES)
    plots = fine_YE.shape[0] > 0
    mask = num_states - 1
    for i in range(num_states):
        high = _next_word(payload_B, word_at)
        state_S[i] = _W(_next_word(payload_B, word_at - 2) | _W(high << _W(16)))
        word_at -= 4
    path_L[:] = 0
    for r in range(depth):
        lanes = min(LANES, (num_rows - r + depth - 1) // depth)
        for j in range(K):
            at = (r * K + j) * LANES
            low = np.int64(low_K[j])
            for i in range(lanes):
                way = path_L[_U(i)]
                quantiser = _I(way & _I(1))
                x = _U(2 * j + quantiser)
                y = _U(0)
                fine = False
                if plots and j > 0:
                    y = _U(x * _U(PLOTS) + _U(plot_L[i]))
                    fine = fine_Y16[y, NUM_SYMBOLS - 1] > 0
                state = state_S[_U(i & mask)]
                slot = np.uint16(state & _W(TOTAL - 1))
                if fine:
                    symbol = symbol_of(fine_YE, y, slot)
                    below = _W(fine_YE[y, symbol])
                    above = _W(fine_YE[y, symbol + _U(1)])
                else:
                    symbol = symbol_of(table_XE, x, slot)
                    below = _W(table_XE[x, symbol])
                    above = _W(table_XE[x, symbol + _U(1)])
                count_X16[x, symbol] += _I(1)
                state = _W(_W(_W(above - below) * _W(state >> _W(PLACES))) + _W(slot - below))
                # Both without a branch: which it will be is as good as random.
                short = np.int64(state < _W(_LOWEST))
                renewed = _W(_W(state << _W(16)) | _next_word(payload_B, word_at))
                state = renewed if short else state
                word_at -= 2 * short
                state_S[_U(i & mask)] = state
                k = _I(_I(symbol) - _I(ZERO))
                if low > 0 or symbol == _U(ESCAPE):
                    rest = get_bits(payload_B, raw_at, low)
                    raw_at += low
                    e = np.int64(k)
                    if symbol == _U(ESCAPE):
                        sign = get_bits(payload_B, raw_at, _ONE)
                        e, raw_at = get_number(payload_B, raw_at + 1, _TWO)
                        e = min(e + ZERO, (LARGEST >> low) - 1)
                        e = -e if sign else e
                    k = _I((e << low) | rest)
                if plots:
                    if j > 0:
                        count_fine(fine_Y16, fine_YE, y, table_XE, x, symbol)
                    plot_L[i] = next_plot(j, k, plot_L[i], axis_2)
                if halves:
                    level_N[_U(at + i)] = _I(_I(k + k) + _I(1))
                else:
                    path_L[_U(i)] = next_state(way, k)
                    level_N[_U(at + i)] = level(k, quantiser)
            for i in range(lanes, LANES):
                level_N[_U(at + i)] = _I(0)
        if tick(clock_2):
            make_coarse(count_X16, prior_X16, table_XE)
    return word_at, raw_at
