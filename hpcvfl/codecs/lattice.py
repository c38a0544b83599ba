"""`lattice`: groups of 2, 4 or 8 values to the nearest codeword of a bounded lattice codebook.

C-VFL's vector compressor (arXiv 2206.08330), with three repairs to its published code, whose maths
`lattice-paper` keeps: the codebook is bounded, so that a group of `dim` values
costs dim * bits bits and no more; a value outside goes to the codeword that is really the nearest;
and centre and step are fitted to the data and sent along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hpcvfl.codecs import ranges
from hpcvfl.codecs.base import (
    Array,
    Bytes,
    Codec,
    as_float32,
    check_status,
    choice,
    known_options,
    require_finite,
)
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import lattice_code, scan
from hpcvfl.kernels.lattice_book import DIMS, Book, book

# legend: R rows, C columns, G ranges (1 or C), B bytes


@dataclass(frozen=True, eq=False)
class LatticeCodec(Codec):
    """Nearest codewords of A2 (dim 2), D4 (4) or E8 (8).

    dim   : 2, 4 or 8 consecutive values of a row, or of one row and the next, are one group
    bits  : 1..8 a value
    kind  : gauss (codebook and step fitted to a normal with the data's mean and deviation), minmax
            (fitted to an even spread over the data's range) or fixed:lo:hi (over that range;
            nothing is sent along)
    scope : message (one range a tensor) or column (one a column, for two-dimensional tensors; each
            value is scaled by its own column's before it is grouped)
    Payload: centres, then steps (float32, one each a range; none for fixed), then the indices,
    dim * bits bits each, lowest bits first. A group that the tensor does not fill is filled up with
    the centre and counted whole.
    """

    dim: int
    bits: int
    kind: str = "gauss"
    scope: str = "message"
    fixed: tuple[float, float] | None = None

    name = "lattice"
    examples = (
        *(f"lattice:dim=2,bits={b}" for b in (1, 2, 3, 4, 8)),
        *(f"lattice:dim=4,bits={b}" for b in (1, 3, 8)),
        *(f"lattice:dim=8,bits={b}" for b in (1, 2, 5, 8)),
        "lattice:dim=8,bits=3,range=minmax,scope=column",
        "lattice:dim=2,bits=2,scope=column",
        "lattice:dim=4,bits=2,range=minmax,scope=column",
        "lattice:dim=2,bits=3,range=fixed:-1:1",
        "lattice:dim=4,bits=5,range=fixed:-2.5:0.5",
    )

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], parse: Callable[[str], Codec]
    ) -> LatticeCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("dim", "bits", "range", "scope"))
        for option, choices in (("dim", "2, 4, 8"), ("bits", "1 to 8")):
            if option not in options:
                raise ConfigError(
                    f"codec lattice: {option} is missing; possible: {choices}, "
                    "e.g. lattice:dim=2,bits=4"
                )
        dim = choice(cls.name, "dim", options["dim"], [str(d) for d in DIMS])
        bits = choice(cls.name, "bits", options["bits"], [str(b) for b in range(1, 9)])
        kind, scope, fixed = ranges.range_options(cls.name, options, ("gauss", "minmax", "fixed"))
        return cls(int(dim), int(bits), kind, scope, fixed)

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"lattice:dim={self.dim},bits={self.bits}"
        return text + ranges.range_spec(self.kind, self.scope, self.fixed, "gauss")

    @property
    def book(self) -> Book:
        """The codebook."""
        return book(self.dim, self.bits, "gauss" if self.kind == "gauss" else "uniform")

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Two float32 a range, and the indices."""
        codes = lattice_code.code_nbytes(math.prod(shape), self.dim, self.bits)
        return 8 * ranges.num_ranges(shape, self.scope, self.fixed) + codes

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Two passes over the tensor: scan, then quantise and pack."""
        if x.size == 0:
            return
        # The kernels are float32; a float64 tensor is rounded first (2**-24, far below one step).
        x_N = as_float32(x).reshape(-1)
        num_ranges = ranges.num_ranges(x.shape, self.scope, self.fixed)
        side_2G = self._scanned(x_N.reshape(-1, num_ranges or 1))
        out_B[: num_ranges * 8] = side_2G.reshape(-1).view(np.uint8)[: num_ranges * 8]
        inverse_G = ranges.inverses(side_2G[1])
        lattice_code.encode_lattice(x_N, side_2G[0], inverse_G, self.book, out_B[num_ranges * 8 :])

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """One pass: unpack, look up the codewords, scale."""
        if out.size == 0:
            return
        num_ranges = ranges.num_ranges(out.shape, self.scope, self.fixed)
        side_2G = (
            self._fixed_side(self.fixed)
            if self.fixed
            else payload_B[: num_ranges * 8].copy().view(np.float32).reshape(2, -1)
        )
        if not ranges.is_sound(side_2G[0], side_2G[1], self._reach):
            raise WireError(ranges.BAD_SIDE)
        to = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        lattice_code.decode_lattice(
            payload_B[num_ranges * 8 :], side_2G[0], side_2G[1], self.book, to.reshape(-1)
        )
        if to is not out:
            out[...] = to

    @property
    def _reach(self) -> float:
        """Steps that must be finite: up to the outermost codeword, and the step itself."""
        return max(self.book.reach, 1)

    def _fixed_side(self, ends: tuple[float, float]) -> Array:
        """Centre and step of the fixed range, as if they had been sent."""
        lo, hi = ends
        return np.array([[0.5 * lo + 0.5 * hi], [self.book.step * (hi - lo)]], np.float32)

    def _scanned(self, x_RG: Array) -> Array:
        """Centres and steps, float32, shape (2, G); the values are found finite."""
        if self.fixed:
            require_finite(x_RG)
            return self._fixed_side(self.fixed)
        stats_G2 = np.empty((x_RG.shape[1], 2), np.float32)
        if self.kind == "gauss":
            check_status(scan.moments_columns(x_RG, stats_G2))
        elif len(stats_G2) == 1:
            check_status(scan.minmax(x_RG.reshape(-1), stats_G2[0]))
        else:
            check_status(scan.minmax_columns(x_RG, stats_G2))
        first_G, second_G = stats_G2.astype(np.float64).T
        if self.kind == "gauss":
            side_2G = np.stack([first_G, self.book.step * second_G])
        else:
            side_2G = np.stack([(first_G + second_G) / 2, self.book.step * (second_G - first_G)])
        if not ranges.spans(side_2G[0], side_2G[1], self._reach):
            raise NonFiniteError(ranges.TOO_WIDE)
        return side_2G.astype(np.float32)
