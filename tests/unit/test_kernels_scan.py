"""Ranges, moments and status: compiled and plain Python against exact twins."""

import numpy as np
import pytest
from support import naive

from hpcvfl.kernels import scan

SIZES = (0, 1, 7, 8, 9, 4097)
KERNELS = ("range_line", "range_columns", "sum_columns", "status_line", "status_columns")


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    if request.param == "python":
        for name in KERNELS:
            monkeypatch.setattr(scan, name, naive.plain(getattr(scan, name)))
    with np.errstate(over="ignore", invalid="ignore"):
        yield request.param


def values(n, offset=0.0):
    return (np.random.default_rng(n).normal(size=n) + offset).astype(np.float32)


def negative_zero_free(pair):
    return not np.signbit(pair[pair == 0]).any()


@pytest.mark.parametrize("offset", [-9.0, 0.0, 9.0])
@pytest.mark.parametrize("n", SIZES)
def test_minmax_agrees_with_the_twin(mode, n, offset):
    out_2 = np.full(2, np.nan, np.float32)
    assert scan.minmax(values(n, offset), out_2) == 0
    assert tuple(out_2) == naive.minmax(values(n, offset))


@pytest.mark.parametrize(
    "x", [[-0.0], [-0.0, 0.0], [-3.0, -0.0], [-0.0, 5.0], [-1e-45, 1e-45], [3.4e38, -3.4e38]]
)
def test_minmax_of_zeros_subnormals_and_extremes(mode, x):
    out_2 = np.empty(2, np.float32)
    assert scan.minmax(np.array(x, np.float32), out_2) == 0
    assert tuple(out_2) == naive.minmax(np.array(x, np.float32))
    assert negative_zero_free(out_2)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("place", [0, 7, 2048, 4096])
@pytest.mark.parametrize("bad", [[NAN], [-NAN], [INF], [-INF], [INF, NAN], [-INF, -NAN]])
@pytest.mark.parametrize("offset", [-9.0, 0.0, 9.0])
def test_every_scan_reports_nan_and_inf(mode, bad, place, offset):
    x = values(4097 + 15, offset)
    x[[place, place + 15][: len(bad)]] = bad
    expected = naive.status(x)
    assert expected in (1, 2)
    assert scan.minmax(x, np.empty(2, np.float32)) == expected
    x_RC = x.reshape(-1, 16)
    out_C2 = np.empty((16, 2), np.float32)
    assert scan.minmax_columns(x_RC, out_C2) == expected
    assert scan.moments_columns(x_RC, out_C2) == expected
    assert scan.moments_columns(x[:, None], out_C2[:1]) == expected
    assert scan.status_line(x.view(np.uint32)) == expected
    assert scan.status_columns(x_RC.view(np.uint32)) == expected


@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 257])
@pytest.mark.parametrize("columns", [0, 1, 3, 16])
def test_column_ranges_and_moments_agree_with_the_twin(mode, rows, columns):
    x_RC = values(rows * columns, 3.0).reshape(rows, columns)
    ranges_C2, moments_C2 = np.full((2, columns, 2), np.nan, np.float32)
    assert scan.minmax_columns(x_RC, ranges_C2) == 0
    assert scan.moments_columns(x_RC, moments_C2) == 0
    for c in range(columns):
        assert tuple(ranges_C2[c]) == naive.minmax(x_RC[:, c])
        np.testing.assert_allclose(moments_C2[c], naive.moments(x_RC[:, c]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("n", SIZES)
def test_moments_of_one_column_agree_with_the_twin(mode, n):
    out_12 = np.empty((1, 2), np.float32)
    assert scan.moments_columns(values(n, -5.0)[:, None], out_12) == 0
    np.testing.assert_allclose(out_12[0], naive.moments(values(n, -5.0)), rtol=1e-6)


def test_a_constant_column_has_no_deviation_at_all(mode):
    x_RC = np.full((1000, 2), 0.1, np.float32) * np.array([1, 1e30], np.float32)
    out_C2 = np.empty((2, 2), np.float32)
    assert scan.moments_columns(x_RC, out_C2) == 0
    assert out_C2[:, 1].tolist() == [0, 0]
    assert out_C2[:, 0].tolist() == x_RC[0].tolist()


def test_strided_and_read_only_input_is_scanned_alike(mode):
    dense_RC = values(64 * 12).reshape(64, 12)
    wide_RC = np.full((128, 36), 1e9, np.float32)
    x_RC = wide_RC[::2, 1::3]
    x_RC[:] = dense_RC
    x_RC.flags.writeable = False
    for scan_columns in (scan.minmax_columns, scan.moments_columns):
        got_C2, due_C2 = np.empty((2, 12, 2), np.float32)
        assert scan_columns(x_RC, got_C2) == scan_columns(dense_RC, due_C2) == 0
        np.testing.assert_array_equal(got_C2, due_C2)
    out_2 = np.empty(2, np.float32)
    assert scan.minmax(x_RC[:, 5], out_2) == 0
    assert tuple(out_2) == naive.minmax(dense_RC[:, 5])
    got, due = np.empty((2, 1, 2), np.float32)
    assert scan.moments_columns(x_RC[:, 5:6], got) == 0
    assert scan.moments_columns(dense_RC[:, 5:6].copy(), due) == 0
    np.testing.assert_array_equal(got, due)
    assert scan.status_columns(x_RC.view(np.uint32)) == 0
