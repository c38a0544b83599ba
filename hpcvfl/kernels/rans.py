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
    ((1227, 904, 368, 116, 30, 9, 3, 2), (644, 943, 518, 193, 55, 14, 4, 2)),
)
# The same once there are low bits, symmetric about -1/2: k >> s = 0..6 and -1..-7.
_LARGE = (
    (1362, 541, 113, 18, 4, 2, 1),
    (1117, 627, 247, 75, 20, 6, 3),
)


def low_bits(klass: int) -> int:
    """Bits of an index that are written as they are, by class."""
    return max(0, (klass - 5) // 2)


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


@helper
def put_number(raw_B, at, value, order):  # type: ignore[no-untyped-def]
    """Write value >= 0 in the exponential Golomb code of `order`; returns the bit after it."""
    value += 1 << order
    n = 0
    while value >> (n + 1):
        n += 1
    at = put_bits(raw_B, at, np.int64(1) << (n - order), n - order + 1)  # n - order zeros, a one
    return put_bits(raw_B, at, value, n)


@helper
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
def put_numbers(value_N, order, raw_B, at):  # type: ignore[no-untyped-def]
    """Write signed numbers, 0, -1, 1, -2, .. as 0, 1, 2, 3, ..; returns the bit after them.

    value_N : int64, shape (N,), |value| < 2**30
    raw_B   : uint8, zeros from bit `at` on, long enough for 64 bits a number
    """
    for i in range(value_N.shape[0]):
        v = value_N[i]
        at = put_number(raw_B, at, 2 * v if v >= 0 else -2 * v - 1, order)
    return at


@kernel
def get_numbers(raw_B, at, order, out_N):  # type: ignore[no-untyped-def]
    """Read what `put_numbers` wrote into out_N (int64); any bytes give numbers within 2**30."""
    for i in range(out_N.shape[0]):
        v, at = get_number(raw_B, at, order)
        out_N[i] = (v >> 1) ^ -(v & 1)
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
            np.maximum(0, (class_K - 5) // 2).astype(np.int32),
            axis_2,
            PRIORS[class_K].reshape(2 * K, NUM_SYMBOLS),
            np.zeros((2 * K, NUM_SYMBOLS), np.int32),
            np.empty((2 * K, WIDTH), np.uint16),
            np.array([0, 1], np.int64),
            np.zeros((Y, NUM_SYMBOLS), np.int32),
            np.empty((Y, WIDTH), np.uint16),
            due_Y2,
        )
        _make_tables(model)
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
def _make_coarse(model, weight_16):  # type: ignore[no-untyped-def]
    """All coarse tables anew; counts are halved where they have grown large."""
    for x in range(_U(model.count_X16.shape[0])):
        for i in range(_U(NUM_SYMBOLS)):
            weight_16[i] = _I(_I(model.count_X16[x, i] * _I(WEIGHT)) + model.prior_X16[x, i])
        if _shares(weight_16, model.table_XE, x) > _I(_FULL):
            for i in range(_U(NUM_SYMBOLS)):
                model.count_X16[x, i] >>= _I(1)


@helper
def _make_fine(model, x, y, weight_16):  # type: ignore[no-untyped-def]
    """Table y anew, from its counts and coarse table x."""
    for i in range(_U(NUM_SYMBOLS)):
        share = _I(_I(model.table_XE[x, i + _U(1)]) - _I(model.table_XE[x, i]))
        weight_16[i] = _I(_I(model.fine_Y16[y, i] * _I(_FINE_WEIGHT)) + share)
    if _shares(weight_16, model.fine_YE, y) > _I(_FULL):
        for i in range(_U(NUM_SYMBOLS)):
            model.fine_Y16[y, i] >>= _I(1)


@kernel
def _make_tables(model):  # type: ignore[no-untyped-def]
    _make_coarse(model, np.empty(NUM_SYMBOLS, np.int32))


@helper
def _count_fine(model, x, y, symbol, weight_16):  # type: ignore[no-untyped-def]
    """Count a symbol in table y, made anew after 1, 2, 3, 4, 5, 7, 9, 12, .. symbols."""
    model.fine_Y16[y, _U(symbol)] += _I(1)
    n = _I(model.due_Y2[y, 0] + _I(1))
    model.due_Y2[y, 0] = n
    if n == model.due_Y2[y, 1]:
        model.due_Y2[y, 1] = _I(_I(n + _I(1)) + _I(n >> _I(2)))
        _make_fine(model, x, y, weight_16)


@helper
def _tick(model, weight_16):  # type: ignore[no-untyped-def]
    """A row of lanes is counted."""
    n = model.clock_2[0] + 1
    model.clock_2[0] = n
    if n == model.clock_2[1]:
        model.clock_2[1] = n + 1 + (n >> 3)
        _make_coarse(model, weight_16)


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
    K = model.low_K.shape[0]
    depth = k_N.shape[0] // (K * LANES)
    plots = model.fine_YE.shape[0] > 0
    weight_16 = np.empty(NUM_SYMBOLS, np.int32)
    for r in range(depth):
        lanes = min(LANES, (num_rows - r + depth - 1) // depth)
        for j in range(K):
            at = (r * K + j) * LANES
            low = np.int64(model.low_K[j])
            for i in range(lanes):
                k = k_N[_U(at + i)]
                x = _U(2 * j + (path_N[_U(at + i)] & 1))
                e = k >> low
                symbol = _U(e + ZERO) if -ZERO < e < ZERO else _U(ESCAPE)
                below, above = model.table_XE[x, symbol], model.table_XE[x, symbol + _U(1)]
                model.count_X16[x, symbol] += _I(1)
                if plots:
                    plot = plot_L[i]
                    if j > 0:
                        y = _U(x * _U(PLOTS) + _U(plot))
                        if model.due_Y2[y, 0] > 0:
                            below = model.fine_YE[y, symbol]
                            above = model.fine_YE[y, symbol + _U(1)]
                        _count_fine(model, x, y, symbol, weight_16)
                    plot_L[i] = _plot(j, k, plot, model.axis_2)
                op_N[_U(at + i)] = _W(_W(below) | _W(_W(_W(above) - _W(below)) << _W(16)))
                if low > 0:
                    raw_at = put_bits(raw_B, raw_at, np.int64(k), low)
                if symbol == _U(ESCAPE):
                    raw_at = put_bits(raw_B, raw_at, np.int64(e < 0), 1)
                    raw_at = put_number(raw_B, raw_at, np.int64(abs(e) - ZERO), 2)
            for i in range(lanes, LANES):
                op_N[_U(at + i)] = _W(0)
        _tick(model, weight_16)
    return raw_at


@kernel
def code_block(op_N, num_states, state_S, word_W):  # type: ignore[no-untyped-def]
    """Second pass, backwards: symbols to words; returns how many.

    op_N    : uint32, as model_block left it
    state_S : uint32, shape (4,), scratch; num_states is 1, 2 or 4
    word_W  : uint16, at least N + 2 * num_states long; overwritten, the last word to be read first
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
            if _U(x) >= _U(share) << _U(32 - PLACES):
                word_W[_U(n)] = np.uint16(x)
                x = _W(x >> _W(16))
                n += 1
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
    """The word that ends before byte `at`; 0 where the payload begins."""
    if at < 2:
        return _W(0)
    return _W(_W(payload_B[_U(at - 2)]) | _W(_W(payload_B[_U(at - 1)]) << _W(8)))


@helper
def _symbol_of(table_XE, x, slot):  # type: ignore[no-untyped-def]
    """How many of entries 1..15 are not above `slot`."""
    symbol = np.uint16(0)
    for i in range(_U(1), _U(NUM_SYMBOLS)):
        symbol = np.uint16(symbol + np.uint16(table_XE[x, i] <= slot))
    return _U(symbol)


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
    K = model.low_K.shape[0]
    depth = level_N.shape[0] // (K * LANES)
    plots = model.fine_YE.shape[0] > 0
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
            low = np.int64(model.low_K[j])
            for i in range(lanes):
                way = path_L[_U(i)]
                quantiser = _I(way & _I(1))
                x = _U(2 * j + quantiser)
                y = _U(0)
                fine = False
                if plots and j > 0:
                    y = _U(x * _U(PLOTS) + _U(plot_L[i]))
                    fine = model.due_Y2[y, 0] > 0
                state = state_S[_U(i & mask)]
                slot = np.uint16(state & _W(TOTAL - 1))
                if fine:
                    symbol = _symbol_of(model.fine_YE, y, slot)
                    below = _W(model.fine_YE[y, symbol])
                    above = _W(model.fine_YE[y, symbol + _U(1)])
                else:
                    symbol = _symbol_of(model.table_XE, x, slot)
                    below = _W(model.table_XE[x, symbol])
                    above = _W(model.table_XE[x, symbol + _U(1)])
                model.count_X16[x, symbol] += _I(1)
                state = _W(_W(_W(above - below) * _W(state >> _W(PLACES))) + _W(slot - below))
                if state < _W(_LOWEST):
                    state = _W(_W(state << _W(16)) | _next_word(payload_B, word_at))
                    word_at -= 2
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
                        _count_fine(model, x, y, symbol, weight_16)
                    plot_L[i] = _plot(j, k, plot_L[i], model.axis_2)
                path_L[_U(i)] = next_state(way, k)
                level_N[_U(at + i)] = level(k, quantiser)
            for i in range(lanes, LANES):
                level_N[_U(at + i)] = _I(0)
        _tick(model, weight_16)
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


@kernel
def read_bits(raw_B, at, n):  # type: ignore[no-untyped-def]
    """Kernel around `get_bits`."""
    return get_bits(raw_B, at, n)


@kernel
def write_bits(raw_B, at, value, n):  # type: ignore[no-untyped-def]
    """Kernel around `put_bits`."""
    return put_bits(raw_B, at, value, n)
