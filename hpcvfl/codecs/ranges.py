"""Ranges of the codecs that have one (`scalar`, `lattice`): options, side information, limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcvfl.codecs.base import Array, choice
from hpcvfl.errors import ConfigError

# legend: G ranges

FLOAT32_MAX = float(np.finfo(np.float32).max)
SMALLEST_STEP = 2.0**-125
"""A smaller step has no finite inverse in float32: all values of such a range are one level."""

BAD_SIDE = "a range in the payload is negative or not finite; the payload is corrupt"
TOO_WIDE = "the range of a message overflows float32"

Fixed = tuple[float, float]


def range_options(
    codec: str, options: Mapping[str, str], kinds: Sequence[str]
) -> tuple[str, str, Fixed | None]:
    """(kind, scope, ends of a fixed range) from the options `range` and `scope` of a spec string.

    kinds : possible ranges, the default first
    Raises ConfigError that names option, value and choices.
    """
    text = options.get("range", kinds[0])
    kind, *ends = text.split(":")
    choice(codec, "range", kind, kinds)
    scope = choice(codec, "scope", options.get("scope", "message"), ("message", "column"))
    fixed = _fixed_range(codec, text, ends) if kind == "fixed" else None
    if fixed and scope == "column":
        raise ConfigError(f"codec {codec}: scope = 'column' has no meaning with a fixed range")
    if ends and not fixed:
        raise ConfigError(f"codec {codec}: range = {text!r}; {kind} takes no numbers")
    return kind, scope, fixed


def _fixed_range(codec: str, text: str, ends: list[str]) -> Fixed:
    try:
        lo, hi = (float(end) for end in ends)
    except ValueError:
        lo, hi = np.nan, np.nan
    if not (np.isfinite([lo, hi]).all() and lo < hi and abs(lo) < 1e30 and abs(hi) < 1e30):
        raise ConfigError(
            f"codec {codec}: range = {text!r}; due: fixed:lo:hi with lo < hi, e.g. fixed:-1:1"
        )
    return lo, hi


def range_spec(kind: str, scope: str, fixed: Fixed | None, default: str) -> str:
    """The end of a spec string: `range` and `scope`, left out at their defaults."""
    text = ""
    if fixed:
        text += f",range=fixed:{fixed[0]!r}:{fixed[1]!r}"
    elif kind != default:
        text += f",range={kind}"
    return text if scope == "message" else f"{text},scope={scope}"


def num_ranges(shape: tuple[int, ...], scope: str, fixed: Fixed | None) -> int:
    """Ranges that are sent along: none if fixed, one a column if asked for, else one."""
    if fixed or 0 in shape:
        return 0
    return shape[-1] if scope == "column" and len(shape) > 1 else 1


def spans(lo_G: Any, step_G: Any, reach: float) -> bool:
    """Whether every value up to `reach` steps from its `lo` is finite in float32; NaN is not."""
    lo, step = float(np.abs(lo_G).max()), float(np.abs(step_G).max())
    return lo + step * reach < FLOAT32_MAX


def is_sound(lo_G: Any, step_G: Any, reach: float) -> bool:
    """Whether side information can have come from an encoder: no step negative, all finite."""
    return bool(np.min(step_G) >= 0) and spans(lo_G, step_G, reach)


def inverses(step_G: Any) -> Array:
    """1 / step, float32, shape (G,); 0 below SMALLEST_STEP."""
    inverse_G = np.zeros(len(step_G), np.float32)
    np.divide(1, step_G, out=inverse_G, where=step_G >= SMALLEST_STEP)
    return inverse_G
