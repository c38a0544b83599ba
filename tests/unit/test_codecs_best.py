"""`best`: its aims in decibels, its budget, its payloads against a slow twin, hostile bytes."""

import contextlib
import math

import numpy as np
import pytest
from support import naive_best

from hpcvfl.codecs import best_encoder, best_side, table
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import lanes
from hpcvfl.kernels.counts import HALF_PRIORS, PRIORS
from hpcvfl.kernels.trellis import LANES


def encode(spec, x):
    codec = table.parse(spec)
    payload_B = np.full(codec.nbytes(x.shape, x.itemsize), 0xA5, np.uint8)
    codec.encode(x, 0, payload_B)
    return payload_B


def decode(spec, payload_B, shape):
    out = np.full(shape, np.nan, np.float32)
    table.parse(spec).decode(payload_B, 0, out)
    return out


def decibels(spec, x):
    """Signal to noise, the signal measured from the mean of each column."""
    error = decode(spec, encode(spec, x), x.shape).astype(np.float64) - x
    return 10 * np.log10(x.astype(np.float64).var(axis=0).mean() / (error**2).mean())


def normal(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def clusters(rows, seed=0, kinds=10, C=16, within=0.4):
    """Rows around a few centres, as embeddings of a trained tower are."""
    rng = np.random.default_rng(seed)
    centre = rng.normal(size=(kinds, C)) * 1.5 ** -np.arange(C)
    mix = rng.normal(size=(C, C)) / 4
    rows_RC = centre[rng.integers(0, kinds, rows)] + within * rng.normal(size=(rows, C)) / 4
    return (rows_RC @ mix + 0.3).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "bits", "due"),
    [
        # Ideal entropy-coded scalar quantiser: 10.51 and 16.53; Shannon: 12.04 and 18.06.
        ((1000, 16), "2", 10.9),
        ((4096, 128), "2", 11.0),
        ((1000, 16), "3", 16.9),
        ((4096, 128), "3", 16.9),
        ((1000, 16), "1", 4.9),
        ((1000, 16), "0.5", 2.0),
        ((1000, 16), "0.25", 0.9),
        ((10, 64), "4", 21.5),
        ((70_000,), "1", 5.0),
        ((1000, 16), "8", 46.5),
    ],
)
def test_a_normal_message_reaches_its_aim(shape, bits, due):
    assert decibels(f"best:bits={bits}", normal(shape)) > due


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("kind", ["normal", "tanh", "uniform", "wide", "clusters"])
def test_best_is_better_than_scalar_at_the_same_bits(kind, bits):
    x = {
        "normal": normal((1000, 16)),
        "tanh": np.tanh(normal((1000, 16))),
        "uniform": np.random.default_rng(0).uniform(-1, 1, (1000, 16)).astype(np.float32),
        "wide": normal((1000, 16)) * np.logspace(0, 1, 16, dtype=np.float32),
        "clusters": clusters(1000),
    }[kind]
    scalar = f"scalar:bits={bits},range=gauss,scope=column"
    # The bits that scalar has with its side information, 0.064 more.
    best = f"best:bits={bits}.064"
    assert table.parse(best).nbytes(x.shape, 4) == table.parse(scalar).nbytes(x.shape, 4)
    assert decibels(best, x) > decibels(scalar, x) - (0.1 if kind == "uniform" and bits == 1 else 0)


def test_two_levels_serve_what_has_no_middle():
    rng = np.random.default_rng(0)
    x = (rng.choice([-1, 1], (1000, 16)) + 0.1 * rng.normal(size=(1000, 16))).astype(np.float32)
    assert decibels("best:bits=1.05", x) > 18  # of 20 that there are


def test_axes_are_worth_a_bit_on_clusters():
    x = clusters(1000)
    assert decibels("best:bits=1", x) > decibels("scalar:bits=2,range=gauss,scope=column", x) + 2


def test_columns_share_the_bits_as_they_need_them():
    x = normal((1000, 16)) * np.array([10] + 15 * [0.01], np.float32)
    assert decibels("best:bits=0.5", x) > 35  # 8 bits for the one column that matters


def test_a_shifted_message_costs_next_to_nothing():
    x = normal((1000, 16))
    assert decibels("best:bits=2", x + 100) > decibels("best:bits=2", x) - 0.3


def test_a_few_rare_values_do_not_spoil_the_rest():
    x = normal((1000, 16))
    x[::100, 3] = 1e4
    rest = np.delete(x, 3, axis=1)
    got = np.delete(decode("best:bits=2", encode("best:bits=2", x), x.shape), 3, axis=1)
    assert ((got - rest) ** 2).mean() < 0.25


