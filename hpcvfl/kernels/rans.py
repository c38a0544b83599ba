"""Entropy coder of trellis indices: counted symbols, range asymmetric numeral systems.

An index k of a column with s low bits becomes a symbol of 16, (k >> s) + 8, and its s lowest bits,
written as they are; symbol 0 says that k >> s is not within -7..7 and follows, also as bits. Each
column has one table of frequencies for each quantiser of the trellis. A table is a prior, which
depends on the column's class alone (its deviation in steps, in half octaves), plus what was counted
so far; both sides count alike, and make the tables anew after 1, 2, .. 8 steps of all lanes and
then whenever there are an eighth more.

Symbols go through rANS (Duda 2013, arXiv 1311.2540): states of 32 bits, renewed 16 bits at a time,
frequencies in 2**14ths, lane i in state i % num_states. Words stand so that the decoder reads
backwards from the end of the payload; the bits that are written as they are stand in front, lowest
first. What lies between is zero.

Integers, and one float32 division and product each a frequency: the same on every machine.

Legend: N values of a block, L lanes, K columns, B bytes, W words, X the two quantisers' tables of
all columns (table 2 * column + quantiser).
"""

from __future__ import annotations

import math

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
"""Entries of a table: what lies below each symbol, then TOTAL; two tables fill a cache line."""

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


@helper
def _make_table(count_X16, prior_X16, x, table_XE):  # type: ignore[no-untyped-def]
    """Frequencies of one table from its prior and counts; each at least 1, the rest to ZERO."""
    wide()
    total = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        total = _I(total + _I(_I(count_X16[x, i] * _I(WEIGHT)) + prior_X16[x, i]))
    factor = np.float32(np.float32(TOTAL - NUM_SYMBOLS) / np.float32(total))
    spent = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        weight = _I(_I(count_X16[x, i] * _I(WEIGHT)) + prior_X16[x, i])
        share = _I(_I(np.float32(np.float32(weight) * factor)) + _I(1))
        table_XE[x, i + _U(NUM_SYMBOLS)] = np.uint16(share)
        spent = _I(spent + share)
    below = _I(0)
    for i in range(_U(NUM_SYMBOLS)):
        share = _I(table_XE[x, i + _U(NUM_SYMBOLS)])
        table_XE[x, i] = np.uint16(below)
        below = _I(below + share)
        if i == _U(ZERO):
            below = _I(below + _I(_I(TOTAL) - spent))
    table_XE[x, NUM_SYMBOLS] = np.uint16(TOTAL)
    if total > _I(_FULL):
        for i in range(_U(NUM_SYMBOLS)):
            count_X16[x, i] >>= _I(1)


@kernel
def make_tables(count_X16, prior_X16, table_XE):  # type: ignore[no-untyped-def]
    """Tables anew from counts (int32) and priors (int32); table_XE: uint16, shape (X, WIDTH)."""
    for x in range(_U(count_X16.shape[0])):
        _make_table(count_X16, prior_X16, x, table_XE)


@helper
def _next_due(step):  # type: ignore[no-untyped-def]
    """Steps after which tables are made anew, the step after which they just were."""
    return step + 1 + (step >> 3)


