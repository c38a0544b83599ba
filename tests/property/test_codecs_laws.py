"""Every codec of the table on what hypothesis thinks of: shapes, values, damage."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bounds import bound

from hpcvfl.codecs import table
from hpcvfl.errors import ConfigError, NonFiniteError, WireError

SPECS = sorted({spec for c in table.CODECS.values() for spec in (c.examples[0], c.examples[-1])})
"""Two of every codec: with its defaults, and with its rarer options."""

SHAPES = st.one_of(
    st.tuples(st.integers(0, 40), st.integers(1, 20)),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5)),
)
LAWS = settings(max_examples=12, deadline=None, derandomize=True)
MODERATE = ("normal", "even", "constant", "sparse", "far from zero")
WILD = ("denormal", "huge", "of all sizes")


@st.composite
def tensors(draw, kinds):
    """A float32 tensor of one of the kinds; single values are put anywhere in it."""
    shape, kind = draw(SHAPES), draw(st.sampled_from(kinds))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = {
        "normal": lambda: rng.normal(0.3, draw(st.floats(1e-3, 1e3)), shape),
        "even": lambda: rng.uniform(-1, 1, shape),
        "constant": lambda: np.full(shape, draw(st.floats(-100, 100))),
        "sparse": lambda: rng.normal(size=shape) * (rng.random(shape) < 0.1),
        "far from zero": lambda: rng.normal(1000, 1, shape),
        "denormal": lambda: rng.normal(size=shape) * 1e-41,
        "huge": lambda: rng.normal(size=shape) * 1e37,
        "of all sizes": lambda: rng.normal(size=shape) * 10.0 ** rng.integers(-44, 30, shape),
    }[kind]().astype(np.float32)
    if x.size:
        for value in draw(st.lists(st.sampled_from([0.0, -0.0, 1e-45, 1.25, -7.0]), max_size=3)):
            x.reshape(-1)[draw(st.integers(0, x.size - 1))] = value
    return x


def encoded(codec, x, key):
    payload_B = np.full(codec.nbytes(x.shape, 4), 0xA5, np.uint8)
    codec.encode(x, key, payload_B)
    return payload_B


def decoded(codec, payload_B, x, key):
    out = np.full_like(x, np.nan)
    codec.decode(payload_B, key, out)
    return out


@pytest.mark.parametrize("spec", SPECS)
@LAWS
@given(x=tensors(MODERATE), key=st.integers(0, 2**64 - 1))
def test_what_comes_back_is_within_the_bound_and_the_same_every_time(spec, x, key):
    codec = table.parse(spec)
    try:
        payload_B = encoded(codec, x, key)
    except ConfigError:
        assert codec.name == "lattice-paper"  # the published quantiser knows no bounds
        return
    assert payload_B.tobytes() == encoded(codec, x.copy(), key).tobytes()
    got = decoded(codec, payload_B, x, key)
    # float32 arithmetic on values of this size adds a few units in their last place.
    slack = 1e-5 * np.abs(x).max(initial=0) + 1e-6
    assert np.abs(got - x).max(initial=0) <= bound(codec, x) * 1.001 + slack


@pytest.mark.parametrize("spec", SPECS)
@LAWS
@given(x=tensors(WILD), key=st.integers(0, 2**64 - 1))
def test_denormal_and_huge_values_come_back_finite_or_are_refused(spec, x, key):
    codec = table.parse(spec)
    try:
        payload_B = encoded(codec, x, key)
    except NonFiniteError:
        # Too wide for float32, or for float16; never for values of moderate size.
        assert np.abs(x).max() > 6e4
        return
    except ConfigError:
        assert codec.name == "lattice-paper"
        return
    assert np.isfinite(decoded(codec, payload_B, x, key)).all()


@pytest.mark.parametrize("spec", SPECS)
@LAWS
@given(x=tensors(MODERATE), key=st.integers(0, 2**64 - 1), data=st.data())
def test_damaged_payloads_give_finite_values_or_a_wire_error(spec, x, key, data):
    codec = table.parse(spec)
    try:
        payload_B = encoded(codec, x, key)
    except ConfigError:
        assert codec.name == "lattice-paper"
        return
    if data.draw(st.booleans(), "cut"):
        payload_B[data.draw(st.integers(0, payload_B.size), "cut at") :] = 0
    for _ in range(data.draw(st.integers(0, 8), "flips") if payload_B.size else 0):
        at = data.draw(st.integers(0, payload_B.size - 1), "flip at")
        payload_B[at] ^= data.draw(st.integers(1, 255), "mask")
    with contextlib.suppress(WireError):
        assert np.isfinite(decoded(codec, payload_B, x, key)).all()


@pytest.mark.parametrize("spec", SPECS)
@LAWS
@given(shape=SHAPES, data=st.data(), bad=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_nan_and_inf_are_refused_wherever_they_are(spec, shape, data, bad):
    x = np.ones(shape, np.float32)
    if not x.size:
        return
    x.reshape(-1)[data.draw(st.integers(0, x.size - 1), "at")] = bad
    with pytest.raises(NonFiniteError):
        encoded(table.parse(spec), x, 1)
