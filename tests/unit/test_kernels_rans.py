"""The coder of `best`: numbers, tables and symbols against slow twins; any bytes decode."""

import math

import numpy as np
import pytest
from support import naive_rans
from support.naive import plain

from hpcvfl.kernels import counts, golomb, rans
from hpcvfl.kernels.counts import PRIORS, TOTAL, Model
from hpcvfl.kernels.prices import prices_of
from hpcvfl.kernels.trellis import LANES

BOTH = pytest.mark.parametrize("form", [lambda f: f, plain], ids=["compiled", "python"])
SIZES = [0, 1, 7, 8, 9, 40]


def draw(rows, classes, seed=0):
    """(k_N, path_N) of a block whose columns are about as wide as their classes say."""
    K, depth = len(classes), -(-rows // LANES)
    rng = np.random.default_rng(seed)
    width_K = 2.0 ** ((np.array(classes) - 3) / 2)
    k_NK = np.rint(rng.laplace(size=(depth, K, LANES)) * width_K[None, :, None] / 3)
    k_N = k_NK.astype(np.int32).reshape(-1)
    # The coder knows the quantiser only from parities, so it has to be the right one.
    path_NK = np.zeros((depth * K, LANES), np.uint8)
    for lane in range(LANES):
        path_NK[:, lane] = naive_rans.quantisers((k_N.reshape(-1, LANES)[:, lane] & 1).tolist())
    return k_N, path_NK.reshape(-1)


def code(rows, classes, plots, num_states, form=lambda f: f, seed=0):
    """(payload_B, raw_end, levels due, ideal bits) of one block."""
    k_N, path_N = draw(rows, classes, seed)
    model = Model.start(np.array(classes), plots)
    op_N = np.zeros(len(k_N), np.uint32)
    raw_B = np.zeros(8 * len(k_N) + 64, np.uint8)
    end = form(rans.model_block)(
        k_N, path_N, rows, model, np.empty(LANES, np.int64), op_N, raw_B, 0
    )
    word_W = np.zeros(len(k_N) + 8, np.uint16)
    n = form(rans.code_block)(op_N, num_states, np.empty(4, np.uint32), word_W)
    raw = raw_B[: -(-end // 8)].tobytes()
    payload_B = np.frombuffer(raw + bytes(16) + word_W[:n].astype("<u2").tobytes(), np.uint8)
    share_N = (op_N >> 16)[op_N > 0].astype(float)
    ideal = (14 - np.log2(share_N)).sum() if share_N.size else 0.0
    depth = -(-rows // LANES)
    level_N = 2 * k_N - np.sign(k_N) * path_N.astype(np.int32)
    keep = np.arange(LANES)[None, :] * depth + np.arange(depth)[:, None] < rows
    level_N = np.where(keep[:, None, :], level_N.reshape(depth, len(classes), LANES), 0)
    return payload_B, end, level_N.reshape(-1), ideal, n


def decode(payload_B, rows, classes, plots, num_states, form=lambda f: f):
    """(level_N, word_at, raw_at) of a block."""
    level_N = np.full(-(-rows // LANES) * len(classes) * LANES, -99, np.int32)
    word_at, raw_at = form(rans.decode_block)(
        payload_B,
        payload_B.size,
        0,
        rows,
        Model.start(np.array(classes), plots),
        False,
        num_states,
        np.empty(4, np.uint32),
        np.empty(LANES, np.int32),
        np.empty(LANES, np.int64),
        level_N,
    )
    return level_N, word_at, raw_at


@BOTH
@pytest.mark.parametrize("order", [0, 1, 5])
def test_numbers_come_back_and_are_as_long_as_documented(form, order):
    values = np.array([[0, -1, 1, 2, -7], [1000, -(2**20), 2**29, 5, 0]])
    raw_B = np.zeros(128, np.uint8)
    at = form(golomb.put_rows)(values, np.array([order, order + 2]), raw_B, 3)
    got = np.empty_like(values)
    assert form(golomb.get_rows)(raw_B, 3, np.array([order, order + 2]), got) == at
    assert (got == values).all()
    bits = naive_rans.Bits(raw_B.tobytes())
    bits.at = 3
    for row, m in zip(values, (order, order + 2), strict=True):
        assert [bits.signed(m) for _ in row] == row.tolist()
    assert bits.at == at


@BOTH
def test_numbers_of_any_bytes_end_and_are_bounded(form):
    rng = np.random.default_rng(0)
    for raw_B in (np.zeros(5, np.uint8), np.zeros(0, np.uint8), rng.integers(0, 4, 9, np.uint8)):
        got = np.empty((4, 3), np.int64)
        at = form(golomb.get_rows)(raw_B, 0, np.arange(4), got)
        assert 0 < at <= 12 * 62 + 8 * raw_B.size
        assert np.abs(got).max() <= 2**30


@BOTH
def test_tables_are_those_of_the_twin_and_leave_no_symbol_out(form):
    rng = np.random.default_rng(1)
    counted = rng.integers(0, 2000, (88, 16)).astype(np.int32)
    prior = PRIORS.reshape(88, 16)
    table_XE = np.zeros((88, counts.WIDTH), np.uint16)
    form(counts._make_tables)(counted.copy(), prior, table_XE)
    share_X16 = np.diff(table_XE[:, :17].astype(int))
    assert share_X16.min() >= 1
    assert (share_X16.sum(axis=1) == TOTAL).all()
    for got, n, p in zip(share_X16, counted, prior, strict=True):
        assert got.tolist() == naive_rans.shares((256 * n + p).tolist())


def test_large_counts_are_halved():
    counted = np.full((2, 16), 1 << 16, np.int32)
    counts._make_tables(counted, PRIORS[3], np.zeros((2, counts.WIDTH), np.uint16))
    assert (counted == 1 << 15).all()


@BOTH
@pytest.mark.parametrize("classes", [(3,), (0, 8), (6, 5, 9), (12, 3, 3, 1)], ids=str)
@pytest.mark.parametrize("plots", [False, True])
@pytest.mark.parametrize("rows", SIZES)
def test_a_block_comes_back_and_reads_as_the_twin_reads_it(form, classes, plots, rows):
    num_states = 1 + rows % 2
    payload_B, end, due_N, _, _ = code(rows, classes, plots, num_states, form)
    level_N, word_at, raw_at = decode(payload_B, rows, classes, plots, num_states, form)
    assert (level_N == due_N).all()
    assert raw_at == end
    assert word_at == -(-end // 8) + 16
    bits, words = naive_rans.Bits(payload_B.tobytes()), naive_rans.Words(payload_B.tobytes())
    tables = naive_rans.Tables(classes, PRIORS, plots)
    twin = naive_rans.block(bits, words, rows, tables, num_states)
    depth = -(-rows // LANES)
    for row, levels in enumerate(twin):
        lane, r = divmod(row, depth)
        got = level_N.reshape(depth, len(classes), LANES)[r, :, lane]
        assert levels == got.tolist()
    assert (bits.at, words.at) == (raw_at, word_at)


@pytest.mark.parametrize("num_states", [1, 2, 4])
def test_words_are_as_many_as_the_frequencies_ask_for(num_states):
    _, _, _, ideal, n = code(4000, (3, 6, 7), True, num_states)
    assert ideal <= 16 * n <= 1.0005 * ideal + 32 * num_states


def test_counting_comes_near_the_entropy():
    rows, classes = 20_000, (4,)
    k_N, path_N = draw(rows, classes)
    _, _, _, ideal, _ = code(rows, classes, False, 1)
    entropy = 0.0
    for q in (0, 1):
        n = np.unique(k_N[path_N == q], return_counts=True)[1]
        entropy -= (n * np.log2(n / n.sum())).sum()
    assert entropy < ideal < 1.005 * entropy


def test_clusters_are_seen_by_the_finer_tables():
    classes, rows = (5, 5, 5), 4096
    rng = np.random.default_rng(0)
    side_LR = rng.choice([-2, 2], (rows // LANES, 1, LANES))
    k_N = np.ascontiguousarray(np.broadcast_to(side_LR, (rows // LANES, 3, LANES)), np.int32)
    spent = []
    for plots in (False, True):
        op_N = np.zeros(k_N.size, np.uint32)
        rans.model_block(
            k_N.reshape(-1), np.zeros(k_N.size, np.uint8), rows,
            Model.start(np.array(classes), plots), np.empty(LANES, np.int64), op_N,
            np.zeros(64, np.uint8), 0,
        )  # fmt: skip
        spent.append((14 - np.log2(op_N >> 16)).sum() / rows)
    assert spent[0] == pytest.approx(3, abs=0.2)
    assert spent[1] == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_decode_to_bounded_levels(seed):
    rng = np.random.default_rng(seed)
    payload_B = rng.integers(0, 256, int(rng.integers(2, 60)), np.uint8)
    payload_B[rng.random(payload_B.size) < 0.5] = rng.choice([0, 255])
    classes = rng.integers(0, counts.NUM_CLASSES, 3).tolist()
    level_N, _, _ = decode(payload_B, 100, classes, True, 2)
    assert np.abs(level_N.astype(np.int64)).max() <= 2 * rans.LARGEST


def test_prices_are_the_bits_of_a_table():
    # A table made from a parabola of bits gives the parabola back.
    bits = 2 + 0.5 * np.abs(np.arange(16) - 8) + 0.1 * (np.arange(16) - 8) ** 2
    share = np.maximum(np.rint(TOTAL * 2.0**-bits), 1)
    table_XE = np.zeros((2, counts.WIDTH), np.uint16)
    table_XE[:, 1:17] = np.cumsum(share)
    price_8K = prices_of(table_XE, np.zeros(1, np.int32), 0.5)
    assert price_8K[:4] == pytest.approx([1, 1, 0.25, 0.05], abs=0.01)
    assert (price_8K[4:] == price_8K[:4]).all()


@pytest.mark.parametrize("low", [0, 1, 3])
def test_prices_are_the_weighted_parabola_of_numpy(low):
    seen = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        weight_E = np.exp(-((np.arange(16) - 8.0) ** 2) / rng.uniform(4, 40)) + 1e-3
        share = np.maximum(np.rint(TOTAL * weight_E / weight_E.sum() * rng.uniform(0.7, 1, 16)), 1)
        table_XE = np.zeros((2, counts.WIDTH), np.uint16)
        table_XE[:, 1:17] = np.cumsum(share)
        price_8K = prices_of(table_XE, np.array([low], np.int32), 1.0)
        m = np.abs((np.arange(1, 16) - 8.0) * 2**low + (2**low - 1) / 2)
        keep = (np.arange(1, 16) != 8) | (low > 0)
        bits = 14 - np.log2(share[1:]) + low
        bend, slope, base = np.polyfit(m[keep], bits[keep], 2, w=np.sqrt(share[1:][keep]))
        if bend > 0:  # otherwise it is a line
            seen += 1
            due = [base if low else bits[7], base, slope, bend]
            assert price_8K[:4] == pytest.approx(due, rel=1e-4, abs=1e-4)
    assert seen > 10


def test_prices_never_bend_down():
    for klass in range(counts.NUM_CLASSES):
        model = Model.start(np.array([klass]), False)
        price_8K = prices_of(model.table_XE, model.low_K, 1.0)
        assert np.isfinite(price_8K).all()
        assert price_8K[[2, 3, 6, 7]].min() >= 0
        assert math.isclose(model.low_K[0], max(0, (klass - 6) // 2))
