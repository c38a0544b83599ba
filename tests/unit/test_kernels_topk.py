"""Selection and subset codes: compiled and plain Python against twins, for any kind of tie."""

import itertools
import math

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive, naive_sparse

from hpcvfl.kernels import bitscan, combinations, topk, topk_line
from hpcvfl.kernels.compiling import FAR

KEY = 0x0123456789ABCDEF
law = settings(deadline=None, derandomize=True, max_examples=40)


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        for module, names in (
            (topk, ("rows_selector", "gather_rows", "scatter_rows", "magnitude_sums")),
            (topk_line, ("count_digits",)),
            (combinations, ("put_numbers", "take_numbers", "put_marks", "take_marks")),
        ):
            for name in names:
                monkeypatch.setattr(module, name, naive.plain(getattr(module, name)))
        made = topk_line.line_selector
        monkeypatch.setattr(topk_line, "line_selector", lambda h: naive.plain(made(h)))
    with np.errstate(over="ignore"):
        yield request.param


def matrix(kind, R, C):
    x = np.random.default_rng(R + C).normal(size=(R, C))
    made = {
        "normal": x,
        "zeros": np.zeros((R, C)),
        "relu": np.maximum(x, 0),
        "few values": np.round(2 * x),
        "close": 1 + 1e-6 * x,
        "denormal": x * 1e-42,
        "huge": x * 1e37,
        "signed zeros": np.copysign(0.0, x),
    }
    return made[kind].astype(np.float32)


KINDS = ("normal", "zeros", "relu", "few values", "close", "denormal", "huge", "signed zeros")
ROWS = ((0, 3), (1, 1), (1, 8), (7, 2), (8, 9), (9, 7), (33, 40), (257, 3))


def select(x_RC, K):
    out_RK = np.full((len(x_RC), K), -1, np.int32)
    kept_RK = np.full((len(x_RC), K), np.nan, x_RC.dtype)
    assert topk.select_rows(x_RC, x_RC, out_RK, kept_RK) == 0
    return out_RK, kept_RK


