"""`ef(codec)`: error feedback, which sends the change since what the receivers already hold.

Sender and receivers keep the same memory of every sample: what they last agreed its embedding to
be. A message is the codec's payload of (new value - memory), and both ends add what was decoded;
what one message could not carry is in the next one's change. EF21 (Richtarik, Sokolov & Fatkhullin
2021) as EF-VFL uses it (Valdeira et al., arXiv 2406.14420), whose published code copies the whole
memory at every step; here a step touches the rows of the batch only.

Payloads are relayed, so every rank holds a memory of every stream: M x rows x P values for the
embeddings, and one of the head.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch

from hpcvfl.codecs.base import Array, Bytes, Codec, known_options
from hpcvfl.errors import ConfigError
from hpcvfl.kernels import feedback as kernels

# legend: S rows of the memory, N rows of a batch, P values a row


class FeedbackCodec(Codec):
    """Any codec on the change since the last message about the same rows; memory in float32.

    By itself the first message, when all memories are zero: the inner codec's own payload.
    """

    name = "ef"
    examples: ClassVar[Sequence[str]] = ("ef(scalar:bits=1,range=gauss,scope=column)", "ef(none)")
    stateful = True
    state_dtype: np.dtype = np.dtype(np.float32)

    def __init__(self, inner: Codec) -> None:
        """Feed back the error of `inner`, which may itself be `auto` but not `ef`."""
        if isinstance(inner, FeedbackCodec):
            raise ConfigError(f"codec {self.name}({inner.spec}): error feedback is given twice")
        self.inner = inner

    @classmethod
    def from_options(cls, options: Mapping[str, str], parse: Callable[[str], Codec]) -> Codec:
        """From ef(SPEC)."""
        known_options(cls.name, options, ("codec",))
        if "codec" not in options:
            example = f"{cls.name}(scalar:bits=1,range=gauss)"
            raise ConfigError(f"codec {cls.name}: which one? e.g. {example}")
        return cls(parse(options["codec"]))

    @property
    def spec(self) -> str:
        """The inner codec in brackets."""
        return f"{self.name}({self.inner.spec})"

    def nbytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Those of the inner codec; feedback costs no bytes."""
        return self.inner.nbytes(shape, itemsize)

    def encode(self, x: Array, key: int, out_B: Bytes) -> None:
        """The inner codec's."""
        self.inner.encode(x, key, out_B)

    def decode(self, payload_B: Bytes, key: int, out: Array) -> None:
        """The inner codec's."""
        self.inner.decode(payload_B, key, out)


class HalfFeedbackCodec(FeedbackCodec):
    """`ef` with its memory in float16: half the memory, 11 significant bits."""

    name = "ef16"
    examples = ("ef16(scalar:bits=2)",)
    state_dtype = np.dtype(np.float16)


class Memory:
    """What all ranks believe the rows of one tensor of one sender to be; zero at first."""

    def __init__(self, num_rows: int, width: int, dtype: np.dtype, folder: str | None) -> None:
        """Room for `num_rows` x `width` values; in a nameless file in `folder`, if given."""
        self.state_SP = zeros((num_rows, width), dtype, folder)

    def subtract(self, x_NP: Array, rows_N: Array, out_NP: Array) -> None:
        """out = x - state[rows]; x and out float32 or float64, shape (N, P)."""
        if self.state_SP.dtype == np.float32:
            kernels.subtract_rows(x_NP, self.state_SP, rows_N, out_NP)
        else:
            np.subtract(x_NP, self._half(rows_N).numpy(), out=out_NP)

    def add(self, change_NP: Array, rows_N: Array, out_NP: Array) -> None:
        """state[rows] += change, rounded to the memory's type; out = state[rows].

        rows_N : int64, none twice; out may be `change_NP` itself
        """
        if self.state_SP.dtype == np.float32:
            kernels.add_rows(change_NP, self.state_SP, rows_N, out_NP)
        else:
            sum_NP = self._half(rows_N).add_(torch.from_numpy(change_NP))
            top = torch.finfo(torch.float16).max
            half_NP = sum_NP.clamp_(-top, top).half()
            torch.from_numpy(self.state_SP).index_copy_(0, torch.from_numpy(rows_N), half_NP)
            torch.from_numpy(out_NP).copy_(half_NP)

    def _half(self, rows_N: Array) -> torch.Tensor:
        """Rows of a float16 memory as float32; torch converts ten times as fast as numpy."""
        state_SP = torch.from_numpy(self.state_SP)
        return state_SP.index_select(0, torch.from_numpy(rows_N)).float()


def zeros(shape: tuple[int, int], dtype: np.dtype, folder: str | None) -> Array:
    """Zeros in memory, or in a file of `folder` that vanishes with the process."""
    nbytes = shape[0] * shape[1] * dtype.itemsize
    if folder is None or nbytes == 0:
        return np.zeros(shape, dtype)
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk shows now, not in a round
            return np.memmap(file, dtype, "r+", shape=shape)
    except OSError as error:
        raise ConfigError(
            f"run.memory_folder = {folder!r}: {error.strerror or error} ({nbytes} bytes needed)"
        ) from None


def memory_nbytes(codec: Codec, num_rows: int, width: int) -> int:
    """Bytes that every rank keeps for one sender's stream of `codec`; 0 without feedback."""
    if not isinstance(codec, FeedbackCodec):
        return 0
    return num_rows * width * codec.state_dtype.itemsize
