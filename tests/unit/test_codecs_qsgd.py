"""qsgd: kernels bit for bit against twins; mean and error against their closed forms."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import naive, naive_sparse

from hpcvfl.codecs import table
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import qsgd

KEY = 0x0123456789ABCDEF
SIZES = (0, 1, 7, 8, 9, 2047, 4099)
law = settings(deadline=None, derandomize=True, max_examples=40)


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        for name in ("square_sums", "largest_magnitudes"):
            monkeypatch.setattr(qsgd, name, naive.plain(getattr(qsgd, name)))
        for name in ("encoder", "decoder"):
            made = getattr(qsgd, name)
            monkeypatch.setattr(qsgd, name, lambda b, made=made: naive.plain(made(b)))
    with np.errstate(over="ignore", invalid="ignore"):
        yield request.param


def values(n, scale=1.0):
    return (np.random.default_rng(n).normal(size=n) * scale).astype(np.float32)


def buckets(n, D):
    return [slice(first, min(first + D, n)) for first in range(0, n, D)]


@pytest.mark.parametrize("D", [1, 5, 16, 2048, 10_000])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", [2, 5, 8])
def test_encode_and_decode_agree_with_the_twin(mode, bits, n, D):
    if mode == "python" and n > 2048 and D not in (5, 2048):
        n = 300  # plain Python is slow
    x_N, s = values(n), 2 ** (bits - 1) - 1
    parts = buckets(n, D)
    scale_G = np.array([s / np.abs(x_N[part]).max() for part in parts], np.float32)
    out_B = np.full(bit_kernels.packed_nbytes(n, bits), 0xAA, np.uint8)
    qsgd.encode_levels(x_N, D, scale_G, bits, KEY, out_B)
    scales = [scale_G[i // D] for i in range(n)]
    codes_N = naive_sparse.qsgd_codes(x_N, scales, bits, KEY)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))
    factor_G, y_N = np.float32(1) / scale_G, np.full(n, np.nan, np.float32)
    qsgd.decode_levels(out_B, D, factor_G, bits, y_N)
    due_N = [np.float32(int(c) - s) * factor_G[i // D] for i, c in enumerate(codes_N)]
    np.testing.assert_array_equal(y_N, np.array(due_N, np.float32))


@pytest.mark.parametrize("D", [1, 6, 7, 128, 255, 256, 300, 5000])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 4099])
def test_norms_are_the_exact_ones_rounded(mode, n, D):
    if mode == "python" and n > 9:
        n = 600
    for scale in (1.0, 1e-30, 1e30):
        x_N = values(n, scale)
        l2_G, max_G = np.empty(-(-n // D), np.float32), np.empty(-(-n // D), np.float32)
        assert qsgd.norms(x_N, D, "l2", l2_G) == 0
        assert qsgd.norms(x_N, D, "max", max_G) == 0
        for g, part in enumerate(buckets(n, D)):
            exact = math.sqrt(math.fsum(float(v) ** 2 for v in x_N[part]))
            assert l2_G[g] == pytest.approx(exact, rel=2.0**-23)
            assert max_G[g] == np.abs(x_N[part]).max()


@pytest.mark.parametrize("kind", ["l2", "max"])
@pytest.mark.parametrize("at", [0, 300, 4098])
@pytest.mark.parametrize(("bad", "due"), [(np.nan, 1), (np.inf, 2), (-np.inf, 2)])
def test_nan_and_inf_are_reported(mode, bad, due, at, kind):
    x_N = values(4099)
    x_N[at] = bad
    assert qsgd.norms(x_N, 300, kind, np.empty(14, np.float32)) == due


def test_strided_and_read_only_input_is_encoded_alike():
    x_N, scale_G = values(3000), np.ones(1, np.float32)
    due_B, out_B = np.empty(500, np.uint8), np.empty(500, np.uint8)
    qsgd.encode_levels(x_N[::3].copy(), 1000, scale_G, 4, KEY, due_B)
    part_N = x_N[::3]
    part_N.setflags(write=False)
    qsgd.encode_levels(part_N, 1000, scale_G, 4, KEY, out_B)
    np.testing.assert_array_equal(out_B, due_B)


def decode_many(spec, x, draws):
    """What `draws` keys decode to, float64, shape (draws, N)."""
    codec, y_KN = table.parse(spec), np.empty((draws, x.size), np.float32)
    payload_B = np.empty(codec.nbytes(x.shape, 4), np.uint8)
    for key in range(draws):
        codec.encode(x, key * 0x9E3779B97F4A7C15 % 2**64, payload_B)
        codec.decode(payload_B, key, y_KN[key])
    return y_KN.astype(np.float64)


def variances(x, bits, norm):
    """Of every decoded value: one level squared, times f (1 - f) for the fraction f of a level."""
    s = 2 ** (bits - 1) - 1
    fraction = np.abs(x.astype(np.float64)) * s / norm % 1
    return (norm / s) ** 2 * fraction * (1 - fraction)


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", [2, 3, 6, 8])
def test_the_mean_is_the_value_and_the_error_its_closed_form(bits, norm):
    x, draws = np.random.default_rng(bits).normal(size=200).astype(np.float32), 3000
    length = np.sqrt((x.astype(np.float64) ** 2).sum()) if norm == "l2" else np.abs(x).max()
    y_KN, due_N = decode_many(f"qsgd:bits={bits},norm={norm}", x, draws), variances(x, bits, length)
    sure = due_N == 0
    assert np.abs(y_KN[:, sure] - x[sure]).max(initial=0) <= 1e-6 * length
    z_N = (y_KN.mean(axis=0) - x)[~sure] / np.sqrt(due_N[~sure] / draws)
    # 200 normals: the largest is below 4.5 with probability 0.9986; rare levels have heavier tails
    assert np.abs(z_N).max() < 6
    assert (z_N**2).mean() == pytest.approx(1, abs=0.5)
    error = ((y_KN - x) ** 2).mean(axis=0)
    assert error.sum() == pytest.approx(due_N.sum(), rel=0.03)


def test_small_values_under_a_large_norm_keep_their_mean():
    """Below 2**-14 of a level, where the dither of `scalar` would see nothing."""
    n = 1 << 20
    x = np.full(n, 1e-5, np.float32)
    x[0] = 1
    codec = table.parse("qsgd:bits=2,norm=max")
    payload_B, y = np.empty(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
    codec.encode(x, KEY, payload_B)
    codec.decode(payload_B, KEY, y)
    assert set(np.unique(y)) == {0.0, 1.0}
    ones = np.count_nonzero(y[1:])  # 10.5 are due, of deviation 3.2
    assert 1 <= ones <= 26


def test_values_of_one_key_are_rounded_independently():
    x = np.full(100_000, 0.3, np.float32)
    x[0] = 1
    up = decode_many("qsgd:bits=2,norm=max", x, 1)[0, 1:]
    assert up.mean() == pytest.approx(0.3, abs=5 * math.sqrt(0.21 / x.size))
    for lag in (1, 2, 3, 16, 1024, 2048):
        assert abs(np.corrcoef(up[:-lag], up[lag:])[0, 1]) < 5 / math.sqrt(x.size)


@pytest.mark.parametrize("spec", ["qsgd:bits=2", "qsgd:bits=4", "qsgd:bits=2,norm=max"])
def test_contract_makes_it_a_contraction(spec):
    x, draws = np.random.default_rng(4).normal(size=300).astype(np.float32), 400
    s, square = 2 ** (table.parse(spec).bits - 1) - 1, (x.astype(np.float64) ** 2).sum()
    tau = 1 + min(300 / s**2, math.sqrt(300) / s)
    plain, contracted = decode_many(spec, x, draws), decode_many(f"{spec},contract=on", x, draws)
    np.testing.assert_allclose(contracted, plain / tau, rtol=1e-6)
    error = ((contracted - x) ** 2).sum(axis=1).mean()
    assert error <= (1 - 1 / tau) * square * 1.02
    # without it the l2 norm of many values at few bits is none
    if spec == "qsgd:bits=2":
        assert ((plain - x) ** 2).sum(axis=1).mean() > 5 * square


def test_the_last_bucket_has_its_own_norm_and_factor():
    x = np.array([3, 4, 0, 0, 5, 12], np.float32)
    codec = table.parse("qsgd:bits=8,bucket=4,contract=on")
    payload_B = np.empty(codec.nbytes(x.shape, 4), np.uint8)
    codec.encode(x, KEY, payload_B)
    assert payload_B.size == 8 + 6
    assert payload_B[:8].copy().view(np.float32).tolist() == [5.0, 13.0]
    y = np.empty_like(x)
    codec.decode(payload_B, KEY, y)
    levels = payload_B[8:].astype(np.float64) - 127
    tau = np.repeat([1 + 4 / 127**2, 1 + 2 / 127**2], [4, 2])
    np.testing.assert_allclose(y, levels * np.repeat([5, 13], [4, 2]) / 127 / tau, rtol=1e-6)
    assert np.abs(y - x).max() < 13 / 127


@law
@given(
    st.integers(2, 8), st.integers(1, 300), st.integers(1, 310), st.integers(0, 2**64 - 1),
    st.sampled_from([1e-25, 1.0, 1e30]),
)  # fmt: skip
def test_every_value_goes_to_one_of_the_two_levels_beside_it(bits, n, bucket, key, scale):
    x, s = values(n, scale), 2 ** (bits - 1) - 1
    codec = table.parse(f"qsgd:bits={bits},norm=max,bucket={bucket}")
    payload_B, y = np.empty(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
    codec.encode(x, key, payload_B)
    codec.decode(payload_B, key, y)
    for part in buckets(n, min(bucket, n)):
        level = np.abs(x[part]).max() / np.float32(s)
        assert np.abs(y[part] - x[part]).max() <= level * 1.00001
        assert np.abs(np.round(y[part] / level) - y[part] / level).max() < 1e-4


def test_the_code_that_no_encoder_writes_is_the_highest_level():
    x, codec = np.ones(4, np.float32), table.parse("qsgd:bits=2,norm=max")
    payload_B, y = np.empty(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
    codec.encode(x, KEY, payload_B)
    assert payload_B[4] == 0b10101010
    payload_B[4] = 0xFF
    codec.decode(payload_B, KEY, y)
    assert y.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_the_largest_norms_decode_to_finite_values(bits, norm):
    codec = table.parse(f"qsgd:bits={bits},norm={norm}")
    for value, n in ((np.float32(3.39999e38), 1), (np.float32(3.39999e38 / 10), 100)):
        x = np.full(n, value, np.float32)
        payload_B, y = np.empty(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
        codec.encode(x, KEY, payload_B)
        codec.decode(payload_B, KEY, y)
        assert np.isfinite(y).all()


def test_norms_beyond_float32_are_refused():
    codec = table.parse("qsgd:bits=4")
    x = np.full(1000, 3e37, np.float32)
    with pytest.raises(NonFiniteError, match="overflows float32"):
        codec.encode(x, KEY, np.empty(codec.nbytes(x.shape, 4), np.uint8))
    with pytest.raises(NonFiniteError, match="Inf"):
        codec.encode(np.full(10, 1e300), KEY, np.empty(codec.nbytes((10,), 8), np.uint8))


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e-30])
def test_buckets_of_tiny_norms_decode_to_zeros(value):
    codec, x = table.parse("qsgd:bits=4,bucket=5"), np.ones(10, np.float32)
    x[:5] = value
    payload_B, y = np.empty(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
    codec.encode(x, KEY, payload_B)
    codec.decode(payload_B, KEY, y)
    assert not y[:5].any()
    assert y[5:].any()


@pytest.mark.parametrize("norm", [np.nan, np.inf, -1.0, 3.402e38])
def test_a_norm_that_no_encoder_writes_is_a_wire_error(norm):
    codec, x = table.parse("qsgd:bits=4,bucket=5"), values(10)
    payload_B = np.empty(codec.nbytes(x.shape, 4), np.uint8)
    codec.encode(x, KEY, payload_B)
    payload_B[4:8] = np.array([norm], np.float32).view(np.uint8)
    with pytest.raises(WireError, match="norm"):
        codec.decode(payload_B, KEY, np.empty_like(x))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("qsgd", "bits is missing"),
        ("qsgd:bits=1", "leaves no level; possible: 2 to 8"),
        ("qsgd:bits=9", "possible: 2, 3"),
        ("qsgd:bits=2,norm=l1", "possible: l2, max"),
        ("qsgd:bits=2,bucket=0", "possible: 1, 2, 3"),
        ("qsgd:bits=2,bucket=1.5", "possible: 1, 2, 3"),
        ("qsgd:bits=2,contract=yes", "possible: on, off"),
        ("qsgd:bits=2,dither=on", "options: bits, norm, bucket, contract"),
    ],
)
def test_a_bad_spec_names_option_and_choices(spec, words):
    with pytest.raises(ConfigError, match=words):
        table.parse(spec)


def test_canonical_specs_leave_defaults_out():
    assert table.parse("qsgd:norm=l2,contract=off,bits=3").spec == "qsgd:bits=3"
    full = "qsgd:bits=3,norm=max,bucket=64,contract=on"
    assert table.parse("qsgd:bits=3,contract=on,bucket=064,norm=max").spec == full
