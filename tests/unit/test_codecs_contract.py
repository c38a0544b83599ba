"""What every codec of the table must do; a new codec is tested here without a new line."""

import contextlib
import warnings

import numpy as np
import pytest
from support.bounds import bound

from hpcvfl.codecs import table
from hpcvfl.codecs.base import Message, split_spec
from hpcvfl.codecs.scalar import GAUSS_STEP, ScalarCodec
from hpcvfl.errors import ConfigError, NonFiniteError, WireError

SPECS = [spec for codec in table.CODECS.values() for spec in codec.examples]
SHAPES = [(0, 4), (1, 1), (7, 1), (8, 3), (9, 5), (100, 16), (10,), (0,), (3, 2, 5), (4097, 2)]
KEY = 0x0123_4567_89AB_CDEF


def draw(shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).normal(0.3, 2.0, shape).astype(dtype)


def encoded(codec, x, key=KEY):
    """Payload between guard bytes that no codec may touch."""
    room_B = np.full(codec.nbytes(x.shape, x.itemsize) + 16, 0xA5, np.uint8)
    codec.encode(x, key, room_B[8:-8])
    assert (room_B[:8] == 0xA5).all()
    assert (room_B[-8:] == 0xA5).all()
    return room_B[8:-8]


def decoded(codec, payload_B, x, key=KEY):
    out = np.full_like(x, np.nan)
    codec.decode(payload_B, key, out)
    return out


@pytest.mark.parametrize("spec", SPECS)
class TestEveryCodec:
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    @pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
    def test_decoded_is_within_the_bound_of_the_codec(self, spec, shape, dtype):
        codec = table.parse(spec)
        x = draw(shape, dtype)
        got = decoded(codec, encoded(codec, x), x)
        assert got.dtype == x.dtype
        assert np.abs(got - x).max(initial=0) <= bound(codec, x)

    def test_two_ranks_write_and_read_the_same_bits(self, spec):
        codec = table.parse(spec)
        x = draw((33, 4))
        payload_B = encoded(codec, x)
        assert payload_B.tobytes() == encoded(codec, x.copy()).tobytes()
        assert decoded(codec, payload_B, x).tobytes() == decoded(codec, payload_B, x).tobytes()

    def test_the_input_is_not_changed(self, spec):
        x = draw((20, 4))
        before = x.copy()
        x.setflags(write=False)
        encoded(table.parse(spec), x)
        assert (x == before).all()

    def test_a_payload_at_any_address_decodes_alike(self, spec):
        codec = table.parse(spec)
        x = draw((21, 4))
        payload_B = encoded(codec, x)
        for shift in range(1, 8):
            room_B = np.zeros(payload_B.size + 8, np.uint8)
            room_B[shift : shift + payload_B.size] = payload_B
            again = decoded(codec, room_B[shift : shift + payload_B.size], x)
            assert again.tobytes() == decoded(codec, payload_B, x).tobytes()

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize("at", [0, 39])
    def test_nan_and_inf_are_refused(self, spec, bad, at):
        x = draw((10, 4))
        x.reshape(-1)[at] = bad
        with pytest.raises(NonFiniteError):
            encoded(table.parse(spec), x)

    def test_values_beyond_float32_are_refused_or_carried_without_a_warning(self, spec):
        x = draw((10, 4), np.float64) * 1e200
        with warnings.catch_warnings(), contextlib.suppress(NonFiniteError):
            warnings.simplefilter("error")
            assert np.isfinite(decoded(table.parse(spec), encoded(table.parse(spec), x), x)).all()

    @pytest.mark.parametrize("value", [0.0, -3.5, 1e-42])
    def test_a_constant_tensor_survives(self, spec, value):
        codec = table.parse(spec)
        x = np.full((9, 3), value, np.float32)
        got = decoded(codec, encoded(codec, x), x)
        assert np.abs(got - x).max() <= bound(codec, x) + 1e-6

    def test_flipped_payload_bytes_give_finite_values_or_a_wire_error(self, spec):
        codec = table.parse(spec)
        x = draw((12, 3))
        payload_B = encoded(codec, x)
        for at in range(payload_B.size):
            for flip in (0x01, 0x80, 0xFF):
                hostile_B = payload_B.copy()
                hostile_B[at] ^= flip
                with contextlib.suppress(WireError):
                    assert np.isfinite(decoded(codec, hostile_B, x)).all()

    def test_canonical_spec_parses_to_the_same_codec(self, spec):
        codec = table.parse(spec)
        assert table.parse(codec.spec) == codec
        assert hash(table.parse(codec.spec)) == hash(codec)

    def test_a_message_of_several_tensors_is_their_payloads_in_order(self, spec):
        codec = table.parse(spec)
        tensors = [draw((10, 4)), draw((10,)), draw((3, 3))]
        message = Message(codec, [t.shape for t in tensors], np.dtype(np.float32))
        assert message.count == 59
        assert message.nbytes == sum(codec.nbytes(t.shape, 4) for t in tensors)
        payload_B = np.zeros(message.nbytes, np.uint8)
        message.encode(tensors, KEY, payload_B)
        out = [np.zeros_like(t) for t in tensors]
        message.decode(payload_B, KEY, out)
        for got, x in zip(out, tensors, strict=True):
            assert np.abs(got - x).max() <= bound(codec, x)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scope", ["message", "column"])
