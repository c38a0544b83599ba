"""Nearest points against lists of points, compiled and in plain Python."""

import numpy as np
import pytest
from support import naive, naive_lattice

from hpcvfl.kernels import lattice
from hpcvfl.kernels.lattice_book import DIMS

SIZES = (0, 1, 7, 8, 9)
NEAREST = {2: lattice.nearest_a2, 4: lattice.nearest_d4, 8: lattice.nearest_e8}
VOLUME = {2: np.sqrt(3) / 2, 4: 2.0, 8: 1.0}
SECOND_MOMENT = {2: 0.080188, 4: 0.076603, 8: 0.071682}


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        for dim in DIMS:
            monkeypatch.setitem(NEAREST, dim, naive.plain(NEAREST[dim]))
    return request.param


def nearest(dim, x_GD):
    out_GD = np.full_like(x_GD, np.nan)
    NEAREST[dim](x_GD, out_GD)
    return out_GD


def normal(shape, scale=1.0, seed=0, dtype=np.float64):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def is_point(dim, v_GD):
    """Whether each row is a point of the lattice."""
    if dim == 2:
        j = v_GD[:, 1] * 2 / np.sqrt(3)
        i = v_GD[:, 0] - j / 2
        parts = np.stack([i, j], axis=1)
        return (np.abs(parts - np.rint(parts)) < 1e-5).all(axis=1)
    doubled = 2 * v_GD
    alike = (doubled % 2 == 0).all(axis=1)
    if dim == 8:
        alike |= (doubled % 2 == 1).all(axis=1)
    return alike & (v_GD.sum(axis=1) % 2 == 0)


def some_points(dim, n, reach=50):
    """n random lattice points."""
    rng = np.random.default_rng(dim)
    if dim == 2:
        i, j = rng.integers(-reach, reach, (2, n))
        return np.stack([i + j / 2, j * np.sqrt(3) / 2], axis=1)
    v = rng.integers(-reach, reach, (n, dim)).astype(float)
    v[:, 0] += v.sum(axis=1) % 2
    return v + (0.5 * rng.integers(0, 2, (n, 1)) if dim == 8 else 0)


class TestNearestPoint:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
    def test_a2_and_d4_agree_with_a_search_of_all_points_around(self, mode, dtype):
        for dim, points in (
            (2, naive_lattice.a2_points(9)),
            (4, naive_lattice.even_points(4, 3)),
        ):
            x = np.clip(normal((150, dim), dtype=dtype), -1.9, 1.9)
            got = nearest(dim, x)
            assert is_point(dim, got).all()
            _, square = naive_lattice.nearest(points, x)
            np.testing.assert_allclose(((got - x) ** 2).sum(axis=1), square, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f32", "f64"])
    def test_e8_is_no_farther_than_any_neighbour_of_the_point_found(self, mode, dtype):
        """The 240 shortest vectors of E8 bound its Voronoi cell, so no others matter."""
        x = normal((60, 8), 3, dtype=dtype)
        got = nearest(8, x)
        assert is_point(8, got).all()
        roots = naive_lattice.e8_roots()
        assert len(roots) == 240
        others = got[:, None].astype(float) + roots
        square = ((x - got.astype(float)) ** 2).sum(axis=1)
        assert (square[:, None] <= ((others - x[:, None]) ** 2).sum(axis=2) + 1e-5).all()
        assert square.max() <= 1 + 1e-5  # covering radius

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("dim", DIMS)
    def test_strided_read_only_and_in_place_arrays_give_the_same(self, mode, dim, n):
        dense = normal((n, dim), 2, seed=n)
        due = nearest(dim, dense)
        x = np.zeros((2 * n, 3 * dim))[::2, ::3]
        x[:] = dense
        x.flags.writeable = False
        np.testing.assert_array_equal(nearest(dim, x), due)
        NEAREST[dim](dense, dense)
        np.testing.assert_array_equal(dense, due)

    @pytest.mark.parametrize("dim", DIMS)
    def test_points_of_the_lattice_are_their_own_nearest(self, mode, dim):
        v = some_points(dim, 200)
        np.testing.assert_allclose(nearest(dim, v), v, atol=1e-12)

    @pytest.mark.parametrize("dim", DIMS)
    def test_translations_by_lattice_points_change_nothing(self, mode, dim):
        v, x = some_points(dim, 300), normal((300, dim))
        np.testing.assert_allclose(nearest(dim, x + v), nearest(dim, x) + v, atol=1e-9)

    @pytest.mark.parametrize("dim", DIMS)
    def test_second_moment_is_the_known_one(self, dim):
        """Per dimension, at unit volume (Conway & Sloane 1982, table I): the mean over whole
        cells, at the points n * (1/r, 1/r^2, ..) mod 1, r^(dim + 1) = r + 1, evenly spread.
        """
        r = 1.5
        for _ in range(60):
            r = (1 + r) ** (1 / (dim + 1))
        x = 2 * (np.arange(1, 1_000_001)[:, None] * r ** -np.arange(1.0, dim + 1) % 1)
        x[:, 1] *= np.sqrt(3) if dim == 2 else 1
        square = ((nearest(dim, x) - x) ** 2).sum(axis=1) / dim / VOLUME[dim] ** (2 / dim)
        assert square.mean() == pytest.approx(SECOND_MOMENT[dim], rel=1e-3)
