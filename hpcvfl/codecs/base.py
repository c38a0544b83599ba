"""The contract of a codec: one tensor to one payload of a size that every rank knows beforehand."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from hpcvfl import seeds
from hpcvfl.errors import ConfigError, NonFiniteError
from hpcvfl.kernels import scan

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]

# legend: R rows, C columns, B bytes


class Codec(ABC):
    """A stateless recipe: tensor -> payload -> tensor.

    The same (tensor, key, score) gives the same payload on every rank, and the same (payload, key)
    the same tensor, bit for bit. A codec never changes its input. What a sender and its receivers
    remember from message to message (the memory of `ef`, the rate of `auto`) is in stream.py.
    """

    name: ClassVar[str]
    """First word of the spec string."""
    examples: ClassVar[Sequence[str]]
    """Spec strings that between them use every option; the contract tests run over them."""
    exact: bool = False
    """Whether decode gives back the very input, so that nobody need measure the error."""
    zeros_decode: bool = True
    """Whether a payload of zeros is decoded the way of any other, so that it can stand for one."""
    stateful: bool = False
    """Whether a stream (stream.py) adds something that lasts, so that no codec may wrap this one
    for values of its own.
    """
    wants_score: bool = False
    """Whether `encode_scored` uses the importance of columns, so that somebody must compute it."""

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> Codec:
        """The codec of a spec string's options; this one takes none.

        parse : makes the codec of an option that is itself a spec string
        Raises ConfigError for an option or value that the codec does not have.
        """
        known_options(cls.name, options, ())
        return cls()

    @property
    @abstractmethod
    def spec(self) -> str:
        """The canonical string: `table.parse(codec.spec) == codec`, options at their defaults left
        out.
        """

    @abstractmethod
    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Exact payload size in bytes of a tensor of `shape` whose elements have `itemsize`
        bytes.
        """

    @abstractmethod
    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """Write the payload of `x` to `out_B`.

        x     : float32 or float64, C-contiguous, any shape
        key   : keys the dither; below 2**64
        out_B : uint8, nbytes(x.shape, x.itemsize) long; overwritten
        Raises NonFiniteError for NaN, Inf, or values beyond what the codec can carry.
        """

    def encode_scored(self, x: Array, key: int, out_B: Bytes, score_C: Array | None) -> None:
        """`encode`, told how much each column matters to the sender.

        score_C : float, shape (x.shape[-1],), not negative; None where nobody knows
        """
        self.encode(x, key, out_B)

    @abstractmethod
    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """Write the decoded tensor to `out` (C-contiguous, dtype and shape of what was encoded).

        Raises WireError when side information (a scale, an index) cannot have come from `encode`.
        """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.spec == other.spec

    def __hash__(self) -> int:
        return hash(self.spec)

    def __repr__(self) -> str:
        return f"<codec {self.spec}>"


class Message:
    """The tensors of one frame as one payload: each tensor through the codec, one behind the
    other.
    """

    def __init__(self, codec: Codec, shapes: Sequence[tuple[int, ...]], dtype: np.dtype) -> None:
        self.codec = codec
        self.shapes = [tuple(shape) for shape in shapes]
        self.count = sum(math.prod(shape) for shape in self.shapes)
        sizes = [codec.nbytes(shape, dtype.itemsize) for shape in self.shapes]
        self._cuts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).tolist()
        self.nbytes: int = self._cuts[-1]

    def encode(
        self,
        tensors: Sequence[Array],
        key: int,
        payload_B: Bytes,
        score_C: Array | None = None,
    ) -> None:
        """Encode `tensors` (shapes as given to the constructor); see Codec.encode_scored."""
        # A payload is written without bounds checks, so this must hold whatever the caller did.
        assert [x.shape for x in tensors] == self.shapes, (self.shapes, [x.shape for x in tensors])
        for i, x in enumerate(tensors):
            part_B = payload_B[self._cuts[i] : self._cuts[i + 1]]
            self.codec.encode_scored(x, seeds.subkey(key, i), part_B, score_C)

    def decode(self, payload_B: Bytes, key: int, out: Sequence[Array]) -> None:
        """Decode into `out`; see Codec.decode."""
        for i, x in enumerate(out):
            self.codec.decode(payload_B[self._cuts[i] : self._cuts[i + 1]], seeds.subkey(key, i), x)


