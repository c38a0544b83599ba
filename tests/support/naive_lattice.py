"""Slow twins of the lattice kernels: lists of points, all distances, Python integers.

Nothing here imports the package. A lattice is given by what it is, not by how it is searched.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np


def a2_points(reach: int) -> np.ndarray:
    """i * (1, 0) + j * (1/2, sqrt(3)/2) for |i|, |j| <= reach."""
    steps = range(-reach, reach + 1)
    return np.array([(i + j / 2, j * math.sqrt(3) / 2) for i in steps for j in steps])


def even_points(dim: int, reach: int) -> np.ndarray:
    """D_dim: integer points with an even sum, coordinates up to `reach`."""
    points = itertools.product(range(-reach, reach + 1), repeat=dim)
    return np.array([p for p in points if sum(p) % 2 == 0], float)


def e8_roots() -> np.ndarray:
    """The 240 shortest vectors of E8, by which every Voronoi cell is bounded."""
    pairs = [
        (s * (k == i) + t * (k == j) for k in range(8))
        for i in range(8)
        for j in range(i)
        for s in (1, -1)
        for t in (1, -1)
    ]
    halves = [p for p in itertools.product((0.5, -0.5), repeat=8) if sum(p) % 2 == 0]
    return np.array([tuple(p) for p in pairs] + halves, float)


def book_points(sides, first, spacing, parity: bool) -> np.ndarray:
    """All codewords in the order of their indices, first coordinate fastest, in units of a step.

    With a parity the last coordinate goes by its half; the sum of all tells which of the two it is.
    """
    points = []
    for side, start in zip(sides, first, strict=True):
        ranges = [range(n) for n in side]
        if parity:
            ranges[-1] = range(side[-1] // 2)
        for reverse in itertools.product(*ranges[::-1]):
            d = list(reverse[::-1])
            if parity:
                d[-1] = 2 * d[-1] + sum(d[:-1]) % 2
            points.append([(k + a) * gap for k, a, gap in zip(d, start, spacing, strict=True)])
    return np.array(points)


def nearest(points: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(index, squared distance) of the point nearest to each row of `x`, by looking at all."""
    squares = np.array([((points - row) ** 2).sum(axis=1) for row in np.asarray(x, float)])
    return squares.argmin(axis=1), squares.min(axis=1)


def exact_squares(sides, first, root3: bool, parity: bool):
    """Function of a float32 point: its squared distances to all codewords, in whole numbers.

    root3 : the second coordinate of codewords is a multiple of sqrt(3), here with 260 bits
    Units are 2**-200 of a step, squared; float32 and multiples of 2**-12 are whole numbers of them.
    """
    points = book_points(sides, first, [1.0] * len(sides[0]), parity)
    whole_PD = np.vectorize(lambda v: int(v * 4096) << 188, otypes=[object])(points)
    if root3:
        whole_PD[:, 1] = whole_PD[:, 1] * math.isqrt(3 << 520) // (1 << 260)

    def squares(x_D):
        row = np.array([int(Fraction(float(v)) * (1 << 200)) for v in x_D], object)
        return ((whole_PD - row) ** 2).sum(axis=1)

    return squares


def square_to_book(x: np.ndarray, sides, first, spacing, parity: bool) -> np.ndarray:
    """Squared distance of each row to the nearest codeword of a book of any size, in steps.

    Each box on its own: the nearest allowed point of every coordinate, and, for an odd sum, the
    best of all ways to exchange one coordinate for one of its neighbours.
    """
    boxes = []
    for side, start in zip(sides, first, strict=True):
        top, gap = np.array(side) - 1, np.array(spacing)
        u = x / gap - np.array(start)
        d = np.clip(np.rint(u), 0, top)
        cost = ((u - d) * gap) ** 2
        square = cost.sum(axis=1)
        if parity:
            ways = [
                np.where((d + way >= 0) & (d + way <= top), (u - d - way) ** 2 - cost, np.inf)
                for way in (1, -1)
            ]
            odd = d.sum(axis=1) % 2 == 1
            square = square + np.where(odd, np.minimum(*ways).min(axis=1), 0)
        boxes.append(square)
    return np.minimum(*boxes)


def pack(codes, width: int) -> bytes:
    """Index n occupies bits n * width .. n * width + width - 1, lowest first."""
    number = sum(int(code) << (n * width) for n, code in enumerate(codes))
    return number.to_bytes(math.ceil(len(codes) * width / 8), "little")
