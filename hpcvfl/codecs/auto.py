"""`auto`: bits chosen while training, so that the mean error follows a schedule.

C-VFL converges at O(1/sqrt(T)) if the mean squared error of its messages does (arXiv 2206.08330,
theorem 1 with its corollary). The schedule is

    due(r) = error / sqrt(1 + r / horizon)           of the message's own energy, in round r

(the paper's E is absolute; a share of the energy means the same as long as embeddings keep their
size, and needs no knowledge of it), and the rule takes the fewest bits whose expected error is
within it, plus a share of what earlier messages left over. The sender measures and chooses; the
choice for round r + 1 travels in the header of round r, so that every rank knows every size
beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property

from hpcvfl.codecs.base import Array, Bytes, Codec, known_options, nested, split_spec
from hpcvfl.errors import ConfigError

BITS = range(1, 9)
"""Bits a value that `auto` tries to choose from; a codec need not have all of them."""

PATIENCE = 32
"""Rounds over which what was left over is spent."""

SHARE = 0.25
"""Weight of the newest measurement in the error expected of a level."""


class AutoCodec(Codec):
    """One codec at those of 1 to 8 bits that it has; by itself the first message."""

    name = "auto"
    examples = (
        "auto:error=0.1,codec=(scalar:range=gauss,scope=column)",
        "auto:error=0.02,horizon=500,codec=scalar",
    )
    stateful = True

    def __init__(self, error: float, horizon: int, rates: Mapping[int, Codec]) -> None:
        """rates : bits -> codec, the same but for their bits, in ascending order"""
        self.error, self.horizon = error, horizon
        self.bits, self.rates = tuple(rates), tuple(rates.values())

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> Codec:
        """error (0 to 1, a share of the energy), horizon (rounds), codec (a spec without bits)."""
        known_options(cls.name, options, ("error", "horizon", "codec"))
        error = _number(options, "error", "0.1")
        horizon = _number(options, "horizon", "100")
        inner = options.get("codec", DEFAULT_INNER)
        if not 0 < error < 1:
            raise ConfigError(f"codec auto: error = {error:g}; due is a share, between 0 and 1")
        if not (1 <= horizon < 2**32 and horizon == int(horizon)):
            raise ConfigError(f"codec auto: horizon = {horizon:g}; due is a number of rounds")
        name, known = split_spec(inner)
        if "bits" in known:
            raise ConfigError(f"codec auto: {inner!r} fixes bits, which auto is to choose")
        rest = "".join(f",{option}={nested(value)}" for option, value in known.items())
        rates: dict[int, Codec] = {}
        refused: ConfigError | None = None
        for bits in BITS:
            try:
                rates[bits] = parse(f"{name}:bits={bits}{rest}")
            except ConfigError as none_such:
                refused = none_such
        if not rates:
            raise ConfigError(f"codec auto: codec = {inner!r} has no bits to choose: {refused}")
        return cls(error, int(horizon), rates)

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        name, known = split_spec(self.rates[0].spec)
        del known["bits"]
        rest = ",".join(f"{option}={nested(value)}" for option, value in known.items())
        inner = f"{name}:{rest}" if rest else name
        text = f"auto:error={self.error!r}"
        if self.horizon != 100:
            text += f",horizon={self.horizon}"
        if inner != DEFAULT_INNER:
            text += f",codec={nested(inner)}"
        return text

    @cached_property
    def first_level(self) -> int:
        """Index of the level of round 0: 6 dB a bit, from the schedule's start."""
        enough = [i for i, bits in enumerate(self.bits) if 4.0**-bits <= self.error]
        return enough[0] if enough else len(self.bits) - 1

    def due(self, round_index: int) -> float:
        """Mean squared error allowed in a round, as a share of the message's energy."""
        return self.error / math.sqrt(1 + round_index / self.horizon)

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Those of the first level."""
        return self.rates[self.first_level].nbytes(shape, itemsize)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """At the first level."""
        self.rates[self.first_level].encode(x, key, out_B)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """At the first level."""
        self.rates[self.first_level].decode(payload_B, key, out)


class RateControl:
    """The sender's choice of levels: measured errors in, the level of the next round out."""

    def __init__(self, codec: AutoCodec) -> None:
        """Nothing measured yet."""
        self.codec = codec
        self.left = 0.0  # allowed less measured, summed over the rounds
        self.expected: dict[int, float] = {}  # level -> error

    def next_level(self, round_index: int, level: int, error: float) -> int:
        """Level of round `round_index` + 1, after a message at `level` had `error` (a share)."""
        self.left += self.codec.due(round_index) - error
        before = self.expected.get(level, error)
        self.expected[level] = before + SHARE * (error - before)
        allowed = self.codec.due(round_index + 1) + self.left / PATIENCE
        for candidate in range(len(self.codec.bits)):
            if self._expect(candidate) <= allowed:
                return candidate
        return len(self.codec.bits) - 1

    def _expect(self, level: int) -> float:
        """From the nearest level that was measured, 6 dB a bit."""
        nearest = min(self.expected, key=lambda known: (abs(known - level), known))
        return self.expected[nearest] * 4.0 ** (self.codec.bits[nearest] - self.codec.bits[level])


DEFAULT_INNER = "scalar:range=gauss,scope=column"


def _number(options: Mapping[str, str], option: str, default: str) -> float:
    text = options.get(option, default)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"codec auto: {option} = {text!r} is no number") from None