def require_finite(x: Array) -> None:
    """Raise NonFiniteError if `x` (float32 or float64, C-contiguous) holds NaN or Inf."""
    if x.dtype == np.float32:
        bounds_2 = np.empty(2, np.float32)
        check_status(scan.minmax(x.reshape(-1), bounds_2))
    elif not np.isfinite(x).all():
        check_status(1 if np.isnan(x).any() else 2)


def as_float32(x: Array) -> Array:
    """`x` itself if it is float32, else rounded: what is beyond float32 becomes Inf, for a scan to
    find, and no warning.
    """
    with np.errstate(over="ignore"):
        return x.astype(np.float32, copy=False)


def check_status(status: int) -> None:
    """Turn the status of a scan kernel into NonFiniteError."""
    if status:
        raise NonFiniteError(f"{'NaN' if status == 1 else 'Inf'} in a message")


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of a spec string.

    "scalar:bits=2,scope=column"      -> ("scalar", {"bits": "2", "scope": "column"})
    "topk:k=2,values=(scalar:bits=1,range=gauss)" -> ("topk", {.., "values": "scalar:bits=1,.."})
    "ef(scalar:bits=1)"               -> ("ef", {"codec": "scalar:bits=1"})
    Spaces mean nothing.
    """
    spec = "".join(spec.split())
    name, at, rest = spec, len(spec), ""
    for sign in ":(":
        if (found := spec.find(sign)) != -1 and found < at:
            name, at = spec[:found], found
            rest = spec[found + 1 :] if sign == ":" else f"codec={spec[found:]}"
    if rest == "codec=()":
        rest = ""
    options: dict[str, str] = {}
    for part in filter(None, _split_outside(spec, rest)):
        option, equals, value = part.partition("=")
        if value.startswith("(") and value.endswith(")"):
            value = value[1:-1]
        if not equals or not value:
            raise ConfigError(f"codec {spec!r}: {part!r} is not of the form option=value")
        if option in options:
            raise ConfigError(f"codec {spec!r}: option {option!r} is given twice")
        options[option] = value
    return name, options


def nested(spec: str) -> str:
    """A spec as the value of an option of another one: in brackets where it has a comma."""
    return f"({spec})" if "," in spec else spec


def _split_outside(spec: str, rest: str) -> list[str]:
    """`rest` cut at the commas that stand in no bracket; ConfigError if brackets do not match."""
    parts, depth = [""], 0
    for sign in rest:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            break
        if sign == "," and not depth:
            parts.append("")
        else:
            parts[-1] += sign
    if depth:
        raise ConfigError(f"codec {spec!r}: brackets do not match")
    return parts


def known_options(name: str, options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise ConfigError for an option that the codec does not have."""
    inner = ""  # the last option before, if its value is a spec with options of its own
    for option, value in options.items():
        if option in known:
            inner = option if ":" in value and "(" not in value else inner
            continue
        text = f"codec {name}: unknown option {option!r}; "
        text += f"options: {', '.join(known)}" if known else "it takes none"
        if inner and inner != "range":
            meant = f"{inner}=({options[inner]},{option}={value})"
            text += f"; an option of the codec inside stands in brackets with it: {meant}"
        raise ConfigError(text)


def choice(name: str, option: str, value: str, choices: Sequence[str]) -> str:
    """`value` if it is one of `choices`, else ConfigError."""
    if value not in choices:
        raise ConfigError(f"codec {name}: {option} = {value!r}; possible: {', '.join(choices)}")
    return value
