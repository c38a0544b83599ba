"""What `lattice` and `lattice-paper` promise beyond the contract of every codec."""

import struct

import numpy as np
import pytest
from support import naive, naive_lattice
from support.bounds.lattice_paper import GAP

from hpcvfl.codecs import table
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import lattice_paper

KEY = 0x0123_4567_89AB_CDEF


def normal(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def encoded(spec, x, key=KEY):
    codec = table.parse(spec)
    payload_B = np.full(codec.nbytes(x.shape, x.itemsize), 0xA5, np.uint8)
    codec.encode(x, key, payload_B)
    return payload_B


def decoded(spec, payload_B, like, key=KEY):
    out = np.full_like(like, np.nan)
    table.parse(spec).decode(payload_B, key, out)
    return out


def round_trip(spec, x, key=KEY):
    return decoded(spec, encoded(spec, x, key), x, key)


def snr_db(spec, x):
    noise = (round_trip(spec, x).astype(np.float64) - x).var()
    return 10 * np.log10(x.astype(np.float64).var() / noise)


class TestLattice:
    @pytest.mark.parametrize("bits", [2, 3, 4])
    @pytest.mark.parametrize("dim", [2, 4, 8])
    def test_on_a_normal_no_dimension_is_worse_than_scalar(self, dim, bits):
        x = normal((4096, 128))
        assert snr_db(f"lattice:dim={dim},bits={bits}", x) > snr_db(
            f"scalar:bits={bits},range=gauss", x
        )

    @pytest.mark.parametrize(
        ("dim", "bits", "due_db"),
        [(2, 2, 9.33), (2, 4, 20.17), (4, 3, 15.01), (4, 4, 20.47), (8, 2, 9.91), (8, 3, 14.99)],
    )
    def test_signal_to_noise_on_a_normal_is_the_measured_one(self, dim, bits, due_db):
        assert snr_db(f"lattice:dim={dim},bits={bits}", normal((4096, 128), 7)) == pytest.approx(
            due_db, abs=0.05
        )

    def test_columns_of_unlike_scale_are_each_as_good_as_alone(self):
        scales = np.array([1e-6, 1, 50, 1e8], np.float32)
        x = (normal((4000, 4)) + 5) * scales
        y = round_trip("lattice:dim=8,bits=3,scope=column", x)
        assert (10 * np.log10(x.var(axis=0) / (y - x).var(axis=0)) > 14.5).all()

    @pytest.mark.parametrize("dim", [2, 4, 8])
    def test_a_fixed_range_sends_nothing_but_indices_and_errs_less_than_a_cell(self, dim):
        spec = f"lattice:dim={dim},bits=6,range=fixed:-3:5"
        x = np.random.default_rng(1).uniform(-3, 5, (500, 16)).astype(np.float32)
        assert encoded(spec, x).size == 500 * 16 * 6 // 8
        y = round_trip(spec, x)
        assert np.abs(y - x).max() < 1.5 * 8 / 64
        np.testing.assert_array_equal(round_trip(spec, y), y)

    def test_what_is_outside_a_fixed_range_goes_to_its_edge(self):
        x = np.array([[1e30, -1e30], [1e38, 1e38]], np.float32)
        y = round_trip("lattice:dim=2,bits=4,range=fixed:-1:1", x)
        assert (np.sign(y) == np.sign(x)).all()
        assert (np.abs(y) > 0.8).all()
        assert (np.abs(y) < 1.2).all()

    def test_nbytes_are_side_information_and_whole_groups(self):
        for spec, shape, due in [
            ("lattice:dim=2,bits=2", (1000, 16), 8 + 4000),
            ("lattice:dim=4,bits=3,scope=column", (100, 16), 16 * 8 + 600),
            ("lattice:dim=8,bits=3", (3, 3), 8 + 6),
            ("lattice:dim=4,bits=1", (1,), 8 + 1),
            ("lattice:dim=2,bits=7", (5, 1), 8 + 6),
            ("lattice:dim=8,bits=8,range=fixed:0:1", (9,), 16),
            ("lattice:dim=8,bits=8", (0, 4), 0),
        ]:
            assert table.parse(spec).nbytes(shape, 4) == due

    def test_payloads_are_byte_for_byte_these(self):
        x = np.linspace(-1, 1, 12, dtype=np.float32)
        for spec, due in GOLDEN.items():
            assert encoded(spec, x).tobytes().hex() == due, spec

    @pytest.mark.parametrize("kind", ["gauss", "minmax"])
    @pytest.mark.parametrize("scope", ["message", "column"])
    def test_a_range_beyond_float32_is_refused(self, kind, scope):
        x = np.array([[-3.4e38, 0], [3.4e38, 0]], np.float32)
        with pytest.raises(NonFiniteError, match="overflows"):
            encoded(f"lattice:dim=2,bits=1,range={kind},scope={scope}", x)

    @pytest.mark.parametrize("scope", ["message", "column"])
    @pytest.mark.parametrize("side", [(0.0, -1.0), (np.nan, 1.0), (0.0, np.inf), (3e38, 3e38)])
    def test_side_information_that_cannot_be_is_a_wire_error(self, side, scope):
        spec, x = f"lattice:dim=8,bits=2,scope={scope}", normal((8, 3))
        payload_B = encoded(spec, x)
        last = 2 if scope == "column" else 0  # centres come first, then steps
        payload_B[4 * last : 4 * last + 4] = np.frombuffer(struct.pack("<f", side[0]), np.uint8)
        last = 5 if scope == "column" else 1
        payload_B[4 * last : 4 * last + 4] = np.frombuffer(struct.pack("<f", side[1]), np.uint8)
        with pytest.raises(WireError, match="corrupt"):
            decoded(spec, payload_B, x)


GOLDEN = {
    "lattice:dim=2,bits=2": "0000000057712b3f8069ee",
    "lattice:dim=4,bits=3,range=minmax": "000000002bf6973e8861605809",
    "lattice:dim=8,bits=1": "00000000b5957c3f708f",
    "lattice:dim=8,bits=4,range=fixed:-1:1": "10437659cbfe77b7",
}


class TestLatticePaper:
    @pytest.mark.parametrize("shape", [(40, 4), (9, 3), (12,), (3, 2, 5), (5, 1)])
    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_it_computes_what_the_published_code_computes(self, bits, shape):
        x = normal(shape, 3)
        wide = np.pad(x.reshape(-1, shape[-1]), ((0, 0), (0, -shape[-1] % 2)))
        d = naive.dither(KEY, 0, wide.size).reshape(wide.shape) / (2**bits - 1)
        scaled = (wide / x.max() + d).reshape(-1, 2)
        points = naive_lattice.a2_points(3 * int(np.abs(scaled).max() / GAP[bits]) + 3) * GAP[bits]
        nearest, _ = naive_lattice.nearest(points, scaled)
        due = (points[nearest].reshape(wide.shape) - d) * x.max()
        got = round_trip(f"lattice-paper:bits={bits}", x).reshape(wide.shape[0], -1)
        np.testing.assert_allclose(got, due[:, : shape[-1]], atol=1e-5 * np.abs(x).max())

    @pytest.mark.parametrize(("bits", "half", "whole"), [(2, 27, 67), (3, 75, 229), (4, 270, 941)])
    def test_points_that_a_square_meets_are_as_many_as_known_and_all_have_numbers(
        self, bits, half, whole
    ):
        """Counted for values in [0, 1] and in [-1, 1], with dither; every one has been met but for
        a few at the corners, where the cells that stick in are small.
        """
        book = lattice_paper.BOOKS[bits]
        for low, due in ((0, half), (-1, whole)):
            x = np.random.default_rng(0).uniform(low, 1, (400_000, 2)).astype(np.float32)
            x[:2] = [[1, 1], [low, 1]]
            codes_P = np.empty(len(x), np.uint16)
            none = np.empty(0, np.uint32), np.empty((0, 2), np.int16)
            keys = (np.uint32(1), np.uint32(2))
            assert lattice_paper.encode_paper(x, 1.0, book, keys, codes_P, *none) == (0, 0)
            assert due - 6 <= len(np.unique(codes_P)) <= due
        assert whole <= sum(book.counts) <= 2**book.width

    @pytest.mark.parametrize(("bits", "due"), [(2, 8.69e-3), (3, 1.92e-3), (4, 3.85e-4)])
    def test_error_is_that_of_the_hexagonal_cell(self, bits, due):
        """5 / (36 sqrt(3)) times the area of a cell, a value, in units of the largest."""
        x = np.random.default_rng(5).uniform(0, 1, (200_000, 2)).astype(np.float32)
        y = round_trip(f"lattice-paper:bits={bits}", x)
        assert ((y - x) ** 2).mean() == pytest.approx(due, rel=0.01)
        assert due == pytest.approx(5 / 72 * GAP[bits] ** 2, rel=0.01)

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_error_on_signed_values_is_the_same_in_units_of_the_largest(self, bits):
        x = normal((64, 4096), 2)
        y = round_trip(f"lattice-paper:bits={bits}", x)
        due = 5 / 72 * (GAP[bits] * x.max()) ** 2
        assert ((y - x).astype(np.float64) ** 2).mean() == pytest.approx(due, rel=0.03)

    def test_nbytes_count_the_whole_list(self):
        for spec, shape, due in [
            ("lattice-paper:bits=2", (1000, 16), 8 + 80 * 8 + 7000),
            ("lattice-paper:bits=3", (1000, 16), 8 + 80 * 8 + 8000),
            ("lattice-paper:bits=4", (1000, 16), 8 + 80 * 8 + 10000),
            ("lattice-paper:bits=4,escapes=0", (1000, 16), 8 + 16 * 8 + 10000),
            ("lattice-paper:bits=2,escapes=100", (10, 4), 8 + 20 * 8 + 18),
            ("lattice-paper:bits=2", (3,), 8 + 2 * 8 + 2),
            ("lattice-paper:bits=2", (0, 3), 0),
        ]:
            assert table.parse(spec).nbytes(shape, 4) == due

    @pytest.mark.parametrize("bits", [2, 3, 4])
    def test_pairs_far_below_the_maximum_go_to_the_list_and_come_back(self, bits):
        x = np.abs(normal((100, 4))) / 4
        x[0, 0] = 1.0
        x[::10, 2] = -np.linspace(3, 50, 10)
        payload_B = encoded(f"lattice-paper:bits={bits}", x)
        assert struct.unpack_from("<I", payload_B, 4) == (10,)
        y = decoded(f"lattice-paper:bits={bits}", payload_B, x)
        assert np.abs(y - x).max() < GAP[bits]

    def test_too_many_pairs_without_a_number_name_the_option(self):
        x = np.full((100, 4), -5, np.float32)
        x[0] = 1
        with pytest.raises(ConfigError, match=r"198 pairs of 200 .* at most 16.* from 1 to 99"):
            encoded("lattice-paper:bits=2", x)
        assert np.abs(round_trip("lattice-paper:bits=2,escapes=99", x) - x).max() < GAP[2]

    def test_a_tiny_maximum_among_large_values_is_refused_in_words(self):
        x = np.array([[1e-9, -1.0]], np.float32)
        with pytest.raises(ConfigError, match=r"half steps from 0.*use lattice:dim=2,bits=3"):
            encoded("lattice-paper:bits=3", x)
        x[0, 0] = 1e-45
        with pytest.raises(ConfigError, match="half steps from 0"):
            encoded("lattice-paper:bits=3", x)

    @pytest.mark.parametrize("bits", [2, 3, 4])
    @pytest.mark.parametrize("rows", [100, 1000])
    def test_the_list_has_room_to_spare_for_normalised_rows(self, bits, rows):
        for seed in range(20):
            x = normal((rows, 16), seed)
            x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
            (found,) = struct.unpack_from("<I", encoded(f"lattice-paper:bits={bits}", x), 4)
            assert found <= 8

    @pytest.mark.parametrize("high", [-1e-3, 0.0])
    def test_without_a_positive_value_the_smallest_is_the_scale(self, high):
        x = -np.abs(normal((50, 4)))
        x[3, 1] = high
        x = np.minimum(x, high).astype(np.float32)
        scale = np.abs(x).max()
        assert np.abs(round_trip("lattice-paper:bits=4", x) - x).max() <= GAP[4] / 1.7 * scale

    def test_zeros_decode_to_zeros(self):
        x = np.zeros((5, 4), np.float32)
        np.testing.assert_array_equal(round_trip("lattice-paper:bits=2", x), x)

    def test_an_odd_last_column_is_paired_with_zero(self):
        x = normal((20, 5), 4)
        wide = np.pad(x, ((0, 0), (0, 1)))
        np.testing.assert_array_equal(
            encoded("lattice-paper:bits=3", x), encoded("lattice-paper:bits=3", wide)
        )

    def test_the_dither_depends_on_the_key(self):
        x = normal((50, 4))
        spec = "lattice-paper:bits=2"
        assert (encoded(spec, x) != encoded(spec, x, KEY ^ 1)).mean() > 0.1

    @pytest.mark.parametrize(
        ("at", "value", "words"),
        [
            ("count", 17, "17 escapes in a payload that has room for 16"),
            ("pair", (4, 4), "no lattice points in order"),
            ("pair", (4, 3), "no lattice points in order"),
            ("pair", (4, 200), "no lattice points in order"),
            ("point", (3, 4), "no lattice points in order"),
            ("scale", np.nan, "not finite"),
            ("scale", -np.inf, "not finite"),
            ("scale", 3e38, "not finite"),
        ],
    )
    def test_a_list_that_cannot_be_is_a_wire_error(self, at, value, words):
        x = np.abs(normal((100, 4)))
        x[[1, 2], 1] = -100
        payload_B = encoded("lattice-paper:bits=2", x)
        assert struct.unpack_from("<I", payload_B, 4) == (2,)
        if at == "count":
            struct.pack_into("<I", payload_B.data, 4, value)
        elif at == "pair":
            struct.pack_into("<I", payload_B.data, 8, value[0])
            struct.pack_into("<I", payload_B.data, 16, value[1])
        elif at == "point":
            struct.pack_into("<hh", payload_B.data, 12, *value)
        else:
            struct.pack_into("<f", payload_B.data, 0, value)
        with pytest.raises(WireError, match=words):
            decoded("lattice-paper:bits=2", payload_B, x)

    @pytest.mark.parametrize("shape", [(1, 1), (7, 3), (3, 8), (700, 4)])
    def test_python_and_compiled_agree_bit_for_bit(self, shape):
        book, keys, x = lattice_paper.BOOKS[3], (np.uint32(7), np.uint32(9)), normal(shape, 1)
        pairs = shape[0] * -(-shape[1] // 2)
        made: list = []
        with np.errstate(over="ignore"):
            for plain in (False, True):
                run = naive.plain if plain else lambda kernel: kernel
                codes_P, k_K = np.empty(pairs, np.uint16), np.empty(2048, np.int32)
                at_E, point_E2 = np.zeros(pairs, np.uint32), np.zeros((pairs, 2), np.int16)
                found, beyond = run(lattice_paper.encode_pairs)(
                    x,
                    np.float32(0.4),
                    *book.numbers,
                    book.limits,
                    *keys,
                    k_K,
                    codes_P,
                    at_E,
                    point_E2,
                )
                assert beyond == 0
                listed, y = (at_E[:found], point_E2[:found]), np.empty_like(x)
                run(lattice_paper.decode_pairs)(
                    codes_P, *listed, np.float32(0.4), *book.numbers, book.limits, *keys, k_K, y
                )
                made.append((codes_P, *listed, y))
                assert np.abs(y - x).max() < 0.4 * GAP[3]
        for compiled, plain in zip(*made, strict=True):
            np.testing.assert_array_equal(compiled, plain)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lattice", "dim is missing; possible: 2, 4, 8"),
        ("lattice:dim=2", "bits is missing; possible: 1 to 8"),
        ("lattice:dim=3,bits=2", "possible: 2, 4, 8"),
        ("lattice:dim=2,bits=9", "possible: 1, 2"),
        ("lattice:dim=2,bits=2,range=wide", "possible: gauss, minmax, fixed"),
        ("lattice:dim=2,bits=2,range=fixed:1:1", "lo < hi"),
        ("lattice:dim=2,bits=2,range=fixed:a:1", "lo < hi"),
        ("lattice:dim=2,bits=2,range=fixed:0:1,scope=column", "no meaning"),
        ("lattice:dim=2,bits=2,range=minmax:1:2", "takes no numbers"),
        ("lattice:dim=2,bits=2,scope=row", "possible: message, column"),
        ("lattice:dim=2,bits=2,dither=on", "options: dim, bits, range, scope"),
        ("lattice-paper", "bits is missing; possible: 2, 3, 4"),
        ("lattice-paper:bits=5", "possible: 2, 3, 4"),
        ("lattice-paper:bits=2,escapes=101", "possible: 0 to 100"),
        ("lattice-paper:bits=2,escapes=-1", "possible: 0 to 100"),
        ("lattice-paper:bits=2,escapes=x", "possible: 0 to 100"),
        ("lattice-paper:bits=2,dim=2", "options: bits, escapes"),
    ],
)
def test_a_bad_spec_names_option_and_choices(spec, words):
    with pytest.raises(ConfigError, match=words):
        table.parse(spec)