@pytest.mark.parametrize(
    ("spec", "x"),
    [
        ("best:bits=1", normal((60, 4))),
        ("best:bits=2.5", normal((10, 7))),
        ("best:bits=1", np.tanh(3 * normal((200, 4)))),
        ("best:bits=2", np.random.default_rng(1).uniform(size=(64, 4)).astype(np.float32)),
        ("best:bits=0.5", clusters(200)),
        ("best:bits=2", clusters(100)),
        ("best:bits=8", clusters(60)),
        ("best:bits=6", np.random.default_rng(0).standard_cauchy((200,)).astype(np.float32)),
        ("best:bits=3", np.full((50, 3), -3.5, np.float32)),
        ("best:bits=4", normal((1000, 1), seed=2) * 1e30),
        ("best:bits=4", np.zeros((3, 3), np.float32)),
    ],
    ids=str,
)
def test_a_payload_reads_as_the_twin_reads_it(spec, x):
    payload_B = encode(spec, x)
    twin = naive_best.decode(payload_B.tobytes(), x.shape, PRIORS, HALF_PRIORS)
    assert decode(spec, payload_B, x.shape).tobytes() == twin.tobytes()


def test_many_blocks_read_as_the_twin_reads_them(monkeypatch):
    monkeypatch.setattr(best_encoder, "BLOCK_STEPS", 8)
    monkeypatch.setattr(naive_best, "STEPS", 8)
    for x in (clusters(700), normal((600, 3))):
        payload_B = encode("best:bits=2", x)
        twin = naive_best.decode(payload_B.tobytes(), x.shape, PRIORS, HALF_PRIORS)
        got = decode("best:bits=2", payload_B, x.shape)
        assert got.tobytes() == twin.tobytes()
        assert ((got - x) ** 2).mean() < 0.2 * x.var()


@pytest.mark.parametrize("bits", ["0.25", "0.75", "2", "5"])
@pytest.mark.parametrize("make", [lambda: normal((1000, 16)), lambda: clusters(2000)])
def test_nearly_all_of_a_payload_is_used(make, bits):
    payload_B = encode(f"best:bits={bits}", make())
    gap, longest = 0, 0
    for byte in payload_B:
        gap = 0 if byte else gap + 1
        longest = max(longest, gap)
    assert longest <= 0.04 * payload_B.size + 2


@pytest.mark.parametrize(
    ("shape", "bits", "due"),
    [
        ((1000, 16), "0.1", 200),
        ((1000, 16), "0.25", 500),
        ((1000, 16), "2", 4000),
        ((1001, 3), "0.75", 282),
        ((10,), "1", 12),
        ((1,), "8", 5),
        ((0, 4), "1", 0),
        ((3,), "0.1", 7),
    ],
)
def test_payloads_have_their_bytes(shape, bits, due):
    assert table.parse(f"best:bits={bits}").nbytes(shape, 4) == due
    assert encode(f"best:bits={bits}", normal(shape)).size == due


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e10, 1e37])
@pytest.mark.parametrize("make", [normal, lambda shape: clusters(*shape[:1])])
def test_the_scale_of_a_message_does_not_matter(scale, make):
    x = make((500, 16))
    x = (x / np.abs(x).max() * scale).astype(np.float32)
    assert decibels("best:bits=3", x) == pytest.approx(
        decibels("best:bits=3", (x / scale).astype(np.float32)), abs=2.5
    )


def test_what_is_too_large_is_refused_and_what_is_too_small_is_zero():
    x = normal((20, 4))
    x[3, 2] = 1.1e38
    with pytest.raises(NonFiniteError, match="beyond what codec best can carry"):
        encode("best:bits=2", x)
    with pytest.raises(NonFiniteError, match="Inf"):
        encode("best:bits=2", np.full((4, 4), 1e300))
    tiny = np.full((8, 8), 1e-40, np.float32)
    assert (decode("best:bits=2", encode("best:bits=2", tiny), tiny.shape) == 0).all()


def test_a_float64_message_is_that_of_its_float32():
    x = clusters(300)
    assert (
        encode("best:bits=1", x.astype(np.float64)).tobytes() == encode("best:bits=1", x).tobytes()
    )


@pytest.mark.parametrize("seed", range(12))
def test_any_bytes_decode_to_finite_values_or_a_wire_error(seed):
    rng = np.random.default_rng(seed)
    spec, x = ("best:bits=2", clusters(64)) if seed % 2 else ("best:bits=1", normal((300, 5)))
    payload_B = encode(spec, x)
    for _ in range(60):
        hostile_B = payload_B.copy()
        at = rng.integers(0, payload_B.size, 1 + rng.integers(0, 6))
        hostile_B[at] = rng.integers(0, 256, at.size)
        if rng.random() < 0.2:
            hostile_B[2:] = rng.integers(0, 256, hostile_B.size - 2)
        with contextlib.suppress(WireError):
            assert np.isfinite(decode(spec, hostile_B, x.shape)).all()


