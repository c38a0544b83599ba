"""Lattice codes against lists of all codewords, compiled and in plain Python."""

import itertools

import numpy as np
import pytest
from support import naive, naive_lattice

from hpcvfl.kernels import lattice_code as kernels
from hpcvfl.kernels import lattice_far
from hpcvfl.kernels.compiling import FAR
from hpcvfl.kernels.lattice_book import DIMS, book

SIZES = (0, 1, 7, 8, 9, 2049)
FACTORIES = ((kernels, "encoder"), (kernels, "decoder"), (lattice_far, "corrector"))
SMALL = [(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2), (4, 3), (8, 1)]
"""(dim, bits) of books whose points can all be looked at."""
LARGE = [(2, 5), (2, 8), (4, 5), (4, 8), (8, 3), (8, 8)]
ALL = list(itertools.product(("gauss", "uniform"), DIMS, range(1, 9)))
SCALAR_DB = (4.40, 9.25, 14.27, 19.38, 24.57, 29.83, 35.13, 40.34)
"""Signal to noise of the best uniform scalar quantiser of N(0,1) at 1 to 8 bits (Max 1960)."""


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        for module, name in FACTORIES:
            made = getattr(module, name)
            monkeypatch.setattr(module, name, lambda b, made=made: naive.plain(made(b)))
    with np.errstate(over="ignore"):
        yield request.param


def points_of(b):
    return naive_lattice.book_points(b.sides, b.first, b.spacing, b.parity)


def columns(values):
    return np.atleast_1d(np.asarray(values, np.float32))


def encode(x_N, b, lo=0.0, inv_step=1.0):
    room_B = np.full(kernels.code_nbytes(x_N.size, b.dim, b.bits) + 16, 0xA5, np.uint8)
    kernels.encode_lattice(x_N, columns(lo), columns(inv_step), b, room_B[8:-8])
    assert (room_B[:8] == 0xA5).all()
    assert (room_B[-8:] == 0xA5).all()
    return room_B[8:-8]


def decode(in_B, n, b, lo=0.0, step=1.0):
    room_N = np.full(n + 16, np.nan, np.float32)
    kernels.decode_lattice(in_B, columns(lo), columns(step), b, room_N[8:-8])
    assert np.isnan(room_N[:8]).all()
    assert np.isnan(room_N[-8:]).all()
    return room_N[8:-8]


