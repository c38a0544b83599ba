"""`scalar`: uniform quantiser with b bits a value, its range sent along or agreed beforehand.

C-VFL's scalar compressor (facts: section 2.1) with two repairs: the range runs from the smallest
to the largest value (the published code clips every negative value), and the dither is drawn from
a keyed generator on both sides, where the published code subtracts an array that no receiver has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hpcvfl.codecs.base import (
    Array,
    Bytes,
    Codec,
    check_status,
    choice,
    known_options,
    require_scales,
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
"""Step of the best uniform quantiser of N(0,1) at b bits (Max 1960, IRE T-IT 6(1), table II)."""


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
    def from_options(cls, options: Mapping[str, str]) -> ScalarCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("bits", "range", "scope", "dither"))
        if "bits" not in options:
            raise ConfigError("codec scalar: bits is missing; possible: 1 to 8, e.g. scalar:bits=4")
        bits = choice(cls.name, "bits", options["bits"], [str(b) for b in range(1, 9)])
        kind, *ends = options.get("range", "minmax").split(":")
        choice(cls.name, "range", kind, ("minmax", "gauss", "fixed"))
        scope = choice(cls.name, "scope", options.get("scope", "message"), ("message", "column"))
        default = "off" if kind == "gauss" else "on"
        dither = choice(cls.name, "dither", options.get("dither", default), ("on", "off"))
        fixed = _fixed_range(options["range"], ends) if kind == "fixed" else None
        if fixed and scope == "column":
            raise ConfigError("codec scalar: scope = 'column' has no meaning with a fixed range")
        if ends and not fixed:
            raise ConfigError(
                f"codec scalar: range = {options['range']!r}; {kind} takes no numbers"
            )
        return cls(int(bits), kind, scope, dither == "on", fixed)

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"scalar:bits={self.bits}"
        if self.fixed:
            text += f",range=fixed:{self.fixed[0]!r}:{self.fixed[1]!r}"
        elif self.kind != "minmax":
            text += f",range={self.kind}"
        if self.scope != "message":
            text += f",scope={self.scope}"
        if self.dither != (self.kind != "gauss"):
            text += f",dither={'on' if self.dither else 'off'}"
        return text

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Two float32 a range, and the codes."""
        return 8 * self._num_ranges(shape) + bit_kernels.packed_nbytes(
            int(np.prod(shape)), self.bits
        )

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """One or two passes over the tensor: scan (unless fixed), then quantise and pack."""
        # The kernels are float32; a float64 tensor is rounded first (2**-24, far below one step).
        x_RC = _as_matrix(x.astype(np.float32, copy=False), self.scope)
        if x_RC.size == 0:
            return
        lo_G, step_G = self._levels(x_RC)
        side_B = lo_G.nbytes + step_G.nbytes if not self.fixed else 0
        if side_B:
            out_B[:side_B].view(np.float32)[: lo_G.size] = lo_G
            out_B[:side_B].view(np.float32)[lo_G.size :] = step_G
        inverse_G = np.zeros_like(step_G)
        # A step below the normal floats has no finite inverse: such a range is one level.
        np.divide(np.float32(1), step_G, out=inverse_G, where=step_G >= _SMALLEST_STEP)
        codes_B = out_B[side_B:]
        if self.scope == "column" and lo_G.size > 1:
            status = scalar.encode_uniform_columns(
                x_RC, lo_G, inverse_G, self.bits, self.dither, key, codes_B
            )
        else:
            status = scalar.encode_uniform(
                x_RC.reshape(-1), lo_G[0], inverse_G[0], self.bits, self.dither, key, codes_B
            )
        check_status(status)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """One pass: unpack, subtract the dither, scale."""
        if out.size == 0:
            return
        num_ranges = self._num_ranges(out.shape)
        if self.fixed:
            lo_G, step_G = self._fixed_levels()
        else:
            side_2G = payload_B[: 8 * num_ranges].copy().view(np.float32)
            lo_G, step_G = side_2G[:num_ranges], side_2G[num_ranges:]
            require_scales(lo_G, step_G)
            if (step_G < 0).any() or not np.isfinite(
                lo_G + step_G * np.float32(2**self.bits)
            ).all():
                raise WireError(
                    "a step in the payload is negative or overflows; the payload is corrupt"
                )
        codes_B = payload_B[8 * num_ranges :]
        as_float32 = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        out_RC = _as_matrix(as_float32, self.scope)
        if num_ranges > 1:
            scalar.decode_uniform_columns(
                codes_B, lo_G, step_G, self.bits, self.dither, key, out_RC
            )
        else:
            scalar.decode_uniform(
                codes_B, lo_G[0], step_G[0], self.bits, self.dither, key, out_RC.reshape(-1)
            )
        if as_float32 is not out:
            out[...] = as_float32

    def _num_ranges(self, shape: tuple[int, ...]) -> int:
        if self.fixed or 0 in shape:
            return 0
        return shape[-1] if self.scope == "column" and len(shape) > 1 else 1

    def _fixed_levels(self) -> tuple[Array, Array]:
        lo, hi = self.fixed  # type: ignore[misc]
        step = (hi - lo) / (2**self.bits - 1)
        return np.array([lo], np.float32), np.array([step], np.float32)

    def _levels(self, x_RC: Array) -> tuple[Array, Array]:
        """Lowest level and step of each range, float32."""
        if self.fixed:
            return self._fixed_levels()
        scan_RC = x_RC if self.scope == "column" else x_RC.reshape(-1, 1)
        stats_C2 = np.empty((scan_RC.shape[1], 2), np.float32)
        top = 2**self.bits - 1
        if self.kind == "gauss":
            check_status(scan.moments_columns(scan_RC, stats_C2))
            mean_C, std_C = stats_C2.astype(np.float64).T
            step_C = GAUSS_STEP[self.bits] * std_C
            lo_C = mean_C - 0.5 * top * step_C
        else:
            if scan_RC.shape[1] == 1:
                check_status(scan.minmax(x_RC.reshape(-1), stats_C2[0]))
            else:
                check_status(scan.minmax_columns(scan_RC, stats_C2))
            lo_C, hi_C = stats_C2.astype(np.float64).T
            step_C = (hi_C - lo_C) / top
        with np.errstate(over="ignore"):
            lo_G, step_G = lo_C.astype(np.float32), step_C.astype(np.float32)
            reach_G = lo_G + step_G * np.float32(2**self.bits)
        if not np.isfinite(reach_G).all():
            raise NonFiniteError("the range of a message overflows float32")
        return lo_G, step_G


_SMALLEST_STEP = np.float32(2.0**-125)


def _as_matrix(x: Array, scope: str) -> Array:
    """(R, C) view: the last axis is the column axis; anything one-dimensional is one column."""
    return x.reshape(-1, x.shape[-1] if scope == "column" and x.ndim > 1 else 1)


def _fixed_range(text: str, ends: list[str]) -> tuple[float, float]:
    try:
        lo, hi = (float(end) for end in ends)
    except ValueError:
        lo, hi = np.nan, np.nan
    if not (np.isfinite([lo, hi]).all() and lo < hi and abs(lo) < 1e30 and abs(hi) < 1e30):
        raise ConfigError(
            f"codec scalar: range = {text!r}; due: fixed:lo:hi with lo < hi, e.g. fixed:-1:1"
        )
    return lo, hi
