"""Frequencies of trellis indices, from what was counted so far; the same on both sides.

An index k of a column with s low bits becomes a symbol of 16, (k >> s) + 8, and its s lowest bits;
symbol 0 says that k >> s is not within -7..7. Each column has one table of frequencies for each
quantiser of the trellis. A table is a prior, which depends on the column's class alone (its
deviation in steps, in half octaves), plus the counts; the tables are made anew after 1, 2, .. 8
rows of all lanes and then whenever there are an eighth more. In a rotated message each table has in
addition finer ones, by where the row lies on the first two axes: embeddings come in clusters, which
no rotation makes independent (7-11 % fewer bits, bench/LOG.md). A finer table starts from the
coarse one.

Integers, and one float32 division and a product for each frequency: the same on every machine.

Legend: K columns, X tables (2 * column + quantiser), Y finer tables (x * PLOTS + plot), E entries
of a table.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from hpcvfl.kernels.compiling import helper, kernel

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

_FULL = 1 << 26  # weight of a table from which on its counts are halved
_I, _U = np.int32, np.uint64

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


# Rounding to odd levels, by class: mean of the two densities, k = 0, 1, .. and -1, -2, ...
_HALVES = (
    (2040, 4, 1, 1),
    (2030, 14, 1, 1),
    (1998, 45, 3, 1),
    (1940, 103, 6, 1),
    (1747, 274, 22, 3),
    (1473, 467, 88, 16),
    (1137, 553, 232, 80),
    (850, 520, 340, 180, 90, 45, 18, 8),
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


def _half_priors() -> np.ndarray:
    """The same without a level at the centre; large classes have low bits, and look alike."""
    prior = PRIORS.copy()
    for c, row in enumerate(_HALVES):
        prior[c] = 1
        for k, weight in enumerate(row):
            prior[c, :, ZERO + k] = weight
            prior[c, :, ZERO - 1 - k] = weight
        prior[c, :, ESCAPE] = 3
    return prior


HALF_PRIORS = _half_priors()
"""Priors of columns whose values are rounded to odd levels."""


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
    fine_Y16, fine_YE : the same of the finer tables, but counts of each symbol and those below it;
                where nothing is counted yet, the coarse table stands in
    """

    low_K: np.ndarray
    axis_2: np.ndarray
    prior_X16: np.ndarray
    count_X16: np.ndarray
    table_XE: np.ndarray
    clock_2: np.ndarray
    fine_Y16: np.ndarray
    fine_YE: np.ndarray

    @classmethod
    def start(cls, class_K: np.ndarray, plots: bool, prior: np.ndarray = PRIORS) -> Model:
        """Before anything is counted, for columns of these classes (int64)."""
        K = len(class_K)
        Y = 2 * K * PLOTS if plots and K > 1 else 0
        axis_2 = np.zeros(2, np.int64)
        if Y:
            halves_2 = class_K[:2] - 3
            root_2 = np.where(halves_2 & 1, math.sqrt(2), 1.0)
            # Every step exact but one rounding of a division: all machines have the same.
            axis_2[:] = np.ldexp(2**17 / _STRETCH / root_2, -(halves_2 >> 1).astype(np.int32))
        model = cls(
            np.maximum(0, (class_K - 6) // 2).astype(np.int32),
            axis_2,
            prior[class_K].reshape(2 * K, NUM_SYMBOLS),
            np.zeros((2 * K, NUM_SYMBOLS), np.int32),
            np.zeros((2 * K, WIDTH), np.uint16),
            np.array([0, 1], np.int64),
            np.zeros((Y, NUM_SYMBOLS), np.int32),
            np.zeros((Y, WIDTH), np.uint16),
        )
        _make_tables(model.count_X16, model.prior_X16, model.table_XE)
        return model

    def copy(self) -> Model:
        """A model that changes apart from this one."""
        return Model(*(part.copy() for part in self))


@helper
def make_coarse(count_X16, prior_X16, table_XE):  # type: ignore[no-untyped-def]
    """All coarse tables anew; counts are halved where they have grown large.

    What lies below a symbol is the weight below it, rounded down, and one for each symbol: so every
    symbol has at least one.
    """
    for x in range(_U(count_X16.shape[0])):
        total = _I(0)
        for i in range(_U(NUM_SYMBOLS)):
            total = _I(total + _I(_I(count_X16[x, i] * _I(WEIGHT)) + prior_X16[x, i]))
        factor = np.float32(np.float32(TOTAL - NUM_SYMBOLS) / np.float32(total))
        below = _I(0)
        for i in range(_U(NUM_SYMBOLS)):
            table_XE[x, i] = np.uint16(_I(_I(np.float32(np.float32(below) * factor)) + _I(i)))
            below = _I(below + _I(_I(count_X16[x, i] * _I(WEIGHT)) + prior_X16[x, i]))
        table_XE[x, NUM_SYMBOLS] = np.uint16(TOTAL)
        if total > _I(_FULL):
            for i in range(_U(NUM_SYMBOLS)):
                count_X16[x, i] >>= _I(1)


@kernel
def _make_tables(count_X16, prior_X16, table_XE):  # type: ignore[no-untyped-def]
    make_coarse(count_X16, prior_X16, table_XE)


def count_fine(fine_Y16, fine_YE, y, table_XE, x, symbol):  # type: ignore[no-untyped-def]
    """Count a symbol in finer table y and make it anew from coarse table x.

    As counts, too, are of a symbol and all below it, nothing has to be summed up.
    """
    fine_Y16[y, int(symbol) :] += 1
    n = int(fine_Y16[y, NUM_SYMBOLS - 1])
    factor = np.float32(TOTAL - NUM_SYMBOLS) / np.float32(n * _FINE_WEIGHT + TOTAL)
    weight_16 = fine_Y16[y] * np.int32(_FINE_WEIGHT) + table_XE[x, 1 : NUM_SYMBOLS + 1]
    share_16 = (weight_16.astype(np.float32) * factor).astype(np.int32)
    fine_YE[y, 1 : NUM_SYMBOLS + 1] = share_16 + np.arange(1, NUM_SYMBOLS + 1)
    fine_YE[y, NUM_SYMBOLS] = TOTAL
    if n > _FULL // _FINE_WEIGHT:
        fine_Y16[y] >>= 1


@intrinsic
def _count_fine(context, fine_Y16, fine_YE, y, table_XE, x, symbol):  # type: ignore[no-untyped-def]
    """`count_fine` but for the halving; returns how many symbols are counted."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        word, short, real = ir.IntType(32), ir.IntType(16), ir.FloatType()

        def vector(kind, values):  # type: ignore[no-untyped-def]
            return ir.Constant(ir.VectorType(kind, NUM_SYMBOLS), values)

        def all_of(value):  # type: ignore[no-untyped-def]
            lanes = vector(value.type, ir.Undefined)
            for i in range(NUM_SYMBOLS):
                lanes = builder.insert_element(lanes, value, word(i))
            return lanes

        def row(which, width, at, first):  # type: ignore[no-untyped-def]
            array = context.make_array(signature.args[which])(context, builder, args[which])
            start = builder.add(builder.mul(at, at.type(width)), at.type(first))
            kind = ir.VectorType(array.data.type.pointee, NUM_SYMBOLS)
            return builder.bitcast(builder.gep(array.data, [start]), kind.as_pointer())

        count_at = row(0, NUM_SYMBOLS, args[2], 0)
        reached = builder.icmp_unsigned(
            ">=", vector(word, list(range(NUM_SYMBOLS))), all_of(builder.trunc(args[5], word))
        )
        below = builder.add(
            builder.load(count_at, align=4), builder.zext(reached, ir.VectorType(word, NUM_SYMBOLS))
        )
        builder.store(below, count_at, align=4)
        n = builder.extract_element(below, word(NUM_SYMBOLS - 1))
        total = builder.add(builder.mul(n, word(_FINE_WEIGHT)), word(TOTAL))
        factor = builder.fdiv(real(float(TOTAL - NUM_SYMBOLS)), builder.sitofp(total, real))
        coarse = builder.load(row(3, WIDTH, args[4], 1), align=2)
        weight = builder.add(
            builder.mul(below, vector(word, [_FINE_WEIGHT] * NUM_SYMBOLS)),
            builder.zext(coarse, below.type),
        )
        weight = builder.sitofp(weight, ir.VectorType(real, NUM_SYMBOLS))
        share = builder.fptosi(builder.fmul(weight, all_of(factor)), below.type)
        share = builder.add(share, vector(word, list(range(1, NUM_SYMBOLS + 1))))
        share = builder.insert_element(share, word(TOTAL), word(NUM_SYMBOLS - 1))
        table = builder.trunc(share, ir.VectorType(short, NUM_SYMBOLS))
        builder.store(table, row(1, WIDTH, args[2], 1), align=2)
        return n

    index = types.uint64
    return types.int32(fine_Y16, fine_YE, index, table_XE, index, index), codegen


@overload(count_fine, inline="always")
def _count_fine_at_once(fine_Y16, fine_YE, y, table_XE, x, symbol):  # type: ignore[no-untyped-def]
    """One vector of all: LLVM unrolls a loop of 16 and leaves it scalar, 70 ns in place of 10."""

    def count(fine_Y16, fine_YE, y, table_XE, x, symbol):  # type: ignore[no-untyped-def]
        n: Any = _count_fine(fine_Y16, fine_YE, y, table_XE, x, symbol)  # type: ignore[call-arg]
        if n > _FULL // _FINE_WEIGHT:
            for i in range(_U(NUM_SYMBOLS)):
                fine_Y16[y, i] >>= _I(1)

    return count


@helper
def tick(clock_2):  # type: ignore[no-untyped-def]
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
def next_plot(j, k, plot, axis_2):  # type: ignore[no-untyped-def]
    """Plot of a row for column j + 1, from index k of column j and the plot for column j."""
    if j == 0:
        return 5 * _stretch(k, axis_2[0]) + 2
    if j == 1:
        return plot + _stretch(k, axis_2[1]) - 2
    return plot
