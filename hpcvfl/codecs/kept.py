"""What codecs that send a part of the values have in common: how many, of what, in which codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from hpcvfl.codecs.base import Array, Codec
from hpcvfl.errors import ConfigError


@dataclass(frozen=True)
class Amount:
    """How many of n are kept: `k` of them, or the share `ratio`; at least one, at most all."""

    k: int | None = None
    ratio: float | None = None

    @classmethod
    def from_options(cls, name: str, options: Mapping[str, str]) -> Amount:
        """From exactly one of the options k and ratio; ConfigError otherwise."""
        if ("k" in options) == ("ratio" in options):
            raise ConfigError(
                f"codec {name}: due: one of k and ratio, e.g. {name}:k=2 or {name}:ratio=0.1"
            )
        if "k" in options:
            digits = options["k"]
            # isdecimal alone would accept other scripts' digits
            if not (digits.isascii() and digits.isdecimal() and 0 < int(digits) < 1 << 31):
                raise ConfigError(f"codec {name}: k = {digits!r}; possible: 1, 2, 3 ...")
            return cls(k=int(digits))
        try:
            ratio = float(options["ratio"])
        except ValueError:
            ratio = math.nan
        if not 0 < ratio <= 1:
            raise ConfigError(
                f"codec {name}: ratio = {options['ratio']!r}; possible: above 0, up to 1"
            )
        return cls(ratio=ratio)

    @property
    def spec(self) -> str:
        """As option=value."""
        return f"ratio={self.ratio!r}" if self.k is None else f"k={self.k}"

    def of(self, n: int, whole: Callable[[Fraction], int] = math.ceil) -> int:
        """How many of n >= 1.

        whole : ceil or floor, for a share of n that is no whole number; the share is exact in the
                decimal digits of `ratio`
        """
        wanted = whole(Fraction(repr(self.ratio)) * n) if self.k is None else self.k
        return min(n, max(1, wanted))


def as_rows(x: Array, per: str) -> Array:
    """View of the C-contiguous `x` as (R, C): its rows, or all as one row for per=tensor."""
    return x.reshape(1, -1) if per == "tensor" or x.ndim < 2 else x.reshape(-1, x.shape[-1])


def rows_and_columns(shape: tuple[int, ...], per: str) -> tuple[int, int]:
    """Shape of `as_rows`."""
    if per == "tensor" or len(shape) < 2:
        return 1, math.prod(shape)
    return math.prod(shape[:-1]), shape[-1]


def kept_shape(shape: tuple[int, ...], per: str, K: int) -> tuple[int, ...]:
    """Shape of the array of kept values: (R, K), or (K,) where one row is all there can be."""
    rows = rows_and_columns(shape, per)[0]
    return (K,) if per == "tensor" or len(shape) < 2 else (rows, K)


def values_codec(name: str, options: Mapping[str, str], parse: Callable[[str], Codec]) -> Codec:
    """The codec of the kept values, option `values`; ConfigError for one with a memory."""
    inner = parse(options.get("values", "none"))
    if inner.stateful:
        raise ConfigError(
            f"codec {name}: values = {inner.spec!r} has a memory, and the kept places change from "
            f"message to message; put it around: {inner.name}({name}:...)"
        )
    return inner