def test_fixed_scale_encode_decode_encode_is_stable(bits, scope):
    codec = ScalarCodec(bits, "minmax", scope, dither=False)
    x = draw((50, 4))
    first_B = encoded(codec, x)
    once = decoded(codec, first_B, x)
    ends = np.concatenate([x.min(axis=0, keepdims=True), x.max(axis=0, keepdims=True)])
    again_B = encoded(codec, np.concatenate([once, ends]).astype(np.float32))
    side = 8 * (4 if scope == "column" else 1)
    assert decoded(codec, again_B, np.zeros((52, 4), np.float32))[:50] == pytest.approx(
        once, abs=1e-5
    )
    assert codec.nbytes((50, 4), 4) == side + (200 * bits + 7) // 8


def test_minmax_levels_equal_a_naive_quantiser():
    x = draw((40, 3))
    lo, hi = x.min(axis=0), x.max(axis=0)
    step = (hi - lo) / 7
    naive = lo + np.floor((x - lo) / step + 0.5) * step
    codec = table.parse("scalar:bits=3,scope=column,dither=off")
    assert decoded(codec, encoded(codec, x), x) == pytest.approx(naive, abs=1e-5)


@pytest.mark.parametrize(("bits", "due_db"), [(1, 4.40), (2, 9.25), (3, 14.27), (4, 19.38)])
def test_gauss_reaches_the_known_error_of_the_best_uniform_quantiser(bits, due_db):
    # Max 1960, table II: mean squared errors .3634, .1188, .03744, .01154 of N(0,1).
    x = draw((400_000, 1), seed=3)
    codec = table.parse(f"scalar:bits={bits},range=gauss,scope=column")
    error = decoded(codec, encoded(codec, x), x).astype(np.float64) - x
    assert 10 * np.log10(x.var() / (error**2).mean()) == pytest.approx(due_db, abs=0.05)


@pytest.mark.parametrize("bits", range(1, 9))
def test_no_nearby_step_has_a_smaller_error_on_a_normal(bits):
    x = np.linspace(-9, 9, 400_001)
    weight = np.exp(-(x**2) / 2)

    def error(step):
        top = (2**bits - 1) / 2
        level = np.clip(np.round(x / step + top), 0, 2 * top) - top
        return (weight * (level * step - x) ** 2).sum()

    best = GAUSS_STEP[bits]
    assert error(best) <= min(error(0.99 * best), error(1.01 * best))


def test_dither_makes_the_error_uniform_and_independent_of_the_value():
    codec = table.parse("scalar:bits=3,range=fixed:-4:4")
    x = np.random.default_rng(1).uniform(-3, 3, 200_000).astype(np.float32)
    error = decoded(codec, encoded(codec, x), x).astype(np.float64) - x
    step = 8 / 7
    assert error.var() == pytest.approx(step**2 / 12, rel=0.02)
    assert abs(np.corrcoef(error, x)[0, 1]) < 0.01
    assert abs(error.mean()) < 0.01 * step


