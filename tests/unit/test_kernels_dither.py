"""The dither: its definition, and that it looks random along a message and between keys."""

import numpy as np
import pytest
from support import naive

from hpcvfl.kernels import dither
from hpcvfl.kernels.compiling import BLOCK

KEY = 0xFEDCBA9876543210


def draw(key, n, start=0):
    out_N = np.full(n, np.nan, np.float32)
    dither.dither_fill(key, start, out_N)
    return out_N


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    if request.param == "python":
        filler = dither.block_filler
        monkeypatch.setattr(dither, "fill_line", naive.plain(dither.fill_line))
        monkeypatch.setattr(dither, "block_filler", lambda F: naive.plain(filler(F)))
    with np.errstate(over="ignore"):
        yield request.param


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 4097])
@pytest.mark.parametrize("key", [0, KEY, 2**64 - 1])
def test_fill_agrees_with_the_twin(mode, key, n):
    np.testing.assert_array_equal(draw(key, n), naive.dither(key, 0, n))


def test_values_depend_on_the_index_and_not_on_the_chunk(mode):
    whole_N = draw(KEY, 3 * BLOCK)
    for start in (0, 1, BLOCK // 2 - 1, BLOCK // 2, BLOCK + 5, 2 * BLOCK):
        np.testing.assert_array_equal(draw(KEY, 77, start), whole_N[start : start + 77])


def test_a_far_index_agrees_with_the_twin():
    start = 2**33 - 50
    np.testing.assert_array_equal(draw(KEY, 100, start), naive.dither(KEY, start, 100))


@pytest.mark.parametrize("bits", [1, 8, 16])
def test_blocks_hold_the_same_values_as_the_fill(bits):
    F = dither.places(bits)
    encode_like = np.empty(BLOCK, np.int32)
    fill_block = naive.plain(dither.block_filler(F))
    with np.errstate(over="ignore"):
        fill_block(*dither.split_key(KEY), 3, encode_like)
    due = np.floor(draw(KEY, BLOCK, 3 * BLOCK).astype(np.float64) * 2**F)
    np.testing.assert_array_equal(encode_like, due)


N = 1 << 20


@pytest.fixture(scope="module")
def stream():
    return draw(KEY, N).astype(np.float64)


def test_mean_and_variance_are_those_of_a_uniform(stream):
    assert abs(stream.mean() + 2.0**-15) < 5 * np.sqrt(1 / 12 / N)
    assert abs(stream.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / N)
    assert stream.min() == -0.5
    assert stream.max() == 0.5 - 2.0**-14


def correlation_of(spectrum, n):
    """Circular correlation at every lag, in standard deviations of independent values."""
    r = np.fft.irfft(spectrum, n)
    return r / (n / 12) * np.sqrt(n)


def test_no_lag_up_to_4096_is_correlated(stream):
    spectrum = np.abs(np.fft.rfft(stream - stream.mean())) ** 2
    assert np.abs(correlation_of(spectrum, N)[1:4097]).max() < 5.5


def test_squares_are_uncorrelated_too(stream):
    """Catches values whose magnitudes hang together although their signs do not."""
    squares_N = stream**2 - (stream**2).mean()
    r = np.fft.irfft(np.abs(np.fft.rfft(squares_N)) ** 2, N)
    assert np.abs(r[1:4097] / r[0]).max() * np.sqrt(N) < 5.5


def test_all_values_are_equally_frequent(stream):
    counts = np.bincount(((stream + 0.5) * 2**14).astype(np.int64), minlength=2**14)
    chi2 = ((counts - N / 2**14) ** 2 / (N / 2**14)).sum()
    assert abs(chi2 - 2**14) < 5 * np.sqrt(2 * 2**14)


@pytest.mark.parametrize("lag", [1, 2, BLOCK // 2, BLOCK])
def test_pairs_fill_the_plane(stream, lag):
    """64 x 64 cells of (value, value `lag` later); BLOCK / 2 pairs the two halves of one hash."""
    cells = ((stream + 0.5) * 64).astype(np.int64)
    counts = np.bincount(cells[:-lag] * 64 + cells[lag:], minlength=4096)
    due = (N - lag) / 4096
    chi2 = ((counts - due) ** 2 / due).sum()
    assert abs(chi2 - 4096) < 5 * np.sqrt(2 * 4096)


def test_keys_that_differ_in_one_bit_are_independent():
    """65 streams, every pair of them, aligned: no correlation beyond chance."""
    n = 1 << 15
    streams = np.array([draw(KEY, n)] + [draw(KEY ^ (1 << bit), n) for bit in range(64)])
    r = np.corrcoef(streams) * np.sqrt(n)
    assert np.abs(r[np.triu_indices(65, 1)]).max() < 5.5


@pytest.mark.parametrize("other", [KEY ^ 1, KEY ^ (1 << 32), KEY + 1, 0])
def test_keys_are_independent_at_every_lag(stream, other):
    """A stream is no shifted copy of another: cross-correlation at all lags of the message."""
    other_N = draw(other, N).astype(np.float64)
    spectrum = np.fft.rfft(stream) * np.conj(np.fft.rfft(other_N))
    assert np.abs(correlation_of(spectrum, N)).max() < 6.5


def test_split_key_is_one_to_one_on_neighbours():
    keys = [dither.split_key(k) for k in range(4096)] + [dither.split_key(2**64 - 1)]
    assert len({(int(a), int(b)) for a, b in keys}) == 4097
    assert len({int(a) for a, _ in keys}) > 4090
