"""Laws of the lattice codecs and kernels, on inputs that hypothesis chooses."""

import contextlib

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.bounds import bound

from hpcvfl.codecs import frame, table
from hpcvfl.errors import ConfigError, WireError
from hpcvfl.kernels import lattice

law = settings(deadline=None, derandomize=True, max_examples=60)

specs = st.sampled_from(
    [
        "lattice:dim=2,bits=3",
        "lattice:dim=4,bits=2,range=minmax,scope=column",
        "lattice:dim=8,bits=3",
        "lattice:dim=8,bits=2,range=fixed:-1:1",
        "lattice-paper:bits=2,escapes=100",
        "lattice-paper:bits=4,escapes=3",
    ]
)
shapes = st.sampled_from([(1,), (17,), (1, 1), (40, 1), (1, 9), (12, 5), (3, 2, 4), (129, 16)])
seeds = st.integers(0, 2**32 - 1)
keys = st.integers(0, 2**64 - 1)
scales = st.sampled_from([1e-44, 1e-20, 1e-3, 1.0, 1e3, 1e30])
dtypes = st.sampled_from([np.float32, np.float64])


def encoded(codec, x, key):
    payload_B = np.full(codec.nbytes(x.shape, x.itemsize), 0xA5, np.uint8)
    codec.encode(x, key, payload_B)
    return payload_B


def decoded(codec, payload_B, like, key):
    out = np.full_like(like, np.nan)
    codec.decode(payload_B, key, out)
    return out


@law
@given(specs, shapes, seeds, keys, scales, st.floats(-3, 3), dtypes)
def test_what_comes_back_is_within_the_bound(spec, shape, seed, key, scale, offset, dtype):
    codec = table.parse(spec)
    x = ((np.random.default_rng(seed).normal(size=shape) + offset) * scale).astype(dtype)
    try:
        payload_B = encoded(codec, x, key)
    except ConfigError:  # a list that is too short is the one way to fail
        assume(not spec.startswith("lattice-paper"))
        raise
    y = decoded(codec, payload_B, x, key)
    slack = 1e-5 * np.abs(x).max() + 1e-44
    assert np.abs(y - x).max() <= bound(codec, x) + slack
    assert encoded(codec, x, key).tobytes() == payload_B.tobytes()


@law
@given(specs, shapes, seeds, keys, dtypes)
def test_any_payload_decodes_to_finite_values_or_is_a_wire_error(spec, shape, seed, key, dtype):
    codec, rng = table.parse(spec), np.random.default_rng(seed)
    payload_B = rng.integers(0, 256, codec.nbytes(shape, 4)).astype(np.uint8)
    out = np.full(shape, np.nan, dtype)
    with contextlib.suppress(WireError):
        codec.decode(payload_B, key, out)
        assert np.isfinite(out).all()


@law
@given(specs, seeds, keys, st.integers(0, 2**30), st.integers(1, 255))
def test_a_flipped_byte_gives_finite_values_or_a_wire_error(spec, seed, key, at, flip):
    codec = table.parse(spec)
    x = np.random.default_rng(seed).normal(size=(20, 6)).astype(np.float32)
    payload_B = encoded(codec, x, key)
    payload_B[at % payload_B.size] ^= flip
    with contextlib.suppress(WireError):
        assert np.isfinite(decoded(codec, payload_B, x, key)).all()


@law
@given(specs, st.integers(0, 2**30))
def test_a_payload_that_was_cut_is_refused_with_its_frame(spec, cut):
    codec, x = table.parse(spec), np.ones((9, 4), np.float32)
    nbytes = codec.nbytes(x.shape, 4)
    whole_B = np.zeros(frame.HEADER_NBYTES + nbytes, np.uint8)
    codec.encode(x, 1, whole_B[frame.HEADER_NBYTES :])
    header = frame.Header("embed", 0, 1, 0, x.size, nbytes)
    frame.write_header(whole_B, header)
    with pytest.raises(WireError, match="cut short"):
        frame.read_header(whole_B[: cut % whole_B.size], header)


@law
@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 3]), seeds, st.integers(1, 3000))
def test_codewords_of_a_fixed_range_keep_their_indices(dim, bits, seed, n):
    codec = table.parse(f"lattice:dim={dim},bits={bits},range=fixed:-4:3")
    x = np.random.default_rng(seed).normal(size=n).astype(np.float32)
    x = np.pad(x, (0, -n % dim))
    payload_B = encoded(codec, x, 0)
    once = decoded(codec, payload_B, x, 0)
    np.testing.assert_array_equal(encoded(codec, once, 0), payload_B)
    np.testing.assert_array_equal(decoded(codec, encoded(codec, once, 0), once, 0), once)


@law
@given(st.sampled_from([2, 4, 8]), seeds, st.floats(0.01, 1e4), dtypes)
def test_nearest_points_are_nearest_to_themselves_and_no_farther_than_zero(dim, seed, scale, dtype):
    run = {2: lattice.nearest_a2, 4: lattice.nearest_d4, 8: lattice.nearest_e8}[dim]
    x_GD = (np.random.default_rng(seed).normal(size=(50, dim)) * scale).astype(dtype)
    v_GD, again_GD = np.empty_like(x_GD), np.empty_like(x_GD)
    run(x_GD, v_GD)
    run(v_GD, again_GD)
    np.testing.assert_array_equal(again_GD, v_GD)
    covering = {2: 1 / np.sqrt(3), 4: 1.0, 8: 1.0}[dim]
    distance = np.sqrt(((x_GD.astype(float) - v_GD) ** 2).sum(axis=1))
    assert distance.max() <= covering + 1e-6 * scale * 10
    assert (distance <= np.sqrt((x_GD.astype(float) ** 2).sum(axis=1)) + 1e-5 * scale).all()
