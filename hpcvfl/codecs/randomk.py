"""`randomk`: values at places that sender and receivers draw alike, so that none is sent.

The random-k of C-VFL's published code (arXiv 2206.08330) drops single values of the flattened
tensor, drawn afresh for each message from a generator that no receiver has; here the places come
from the key of the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hpcvfl import seeds
from hpcvfl.codecs.base import Array, Bytes, Codec, choice, known_options, nested, require_finite
from hpcvfl.codecs.floats import NoneCodec
from hpcvfl.codecs.kept import Amount, as_rows, kept_shape, rows_and_columns, values_codec
from hpcvfl.kernels import topk, topk_line

# legend: R rows, C columns, K kept, B bytes

_VALUES, _PLACES = 0, 1  # subkeys


@dataclass(frozen=True, eq=False)
class RandomKCodec(Codec):
    """The values kept at random places through another codec; all others decode to 0.

    amount : k=K or ratio=r of all values (per=tensor) or of the columns (per=column); a share is
             rounded up
    per    : tensor  single values of the flattened tensor
             column  whole columns; a one-dimensional tensor is one row
    scale  : the kept values are multiplied by n/K before they are encoded, which makes the
             expectation over the keys that of the values; off by default, since it is no
             contraction, as error feedback needs one
    values : codec of the kept values, an array (K,) or (R, K), places ascending
    Payload: that of the values.
    """

    amount: Amount
    per: str = "tensor"
    scale: bool = False
    values: Codec = field(default_factory=NoneCodec)

    name = "randomk"
    examples = (
        "randomk:ratio=0.3",
        "randomk:k=5,values=scalar:bits=3",
        "randomk:k=2,per=column,values=scalar:bits=2",
        "randomk:ratio=0.4,scale=on,values=float16",
        "randomk:k=2,per=column,scale=on",
    )

    @classmethod
    def from_options(
        cls, options: Mapping[str, str], parse: Callable[[str], Codec]
    ) -> RandomKCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("k", "ratio", "per", "scale", "values"))
        amount = Amount.from_options(cls.name, options)
        per = choice(cls.name, "per", options.get("per", "tensor"), ("tensor", "column"))
        scale = choice(cls.name, "scale", options.get("scale", "off"), ("on", "off"))
        return cls(amount, per, scale == "on", values_codec(cls.name, options, parse))

    @property
    def zeros_decode(self) -> bool:  # type: ignore[override]
        """As the codec of the values."""
        return self.values.zeros_decode

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"randomk:{self.amount.spec}"
        if self.per != "tensor":
            text += f",per={self.per}"
        if self.scale:
            text += ",scale=on"
        if self.values.spec != "none":
            text += f",values={nested(self.values.spec)}"
        return text

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """The kept values; no index is sent."""
        if 0 in shape:
            return 0
        K = self.amount.of(rows_and_columns(shape, self.per)[1])
        return self.values.nbytes(kept_shape(shape, self.per, K), itemsize)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Draw the places, gather, encode; a NaN or Inf at any place is refused."""
        if x.size == 0:
            return
        require_finite(x)
        x_RC = as_rows(x, self.per)
        indices_K = self._places(x_RC.shape[1], key)
        kept_RK = np.empty((len(x_RC), len(indices_K)), x.dtype)
        topk.gather_rows(x_RC, np.broadcast_to(indices_K, kept_RK.shape), kept_RK)
        if self.scale:
            # What overflows becomes Inf, which the codec of the values refuses.
            with np.errstate(over="ignore"):
                factor = x.dtype.type(x_RC.shape[1] / len(indices_K))
                np.multiply(kept_RK, factor, out=kept_RK)
        kept = kept_RK.reshape(kept_shape(x.shape, self.per, len(indices_K)))
        self.values.encode(kept, seeds.subkey(key, _VALUES), out_B)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Draw the same places, decode the values into them."""
        if out.size == 0:
            return
        out_RC = as_rows(out, self.per)
        indices_K = self._places(out_RC.shape[1], key)
        kept_RK = np.empty((len(out_RC), len(indices_K)), out.dtype)
        kept = kept_RK.reshape(kept_shape(out.shape, self.per, len(indices_K)))
        self.values.decode(payload_B, seeds.subkey(key, _VALUES), kept)
        topk.scatter_rows(kept_RK, np.broadcast_to(indices_K, kept_RK.shape), out_RC)

    def _places(self, C: int, key: int) -> Array:
        """The kept columns of (R, C): int32, shape (K,), ascending."""
        indices_K = np.empty(self.amount.of(C), np.int32)
        topk_line.select_random(seeds.subkey(key, _PLACES), C, indices_K)
        return indices_K