@kernel
def model_block(  # type: ignore[no-untyped-def]
    k_N, path_N, num_rows, low_K, count_X16, prior_X16, table_XE, clock_2, op_N, raw_B, raw_at
):
    """First pass over a block: count, and write down what the coder does with each symbol.

    k_N, path_N : as find_path left them; step r * K + j is column j of the lanes' row r
    num_rows    : rows of the block; lane i has rows i * depth .. (i + 1) * depth - 1, the last
                  lanes fewer, where depth = N / (K * LANES)
    low_K       : int32, low bits of each column
    clock_2     : int64, steps so far and when tables are due next; overwritten, as are counts and
                  tables
    op_N        : uint32, overwritten: below | frequency << 16; 0 where a lane has no row
    raw_B       : uint8, zeros from bit raw_at on, long enough for 96 bits a value
    Returns the bit after the last one written.
    """
    K = low_K.shape[0]
    depth = k_N.shape[0] // (K * LANES)
    for r in range(depth):
        lanes = min(LANES, (num_rows - r + depth - 1) // depth)
        for j in range(K):
            at = (r * K + j) * LANES
            low = low_K[j]
            for i in range(lanes):
                k = k_N[_U(at + i)]
                x = _U(2 * j + (path_N[_U(at + i)] & 1))
                e = k >> low
                symbol = e + ZERO if -ZERO < e < ZERO else ESCAPE
                below = np.uint32(table_XE[x, _U(symbol)])
                above = np.uint32(table_XE[x, _U(symbol + 1)])
                op_N[_U(at + i)] = np.uint32(below | ((above - below) << np.uint32(16)))
                count_X16[x, _U(symbol)] += 1
                if low > 0:
                    raw_at = put_bits(raw_B, raw_at, np.int64(k), low)
                if symbol == ESCAPE:
                    raw_at = put_bits(raw_B, raw_at, np.int64(e < 0), 1)
                    raw_at = put_number(raw_B, raw_at, np.int64(abs(e) - ZERO), 2)
            for i in range(lanes, LANES):
                op_N[_U(at + i)] = np.uint32(0)
        clock_2[0] += 1
        if clock_2[0] == clock_2[1]:
            for x in range(_U(2 * K)):
                _make_table(count_X16, prior_X16, x, table_XE)
            clock_2[1] = _next_due(clock_2[0])
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
    return symbol


@kernel
def decode_block(  # type: ignore[no-untyped-def]
    payload_B, word_at, raw_at, num_rows, low_K, num_states, count_X16, prior_X16, table_XE,
    clock_2, state_S, path_L, level_N,
):  # fmt: skip
    """Inverse of find_path, model_block and code_block: levels of a block in steps D.

    payload_B : uint8, any bytes
    word_at   : byte before which the next word ends
    raw_at    : next of the bits that stand in front
    low_K, count_X16, prior_X16, table_XE, clock_2 : as for model_block
    state_S   : uint32, shape (4,), scratch
    path_L    : int32, shape (LANES,), scratch
    level_N   : int32, overwritten, 0 where a lane has no row, |level| <= 2 * LARGEST
    Returns (word_at, raw_at) after the block; negative, or past the end, if the payload was cut.
    """
    K = low_K.shape[0]
    depth = level_N.shape[0] // (K * LANES)
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
            low = low_K[j]
            for i in range(lanes):
                way = path_L[_U(i)]
                quantiser = _I(way & _I(1))
                x = _U(2 * j + quantiser)
                state = state_S[_U(i & mask)]
                slot = np.uint16(state & _W(TOTAL - 1))
                symbol = _symbol_of(table_XE, x, slot)
                below = _W(table_XE[x, _U(symbol)])
                above = _W(table_XE[x, _U(symbol) + _U(1)])
                count_X16[x, _U(symbol)] += 1
                state = _W(_W(_W(above - below) * _W(state >> _W(PLACES))) + _W(slot - below))
                if state < _W(_LOWEST):
                    state = _W(_W(state << _W(16)) | _next_word(payload_B, word_at))
                    word_at -= 2
                state_S[_U(i & mask)] = state
                k = _I(_I(symbol) - _I(ZERO))
                if low > 0 or symbol == ESCAPE:
                    rest = get_bits(payload_B, raw_at, low)
                    raw_at += low
                    e = np.int64(k)
                    if symbol == ESCAPE:
                        sign = get_bits(payload_B, raw_at, 1)
                        e, raw_at = get_number(payload_B, raw_at + 1, 2)
                        e = min(e + ZERO, (LARGEST >> low) - 1)
                        e = -e if sign else e
                    k = _I((e << low) | rest)
                path_L[_U(i)] = next_state(way, k)
                level_N[_U(at + i)] = level(k, quantiser)
            for i in range(lanes, LANES):
                level_N[_U(at + i)] = _I(0)
        clock_2[0] += 1
        if clock_2[0] == clock_2[1]:
            for x in range(_U(2 * K)):
                _make_table(count_X16, prior_X16, x, table_XE)
            clock_2[1] = _next_due(clock_2[0])
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