def due_rows(x_RC, K):
    rows = [naive_sparse.largest(np.abs(row), K) for row in x_RC]
    return np.array(rows, np.int32).reshape(len(x_RC), K)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_rows_keep_what_a_sort_keeps(mode, shape, kind):
    x_RC = matrix(kind, *shape)
    for K in sorted({1, 2, shape[1] // 2, shape[1] - 1, shape[1]} & set(range(1, shape[1] + 1))):
        out_RK, kept_RK = select(x_RC, K)
        np.testing.assert_array_equal(out_RK, due_rows(x_RC, K))
        np.testing.assert_array_equal(kept_RK, np.take_along_axis(x_RC, out_RK, axis=1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 32, 33, 300])
def test_a_line_keeps_what_a_sort_keeps(mode, n, kind):
    x_N = matrix(kind, 1, n)[0]
    for K in sorted({1, (n + 1) // 2, n}):
        out_K = np.full(K, -1, np.int32)
        assert topk_line.select_line(x_N, out_K) == 0
        np.testing.assert_array_equal(out_K, naive_sparse.largest(np.abs(x_N), K))


@pytest.mark.parametrize("kind", ["normal", "few values"])
def test_very_wide_rows_are_searched_as_lines(kind):
    x_RC = matrix(kind, 3, 5000)
    np.testing.assert_array_equal(select(x_RC, 77)[0], due_rows(x_RC, 77))


def test_many_rows_are_fetched_ahead_and_selected_alike():
    x_RC = matrix("normal", FAR // 16 + 300, 16)
    due_RK = np.sort(np.argsort(-np.abs(x_RC), axis=1, kind="stable")[:, :3], axis=1)
    np.testing.assert_array_equal(select(x_RC, 3)[0], due_RK)


def test_strided_and_read_only_rows_are_selected_alike():
    x_RC = matrix("normal", 40, 24)[::2, ::3]
    x_RC.setflags(write=False)
    np.testing.assert_array_equal(select(x_RC, 3)[0], due_rows(x_RC, 3))


def test_what_is_kept_may_have_another_type_than_what_is_compared():
    y_RC = np.random.default_rng(1).normal(size=(9, 6))
    out_RK, kept_RK = np.empty((9, 2), np.int32), np.empty((9, 2))
    assert topk.select_rows(y_RC.astype(np.float32), y_RC, out_RK, kept_RK) == 0
    np.testing.assert_array_equal(kept_RK, np.take_along_axis(y_RC, out_RK, axis=1))


@pytest.mark.parametrize("at", [0, 130, 299])
@pytest.mark.parametrize(("bad", "due"), [(np.nan, 1), (-np.nan, 1), (np.inf, 2), (-np.inf, 2)])
def test_nan_and_inf_are_reported(mode, bad, due, at):
    x_RC = matrix("normal", 100, 3)
    x_RC.reshape(-1)[at] = bad
    out_RK, kept_RK = np.empty((100, 2), np.int32), np.empty((100, 2), np.float32)
    assert topk.select_rows(x_RC, x_RC, out_RK, kept_RK) == due
    assert topk_line.select_line(x_RC.reshape(-1), np.empty(5, np.int32)) == due


def test_a_nan_beside_an_inf_is_the_nan_in_wide_rows_too():
    x_RC = matrix("normal", 2, 5000)
    x_RC[0, 7], x_RC[1, 9] = np.inf, np.nan
    out_RK, kept_RK = np.empty((2, 4), np.int32), np.empty((2, 4), np.float32)
    assert topk.select_rows(x_RC, x_RC, out_RK, kept_RK) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_scatter_undoes_gather_and_zeroes_the_rest(mode, shared):
    x_RC = matrix("normal", 9, 7)
    indices_RK = due_rows(x_RC, 3)
    if shared:
        indices_RK = np.broadcast_to(indices_RK[:1], (9, 3))
    kept_RK, out_RC = np.empty((9, 3), np.float32), np.full_like(x_RC, np.nan)
    topk.gather_rows(x_RC, indices_RK, kept_RK)
    topk.scatter_rows(kept_RK, indices_RK, out_RC)
    mask_RC = np.zeros((9, 7), bool)
    np.put_along_axis(mask_RC, indices_RK, True, axis=1)
    np.testing.assert_array_equal(out_RC, np.where(mask_RC, x_RC, 0))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sums_of_magnitudes_are_the_exact_ones_rounded(mode, dtype):
    x_RC = matrix("normal", 50, 5).astype(dtype)
    sums_C = np.empty(5)
    topk.magnitude_sums(x_RC, sums_C)
    due_C = [math.fsum(np.abs(x_RC[:, c].astype(np.float64))) for c in range(5)]
    np.testing.assert_allclose(sums_C, due_C, rtol=1e-14)


@pytest.mark.parametrize(("n", "K"), [(1, 1), (7, 3), (8, 8), (9, 1), (400, 37), (1000, 990)])
def test_random_places_are_those_of_the_largest_hashes(mode, n, K):
    out_K = np.full(K, -1, np.int32)
    topk_line.select_random(KEY, n, out_K)
    np.testing.assert_array_equal(out_K, naive_sparse.largest(naive_sparse.hashes(KEY, n), K))


def test_random_places_are_right_where_the_bracket_was_too_narrow(monkeypatch):
    due_RK, out_K = np.empty((20, 1000), np.int32), np.empty(1000, np.int32)
    for key in range(20):
        topk_line.select_random(key, 4000, due_RK[key])
    statuses, made = [], topk_line._run
    monkeypatch.setattr(topk_line, "_DEVIATIONS", 0)  # leaves 8 places on either side
    monkeypatch.setattr(topk_line, "_run", lambda *a: statuses.append(made(*a)) or statuses[-1])
    for key in range(20):
        topk_line.select_random(key, 4000, out_K)
        np.testing.assert_array_equal(out_K, due_RK[key])
    failed = statuses.count(topk_line._FAILED)
    assert 0 < failed < 20
    assert statuses.count(0) == 20
    assert len(statuses) == 20 + failed


def test_all_subsets_are_equally_likely():
    counts = dict.fromkeys(itertools.combinations(range(6), 3), 0)
    out_K, draws = np.empty(3, np.int32), 20_000
    for key in range(draws):
        topk_line.select_random(key, 6, out_K)
        counts[tuple(out_K.tolist())] += 1
    due = draws / len(counts)
    # chi-squared, 19 degrees of freedom: 43.8 at 0.1 %
    assert sum((count - due) ** 2 / due for count in counts.values()) < 43.8


def test_every_place_is_kept_as_often_and_neighbours_are_independent():
    n, K, draws = 64, 16, 4000
    kept = np.zeros((draws, n))
    for key in range(draws):
        out_K = np.empty(K, np.int32)
        topk_line.select_random(key * 0x9E3779B97F4A7C15 % 2**64, n, out_K)
        kept[key, out_K] = 1
    share, sigma = K / n, math.sqrt(0.25 * 0.75 / draws)
    assert np.abs(kept.mean(axis=0) - share).max() < 4.5 * sigma
    correlation = np.corrcoef(kept.T) + 1 / (n - 1)  # -1/(n - 1) is due without replacement
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5.5 / math.sqrt(draws)


def test_lowest_and_highest_one_agree_with_python():
    @numba.njit
    def both(word):
        return bitscan.lowest_one(word), bitscan.highest_one(word)

    words = [1 << i for i in range(64)] + [0b1011 << i for i in range(60)] + [2**64 - 1]
    for word in words:
        due = (bitscan.lowest_one(word), bitscan.highest_one(word))
        assert due == (bin(word)[::-1].index("1"), len(bin(word)) - 3)
        assert both(np.uint64(word)) == due
        if word < 1 << 32:
            assert both(np.uint32(word)) == due


SUBSETS = ((1, 1), (2, 1), (9, 4), (9, 9), (16, 2), (16, 8), (40, 20), (128, 8), (128, 13))
SUBSETS += ((128, 40), (500, 1), (3000, 40), (2000, 900), (70_000, 2))


def draw_subsets(C, K, R):
    rng = np.random.default_rng(C + K)
    rows = [np.sort(rng.permutation(C)[:K]) for _ in range(R - 2)]
    return np.array([np.arange(K), np.arange(C - K, C), *rows], np.int32)


def bits_of(code, subset):
    """The bits of one subset, first one lowest, by the definition of each kind."""
    if code.kind == "marks":
        return naive_sparse.mark_bits(subset, code.C)
    if code.kind == "gaps":
        return naive_sparse.gap_bits(subset, code.C, code.low)
    number = sum(math.comb(c, i + 1) for i, c in enumerate(subset))
    return format(number, f"0{code.width}b")[::-1] if code.width else ""


@pytest.mark.parametrize(("C", "K"), SUBSETS)
def test_subsets_are_written_as_defined_and_read_back(mode, C, K):
    code, R = combinations.cheapest(C, K), 5
    indices_RK = draw_subsets(C, K, R)
    out_B = np.full(code.nbytes(R), 0xAA, np.uint8)
    combinations.put_subsets(code, indices_RK, out_B)
    text = "".join(bits_of(code, [int(c) for c in row]) for row in indices_RK)
    assert len(text) == R * code.width
    assert out_B.tobytes() == naive_sparse.as_bytes(text)
    back_RK = np.full_like(indices_RK, -1)
    assert combinations.take_subsets(code, out_B, back_RK)
    np.testing.assert_array_equal(back_RK, indices_RK)


@pytest.mark.parametrize("C", range(1, 9))
def test_numbers_are_the_places_in_the_list_of_all_subsets(C):
    for K in range(1, C + 1):
        subsets = list(itertools.combinations(range(C), K))
        ranks = [naive_sparse.rank(subset) for subset in subsets]
        assert sorted(ranks) == list(range(math.comb(C, K)))
        code = combinations.cheapest(C, K)
        assert code.kind == "number"
        for subset, rank in zip(subsets, ranks, strict=True):
            assert bits_of(code, subset) == (f"{rank:0{code.width}b}"[::-1] if code.width else "")


def test_the_list_and_the_search_read_the_same(monkeypatch):
    code, R = combinations.cheapest(16, 3), 560
    indices_RK = np.array(list(itertools.combinations(range(16), 3)), np.int32)
    out_B, back_RK = np.empty(code.nbytes(R), np.uint8), np.empty_like(indices_RK)
    combinations.put_subsets(code, indices_RK, out_B)
    assert len(combinations._listed(16, 3, code.width)) == 2**code.width
    assert combinations.take_subsets(code, out_B, back_RK)
    np.testing.assert_array_equal(back_RK, indices_RK)
    monkeypatch.setattr(combinations, "_listed", lambda C, K, width: np.empty((0, K), np.int32))
    back_RK[:] = -1
    assert combinations.take_subsets(code, out_B, back_RK)
    np.testing.assert_array_equal(back_RK, indices_RK)


@pytest.mark.parametrize(
    ("C", "K", "kind", "width"),
    [
        (16, 2, "number", 7),
        (16, 16, "number", 0),
        (5000, 5000, "number", 0),
        (128, 8, "number", 41),
        (60, 30, "number", 57),
        (61, 30, "marks", 61),
        (128, 13, "gaps", 67),
        (65536, 655, "gaps", 5608),
    ],
)
def test_the_cheapest_code_is_taken(C, K, kind, width):
    code = combinations.cheapest(C, K)
    assert (code.kind, code.width) == (kind, width)


@law
@given(st.integers(1, 3000), st.data())
def test_no_code_is_wider_than_marks_or_a_list_nor_narrower_than_the_count_of_subsets(C, data):
    K = data.draw(st.integers(1, C))
    width = combinations.cheapest(C, K).width
    least = (math.comb(C, K) - 1).bit_length()
    assert least <= width <= C
    assert width <= K * ((C - 1).bit_length() + 1) + 1
    assert width == least or math.comb(C, K) > 2**57 or K * C > 1 << 16


@law
@given(st.sampled_from(SUBSETS), st.integers(0, 2**32 - 1))
def test_any_bytes_give_a_subset_or_are_refused(sizes, seed):
    C, K = sizes
    code = combinations.cheapest(C, K)
    hostile_B = np.random.default_rng(seed).integers(0, 256, code.nbytes(7)).astype(np.uint8)
    out_RK = np.full((7, K), -1, np.int32)
    if combinations.take_subsets(code, hostile_B, out_RK):
        assert out_RK.min() >= 0
        assert out_RK.max() < C
        assert (np.diff(out_RK, axis=1) > 0).all()


@pytest.mark.parametrize(("C", "K"), [(128, 40), (3000, 40), (128, 13)])
def test_a_mark_too_many_or_too_few_is_refused(mode, C, K):
    code = combinations.cheapest(C, K)
    indices_RK = draw_subsets(C, K, 3)
    out_B, back_RK = np.empty(code.nbytes(3), np.uint8), np.empty_like(indices_RK)
    combinations.put_subsets(code, indices_RK, out_B)
    marks = range(code.K * code.low, code.width)  # of the first subset
    for bit in (marks[0], marks[1], marks[-1]):
        hostile_B = out_B.copy()
        hostile_B[bit // 8] ^= 1 << bit % 8
        assert not combinations.take_subsets(code, hostile_B, back_RK)


def test_low_bits_that_go_down_are_refused(mode):
    code = combinations.cheapest(128, 13)
    indices_RK = np.arange(13, dtype=np.int32).reshape(1, 13)  # high parts 0 0 0 .. 1 1 ..
    out_B, back_RK = np.empty(code.nbytes(1), np.uint8), np.empty_like(indices_RK)
    combinations.put_subsets(code, indices_RK, out_B)
    out_B[0] |= 0b111  # index 0 becomes 7, above index 1
    assert not combinations.take_subsets(code, out_B, back_RK)
