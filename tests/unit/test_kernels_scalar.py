"""The quantiser: compiled and plain Python against exact twins, bit for bit."""

import numpy as np
import pytest
from support import naive

from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import scalar as kernels
from hpcvfl.kernels import scan
from hpcvfl.kernels.compiling import FAR

SIZES = (0, 1, 7, 8, 9, 4097)
FACTORIES = ("encoder", "column_encoder", "decoder", "column_decoder")
KEY = 0x0123456789ABCDEF
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        for name in FACTORIES:
            made = getattr(kernels, name)
            monkeypatch.setattr(kernels, name, lambda b, d, made=made: naive.plain(made(b, d)))
    with np.errstate(over="ignore", invalid="ignore"):
        yield request.param


def values(n):
    return np.random.default_rng(n).normal(size=n).astype(np.float32)


def encode(x_N, lo, inv_step, bits, dither, key=KEY, status=0):
    out_B = np.full(bit_kernels.packed_nbytes(x_N.size, bits), 0xAA, np.uint8)
    assert kernels.encode_uniform(x_N, lo, inv_step, bits, dither, key, out_B) == status
    return out_B


def encode_columns(x_RC, lo_C, inv_C, bits, dither, key=KEY, status=0):
    out_B = np.full(bit_kernels.packed_nbytes(x_RC.size, bits), 0xAA, np.uint8)
    got = kernels.encode_uniform_columns(x_RC, lo_C, inv_C, bits, dither, key, out_B)
    assert got == status
    return out_B


def column_ranges(columns, bits):
    """lo, step and inverse step of each column, all different, some values out of the range."""
    lo_C = np.linspace(-2.5, -1.5, columns).astype(np.float32)
    step_C = ((2.2 - lo_C) / np.float32(2**bits - 1)).astype(np.float32)
    return lo_C, step_C, np.float32(1) / step_C


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("bits", bit_kernels.BITS)
def test_encode_and_decode_agree_with_the_twin(mode, bits, dither, n):
    lo, step = np.float32(-2.5), np.float32(5 / (2**bits - 1))
    inv_step = np.float32(1) / step
    out_B = encode(values(n), lo, inv_step, bits, dither)
    codes_N = naive.codes_of(values(n), lo, inv_step, bits, dither, KEY)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))
    y_N = np.full(n, np.nan, np.float32)
    kernels.decode_uniform(out_B, lo, step, bits, dither, KEY, y_N)
    np.testing.assert_array_equal(y_N, naive.values_of(codes_N, lo, step, bits, dither, KEY))


@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (7, 1), (1, 8), (3, 3), (241, 17)])
@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("bits", bit_kernels.BITS)
def test_column_scope_agrees_with_the_twin(mode, bits, dither, shape):
    x_RC = values(shape[0] * shape[1]).reshape(shape)
    lo_C, step_C, inv_C = column_ranges(shape[1], bits)
    out_B = encode_columns(x_RC, lo_C, inv_C, bits, dither)
    lo, step, inv = (np.broadcast_to(a, shape).ravel() for a in (lo_C, step_C, inv_C))
    codes_N = naive.codes_of(x_RC.ravel(), lo, inv, bits, dither, KEY)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))
    y_RC = np.full(shape, np.nan, np.float32)
    kernels.decode_uniform_columns(out_B, lo_C, step_C, bits, dither, KEY, y_RC)
    due_N = naive.values_of(codes_N, lo, step, bits, dither, KEY)
    np.testing.assert_array_equal(y_RC.ravel(), due_N)


@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_far_values_are_clipped_and_are_no_error(mode, bits, dither):
    """Every magnitude of a float32 far outside, alone in blocks of inside values."""
    x_N = np.zeros(8 * 2048, np.float32)
    x_N[np.arange(8) * 2048 + 99] = [-3e38, -1e9, -300, -2, 2, 300, 1e9, 3e38]
    inv_step = np.float32((2**bits - 1) / 2)
    codes_N = naive.codes_of(x_N, -1, inv_step, bits, dither, KEY)
    np.testing.assert_array_equal(
        encode(x_N, -1, inv_step, bits, dither), naive.pack(codes_N, bits)
    )
    x_RC, ones_C = x_N.reshape(-1, 16), np.ones(16, np.float32)
    out_B = encode_columns(x_RC, -ones_C, ones_C * inv_step, bits, dither)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))


@pytest.mark.parametrize("inv_step", [0.0, 3.0])
@pytest.mark.parametrize("place", [0, 1, 2047, 2048, 4096])
@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("dither", [False, True])
@pytest.mark.parametrize("bits", [2, 8, 16])
def test_encoders_report_nan_and_inf(bits, dither, bad, place, inv_step):
    """The status is exact and every other value keeps its code."""
    x_N = values(4097 + 3)
    x_N[place] = bad
    due = naive.status(x_N)
    out_B = encode(x_N, -0.5, inv_step, bits, dither, status=due)
    clean_N = x_N.copy()
    clean_N[place] = 0
    codes_N = naive.unpack(out_B, bits, len(x_N))
    due_N = naive.unpack(encode(clean_N, -0.5, inv_step, bits, dither), bits, len(x_N))
    assert set(np.flatnonzero(codes_N != due_N)) <= {place}
    x_RC, ones_C = x_N.reshape(-1, 4), np.ones(4, np.float32)
    encode_columns(x_RC, ones_C, ones_C * np.float32(inv_step), bits, dither, status=due)


def test_plain_python_reports_nan_and_inf_too(mode):
    for bad, due in ((NAN, 1), (INF, 2), (-INF, 2)):
        x_N = values(9)
        x_N[5] = bad
        for dither in (False, True):
            encode(x_N, 0, 1, 4, dither, status=due)
            encode_columns(x_N[:, None], x_N[:1] * 0, x_N[:1] * 0 + 1, 4, dither, status=due)


