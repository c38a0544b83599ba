"""Gather, add and sums of squares: compiled and plain Python against numpy."""

import numpy as np
import pytest
from support import naive

from hpcvfl.kernels import feedback

KERNELS = ("subtract_rows", "add_rows", "_squares_of_all")


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    if request.param == "python":
        for name in KERNELS:
            monkeypatch.setattr(feedback, name, naive.plain(getattr(feedback, name)))


def draw(rows, width, dtype=np.float32, seed=0):
    return np.random.default_rng(seed + rows).normal(size=(rows, width)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("count", "width"), [(0, 3), (1, 1), (7, 16), (9, 5), (8, 33)])
def test_rows_are_gathered_and_added_like_numpy_does(mode, count, width, dtype):
    state, x = draw(20, width), draw(count, width, dtype)
    rows = np.random.default_rng(3).permutation(20)[:count].astype(np.int64)
    out = np.full_like(x, np.nan)
    feedback.subtract_rows(x, state, rows, out)
    assert out.tobytes() == (x - state[rows]).astype(dtype).tobytes()
    due = state.copy()
    due[rows] = (due[rows] + x).astype(np.float32)
    feedback.add_rows(x, state, rows, x)  # in place
    assert state.tobytes() == due.tobytes()
    assert x.tobytes() == due[rows].astype(dtype).tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 127, 128, 129, 5000])
def test_sums_of_squares_agree_with_exact_ones(mode, n, dtype):
    x, y = draw(n, 1, dtype).reshape(-1), draw(n, 1, dtype, seed=9).reshape(-1)
    error, energy = feedback.squares(x, y)
    exact = x.astype(np.longdouble)
    assert error == pytest.approx(float(((exact - y) ** 2).sum()), rel=1e-12)
    assert energy == pytest.approx(float((exact**2).sum()), rel=1e-12)


def test_a_read_only_input_is_read(mode):
    x = draw(4, 4)
    x.setflags(write=False)
    out = np.empty((4, 4), np.float32)
    feedback.subtract_rows(x, np.zeros((4, 4), np.float32), np.arange(4), out)
    assert (out == x).all()
