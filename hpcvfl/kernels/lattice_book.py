"""Bounded codebooks out of the lattices A2, D4 and E8, counted and centred.

A book is two boxes of grid points, the second shifted against the first by half a spacing:

    A2 = R u (R + s)             R = Z x sqrt(3) Z, s = (1/2, sqrt(3)/2)
    D4 ~ Z^4 u (Z^4 + s)         s = (1/2, ..); the same lattice as the even sums, turned and scaled
    E8 = D8 u (D8 + s)           D8 = points of Z^8 with an even sum

(Conway & Sloane, Sphere Packings, Lattices and Groups, ch. 4). Because every box is a product of
intervals, the codeword nearest to any point, however far outside, is found coordinate by coordinate
in each box: round and clip, and then take the nearer of two. The boxes need not be alike: two that
are long in different directions make a rounder book that is also coarser in its outskirts, as a
quantiser of a normal should be.

Legend: D coordinates of a group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

DIMS = (2, 4, 8)
"""Dimensions for which there is a book, of A2, D4 and E8."""

_Sides = tuple[tuple[int, ...], tuple[int, ...]]

_SIDES: dict[tuple[str, int], tuple[_Sides, ...]] = {
    ("gauss", 2): (
        ((2, 1), (2, 1)),
        ((4, 2), (4, 2)),
        ((6, 4), (8, 5)),
        ((12, 11), (20, 6)),
        ((24, 22), (38, 13)),
        ((47, 44), (78, 26)),
        ((94, 88), (153, 53)),
        ((190, 175), (301, 107)),
    ),
    ("uniform", 2): (
        ((2, 1), (2, 1)),
        ((4, 2), (4, 2)),
        ((8, 4), (8, 4)),
        ((15, 8), (15, 9)),
        ((30, 17), (30, 17)),
        ((59, 34), (59, 35)),
        ((120, 68), (119, 69)),
        ((240, 137), (237, 137)),
    ),
    ("gauss", 4): (
        ((2, 2, 2, 1), (2, 2, 1, 2)),
        ((3, 3, 4, 3), (4, 3, 3, 4)),
        ((8, 5, 6, 9), (5, 8, 8, 6)),
        ((17, 17, 12, 11), (10, 10, 17, 16)),
        ((35, 33, 21, 20), (22, 22, 34, 34)),
        ((68, 68, 44, 42), (43, 42, 67, 68)),
        ((135, 134, 86, 83), (89, 87, 133, 135)),
        ((271, 272, 178, 178), (163, 163, 273, 270)),
    ),
    ("uniform", 4): (
        ((2, 2, 2, 1), (2, 2, 1, 2)),
        ((3, 3, 4, 4), (4, 3, 3, 3)),
        ((7, 7, 7, 7), (6, 7, 6, 6)),
        ((13, 14, 14, 14), (13, 13, 13, 13)),
        ((27, 27, 27, 27), (27, 27, 26, 27)),
        ((54, 53, 54, 54), (54, 54, 54, 53)),
        ((108, 108, 108, 108), (107, 107, 107, 108)),
        ((215, 215, 215, 216), (216, 215, 215, 215)),
    ),
}
"""Sides of the two boxes at 1 to 8 bits, at most 2**(dim * bits) points together: what a local
search (sides changed singly and in pairs, from boxes of several shapes) found to have the least
squared error on N(0,1) and on an even spread. E8 has cubes: no pair of long boxes that fits was
better at 2 and 3 bits.
"""

_STEP: dict[tuple[str, int], tuple[float, ...]] = {
    ("gauss", 2): (1.698, 1.067, 0.6132, 0.3164, 0.1741, 0.09494, 0.05135, 0.02773),
    ("gauss", 4): (1.854, 1.171, 0.6484, 0.3582, 0.1964, 0.1068, 0.05823, 0.03108),
    ("gauss", 8): (1.572, 0.9895, 0.5822, 0.3345, 0.1887, 0.1046, 0.05697, 0.03092),
    ("uniform", 2): (0.5131, 0.2702, 0.1375, 0.06742, 0.03374, 0.01685, 0.008407, 0.004213),
    ("uniform", 4): (0.5308, 0.2939, 0.1484, 0.07456, 0.03718, 0.01861, 0.009287, 0.004643),
    ("uniform", 8): (0.4506, 0.2448, 0.124, 0.06226, 0.03119, 0.01561, 0.007809, 0.003905),
}
"""Unit of length with the least squared error at 1 to 8 bits, by the same minimisation, for a
deviation or a width of 1; a test repeats it.
"""


@dataclass(frozen=True)
class Book:
    """A bounded codebook of dim * bits bits a group.

    Grid point d of box k lies at (d + first[k]) * spacing, coordinate by coordinate, d = 0 ..
    sides[k] - 1, in units of the step. Its index is d in mixed radix, first coordinate fastest,
    behind all points of the first box for the second. With a parity the last coordinate counts by
    its half.

    sides   : points of each box in each coordinate; at least 2 where there is a parity
    first   : position of d = 0; multiples of 2**-12, such that the mean of all points is 0 up to
              2**-12
    spacing : distance of neighbours in a box in each coordinate
    parity  : only points whose coordinates d have an even sum (E8)
    step    : unit of length that has the least squared error, on N(0,1) or on an interval of
              length 1
    """

    dim: int
    bits: int
    sides: _Sides
    first: tuple[tuple[float, ...], tuple[float, ...]]
    spacing: tuple[float, ...]
    parity: bool
    step: float

    @property
    def counts(self) -> tuple[int, int]:
        """Codewords in each box."""
        a, b = (math.prod(side) // (2 if self.parity else 1) for side in self.sides)
        return a, b

    @property
    def reach(self) -> float:
        """Largest coordinate of a codeword, in units of the step."""
        ends = [
            max(abs(first), abs(first + side - 1)) * gap
            for k in (0, 1)
            for first, side, gap in zip(self.first[k], self.sides[k], self.spacing, strict=True)
        ]
        return max(ends)


@cache
def book(dim: int, bits: int, fit: str) -> Book:
    """The book of `dim` 2, 4 or 8 and `bits` 1..8 fitted to "gauss" or "uniform"."""
    if dim == 8:
        cube: tuple[int, ...] = (2**bits,) * 8
        sides = (cube, cube)
    else:
        sides = _SIDES[fit, dim][bits - 1]
    spacing = (1.0, math.sqrt(3)) if dim == 2 else (1.0,) * dim
    first = _centred(sides)
    return Book(dim, bits, sides, first, spacing, dim == 8, _STEP[fit, dim][bits - 1])


def _centred(sides: _Sides) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Positions of the first points: half a spacing apart, both boxes as central as that allows.

    Where the sides of the boxes differ by an odd number both have their centre at 0.
    """
    counts = [math.prod(side) for side in sides]
    first = []
    for a, b in zip(*sides, strict=True):
        odd = (a - b) % 2
        shift = 0.0 if odd else -0.5 * counts[1] / sum(counts)
        at = round((shift - (a - 1) / 2) * 4096) / 4096
        first.append((at, at + (a - b + 1 - odd) / 2))
    columns = tuple(zip(*first, strict=True))
    return columns[0], columns[1]


def as_float32(values: Sequence[float]) -> list[np.float32]:
    """The numbers as a kernel's constants."""
    return [np.float32(value) for value in values]