@pytest.mark.parametrize("dither", [False, True])
def test_strided_and_read_only_arrays_are_encoded_and_decoded_alike(mode, dither):
    dense_RC = values(130 * 6).reshape(130, 6)
    x_RC = np.full((260, 18), 7, np.float32)[::2, 2::3]
    x_RC[:] = dense_RC
    x_RC.flags.writeable = False
    lo_C, step_C, inv_C = column_ranges(6, 4)
    due_B = encode_columns(dense_RC, lo_C, inv_C, 4, dither)
    np.testing.assert_array_equal(encode_columns(x_RC, lo_C, inv_C, 4, dither), due_B)
    np.testing.assert_array_equal(
        encode(x_RC[:, 2], -2, 3, 4, dither), encode(dense_RC[:, 2].copy(), -2, 3, 4, dither)
    )
    apart_B = np.zeros(2 * len(due_B), np.uint8)[::2]
    apart_B[:] = due_B
    apart_B.flags.writeable = False
    got_RC, due_RC = np.zeros((130, 12), np.float32)[:, ::2], np.empty((130, 6), np.float32)
    kernels.decode_uniform_columns(apart_B, lo_C, step_C, 4, dither, KEY, got_RC)
    kernels.decode_uniform_columns(due_B, lo_C, step_C, 4, dither, KEY, due_RC)
    np.testing.assert_array_equal(got_RC, due_RC)
    got_N, due_N = np.zeros(2 * 780, np.float32)[::2], np.empty(780, np.float32)
    kernels.decode_uniform(apart_B, -2, 0.25, 4, dither, KEY, got_N)
    kernels.decode_uniform(due_B, -2, 0.25, 4, dither, KEY, due_N)
    np.testing.assert_array_equal(got_N, due_N)


@pytest.mark.parametrize("bits", bit_kernels.BITS)
def test_one_range_for_all_columns_is_the_message_scope(bits):
    x_RC = values(512).reshape(32, 16)
    same_C = np.ones(16, np.float32)
    for dither in (False, True):
        np.testing.assert_array_equal(
            encode_columns(x_RC, same_C * -2, same_C * 3, bits, dither),
            encode(x_RC.ravel(), -2, 3, bits, dither),
        )


@pytest.mark.parametrize("dither", [False, True])
def test_a_message_that_is_fetched_ahead_has_the_same_codes(dither):
    """Long messages prefetch the next block; each block still equals the twin."""
    n = FAR + 5000
    x_N, out_2, lo = values(n), np.empty(2, np.float32), np.float32(-5)
    x_N[[7, n - 1]] = 5, -5.5
    assert scan.minmax(x_N, out_2) == 0
    assert out_2.tolist() == [x_N.min(), x_N.max()]
    step = np.float32(10 / 15)
    out_B = encode(x_N, lo, 1 / step, 4, dither)
    y_N = np.empty(n, np.float32)
    kernels.decode_uniform(out_B, lo, step, 4, dither, KEY, y_N)
    for at in (0, 2048 * 100, n // 2048 * 2048):
        part = slice(at, min(at + 2048, n))
        k = np.array(naive.dither_integers(KEY, at, 2048)) * dither
        q = (x_N[part] - lo) * np.float32(1 / step)
        grid = np.rint((q.astype(np.float64) + 0.5) * 2**14) / 2**14 if dither else np.rint(q)
        u = k[: len(q)] / 2**14
        codes = np.clip(np.floor(grid + u), 0, 15)
        packed = slice(at // 2, at // 2 + (len(codes) + 1) // 2)
        np.testing.assert_array_equal(out_B[packed], naive.pack(codes.astype(int), 4))
        due = lo + (codes - u).astype(np.float32) * step
        np.testing.assert_array_equal(y_N[part], due)


def test_keys_matter_with_dither_and_only_then():
    x_N = values(4097)
    for key in (KEY ^ 1, KEY ^ (1 << 63), 0):
        assert (encode(x_N, -3, 2, 4, True, key) != encode(x_N, -3, 2, 4, True)).mean() > 0.1
        np.testing.assert_array_equal(
            encode(x_N, -3, 2, 4, False, key), encode(x_N, -3, 2, 4, False)
        )


def test_dithered_error_is_independent_of_the_value():
    """Subtractive dither: the error is uniform over a step wherever the value lies in it."""
    n, step = 1 << 18, 0.5
    for offset in np.linspace(0, step, 7, dtype=np.float32):
        x_N = np.full(n, 1 + offset, np.float32)
        y_N = np.empty_like(x_N)
        kernels.decode_uniform(encode(x_N, 0, 1 / step, 4, True), 0, step, 4, True, KEY, y_N)
        error_N = (y_N - x_N).astype(np.float64) / step
        assert abs(error_N.mean()) < 5 * np.sqrt(1 / 12 / n) + 2**-15
        assert abs(error_N.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / n) + 1e-4
        assert np.abs(error_N).max() <= 0.5 + 2**-13


def test_no_multiply_and_add_are_fused():
    """A fused multiply-add rounds once where the formula rounds twice, so bits would differ."""
    encode(values(9), -1, 3, 4, True)
    kernels.decode_uniform(np.zeros(5, np.uint8), -1, 3, 4, True, KEY, np.empty(9, np.float32))
    for kernel in (kernels.encoder(4, True), kernels.decoder(4, True)):
        assert all("fmadd" not in text for text in kernel.inspect_asm().values())
        assert all("llvm.fmuladd" not in text for text in kernel.inspect_llvm().values())
