"""Entropy coder of trellis indices: counted symbols, range asymmetric numeral systems.

An index k of a column with s low bits becomes a symbol of 16, (k >> s) + 8, and its s lowest bits,
written as they are; symbol 0 says that k >> s is not within -7..7 and follows, also as bits. Each
column has one table of frequencies for each quantiser of the trellis. A table is a prior, which
depends on the column's class alone (its deviation in steps, in half octaves), plus what was counted
so far; both sides count alike, and make the tables anew after 1, 2, .. 8 rows of all lanes and then
whenever there are an eighth more. In a rotated message each table has in addition finer ones, by
where the row lies on the first two axes: embeddings come in clusters, which no rotation makes
independent (7-11 % fewer bits, bench/LOG.md). A finer table starts from the coarse one.

Symbols go through rANS (Duda 2013, arXiv 1311.2540): states of 32 bits, renewed 16 bits at a time,
frequencies in 2**14ths, lane i in state i % num_states. Words stand so that the decoder reads
backwards from the end of the payload; the bits that are written as they are stand in front, lowest
first. What lies between is zero.

Integers, and one float32 division and product each a frequency: the same on every machine.

Legend: N values of a block, L lanes, K columns, B bytes, W words, X tables (2 * column +
quantiser), Y finer tables (x * PLOTS + plot), E entries of a table.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from hpcvfl.kernels.compiling import helper, kernel, wide
from hpcvfl.kernels.trellis import LANES, PRICES, level, next_state

NUM_SYMBOLS = 16
ESCAPE, ZERO = 0, 8
"""Symbol of an index that is out of reach, and of index 0."""

PLACES = 14
TOTAL = 1 << PLACES
"""Sum of the frequencies of a table."""

WIDTH = 32
"""Entries of a table: what lies below each symbol, then TOTAL, and room up to a cache line."""

WEIGHT = 256
"""Of one counted symbol; a prior weighs 4096, as much as 16 symbols."""

NUM_CLASSES = 44
"""Class c is of columns whose deviation is about 2**((c - 3) / 2) steps; c = 0..43."""

LARGEST = 1 << 22
"""No index is decoded beyond this."""

_FULL = 1 << 26  # weight of a table from which on its counts are halved
_LOWEST = 1 << 16  # of a state between two symbols
_I, _U, _W = np.int32, np.uint64, np.uint32

# Symbols of N(0,1) and Laplace data at the prices of `best`, mean of the two, in 4096ths
# (bench/LOG.md): for even and odd quantiser, |k| = 0..7, sign aside.
_SMALL = (
    ((4040, 20, 2, 1, 1, 1, 1, 1), (3600, 240, 4, 1, 1, 1, 1, 1)),
    ((4028, 28, 2, 1, 1, 1, 1, 1), (3460, 310, 4, 1, 1, 1, 1, 1)),
    ((3929, 83, 3, 1, 1, 1, 1, 1), (2313, 883, 8, 1, 1, 1, 1, 1)),
    ((3248, 414, 10, 2, 1, 1, 1, 1), (1520, 1247, 40, 3, 1, 1, 1, 1)),
    ((2380, 792, 60, 6, 1, 1, 1, 1), (1141, 1286, 179, 14, 2, 1, 1, 1)),
    ((1707, 948, 209, 31, 6, 2, 1, 1), (872, 1140, 389, 68, 11, 2, 1, 1)),
    ((1227, 907, 368, 116, 31, 9, 3, 1), (644, 942, 517, 193, 54, 14, 4, 1)),
    ((879, 773, 443, 224, 100, 41, 16, 7), (474, 740, 529, 299, 145, 60, 23, 9)),
)
# The same once there are low bits, symmetric about -1/2: k >> s = 0..6 and -1..-7.
_LARGE = (
    (1121, 631, 249, 75, 20, 5, 2),
    (864, 581, 330, 161, 70, 28, 11),
)


def _priors() -> np.ndarray:
    """Prior of each class and quantiser, int32, shape (NUM_CLASSES, 2, 16)."""
    prior = np.ones((NUM_CLASSES, 2, NUM_SYMBOLS), np.int32)
    for c in range(NUM_CLASSES):
        for q in range(2):
            if c < len(_SMALL):
                for k, weight in enumerate(_SMALL[c][q]):
                    prior[c, q, ZERO + k] = prior[c, q, ZERO - k] = weight
            else:
                for k, weight in enumerate(_LARGE[(c - len(_SMALL)) % 2]):
                    prior[c, q, ZERO + k] = prior[c, q, ZERO - 1 - k] = weight
            prior[c, q, ESCAPE] = 3
    return prior


PRIORS = _priors()


@helper
def put_bits(raw_B, at, value, n):  # type: ignore[no-untyped-def]
    """Write the low n <= 32 bits of `value` at bit `at` of bytes that are 0 from there on."""
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
    """Write value >= 0 in the exponential Golomb code of `order`; returns the bit after it."""
    value += 1 << order
    n = 0
    while value >> (n + 1):
        n += 1
    at = put_bits(raw_B, at, 1 << (n - order), n - order + 1)  # n - order zeros, a one
    return put_bits(raw_B, at, value, n)


@kernel
def get_number(raw_B, at, order):  # type: ignore[no-untyped-def]
    """(value, the bit after it) of an exponential Golomb code; at most 2**31, whatever is there."""
    zeros = 0
    while zeros + order < 30 and at < 8 * raw_B.shape[0] and not get_bits(raw_B, at, 1):
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


PLOTS = 25
"""Finer tables of a table: 5 stretches of the first axis by 5 of the second."""

_FINE_WEIGHT = TOTAL // 8
"""Of a symbol counted in a finer table; the coarse one weighs as much as 8."""

_STRETCH = 0.7
"""Length of a stretch, in deviations; 0.6 to 0.8 do alike."""


class Model(NamedTuple):
    """Tables of a message; `start` makes one, and coding each block changes it.

    low_K     : int32, bits of an index that are written as they are
    axis_2    : int64, stretches per index on the first two axes, in 2**-16ths; (0, 0): no plots
    prior_X16 : int32
    count_X16, table_XE : int32, uint16
    clock_2   : int64, rows of lanes so far, and when tables are made anew
    fine_Y16, fine_YE, due_Y2 : the same of the finer tables; due_Y2: int32, symbols so far and when
                the table is made anew
    """

    low_K: np.ndarray
    axis_2: np.ndarray
    prior_X16: np.ndarray
    count_X16: np.ndarray
    table_XE: np.ndarray
    clock_2: np.ndarray
    fine_Y16: np.ndarray
    fine_YE: np.ndarray
    due_Y2: np.ndarray

    @classmethod
    def start(cls, class_K: np.ndarray, plots: bool) -> Model:
        """Before anything is counted, for columns of these classes (int64)."""
        K = len(class_K)
        Y = 2 * K * PLOTS if plots and K > 1 else 0
        axis_2 = np.zeros(2, np.int64)
        if Y:
            halves_2 = class_K[:2] - 3
            root_2 = np.where(halves_2 & 1, math.sqrt(2), 1.0)
            axis_2[:] = 2**17 / _STRETCH / root_2 * 2.0 ** -(halves_2 >> 1)
        due_Y2 = np.zeros((Y, 2), np.int32)
        due_Y2[:, 1] = 1
        model = cls(
            np.maximum(0, (class_K - 6) // 2).astype(np.int32),
            axis_2,
            PRIORS[class_K].reshape(2 * K, NUM_SYMBOLS),
            np.zeros((2 * K, NUM_SYMBOLS), np.int32),
            np.empty((2 * K, WIDTH), np.uint16),
            np.array([0, 1], np.int64),
            np.zeros((Y, NUM_SYMBOLS), np.int32),
            np.empty((Y, WIDTH), np.uint16),
            due_Y2,
        )
        _make_tables(model.count_X16, model.prior_X16, model.table_XE)
        return model

    def copy(self) -> Model:
        """A model that changes apart from this one."""
        return Model(*(part.copy() for part in self))


@helper
def _shares(weight_16, table_XE, x):  # type: ignore[no-untyped-def]
    """Make table x of weights (int32), which are overwritten: at least 1 each, the rest to ZERO."""
    wide()
    total = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        total = _I(total + weight_16[i])
    factor = np.float32(np.float32(TOTAL - NUM_SYMBOLS) / np.float32(total))
    spent = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        share = _I(_I(np.float32(np.float32(weight_16[i]) * factor)) + _I(1))
        weight_16[i] = share
        spent = _I(spent + share)
    weight_16[ZERO] += _I(TOTAL) - spent
    below = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        table_XE[x, i] = np.uint16(below)
        below = _I(below + weight_16[i])
    table_XE[x, NUM_SYMBOLS] = np.uint16(TOTAL)
    return total


@helper
def _make_coarse(count_X16, prior_X16, table_XE, weight_16):  # type: ignore[no-untyped-def]
    """All coarse tables anew; counts are halved where they have grown large."""
    for x in range(_U(count_X16.shape[0])):
        for i in range(_U(NUM_SYMBOLS)):
            weight_16[i] = _I(_I(count_X16[x, i] * _I(WEIGHT)) + prior_X16[x, i])
        if _shares(weight_16, table_XE, x) > _I(_FULL):
            for i in range(_U(NUM_SYMBOLS)):
                count_X16[x, i] >>= _I(1)


@helper
def _make_fine(fine_Y16, fine_YE, y, table_XE, x, weight_16):  # type: ignore[no-untyped-def]
    """Table y anew, from its counts and coarse table x."""
    for i in range(_U(NUM_SYMBOLS)):
        share = _I(_I(table_XE[x, i + _U(1)]) - _I(table_XE[x, i]))
        weight_16[i] = _I(_I(fine_Y16[y, i] * _I(_FINE_WEIGHT)) + share)
    if _shares(weight_16, fine_YE, y) > _I(_FULL):
        for i in range(_U(NUM_SYMBOLS)):
            fine_Y16[y, i] >>= _I(1)


@kernel
def _make_tables(count_X16, prior_X16, table_XE):  # type: ignore[no-untyped-def]
    _make_coarse(count_X16, prior_X16, table_XE, np.empty(NUM_SYMBOLS, np.int32))


@helper
def _due(due_Y2, y):  # type: ignore[no-untyped-def]
    """Count a symbol of table y; whether it is made anew, after 1, 2, 3, 4, 6, 8, 11, 15, .."""
    n = _I(due_Y2[y, 0] + _I(1))
    due_Y2[y, 0] = n
    if n < due_Y2[y, 1]:
        return False
    due_Y2[y, 1] = _I(_I(n + _I(1)) + _I(n >> _I(2)))
    return True


@helper
def _tick(clock_2):  # type: ignore[no-untyped-def]
    """Count a row of lanes; whether the coarse tables are made anew."""
    n = clock_2[0] + 1
    clock_2[0] = n
    if n < clock_2[1]:
        return False
    clock_2[1] = n + 1 + (n >> 3)
    return True


@helper
def _stretch(k, per_index):  # type: ignore[no-untyped-def]
    """Where index k lies on its axis, 0..4."""
    far = min((np.int64(abs(k)) * per_index + 32768) >> 16, 2)
    return 2 - far if k < 0 else 2 + far


@helper
def _plot(j, k, plot, axis_2):  # type: ignore[no-untyped-def]
    """Plot of a row for column j + 1, from index k of column j and the plot for column j."""
    if j == 0:
        return 5 * _stretch(k, axis_2[0]) + 2
    if j == 1:
        return plot + _stretch(k, axis_2[1]) - 2
    return plot


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
    low_K, axis_2, prior_X16, count_X16, table_XE, clock_2, fine_Y16, fine_YE, due_Y2 = model
    K = low_K.shape[0]
    depth = k_N.shape[0] // (K * LANES)
    plots = fine_YE.shape[0] > 0
    weight_16 = np.empty(NUM_SYMBOLS, np.int32)
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
                        if due_Y2[y, 0] > 0:
                            below = fine_YE[y, symbol]
                            above = fine_YE[y, symbol + _U(1)]
                        fine_Y16[y, symbol] += _I(1)
                        if _due(due_Y2, y):
                            _make_fine(fine_Y16, fine_YE, y, table_XE, x, weight_16)
                    plot_L[i] = _plot(j, k, plot, axis_2)
                op_N[_U(at + i)] = _W(_W(below) | _W(_W(_W(above) - _W(below)) << _W(16)))
                if low > 0:
                    raw_at = put_bits(raw_B, raw_at, np.int64(k), low)
                if symbol == _U(ESCAPE):
                    raw_at = put_bits(raw_B, raw_at, np.int64(e < 0), 1)
                    raw_at = put_number(raw_B, raw_at, np.int64(abs(e) - ZERO), 2)
            for i in range(lanes, LANES):
                op_N[_U(at + i)] = _W(0)
        if _tick(clock_2):
            _make_coarse(count_X16, prior_X16, table_XE, weight_16)
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
    payload_B, word_at, raw_at, num_rows, model, num_states, state_S, path_L, plot_L, level_N
):
    """Inverse of find_path, model_block and code_block: levels of a block in steps D.

    payload_B : uint8, any bytes
    word_at   : byte before which the next word ends
    raw_at    : next of the bits that stand in front
    model     : Model, overwritten as by model_block
    state_S   : uint32, shape (4,), scratch
    path_L    : int32, shape (LANES,), scratch; plot_L: int64, the same
    level_N   : int32, overwritten, 0 where a lane has no row, |level| <= 2 * LARGEST
    Returns (word_at, raw_at) after the block; negative, or past the end, if the payload was cut.
    """
    # Reaching into a tuple for an array counts references, which costs more than all else here.
    low_K, axis_2, prior_X16, count_X16, table_XE, clock_2, fine_Y16, fine_YE, due_Y2 = model
    K = low_K.shape[0]
    depth = level_N.shape[0] // (K * LANES)
    plots = fine_YE.shape[0] > 0
    weight_16 = np.empty(NUM_SYMBOLS, np.int32)
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
                    fine = due_Y2[y, 0] > 0
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
                        sign = get_bits(payload_B, raw_at, 1)
                        e, raw_at = get_number(payload_B, raw_at + 1, 2)
                        e = min(e + ZERO, (LARGEST >> low) - 1)
                        e = -e if sign else e
                    k = _I((e << low) | rest)
                if plots:
                    if j > 0:
                        fine_Y16[y, symbol] += _I(1)
                        if _due(due_Y2, y):
                            _make_fine(fine_Y16, fine_YE, y, table_XE, x, weight_16)
                    plot_L[i] = _plot(j, k, plot_L[i], axis_2)
                path_L[_U(i)] = next_state(way, k)
                level_N[_U(at + i)] = level(k, quantiser)
            for i in range(lanes, LANES):
                level_N[_U(at + i)] = _I(0)
        if _tick(clock_2):
            _make_coarse(count_X16, prior_X16, table_XE, weight_16)
    return word_at, raw_at


@kernel
def fit_prices(table_XE, low_K, factor, price_8K):  # type: ignore[no-untyped-def]
    """Prices for find_path from tables: least squares over the symbols, weighted by frequency.

    factor   : price of a bit, in squared steps
    price_8K : float32, shape (PRICES * K,), overwritten
    A parabola that bends down would make the farthest index the cheapest; it becomes a line.
    """
    for x in range(table_XE.shape[0]):
        low = low_K[x // 2]
        s0 = s1 = s2 = s3 = s4 = v0 = v1 = v2 = zero = 0.0
        for i in range(1, NUM_SYMBOLS):
            share = np.float64(table_XE[x, i + 1]) - np.float64(table_XE[x, i])
            bits = PLACES - math.log2(share) + low
            if i == ZERO and low == 0:
                zero = bits
                continue
            m = abs((i - ZERO) * 2.0**low + (2.0**low - 1) / 2)
            s0 += share
            s1 += share * m
            s2 += share * m * m
            s3 += share * m * m * m
            s4 += share * m * m * m * m
            v0 += share * bits
            v1 += share * bits * m
            v2 += share * bits * m * m
        a, b, c = s2 - s1 * s1 / s0, s3 - s1 * s2 / s0, s4 - s2 * s2 / s0
        w1, w2 = v1 - v0 * s1 / s0, v2 - v0 * s2 / s0
        bend = max(0.0, (w2 - w1 * b / a) / (c - b * b / a))
        slope = (w1 - bend * b) / a
        base = (v0 - slope * s1 - bend * s2) / s0
        if slope < 0 and bend == 0:
            slope, base = 0.0, v0 / s0
        price_8K[4 * x] = factor * (zero if low == 0 else base)
        price_8K[4 * x + 1] = factor * base
        price_8K[4 * x + 2] = factor * slope
        price_8K[4 * x + 3] = factor * bend
    return PRICES * low_K.shape[0]
