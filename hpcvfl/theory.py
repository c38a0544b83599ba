"""How fine C-VFL's theory wants its messages, with exact constants.

Castiglia et al. 2022 (arXiv 2206.08330) converge at O(1/sqrt(T)) over T local steps if the mean
squared error E of each message of B x P values is O(1/sqrt(T)). For E <= 1/sqrt(T) and values in a
range of width D, the paper's section on parameter choices gives orders of magnitude; here are
numbers:

    scalar    2**b levels with both ends in use, step D / (2**b - 1):    E = B P step**2 / 12
    lattice   hexagonal cells of area V:                                 E = B P V 5 / (36 sqrt(3))
    top-k     the k largest of P kept in each row:                       E <= B (1 - k/P) |h|**2

The bounds printed in the paper are B P D**2 / 12 / 4**b for the scalar, which leaves out that L
levels have L - 1 steps (1.8 times too small at 2 bits), and B P V / 24 for the lattice (1.9 times
too small). A dither that is uniform over the cell changes none of them; the square dither of the
published lattice is not, and these constants do not hold for it exactly.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcvfl.errors import ConfigError

A2_MOMENT = 5 / (36 * math.sqrt(3))
"""Second moment of a hexagon of unit area, per dimension (Conway & Sloane 1982)."""


@dataclass(frozen=True)
class Sizes:
    """What the error is a matter of.

    batch_size    : B, rows of a message
    embedding_dim : P, values a row
    value_range   : D, largest less smallest value
    num_steps     : T, rounds times local steps
    """

    batch_size: int
    embedding_dim: int
    value_range: float
    num_steps: int

    @property
    def due_error(self) -> float:
        """E that the rate O(1/sqrt(T)) allows with the constant 1: squared error of a message."""
        return 1 / math.sqrt(self.num_steps)

    @property
    def largest_row(self) -> float:
        """Largest squared length of a row: every value at an end of a range around zero."""
        return self.embedding_dim * (self.value_range / 2) ** 2


def scalar_error(sizes: Sizes, bits: int) -> float:
    """E of a scalar quantiser with 2**bits levels from end to end of the range."""
    step = sizes.value_range / (2**bits - 1)
    return sizes.batch_size * sizes.embedding_dim * step**2 / 12


def scalar_bits(sizes: Sizes) -> int:
    """Fewest bits a value whose E is within `due_error`."""
    values = sizes.batch_size * sizes.embedding_dim
    levels = 1 + sizes.value_range * math.sqrt(values / (12 * sizes.due_error))
    bits = max(1, math.floor(math.log2(levels)))
    while scalar_error(sizes, bits) > sizes.due_error:
        bits += 1
    return bits


def lattice_error(sizes: Sizes, cell_volume: float) -> float:
    """E of a hexagonal lattice with cells of area `cell_volume`, away from the edge of its book."""
    return sizes.batch_size * sizes.embedding_dim * cell_volume * A2_MOMENT


def lattice_cell(sizes: Sizes) -> float:
    """Largest area of a hexagonal cell whose E is within `due_error`."""
    return sizes.due_error / lattice_error(sizes, 1.0)


def lattice_bits(sizes: Sizes) -> int:
    """Bits a pair of values for the cells that fit into the square of the range."""
    return max(1, math.ceil(math.log2(sizes.value_range**2 / lattice_cell(sizes))))


def topk_error(sizes: Sizes, k: int) -> float:
    """Bound on E of keeping the k largest values of each row; reached when all are equal."""
    return sizes.batch_size * (1 - k / sizes.embedding_dim) * sizes.largest_row


def topk_k(sizes: Sizes) -> int:
    """Fewest values a row whose bound on E is within `due_error`."""
    share = sizes.due_error / (sizes.batch_size * sizes.largest_row)
    return max(1, math.ceil(sizes.embedding_dim * (1 - share) - 1e-9))


def page(sizes: Sizes) -> str:
    """The choices as a page, the paper's printed constants beside the exact ones."""
    bits, cell, k = scalar_bits(sizes), lattice_cell(sizes), topk_k(sizes)
    beyond = ", more than the 8 that the codec has" if bits > 8 else ""
    beyond_lattice = ", more than the 16 that the codec has" if lattice_bits(sizes) > 16 else ""
    whole = ", which is all of them" if k == sizes.embedding_dim else ""
    values = sizes.batch_size * sizes.embedding_dim
    printed = values * sizes.value_range**2 / 12 * 4.0**-bits
    order = math.log2(values * sizes.value_range**2 * math.sqrt(sizes.num_steps))
    return "\n".join(
        [
            f"B = {sizes.batch_size}, P = {sizes.embedding_dim}, range {sizes.value_range:g},"
            f" T = {sizes.num_steps}: a message may have the squared error"
            f" {sizes.due_error:.3g}, that is {sizes.due_error / values:.3g} a value",
            f"scalar   {bits} bits a value{beyond}: error {scalar_error(sizes, bits):.3g} (exact),"
            f" {printed:.3g} (printed bound); the paper's order is log2(B P D^2 sqrt T) ="
            f" {order:.1f} bits",
            f"lattice  hexagonal cells of area {cell:.3g} (exact),"
            f" {sizes.due_error * 24 / values:.3g} (printed bound): {lattice_bits(sizes)} bits a"
            f" pair{beyond_lattice}",
            f"top-k    k = {k} of {sizes.embedding_dim}{whole}: error at most"
            f" {topk_error(sizes, k):.3g}",
            "In practice far fewer bits train as well (README, Results); the constant 1 before"
            " 1/sqrt(T) is ours.",
        ]
    )


def parse(arguments: Sequence[str]) -> Sizes:
    """Sizes from --batch-size, --embedding-dim, --range and --steps; ConfigError in one line."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> Any:
            raise ConfigError(f"theory: {message}")

    parser = Parser(prog="hpcvfl theory", add_help=False, allow_abbrev=False)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--embedding-dim", type=int, required=True)
    parser.add_argument("--range", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    got = parser.parse_args(list(arguments))
    given = {
        "--batch-size": got.batch_size,
        "--embedding-dim": got.embedding_dim,
        "--range": got.range,
        "--steps": got.steps,
    }
    for option, value in given.items():
        if not (0 < value < math.inf):
            raise ConfigError(f"theory: {option} {value:g}; due is a positive number")
    return Sizes(got.batch_size, got.embedding_dim, got.range, got.steps)


def take_smoothness(arguments: Sequence[str]) -> tuple[list[str], float | None]:
    """Arguments without `--smoothness L`, and L (None where it is not given).

    Raises ConfigError in one line unless L is a positive number.
    """
    rest, value = list(arguments), None
    while found := [a for a in rest if a.split("=")[0] == "--smoothness"]:
        at = rest.index(found[0])
        text = rest[at].partition("=")[2] if "=" in rest[at] else "".join(rest[at + 1 : at + 2])
        del rest[at : at + (1 if "=" in found[0] else 2)]
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"theory: --smoothness {text or 'nothing'}; due is a positive number")
    return rest, value
