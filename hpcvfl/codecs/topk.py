"""`topk`: the most important columns or the largest values, their places as few bits.

C-VFL's top-k (arXiv 2206.08330) keeps one set of columns for the whole batch, those with the
largest embedding gradient of the round before; its head is compressed by magnitude over the whole
tensor. Its published code counts no bits for the places; here they are sent and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hpcvfl import seeds
from hpcvfl.codecs.base import (
    Array,
    Bytes,
    Codec,
    as_float32,
    check_status,
    choice,
    known_options,
    nested,
    require_finite,
)
from hpcvfl.codecs.floats import NoneCodec
from hpcvfl.codecs.kept import Amount, as_rows, kept_shape, rows_and_columns, values_codec
from hpcvfl.errors import NonFiniteError, WireError
from hpcvfl.kernels import combinations, topk

# legend: R rows, C columns, S index sets (1 or R), K kept, B bytes


@dataclass(frozen=True, eq=False)
class TopKCodec(Codec):
    """The kept values through another codec; all others decode to 0.

    amount : k=K or ratio=r of the columns (per=column, per=row; a share is rounded up) or of all
             values (per=tensor; rounded down, as in the published code); at least one
    per    : column  one set of columns for the whole tensor: the largest scores, where the sender
                     knows them, else the largest sums of |x|
             row     the largest magnitudes of each row
             tensor  the largest magnitudes of all
             Of equal ones the first is kept. A one-dimensional tensor is one row.
    values : codec of the kept values, which form an array (R, K), rows as before and columns
             ascending, or (K,) for a one-dimensional tensor and for per=tensor
    Payload: the index sets (combinations.py), padded to a byte once, then that of the values.
    """

    amount: Amount
    per: str = "column"
    values: Codec = field(default_factory=NoneCodec)

    name = "topk"
    zeros_decode = False  # hardly ever an index set
    examples = (
        "topk:k=2",
        "topk:k=2,values=scalar:bits=1",
        "topk:ratio=0.3,values=(scalar:bits=2,range=gauss,scope=column)",
        "topk:k=2,per=row",
        "topk:ratio=0.4,per=row,values=float16",
        "topk:k=2,per=row,values=scalar:bits=1",
        "topk:ratio=0.1,per=tensor",
        "topk:k=9,per=tensor,values=scalar:bits=4",
    )

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> TopKCodec:
        """From the options of a spec string; ConfigError names option, value and choices."""
        known_options(cls.name, options, ("k", "ratio", "per", "values"))
        amount = Amount.from_options(cls.name, options)
        per = choice(cls.name, "per", options.get("per", "column"), ("column", "row", "tensor"))
        return cls(amount, per, values_codec(cls.name, options, parse))

    @property
    def wants_score(self) -> bool:  # type: ignore[override]
        """Only columns are chosen by their score."""
        return self.per == "column"

    @property
    def spec(self) -> str:
        """Options at their defaults left out."""
        text = f"topk:{self.amount.spec}"
        if self.per != "column":
            text += f",per={self.per}"
        if self.values.spec != "none":
            text += f",values={nested(self.values.spec)}"
        return text

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """The index sets and the kept values."""
        if 0 in shape:
            return 0
        code, sets = self._code(shape)
        kept = kept_shape(shape, self.per, code.K)
        return code.nbytes(sets) + self.values.nbytes(kept, itemsize)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """As `encode_scored` where nobody knows the scores."""
        self.encode_scored(x, key, out_B, None)

    def encode_scored(self, x: Array, key: int, out_B: Bytes, score_C: Array | None) -> None:
        """Select, gather, write the index sets and the values.

        Magnitudes are compared as float32. A score that is not finite is a NonFiniteError too.
        """
        if x.size == 0:
            return
        code, sets = self._code(x.shape)
        x_RC = as_rows(x, self.per)
        kept_RK = np.empty((len(x_RC), code.K), x.dtype)
        if self.per == "column":
            indices_SK = _largest(_scores(x, x_RC, score_C), code.K)
            topk.gather_rows(x_RC, np.broadcast_to(indices_SK, kept_RK.shape), kept_RK)
        else:
            indices_SK = np.empty((sets, code.K), np.int32)
            check_status(topk.select_rows(_compared(x_RC), x_RC, indices_SK, kept_RK))
        combinations.put_subsets(code, indices_SK, out_B[: code.nbytes(sets)])
        kept = kept_RK.reshape(kept_shape(x.shape, self.per, code.K))
        self.values.encode(kept, seeds.subkey(key, 0), out_B[code.nbytes(sets) :])

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Read the index sets, decode the values, put them in their places."""
        if out.size == 0:
            return
        code, sets = self._code(out.shape)
        indices_SK = np.empty((sets, code.K), np.int32)
        if not combinations.take_subsets(code, payload_B[: code.nbytes(sets)], indices_SK):
            raise WireError(
                f"an index set in the payload is not {code.K} of {code.C}; the payload is corrupt"
            )
        out_RC = as_rows(out, self.per)
        kept_RK = np.empty((len(out_RC), code.K), out.dtype)
        kept = kept_RK.reshape(kept_shape(out.shape, self.per, code.K))
        self.values.decode(payload_B[code.nbytes(sets) :], seeds.subkey(key, 0), kept)
        topk.scatter_rows(kept_RK, np.broadcast_to(indices_SK, kept_RK.shape), out_RC)

    def _code(self, shape: tuple[int, ...]) -> tuple[combinations.SubsetCode, int]:
        """How an index set is written, and how many there are."""
        rows, C = rows_and_columns(shape, self.per)
        whole = math.floor if self.per == "tensor" else math.ceil
        return combinations.cheapest(C, self.amount.of(C, whole)), rows if self.per == "row" else 1


def _compared(x_RC: Array) -> Array:
    if x_RC.dtype == np.float32:
        return x_RC
    require_finite(x_RC)
    rounded_RC = as_float32(x_RC)
    if not np.isfinite(rounded_RC).all():
        raise NonFiniteError("a value is beyond the range of float32")
    return rounded_RC


def _scores(x: Array, x_RC: Array, score_C: Array | None) -> Array:
    """Importance of each column: what the sender says, else the sum of |x|; finite."""
    require_finite(x)
    if score_C is None:
        sums_C = np.empty(x_RC.shape[1])
        topk.magnitude_sums(x_RC, sums_C)
        return sums_C
    assert score_C.shape == (x_RC.shape[1],), (score_C.shape, x_RC.shape)
    if not np.isfinite(score_C).all():
        raise NonFiniteError("NaN or Inf in the scores of the columns of a message")
    return score_C


def _largest(score_C: Array, K: int) -> Array:
    """Places of the K largest scores as one set: int32, shape (1, K), ascending."""
    first_K = np.argsort(-score_C.astype(np.float64), kind="stable")[:K]
    return np.sort(first_K).astype(np.int32).reshape(1, K)
