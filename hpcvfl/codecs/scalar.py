"""`scalar`: uniform quantiser with b bits a value, its range sent along or agreed beforehand.

C-VFL's scalar compressor (arXiv 2206.08330) with two repairs to its published code: the range runs
from the smallest to the largest value (the published code clips every negative value), and the
dither is drawn from a keyed generator on both sides, where the published code subtracts an array
that no receiver has.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

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
)
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.kernels import bits as bit_kernels
from hpcvfl.kernels import scalar, scan

# legend: R rows, C columns, G ranges (1 or C), B bytes

GAUSS_STEP = {
    1: 1.5958,
    2: 0.9957,
    3: 0.5860,
    4: 0.3352,
    5: 0.1881,
    6: 0.1041,
    7: 0.0569,
    8: 0.0308,
}
"""Step of the uniform quantiser of N(0,1) with the least squared error at b bits: 1 to 5 from Max
1960, IRE T-IT 6(1), table II; 6 to 8 by the same minimisation, which a test repeats.
"""


@dataclass(frozen=True, eq=False)
class ScalarCodec(Codec):
    """Uniform levels over a range.

    bits   : 1..8
    kind   : minmax (from the data), gauss (steps fitted to a normal with the data's mean and
             deviation), or fixed:lo:hi (clipped to it; nothing is sent along)
    scope  : message (one range a tensor) or column (one a column, for two-dimensional tensors)
    dither : subtractive, uniform over one step. On by default except for gauss, whose steps are the
             least-error ones without it.
    Payload: lowest levels, then steps (float32, one each a range; none for fixed), then the codes,
    `bits` bits each, row by row, lowest bits first.
    """

    bits: int
    kind: str = "minmax"
    scope: str = "message"
    dither: bool = True
    fixed: tuple[float, float] | None = None

    name = "scalar"
    examples = (
        *(f"scalar:bits={b}" for b in range(1, 9)),
        *(f"scalar:bits={b},range=gauss,scope=column" for b in (1, 2, 3, 4, 8)),
        "scalar:bits=3,range=gauss",
        "scalar:bits=2,range=gauss,dither=on",
        "scalar:bits=5,scope=column",
        "scalar:bits=2,dither=off",
        "scalar:bits=4,range=fixed:-1:1",
        "scalar:bits=3,range=fixed:-2.5:0.5,dither=off",
    )

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> ScalarCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits", "range", "scope", "dither"))
        if "bits" not in options:
            raise ConfigError("codec scalar: bits is missing; possible: 1 to 8, e.g. scalar:bits=4")
        bits = choice(cls.name, "bits", options["bits"], [str(b) for b in range(1, 9)])
        kind, scope, fixed = ranges.range_options(cls.name, options, ("minmax", "gauss", "fixed"))
        default = "off" if kind == "gauss" else "on"
        dither = choice(cls.name, "dither", options.get("dither", default), ("on", "off"))
        return cls(int(bits), kind, scope, dither == "on", fixed)

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"scalar:bits={self.bits}"
        text += ranges.range_spec(self.kind, self.scope, self.fixed, "minmax")
        if self.dither != (self.kind != "gauss"):
            text += f",dither={'on' if self.dither else 'off'}"
        return text

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Two float32 a range, and the codes."""
        codes = bit_kernels.packed_nbytes(math.prod(shape), self.bits)
        return _SIDE.size * ranges.num_ranges(shape, self.scope, self.fixed) + codes

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """One or two passes over the tensor: scan (unless fixed), then quantise and pack."""
        if x.size == 0:
            return
        # The kernels are float32; a float64 tensor is rounded first (2**-24, far below one step).
        x = as_float32(x)
        num_ranges = ranges.num_ranges(x.shape, self.scope, self.fixed)
        codes_B = out_B[_SIDE.size * num_ranges :]
        if num_ranges > 1:
            self._encode_columns(x.reshape(-1, num_ranges), key, out_B, codes_B)
            return
        x_N = x.reshape(-1)
        lo, step = self._fixed_level() if self.fixed else self._level(x_N)
        if num_ranges:
            _SIDE.pack_into(out_B.data, 0, lo, step)
        inverse = 1.0 / step if step >= ranges.SMALLEST_STEP else 0.0
        check_status(scalar.encode_uniform(x_N, lo, inverse, self.bits, self.dither, key, codes_B))

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """One pass: unpack, subtract the dither, scale."""
        if out.size == 0:
            return
        num_ranges = ranges.num_ranges(out.shape, self.scope, self.fixed)
        codes_B = payload_B[_SIDE.size * num_ranges :]
        to = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        if num_ranges > 1:
            side_2G = payload_B[: _SIDE.size * num_ranges].copy().view(np.float32)
            lo_G, step_G = side_2G[:num_ranges], side_2G[num_ranges:]
            if not ranges.is_sound(lo_G, step_G, 2**self.bits):
                raise WireError(ranges.BAD_SIDE)
            scalar.decode_uniform_columns(
                codes_B, lo_G, step_G, self.bits, self.dither, key, to.reshape(-1, num_ranges)
            )
        else:
            lo, step = _SIDE.unpack_from(payload_B.data) if num_ranges else self._fixed_level()
            if not ranges.is_sound(lo, step, 2**self.bits):
                raise WireError(ranges.BAD_SIDE)
            scalar.decode_uniform(codes_B, lo, step, self.bits, self.dither, key, to.reshape(-1))
        if to is not out:
            out[...] = to

    def _fixed_level(self) -> tuple[float, float]:
        lo, hi = self.fixed  # type: ignore[misc]
        return float(np.float32(lo)), float(np.float32((hi - lo) / (2**self.bits - 1)))

    def _level(self, x_N: Array) -> tuple[float, float]:
        """Lowest level and step of one range, as float32 spells them."""
        stats_12 = np.empty((1, 2), np.float32)
        if self.kind == "gauss":
            check_status(scan.moments_columns(x_N.reshape(-1, 1), stats_12))
        else:
            check_status(scan.minmax(x_N, stats_12[0]))
        lo, step = self._levels_from(*stats_12[0].tolist())
        if not ranges.spans(lo, step, 2**self.bits):
            raise NonFiniteError(ranges.TOO_WIDE)
        lo, step = _SIDE.unpack(_SIDE.pack(lo, step))
        return lo, step

    def _encode_columns(self, x_RC: Array, key: int, out_B: Bytes, codes_B: Bytes) -> None:
        """One range a column; `codes_B` is the part of `out_B` behind the ranges."""
        num_ranges = x_RC.shape[1]
        stats_C2 = np.empty((num_ranges, 2), np.float32)
        scanned = scan.moments_columns if self.kind == "gauss" else scan.minmax_columns
        check_status(scanned(x_RC, stats_C2))
        side_2G = np.empty((2, num_ranges), np.float32)
        first_G, second_G = stats_C2.astype(np.float64).T
        lo_G, step_G = self._levels_from(first_G, second_G)
        if not ranges.spans(lo_G, step_G, 2**self.bits):
            raise NonFiniteError(ranges.TOO_WIDE)
        side_2G[0], side_2G[1] = lo_G, step_G
        out_B[: side_2G.nbytes] = side_2G.reshape(-1).view(np.uint8)
        inverse_G = ranges.inverses(side_2G[1])
        check_status(
            scalar.encode_uniform_columns(
                x_RC, side_2G[0], inverse_G, self.bits, self.dither, key, codes_B
            )
        )

    def _levels_from(self, first: Any, second: Any) -> tuple[Any, Any]:
        """(lowest level, step) from (mean, deviation) or (min, max), numbers or arrays of
        float64.
        """
        top = 2**self.bits - 1
        if self.kind == "gauss":
            step = GAUSS_STEP[self.bits] * second
            return first - 0.5 * top * step, step
        return first, (second - first) / top


_SIDE = struct.Struct("<ff")