@pytest.mark.parametrize(
    ("code", "words"), [(1, "no positive number"), (0xFFFF, "no positive number")]
)
def test_a_step_that_is_none_is_a_wire_error(code, words):
    payload_B = encode("best:bits=1", normal((100, 4)))
    payload_B[:2] = code & 255, code >> 8
    with pytest.raises(WireError, match=words):
        decode("best:bits=1", payload_B, (100, 4))


def test_side_information_that_does_not_end_is_a_wire_error():
    ones_B = np.full(table.parse("best:bits=0.1").nbytes((48, 30), 4), 255, np.uint8)
    ones_B[:2] = 0, 0x7F
    with pytest.raises(WireError, match="past the end"):
        decode("best:bits=0.1", ones_B, (48, 30))


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [("best:bits=2.0", "best:bits=2"), ("best:bits=0.50", "best:bits=0.5"), ("best:bits=8", None)],
)
def test_bits_are_written_without_zeros_at_the_end(spec, canonical):
    assert table.parse(spec).spec == (canonical or spec)


@pytest.mark.parametrize("bits", ["0.09", "8.1", "x", "nan", "inf", "-1", "0.1234", ""])
def test_bits_that_cannot_be_are_refused(bits):
    with pytest.raises(ConfigError, match="bits"):
        table.parse(f"best:bits={bits}" if bits else "best")


@pytest.mark.parametrize("form", [lambda f: f, lambda f: f.py_func])
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 40])
def test_rows_go_to_lanes_and_back(form, rows):
    x_RC = normal((50, 6))
    column_K, centre_K = np.array([0, 2, 5]), np.array([1, -1, 0.5], np.float32)
    depth = -(-rows // LANES)
    u_N = np.empty(depth * 3 * LANES, np.float32)
    form(lanes.load_block)(x_RC, 4, rows, column_K, centre_K, np.float32(4), u_N)
    level_N = np.rint(u_N * 1000).astype(np.int32)
    for row in range(rows):
        lane, r = divmod(row, depth)
        due = (x_RC[4 + row, column_K] - centre_K) * np.float32(4)
        assert (u_N.reshape(depth, 3, LANES)[r, :, lane] == due).all()
    out_RC = np.zeros_like(x_RC)
    form(lanes.store_block)(level_N, 4, rows, np.float32(0.25e-3), column_K, centre_K, out_RC)
    assert out_RC[4 : 4 + rows][:, column_K] == pytest.approx(
        x_RC[4 : 4 + rows][:, column_K], abs=2e-4
    )
    assert (out_RC[:4] == 0).all()
    assert (out_RC[4 + rows :] == 0).all()
    assert (out_RC[:, [1, 3, 4]] == 0).all()


def test_blocks_cover_all_rows_once():
    for rows, K in ((1, 1), (70_000, 1), (5000, 128), (100, 9000), (65_537, 1)):
        blocks = best_encoder.blocks_of(rows, K)
        assert [first for first, _ in blocks] == np.cumsum([0] + [n for _, n in blocks])[
            :-1
        ].tolist()
        assert sum(n for _, n in blocks) == rows
        assert max(n for _, n in blocks) <= LANES * max(1, 4096 // K)


def test_steps_are_a_two_hundred_fiftieth_apart():
    for step in (1e-30, 0.37, 1.0, 5e20):
        code = best_side.code_above(step)
        assert step <= best_side.step_of(code) <= step * (1 + 2**-7)
        assert math.isclose(best_side.step_of(code + 256) / best_side.step_of(code), 2)


@pytest.mark.parametrize("period", [2, 4, 128])
def test_rows_that_come_periodically_are_not_overlooked(period):
    x = np.random.default_rng(0).normal(size=(4096, 128)).astype(np.float32)
    x[::period] = 0
    codec = table.parse("best:bits=2")
    payload_B, out = np.zeros(codec.nbytes(x.shape, 4), np.uint8), np.empty_like(x)
    codec.encode(x, 1, payload_B)
    codec.decode(payload_B, 1, out)
    assert np.square(out - x).mean() < 0.12 * x.var()


def test_a_payload_full_of_side_information_keeps_to_its_bytes():
    # Means of many columns take nearly all of it, and there are more blocks than bits left.
    x = np.random.default_rng(0).normal(1e4, 1, (400, 5000)).astype(np.float32)
    codec = table.parse("best:bits=0.1")
    room_B = np.full(codec.nbytes(x.shape, 4) + 16, 0xA5, np.uint8)
    out = np.empty_like(x)
    codec.encode(x, 1, room_B[8:-8])
    assert (room_B[:8] == 0xA5).all()
    assert (room_B[-8:] == 0xA5).all()
    codec.decode(room_B[8:-8], 1, out)
    assert np.isfinite(out).all()