def indices_in(in_B, n, b):
    """The indices of a payload, by Python integers."""
    number, width = int.from_bytes(bytes(in_B), "little"), b.dim * b.bits
    return [(number >> (g * width)) & ((1 << width) - 1) for g in range(-(-n // b.dim))]


def values(n, b, seed=0):
    """Normal values in units of the step, every seventh group far outside, many times over."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) / b.step
    far = np.arange(n) // b.dim % 7 == 3
    x[far] *= 10.0 ** rng.uniform(0, 4, far.sum())
    return x.astype(np.float32)


class TestBooks:
    @pytest.mark.parametrize(("fit", "dim", "bits"), ALL)
    def test_an_index_has_as_many_bits_as_are_paid_for(self, fit, dim, bits):
        b = book(dim, bits, fit)
        if dim == 8:
            assert sum(b.counts) == 2 ** (8 * bits)
        assert 0.95 * 2 ** (dim * bits) <= sum(b.counts) <= 2 ** (dim * bits)

    @pytest.mark.parametrize("fit", ["gauss", "uniform"])
    @pytest.mark.parametrize(("dim", "bits"), SMALL)
    def test_the_codewords_are_centred_points_of_the_lattice(self, dim, bits, fit):
        b = book(dim, bits, fit)
        points = points_of(b)
        assert len(points) == sum(b.counts)
        assert np.abs(points.mean(axis=0)).max() < 2**-11
        assert np.abs(points).max() == pytest.approx(b.reach)
        between = points - points[0]
        doubled = np.rint(2 * between / np.array(b.spacing))
        np.testing.assert_allclose(doubled * np.array(b.spacing) / 2, between, atol=1e-9)
        assert (doubled % 2 == doubled[:, :1] % 2).all()  # all whole, or all half
        nearest = min(
            np.sqrt(((points[i + 1 :] - p) ** 2).sum(axis=1).min())
            for i, p in enumerate(points[:-1])
        )
        assert nearest == pytest.approx(np.sqrt(2) if dim == 8 else 1)

    @pytest.mark.parametrize(("fit", "dim", "bits"), ALL)
    def test_no_nearby_step_has_a_smaller_error(self, fit, dim, bits):
        x, weight = spread(fit, dim)
        best = book(dim, bits, fit).step
        due = error(x, weight, book(dim, bits, fit), best)
        for other in (0.97, 1.03):
            assert due <= error(x, weight, book(dim, bits, fit), other * best)

    @pytest.mark.parametrize("dim", DIMS)
    @pytest.mark.parametrize("bits", range(2, 9))
    def test_on_a_normal_no_lattice_is_worse_than_the_best_scalar_steps(self, dim, bits):
        b = book(dim, bits, "gauss")
        x, weight = spread("gauss", dim)
        assert -10 * np.log10(error(x, weight, b, b.step)) > SCALAR_DB[bits - 1] + 0.03


def spread(fit, dim, groups=1 << 15):
    """Groups and weights for means over a uniform of width 1, or over a normal, the tails of which
    are drawn from a wider one so that they are met often enough.
    """
    rng = np.random.default_rng(dim)
    if fit == "uniform":
        return rng.uniform(-0.5, 0.5, (groups, dim)), np.full(groups, 1 / groups)
    x = rng.normal(size=(groups, dim))
    x[::2] *= 1.5
    square = (x**2).sum(axis=1)
    drawn = np.exp(-square / 2) + np.exp(-square / 2 / 1.5**2) / 1.5**dim
    weight = np.exp(-square / 2) / drawn
    return x, weight / weight.sum()


def error(x, weight, b, step):
    """Mean squared error of a value."""
    square = naive_lattice.square_to_book(x / step, b.sides, b.first, b.spacing, b.parity)
    return (weight * square).sum() * step**2 / b.dim


class TestCodes:
    @pytest.mark.parametrize(
        ("dim", "bits", "fit"),
        [(*small, "gauss") for small in SMALL] + [(2, 3, "uniform"), (4, 2, "uniform")],
    )
    def test_no_codeword_is_nearer_than_the_one_sent(self, mode, dim, bits, fit):
        b = book(dim, bits, fit)
        n = 200 * dim if mode == "compiled" else 40 * dim
        x_N, points = values(n, b), points_of(b)
        x_GD = x_N.reshape(-1, dim).astype(float)
        sent = points[indices_in(encode(x_N, b), n, b)]
        _, due = naive_lattice.nearest(points, x_GD)
        np.testing.assert_allclose(((x_GD - sent) ** 2).sum(axis=1), due, rtol=1e-6, atol=1e-5)
        quick = naive_lattice.square_to_book(x_GD, b.sides, b.first, b.spacing, b.parity)
        np.testing.assert_allclose(quick, due, rtol=1e-9)

    @pytest.mark.parametrize(("dim", "bits"), LARGE)
    def test_codes_of_large_books_are_as_near_as_any_codeword(self, dim, bits):
        b = book(dim, bits, "gauss")
        x_N = values(5000 * dim, b)
        y_N = decode(encode(x_N, b), x_N.size, b)
        x_GD, y_GD = (a.reshape(-1, dim).astype(float) for a in (x_N, y_N))
        due = naive_lattice.square_to_book(x_GD, b.sides, b.first, b.spacing, b.parity)
        np.testing.assert_allclose(((x_GD - y_GD) ** 2).sum(axis=1), due, rtol=1e-6, atol=1e-4)

    @pytest.mark.parametrize(("dim", "bits"), SMALL)
    def test_index_and_codeword_are_one_to_one(self, mode, dim, bits):
        b = book(dim, bits, "gauss")
        points = points_of(b)
        in_B = np.frombuffer(naive_lattice.pack(range(len(points)), dim * bits), np.uint8)
        y_N = decode(in_B, points.size, b)
        np.testing.assert_allclose(y_N, points.ravel(), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(encode(y_N, b), in_B)

    @pytest.mark.parametrize(("dim", "bits"), LARGE)
    def test_codes_of_codewords_come_back(self, dim, bits):
        b = book(dim, bits, "gauss")
        rng = np.random.default_rng(bits)
        last = [0, b.counts[0] - 1, b.counts[0], sum(b.counts) - 1]
        drawn = [int(rng.integers(0, 1 << 62)) * 7 % sum(b.counts) for _ in range(500)]
        in_B = np.frombuffer(naive_lattice.pack(last + drawn, dim * bits), np.uint8)
        y_N = decode(in_B, 504 * dim, b)
        assert len(np.unique(y_N[: 4 * dim].reshape(4, dim), axis=0)) == 4
        np.testing.assert_array_equal(encode(y_N, b), in_B)
        np.testing.assert_array_equal(decode(encode(y_N, b), y_N.size, b), y_N)

    def test_an_index_behind_the_last_is_the_last(self, mode):
        for dim, bits in ((2, 4), (4, 2)):
            b = book(dim, bits, "gauss")
            last = sum(b.counts) - 1
            assert last < 2 ** (dim * bits) - 1
            y_N = decode(np.full(dim * bits, 0xFF, np.uint8), 8 * dim, b)
            due_D = points_of(b)[last]
            np.testing.assert_allclose(y_N.reshape(8, dim), np.tile(due_D, (8, 1)), rtol=1e-6)

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize(("dim", "bits"), [(2, 3), (4, 2), (8, 3)])
    def test_python_and_compiled_agree_bit_for_bit(self, monkeypatch, dim, bits, n):
        b = book(dim, bits, "gauss")
        lo, step = [0.1, -2, 7], [1.1, 0.9, 1.7]
        got_B = encode(values(n, b), b, lo, step)
        got_N = decode(got_B, n, b, lo, step)
        for module, name in FACTORIES:
            made = getattr(module, name)
            monkeypatch.setattr(module, name, lambda b, made=made: naive.plain(made(b)))
        np.testing.assert_array_equal(encode(values(n, b), b, lo, step), got_B)
        np.testing.assert_array_equal(decode(got_B, n, b, lo, step), got_N)

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize(("dim", "bits"), [(2, 3), (4, 2), (8, 3)])
    def test_a_group_that_is_not_full_is_filled_with_the_centre(self, mode, dim, bits, n):
        b = book(dim, bits, "gauss")
        if mode == "python" and n > 9:
            n = 17
        x_N = values(n, b)
        full_N = np.pad(x_N, (0, -n % dim))
        np.testing.assert_array_equal(encode(x_N, b), encode(full_N, b))
        np.testing.assert_array_equal(
            decode(encode(x_N, b), n, b), decode(encode(full_N, b), full_N.size, b)[:n]
        )


def far_groups(dim, groups, seed=0):
    """Groups with a coordinate beyond FAR_OUT: of one size, of all sizes, of equal magnitudes, and
    with coordinates among the codewords; up to 1e30 and more.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(groups, dim))
    alike, unlike, equal, single = (slice(k, None, 4) for k in range(4))
    x[alike] *= 10.0 ** rng.uniform(3.5, 30, x[alike].shape[0])[:, None]
    x[unlike] *= 10.0 ** rng.uniform(-30, 30, x[unlike].shape)
    x[equal] = np.sign(x[equal]) * 10.0 ** rng.uniform(3.5, 38, x[equal].shape[0])[:, None]
    x[single, rng.integers(dim)] = -(10.0 ** rng.uniform(3.5, 30))
    x[:, -1] = np.where(np.abs(x).max(axis=1) > lattice_far.FAR_OUT, x[:, -1], 1e6)
    return x.astype(np.float32)


class TestFarOut:
    @pytest.mark.parametrize(("dim", "bits"), [*SMALL, (2, 6)])
    def test_the_codeword_is_the_nearest_in_exact_arithmetic(self, mode, dim, bits):
        b = book(dim, bits, "gauss")
        groups = 800 if mode == "compiled" and sum(b.counts) < 300 else 80
        x_GD = far_groups(dim, groups)
        squares = naive_lattice.exact_squares(b.sides, b.first, dim == 2, b.parity)
        sent = indices_in(encode(x_GD.ravel(), b), x_GD.size, b)
        for row, index in zip(x_GD, sent, strict=True):
            square = squares(row)
            assert square[index] == square.min()

    @pytest.mark.parametrize(("dim", "bits"), LARGE)
    def test_codes_of_large_books_differ_only_in_the_groups_that_are_far(self, dim, bits):
        b = book(dim, bits, "gauss")
        near_GD = values(300 * dim, b).reshape(-1, dim).clip(-1000, 1000)
        x_GD = near_GD.copy()
        x_GD[::5] = far_groups(dim, 60)
        near, mixed = (indices_in(encode(x.ravel(), b), x.size, b) for x in (near_GD, x_GD))
        assert [m for g, m in enumerate(mixed) if g % 5] == [n for g, n in enumerate(near) if g % 5]
        y_GD = decode(encode(x_GD.ravel(), b), x_GD.size, b).reshape(-1, dim).astype(float)
        x_GD = x_GD.astype(float)
        due = naive_lattice.square_to_book(x_GD, b.sides, b.first, b.spacing, b.parity)
        np.testing.assert_allclose(((x_GD - y_GD) ** 2).sum(axis=1), due, rtol=1e-6, atol=1e-4)

    @pytest.mark.parametrize(("dim", "bits"), SMALL)
    def test_up_to_the_limit_a_codeword_is_the_nearest_but_for_rounding(self, dim, bits):
        b = book(dim, bits, "gauss")
        rng = np.random.default_rng(bits)
        x_GD = rng.uniform(-lattice_far.FAR_OUT, lattice_far.FAR_OUT, (600, dim))
        x_GD[::2, 1:] = rng.normal(size=(300, dim - 1))
        x_GD, points = x_GD.astype(np.float32), points_of(b)
        sent = points[indices_in(encode(x_GD.ravel(), b), x_GD.size, b)]
        _, due = naive_lattice.nearest(points, x_GD)
        square = ((x_GD.astype(float) - sent) ** 2).sum(axis=1)
        assert (square <= due * (1 + 2**-19) + 2**-19).all()

    def test_values_whose_steps_overflow_float32_go_to_the_edge(self, mode):
        b = book(4, 2, "gauss")
        x_N = np.array([3.4e38, -3.4e38, 1e38, -1e38], np.float32)
        y_N = decode(encode(x_N, b, 0, 1e6), 4, b)
        assert (np.sign(y_N) == np.sign(x_N)).all()
        assert (np.abs(y_N) >= 0.5).all()


class TestColumns:
    @pytest.mark.parametrize(
        "shape", [(0, 3), (1, 1), (7, 1), (1, 8), (3, 3), (241, 17), (2, 2050)]
    )
    @pytest.mark.parametrize(("dim", "bits"), [(2, 3), (4, 2), (8, 3)])
    def test_each_value_is_scaled_by_its_own_column(self, mode, dim, bits, shape):
        b = book(dim, bits, "gauss")
        if mode == "python":
            shape = (min(shape[0], 9), min(shape[1], 17))
        x_RC = values(shape[0] * shape[1], b).reshape(shape)
        lo_C = np.linspace(-1, 2, shape[1]).astype(np.float32)
        step_C = np.linspace(0.5, 3, shape[1]).astype(np.float32)
        out_B = encode(x_RC.ravel(), b, lo_C, 1 / step_C)
        scaled_RC = (x_RC - lo_C) * (1 / step_C)
        np.testing.assert_array_equal(out_B, encode(scaled_RC.ravel(), b))
        y_RC = decode(out_B, x_RC.size, b, lo_C, step_C).reshape(shape)
        unit_RC = decode(out_B, x_RC.size, b).reshape(shape)
        np.testing.assert_array_equal(y_RC, lo_C + unit_RC * step_C)

    def test_strided_and_read_only_arrays_are_encoded_and_decoded_alike(self, mode):
        b = book(2, 3, "gauss")
        dense_N = values(186, b)
        x_N = np.full(3 * 186, 7, np.float32)[::3]
        x_N[:] = dense_N
        x_N.flags.writeable = False
        due_B = encode(dense_N, b)
        np.testing.assert_array_equal(encode(x_N, b), due_B)
        apart_B = np.zeros(2 * len(due_B), np.uint8)[::2]
        apart_B[:] = due_B
        apart_B.flags.writeable = False
        got_N = np.zeros(372, np.float32)[::2]
        kernels.decode_lattice(apart_B, columns(0), columns(1), b, got_N)
        np.testing.assert_array_equal(got_N, decode(due_B, 186, b))


@pytest.mark.parametrize(("dim", "bits"), [(2, 4), (8, 2)])
def test_a_message_that_is_fetched_ahead_has_the_same_codes(dim, bits):
    b = book(dim, bits, "gauss")
    x_N = values(FAR + 5000, b)
    out_B = encode(x_N, b)
    y_N = decode(out_B, x_N.size, b)
    for start in (0, 2048 * 100, x_N.size // 2048 * 2048):
        part = slice(start, min(start + 2048, x_N.size))
        cut = slice(start * bits // 8, start * bits // 8 + (part.stop - start) * bits // 8)
        np.testing.assert_array_equal(out_B[cut], encode(x_N[part], b)[: cut.stop - cut.start])
        np.testing.assert_array_equal(y_N[part], decode(out_B[cut], part.stop - start, b))


@pytest.mark.parametrize(("dim", "bits"), [(2, 4), (4, 2), (8, 3)])
def test_no_multiply_and_add_are_fused(dim, bits):
    """A fused multiply-add rounds once where the formula rounds twice, so bits would differ."""
    b = book(dim, bits, "gauss")
    decode(encode(values(64, b), b), 64, b)
    for kernel in (kernels.encoder(b), kernels.decoder(b)):
        assert all("fmadd" not in text for text in kernel.inspect_asm().values())
        assert all("llvm.fmuladd" not in text for text in kernel.inspect_llvm().values())
