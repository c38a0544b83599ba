"""The trellis against its definition: every path of a short message, the parity check, the gain."""

import numpy as np
import pytest
from support import naive_trellis
from support.naive import plain

from hpcvfl.kernels import trellis
from hpcvfl.kernels.compiling import kernel
from hpcvfl.kernels.trellis import LANES, PRICES, level, next_state

BOTH = pytest.mark.parametrize("form", [lambda f: f, plain], ids=["compiled", "python"])


@kernel
def compiled_step(state, k, quantiser):
    return next_state(state, k), level(k, quantiser)


def python_step(state, k, quantiser):
    return next_state.py_func(state, k), level.py_func(k, quantiser)


FREE = np.zeros(PRICES, np.float32)
DEAR = np.array([0.1, 0.5, 0.4, 0.02, 0.3, 0.4, 0.5, 0.01], np.float32)


def path_of(u_TL, price_8K, form=lambda f: f):
    """(k_TL, quantiser_TL, parity_TL) of values in steps."""
    T = len(u_TL)
    path_N, k_N = np.empty(T * LANES, np.uint8), np.empty(T * LANES, np.int32)
    form(trellis.find_path)(
        np.ascontiguousarray(u_TL, np.float32).reshape(-1),
        T,
        price_8K,
        path_N,
        k_N,
        np.empty(4 * LANES, np.float32),
        np.empty(8 * LANES, np.float32),
        np.empty(8 * LANES, np.float32),
        np.empty(LANES, np.int32),
    )
    path_TL = path_N.reshape(T, LANES)
    return k_N.reshape(T, LANES), path_TL & 1, path_TL >> 1


def draw(T, scale=3.0, seed=0):
    return np.random.default_rng(seed).normal(0, scale, (T, LANES)).astype(np.float32)


@BOTH
@pytest.mark.parametrize("price_8K", [FREE, DEAR, np.concatenate([DEAR, FREE])])
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9])
def test_no_path_is_cheaper(form, price_8K, T):
    u_TL = draw(T, seed=T)
    k_TL, _, _ = path_of(u_TL, price_8K, form)
    prices = [price_8K.reshape(-1, PRICES)[t % (len(price_8K) // PRICES)] for t in range(T)]
    for lane in range(0, LANES, 5):
        got = naive_trellis.cost(u_TL[:, lane], k_TL[:, lane].tolist(), prices)
        assert got == pytest.approx(naive_trellis.cheapest(u_TL[:, lane], prices), abs=1e-4)


@BOTH
def test_an_empty_block_is_no_path(form):
    assert path_of(draw(0), FREE, form)[0].shape == (0, LANES)


@BOTH
def test_compiled_and_python_take_the_same_path(form):
    u_TL = draw(40, seed=5)
    assert (path_of(u_TL, DEAR, form)[0] == path_of(u_TL, DEAR)[0]).all()


@pytest.mark.parametrize("step", [compiled_step, python_step])
def test_quantisers_satisfy_the_parity_check_and_follow_the_states(step):
    k_TL, q_TL, p_TL = path_of(draw(60), DEAR)
    assert (p_TL == (k_TL & 1)).all()
    for lane in range(LANES):
        due = naive_trellis.quantisers(p_TL[:, lane].tolist())
        assert q_TL[:, lane].tolist() == due
        state = np.int32(0)
        for k, q in zip(k_TL[:, lane], due, strict=True):
            assert state & 1 == q
            state, value = step(np.int32(state), k, np.int32(q))
            assert value == naive_trellis.level(int(k), q)
            assert 0 <= state < trellis.NUM_STATES


def test_states_are_all_reached_by_two_paths():
    reached = [int(next_state.py_func(np.int32(s), np.int32(k))) for s in range(8) for k in (0, 1)]
    assert sorted(reached) == sorted(2 * list(range(8)))


def test_the_gain_is_that_of_eight_states():
    # Marcellin & Fischer 1990, IEEE T-COM 38(1), table III: 1.09 dB for eight states, uniform
    # source; a plain quantiser of spacing 2 has the error 1/3.
    u_TL = np.random.default_rng(1).uniform(100, 200, (4000, LANES))
    k_TL, q_TL, _ = path_of(u_TL, FREE)
    error = ((u_TL - (2 * k_TL - q_TL)) ** 2).mean()
    assert 10 * np.log10(1 / 3 / error) == pytest.approx(1.09, abs=0.05)


def test_a_far_value_is_met_exactly():
    u_TL = np.full((20, LANES), 2.0**20, np.float32)
    k_TL, q_TL, _ = path_of(u_TL, FREE)
    assert np.abs(2 * k_TL - q_TL - u_TL).max() <= 1


def test_prices_make_zeros():
    dear = np.array([0, 25, 0, 0, 0, 25, 0, 0], np.float32)
    u_TL = np.clip(draw(200, scale=0.8), -2, 2)
    assert (path_of(u_TL, dear)[0] == 0).all()
    assert (path_of(u_TL, FREE)[0] != 0).mean() > 0.3
