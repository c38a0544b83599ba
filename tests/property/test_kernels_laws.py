"""Laws of the kernels that hold for any input, on inputs that hypothesis chooses."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import scalar, scan

law = settings(deadline=None, derandomize=True, max_examples=60)

widths = st.sampled_from(bit_kernels.BITS)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 5000)
keys = st.integers(0, 2**64 - 1)


def message(seed, n, scale=1.0):
    return (np.random.default_rng(seed).normal(size=n) * scale).astype(np.float32)


def range_of(x_N, bits):
    """(lo, step, inv_step) from the scan, as a min/max codec takes them."""
    out_2 = np.empty(2, np.float32)
    assert scan.minmax(x_N, out_2) == 0
    lo, hi = (float(v) for v in out_2)
    step = (hi - lo) / (2**bits - 1)
    return lo, np.float32(step), np.float32(1 / step if step else 0)


def round_trip(x_N, bits, dither, key):
    lo, step, inv_step = range_of(x_N, bits)
    out_B = np.empty(bit_kernels.packed_nbytes(x_N.size, bits), np.uint8)
    assert scalar.encode_uniform(x_N, lo, inv_step, bits, dither, key, out_B) == 0
    y_N = np.empty_like(x_N)
    scalar.decode_uniform(out_B, lo, step, bits, dither, key, y_N)
    return out_B, y_N, lo, step, inv_step


@law
@given(seeds, sizes, widths)
def test_unpack_inverts_pack(seed, n, bits):
    codes_N = np.random.default_rng(seed).integers(0, 2**bits, n).astype(np.uint16)
    out_B = np.empty(bit_kernels.packed_nbytes(n, bits), np.uint8)
    back_N = np.empty(n, np.uint16)
    bit_kernels.pack_bits(codes_N, bits, out_B)
    bit_kernels.unpack_bits(out_B, bits, back_N)
    np.testing.assert_array_equal(back_N, codes_N)


@law
@given(seeds, sizes, widths)
def test_pack_inverts_unpack_on_whole_bytes(seed, n, bits):
    """Eight codes fill whole bytes, so that any payload of them comes back as it was."""
    payload_B = np.random.default_rng(seed).integers(0, 256, n * bits).astype(np.uint8)
    codes_N, out_B = np.empty(8 * n, np.uint16), np.empty_like(payload_B)
    bit_kernels.unpack_bits(payload_B, bits, codes_N)
    bit_kernels.pack_bits(codes_N, bits, out_B)
    np.testing.assert_array_equal(out_B, payload_B)


@law
@given(seeds, sizes, widths, st.booleans(), keys, st.sampled_from([1e-20, 1.0, 1e20]))
def test_decoded_values_lie_within_half_a_step(seed, n, bits, dither, key, scale):
    x_N = message(seed, n, scale)
    _, y_N, lo, step, _ = round_trip(x_N, bits, dither, key)
    slack = 4e-7 * (abs(lo) + float(step) * 2**bits) + float(step) * 2.0**-6 * (bits == 16)
    worst = np.abs(y_N.astype(np.float64) - x_N).max()
    assert worst <= float(step) * (0.5 + 2.0**-13) + slack


@law
@given(seeds, sizes, st.sampled_from(bit_kernels.BITS[:-1]))
def test_encoding_what_was_decoded_gives_the_same_bytes(seed, n, bits):
    x_N = message(seed, n)
    out_B, y_N, lo, _, inv_step = round_trip(x_N, bits, False, 0)
    again_B = np.empty_like(out_B)
    assert scalar.encode_uniform(y_N, lo, inv_step, bits, False, 0, again_B) == 0
    np.testing.assert_array_equal(again_B, out_B)


@law
@given(seeds, sizes, widths)
def test_codes_keep_the_order_of_the_values(seed, n, bits):
    x_N = np.sort(message(seed, n))
    out_B, *_ = round_trip(x_N, bits, False, 0)
    codes_N = np.empty(n, np.uint16)
    bit_kernels.unpack_bits(out_B, bits, codes_N)
    assert (np.diff(codes_N.astype(np.int64)) >= 0).all()
    if n > 1:
        assert codes_N[0] == 0
        assert codes_N[-1] == 2**bits - 1


@law
@given(seeds, st.floats(-(2.0**100), 2.0**100, width=32), sizes, widths)
def test_a_constant_message_comes_back_exactly(seed, value, n, bits):
    x_N = np.full(n, value, np.float32)
    _, y_N, *_ = round_trip(x_N, bits, bool(seed % 2), seed)
    np.testing.assert_array_equal(y_N, x_N)


@law
@given(seeds, sizes, widths, st.booleans(), keys)
def test_any_bytes_decode_inside_the_range(seed, n, bits, dither, key):
    nbytes = bit_kernels.packed_nbytes(n, bits)
    in_B = np.random.default_rng(seed).integers(0, 256, nbytes).astype(np.uint8)
    y_N = np.full(n, np.nan, np.float32)
    step = np.float32(3 / (2**bits - 1))
    scalar.decode_uniform(in_B, -1, step, bits, dither, key, y_N)
    half = 0.5 * float(step) + 1e-6 if dither else 1e-6
    assert (y_N >= -1 - half).all()
    assert (y_N <= 2 + half).all()


@law
@given(seeds, st.integers(1, 60), st.integers(1, 130), widths, st.booleans(), keys)
def test_columns_agree_with_each_column_alone(seed, rows, columns, bits, dither, key):
    """Without dither the codes of a column are those of that column as a message of its own."""
    x_RC = message(seed, rows * columns).reshape(rows, columns)
    ranges_C2 = np.empty((columns, 2), np.float32)
    assert scan.minmax_columns(x_RC, ranges_C2) == 0
    lo_C = ranges_C2[:, 0].copy()
    step_C = ((ranges_C2[:, 1] - lo_C) / np.float32(2**bits - 1)).astype(np.float32)
    inv_C = np.divide(1, step_C, out=np.zeros_like(step_C), where=step_C > 0)
    out_B = np.empty(bit_kernels.packed_nbytes(x_RC.size, bits), np.uint8)
    assert scalar.encode_uniform_columns(x_RC, lo_C, inv_C, bits, dither, key, out_B) == 0
    codes_N = np.empty(x_RC.size, np.uint16)
    bit_kernels.unpack_bits(out_B, bits, codes_N)
    y_RC = np.empty_like(x_RC)
    scalar.decode_uniform_columns(out_B, lo_C, step_C, bits, dither, key, y_RC)
    assert (np.abs(y_RC - x_RC) <= step_C * 0.55 + 1e-5).all()
    c = seed % columns
    alone_B = np.empty(bit_kernels.packed_nbytes(rows, bits), np.uint8)
    column_R = x_RC[:, c].copy()
    scalar.encode_uniform(column_R, lo_C[c], inv_C[c], bits, False, key, alone_B)
    alone_R = np.empty(rows, np.uint16)
    bit_kernels.unpack_bits(alone_B, bits, alone_R)
    if not dither:
        np.testing.assert_array_equal(codes_N.reshape(x_RC.shape)[:, c], alone_R)


@law
@given(st.lists(st.floats(width=32), min_size=1, max_size=300))
def test_minmax_agrees_with_numpy_on_any_floats(values):
    x_N = np.array(values, np.float32)
    out_2 = np.empty(2, np.float32)
    status = scan.minmax(x_N, out_2)
    assert status == (1 if np.isnan(x_N).any() else 2 if np.isinf(x_N).any() else 0)
    if status == 0:
        assert tuple(out_2) == (x_N.min(), x_N.max())
