"""topk and randomk: which values are kept, what they cost, how they come back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive_sparse

from hpcvfl import seeds
from hpcvfl.codecs import table
from hpcvfl.codecs.base import Message
from hpcvfl.errors import ConfigError, NonFiniteError, WireError

KEY = 0x0123_4567_89AB_CDEF
law = settings(deadline=None, derandomize=True, max_examples=40)


def draw(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(0.3, 2.0, shape).astype(dtype)


def encoded(spec, x, key=KEY, score=None):
    codec = table.parse(spec)
    payload_B = np.full(codec.nbytes(x.shape, x.itemsize), 0xA5, np.uint8)
    codec.encode_scored(x, key, payload_B, score)
    return payload_B


def decoded(spec, payload_B, x, key=KEY):
    out = np.full_like(x, np.nan)
    table.parse(spec).decode(payload_B, key, out)
    return out


def round_trip(spec, x, key=KEY, score=None):
    return decoded(spec, encoded(spec, x, key, score), x, key)


def only(x, mask):
    return np.where(mask, x, 0).astype(x.dtype)


@law
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 45), st.booleans(), st.integers(0, 99)
)
def test_each_row_keeps_its_largest_values_exactly(R, C, k, rounded, seed):
    x = np.random.default_rng(seed).normal(size=(R, C)).astype(np.float32)
    x = np.round(x) if rounded else x  # many ties
    mask = np.zeros((R, C), bool)
    for r in range(R):
        mask[r, naive_sparse.largest(np.abs(x[r]), k)] = True
    np.testing.assert_array_equal(round_trip(f"topk:k={k},per=row", x), only(x, mask))


@law
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 60), st.integers(0, 99))
def test_a_tensor_keeps_its_largest_values_exactly(shape, k, seed):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    mask = np.zeros(x.size, bool)
    mask[naive_sparse.largest(np.abs(x.reshape(-1)), k)] = True
    got = round_trip(f"topk:k={k},per=tensor", x)
    np.testing.assert_array_equal(got, only(x, mask.reshape(shape)))


def test_columns_are_those_of_the_largest_scores_and_of_the_largest_sums_without_scores():
    x, score = draw(50, 6), np.array([0.1, 0.9, 0.2, 0.9, 0.3, 0.0])
    x[:, 4] *= 100
    np.testing.assert_array_equal(
        round_trip("topk:k=2", x, score=score), only(x, [False, True, False, True, False, False])
    )
    # of equal scores the first
    np.testing.assert_array_equal(
        round_trip("topk:k=1", x, score=score), only(x, [False, True] + [False] * 4)
    )
    np.testing.assert_array_equal(round_trip("topk:k=1", x), only(x, [False] * 4 + [True, False]))


def test_scores_choose_no_values_of_rows_and_tensors():
    x, score = draw(50, 6), np.array([9.0, 0, 0, 0, 0, 0])
    for per in ("row", "tensor"):
        spec = f"topk:k=2,per={per}"
        assert not table.parse(spec).wants_score
        assert encoded(spec, x, score=score).tobytes() == encoded(spec, x).tobytes()
    assert table.parse("topk:k=2").wants_score


def test_a_message_hands_the_scores_on():
    x, score = draw(50, 6), np.array([0, 0, 0, 0, 0, 1.0])
    message = Message(table.parse("topk:k=1"), [x.shape], x.dtype)
    payload_B, out = np.zeros(message.nbytes, np.uint8), np.empty_like(x)
    message.encode([x], KEY, payload_B, score)
    message.decode(payload_B, KEY, [out])
    np.testing.assert_array_equal(out, only(x, score > 0))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_no_number_is_refused(bad):
    with pytest.raises(NonFiniteError, match="scores"):
        encoded("topk:k=1", draw(5, 3), score=np.array([1.0, bad, 0.0]))


@pytest.mark.parametrize(
    ("spec", "shape", "due"),
    [
        ("topk:k=2", (100, 16), 1 + 100 * 2 * 4),  # one set: 7 bits
        ("topk:k=2,per=row", (100, 16), 88 + 100 * 2 * 4),  # 100 sets: 700 bits
        ("topk:k=2,per=row,values=scalar:bits=1", (1000, 16), 875 + 8 + 250),
        ("topk:k=16,per=row", (100, 16), 100 * 16 * 4),  # all columns: no set
        ("topk:k=99", (100, 16), 100 * 16 * 4),
        ("topk:ratio=0.1,per=row", (10, 30), (10 * 12 + 7) // 8 + 10 * 3 * 4),  # 4060 sets
        ("topk:ratio=0.1", (10, 31), 2 + 10 * 4 * 4),  # 3.1 columns are 4: 31,465 sets, 15 bits
        ("topk:ratio=0.01,per=tensor", (64, 1024), 701 + 655 * 4),  # 655.36 values are 655
        ("topk:ratio=0.001,per=tensor", (64, 10), 2 + 4),  # one of 640 places: 10 bits
        ("topk:k=2", (10,), 1 + 8),  # one row: 2 of 10 in 6 bits
        ("topk:k=2,per=row", (3, 4, 16), 11 + 12 * 2 * 4),
        ("topk:k=2", (0, 4), 0),
        ("topk:k=2,per=row", (4, 0), 0),
        ("randomk:k=5", (100, 16), 20),
        ("randomk:ratio=0.1", (10, 31), 31 * 4),
        ("randomk:ratio=0.1,per=column", (10, 31), 10 * 4 * 4),
        ("randomk:k=5,values=scalar:bits=2", (100, 16), 8 + 2),
        ("randomk:k=3", (0,), 0),
    ],
)
def test_payloads_have_the_bytes_that_the_sets_and_values_need(spec, shape, due):
    assert table.parse(spec).nbytes(shape, 4) == due


def test_a_share_is_exact_in_its_decimal_digits():
    # 0.1 * 30 is 3.0000000000000004 in floating point, and 0.29 * 100 is 28.999999999999996
    for spec, n, due in (("ratio=0.1", 30, 3), ("ratio=0.29", 100, 29), ("ratio=1.0", 7, 7)):
        for per in ("row", "tensor"):
            x = draw(1, n)
            assert np.count_nonzero(round_trip(f"topk:{spec},per={per}", x)) == due
        assert np.count_nonzero(round_trip(f"randomk:{spec}", x)) == due


@pytest.mark.parametrize("inner", ["scalar:bits=3", "scalar:bits=2,range=gauss,scope=column"])
@pytest.mark.parametrize("per", ["row", "column", "tensor"])
def test_kept_values_are_coded_as_an_array_of_their_own(per, inner):
    x = draw(40, 8)
    if per == "tensor":
        places = naive_sparse.largest(np.abs(x.reshape(-1)), 3)
        kept, mask = x.reshape(-1)[places], np.zeros(x.size, bool)
        mask[places] = True
    else:
        rows = [naive_sparse.largest(np.abs(row), 3) for row in x]
        rows = [naive_sparse.columns_by_sum(x, 3)] * 40 if per == "column" else rows
        kept = np.take_along_axis(x, np.array(rows), axis=1)
        mask = np.zeros(x.shape, bool)
        np.put_along_axis(mask, np.array(rows), True, axis=1)
    due = np.zeros_like(x)
    due[mask.reshape(x.shape)] = round_trip(inner, kept, key=seeds.subkey(KEY, 0)).reshape(-1)
    got = round_trip(f"topk:k=3,per={per},values=({inner})", x)
    np.testing.assert_array_equal(got, due)


def test_a_codec_may_hold_a_sparse_one():
    x = draw(20, 8)
    got = round_trip("topk:k=4,values=(topk:k=2,per=row,values=float16)", x)
    assert (np.count_nonzero(got, axis=1) == 2).all()


@pytest.mark.parametrize("per", ["row", "column", "tensor"])
def test_float64_values_are_kept_as_they_are(per):
    x = draw(30, 5, dtype=np.float64)
    got = round_trip(f"topk:k=2,per={per}", x)
    kept = got != 0
    assert kept.any()
    np.testing.assert_array_equal(got[kept], x[kept])


def test_float64_values_beyond_float32_are_refused_where_they_are_compared():
    x = np.array([[1.0, 1e300]])
    with pytest.raises(NonFiniteError, match="beyond the range of float32"):
        encoded("topk:k=1,per=row", x)


def test_the_spread_of_marks_of_a_corrupt_set_is_a_wire_error():
    x = draw(100, 20)
    payload_B = encoded("topk:k=300,per=tensor", x)
    payload_B[:40] = 0
    with pytest.raises(WireError, match="300 of 2000"):
        decoded("topk:k=300,per=tensor", payload_B, x)


@law
@given(st.integers(1, 300), st.integers(1, 320), st.integers(0, 2**64 - 1))
def test_randomk_keeps_k_values_at_the_places_that_the_receiver_draws(n, k, key):
    x = np.arange(1, n + 1, dtype=np.float32)
    got = round_trip(f"randomk:k={k}", x, key)
    kept = got != 0
    assert kept.sum() == min(k, n)
    np.testing.assert_array_equal(got[kept], x[kept])
    assert encoded(f"randomk:k={k}", x, key).view(np.float32).tolist() == x[kept].tolist()


def test_randomk_draws_other_places_for_another_key_and_another_tensor():
    x = np.ones(1000, np.float32)
    seen = [round_trip("randomk:k=100", x, key).nonzero()[0].tolist() for key in (KEY, KEY + 1)]
    message = Message(table.parse("randomk:k=100"), [x.shape, x.shape], x.dtype)
    payload_B, out = np.zeros(message.nbytes, np.uint8), [np.empty_like(x), np.empty_like(x)]
    message.encode([x, x], KEY, payload_B)
    message.decode(payload_B, KEY, out)
    seen += [y.nonzero()[0].tolist() for y in out]
    for i, places in enumerate(seen):
        assert len(places) == 100
        assert all(len(set(places) & set(other)) < 30 for other in seen[:i])  # 10 are due


def test_randomk_keeps_whole_columns():
    x = draw(50, 8)
    kept = round_trip("randomk:k=3,per=column", x) != 0
    assert kept.all(axis=0).sum() == 3
    assert kept.any(axis=0).sum() == 3


def test_the_mean_of_scaled_randomk_is_the_value():
    x, draws = np.array([3.0, -1.0, 0.5, 2.0, -4.0], np.float32), 4000
    y = np.array([round_trip("randomk:k=2,scale=on", x, key) for key in range(draws)], np.float64)
    # y is x n/K with probability K/n: variance x**2 (n/K - 1)
    z = (y.mean(axis=0) - x) / (np.abs(x) * np.sqrt((5 / 2 - 1) / draws))
    assert np.abs(z).max() < 4.5
    assert set(np.unique(np.abs(y))) == {0.0, *(np.abs(x) * 2.5).tolist()}


def test_a_scaled_value_beyond_float32_is_refused():
    x = np.full(1000, 3e38, np.float32)
    with pytest.raises(NonFiniteError):
        encoded("randomk:k=10,scale=on", x)


@pytest.mark.parametrize("spec", ["topk:k=2", "topk:k=2,per=row", "randomk:k=2"])
def test_a_bad_value_where_nothing_is_kept_is_refused(spec):
    for key in range(20):
        x = np.full((40, 8), 5, np.float32)
        x[39, 7] = np.nan
        with pytest.raises(NonFiniteError):
            encoded(spec, x, key)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topk", "one of k and ratio"),
        ("topk:k=2,ratio=0.1", "one of k and ratio"),
        ("topk:k=0", "possible: 1, 2, 3"),
        ("topk:k=-1", "possible: 1, 2, 3"),
        ("topk:k=2.5", "possible: 1, 2, 3"),
        ("topk:k=²", "possible: 1, 2, 3"),
        ("topk:ratio=0", "above 0, up to 1"),
        ("topk:ratio=1.1", "above 0, up to 1"),
        ("topk:ratio=nan", "above 0, up to 1"),
        ("topk:ratio=x", "above 0, up to 1"),
        ("topk:k=2,per=batch", "possible: column, row, tensor"),
        ("topk:k=2,values=foo", "unknown codec 'foo'"),
        ("topk:k=2,values=ef(none)", "has a memory"),
        ("topk:k=2,bits=2", "options: k, ratio, per, values"),
        ("randomk", "one of k and ratio"),
        ("randomk:k=2,per=row", "possible: tensor, column"),
        ("randomk:k=2,scale=2", "possible: on, off"),
        ("randomk:k=2,values=ef16(none)", r"put it around: ef16\(randomk:...\)"),
        ("randomk:k=2,seed=2", "options: k, ratio, per, scale, values"),
    ],
)
def test_a_bad_spec_names_option_and_choices(spec, words):
    with pytest.raises(ConfigError, match=words):
        table.parse(spec)


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("topk:k=02,per=column,values=none", "topk:k=2"),
        ("topk:ratio=.50,per=row", "topk:ratio=0.5,per=row"),
        (
            "topk:values=(scalar:bits=2,dither=off),k=2",
            "topk:k=2,values=(scalar:bits=2,dither=off)",
        ),
        ("randomk:ratio=1e-1,scale=off,per=tensor", "randomk:ratio=0.1"),
        (
            "randomk:k=2,scale=on,per=column,values=(scalar:bits=2)",
            "randomk:k=2,per=column,scale=on,values=scalar:bits=2",
        ),
    ],
)
def test_canonical_specs_leave_defaults_out(spec, canonical):
    assert table.parse(spec).spec == canonical