def test_negative_data_survives():
    x = -np.abs(draw((200, 4))) - 1
    codec = table.parse("scalar:bits=4")
    got = decoded(codec, encoded(codec, x), x)
    assert ((got - x) ** 2).mean() < 0.05 * x.var()


def test_a_range_beyond_float32_is_refused():
    x = np.array([[-3e38], [3e38]], np.float32)
    with pytest.raises(NonFiniteError, match="overflows"):
        encoded(table.parse("scalar:bits=1"), x)
    with pytest.raises(NonFiniteError, match="beyond the range of float16"):
        encoded(table.parse("float16"), x)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("scalar", "bits is missing"),
        ("scalar:bits=0", "possible: 1, 2"),
        ("scalar:bits=9", "possible: 1, 2"),
        ("scalar:bits=x", "possible: 1, 2"),
        ("scalar:bits", "not of the form"),
        ("scalar:bits=2,bits=3", "given twice"),
        ("scalar:bits=2,foo=1", "options: bits, range, scope, dither"),
        ("scalar:bits=2,range=wide", "possible: minmax, gauss, fixed"),
        ("scalar:bits=2,range=fixed:1:1", "lo < hi"),
        ("scalar:bits=2,range=fixed:0", "lo < hi"),
        ("scalar:bits=2,range=fixed:0:nan", "lo < hi"),
        ("scalar:bits=2,range=fixed:0:1,scope=column", "no meaning"),
        ("scalar:bits=2,range=gauss:1:2", "takes no numbers"),
        ("scalar:bits=2,scope=row", "possible: message, column"),
        ("scalar:bits=2,dither=maybe", "possible: on, off"),
        ("none:bits=2", "it takes none"),
        ("float32", "codecs: none, float16, bfloat16, scalar"),
        ("", "codecs: none"),
        ("scalar:bits=(2", "brackets do not match"),
        ("scalar:bits=2)", "brackets do not match"),
        ("scalar(bits=2)", "unknown option 'codec'"),
        ("ef()", "codec ef: which one"),
        ("best", "bits is missing"),
        (
            "topk:k=2,values=scalar:bits=2,range=gauss",
            r"unknown option 'range'; .* values=\(scalar:bits=2,range=gauss\)",
        ),
        ("auto:error=0.1,codec=scalar:range=gauss,dither=on", r"codec=\(scalar:range=gauss,dither"),
    ],
)
def test_a_bad_spec_names_option_and_choices(spec, words):
    with pytest.raises(ConfigError, match=words):
        table.parse(spec)


@pytest.mark.parametrize(
    ("spec", "name", "options"),
    [
        ("a", "a", {}),
        ("a:b=1,c=2:3", "a", {"b": "1", "c": "2:3"}),
        ("a(b)", "a", {"codec": "b"}),
        ("a(b:c=1,d=2)", "a", {"codec": "b:c=1,d=2"}),
        ("a(b(c:d=1))", "a", {"codec": "b(c:d=1)"}),
        ("a:b=(c:d=1,e=2),f=3", "a", {"b": "c:d=1,e=2", "f": "3"}),
        ("a:b=c:d=1,f=3", "a", {"b": "c:d=1", "f": "3"}),
        ("a:b=c(d:e=1,f=2)", "a", {"b": "c(d:e=1,f=2)"}),
    ],
)
def test_a_spec_may_hold_another_one(spec, name, options):
    assert split_spec(spec) == (name, options)


@pytest.mark.parametrize("spec", [c.examples[0] for c in table.CODECS.values()])
def test_a_single_number_is_a_tensor_too(spec):
    codec, x, back = table.parse(spec), np.array(1.5, np.float32), np.zeros((), np.float32)
    payload_B = np.zeros(codec.nbytes((), 4), np.uint8)
    codec.encode(x, 1, payload_B)
    codec.decode(payload_B, 1, back)
    assert abs(float(back) - 1.5) < 2
