"""The messages of one sender, as any rank sees them: sizes, and what both ends remember.

    sender    encode:  change = x - memory         x itself without `ef`
                       payload of the change       at the level in force
                       memory += decoded change    what the others will use
    receiver  decode:  memory += decoded change
    all       follow:  the level of the next message, from the header

Every rank holds a stream for every sender and feeds them all the same payloads, so that memories
and levels are the same everywhere without a message about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpcvfl.codecs.auto import AutoCodec, RateControl
from hpcvfl.codecs.base import Array, Bytes, Codec, Message, require_finite
from hpcvfl.codecs.feedback import FeedbackCodec, Memory
from hpcvfl.errors import DataError, NonFiniteError, WireError
from hpcvfl.kernels.feedback import squares

# legend: N rows of the batch


class Stream:
    """See the file's text. `level` indexes `rates`, the codecs that messages may have."""

    def __init__(
        self,
        codec: Codec,
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype,
        num_rows: int | None = None,
        memory_folder: str | None = None,
    ) -> None:
        """Of a codec and the shapes of the tensors of a message.

        num_rows      : samples that messages are about, each row of a tensor one of them; its
                        `shapes` are those of one row. None: every message holds the same tensors
        memory_folder : where memories lie as files; None: in memory
        """
        inner = codec.inner if isinstance(codec, FeedbackCodec) else codec
        self.codec, self.shapes, self.dtype, self.num_rows = codec, shapes, dtype, num_rows
        self.rates = rates_of(codec)
        self.level = inner.first_level if isinstance(inner, AutoCodec) else 0
        self.control = RateControl(inner) if isinstance(inner, AutoCodec) else None
        self.memories: list[Memory] = []
        if isinstance(codec, FeedbackCodec):
            rows = 1 if num_rows is None else num_rows
            self.memories = [
                Memory(rows, math.prod(shape), codec.state_dtype, memory_folder) for shape in shapes
            ]
        self._messages: dict[tuple[int, int], Message] = {}
        self._scratch: dict[int, list[Array]] = {}

    def message(self, batch_size: int) -> Message:
        """Layout of the next message, for a batch of so many rows."""
        key = (batch_size, self.level)
        if key not in self._messages:
            rows = () if self.num_rows is None else (batch_size,)
            shapes = [(*rows, *shape) for shape in self.shapes]
            self._messages[key] = Message(self.rates[self.level], shapes, self.dtype)
        return self._messages[key]

    def encode(
        self,
        tensors: Sequence[Array],
        key: int,
        payload_B: Bytes,
        rows_N: Array,
        score_C: Array | None = None,
    ) -> tuple[float, float]:
        """Write the payload of `tensors`; (squared error, energy) of the whole message.

        rows_N : int64, the samples of the batch, none twice
        The error is that of what the others will use; energy is the sum of squares of `tensors`.
        """
        message = self.message(len(rows_N))
        back = self._buffers(message)
        if self.memories:
            rows_N = self._rows(rows_N)
            for x, memory, change in zip(tensors, self.memories, back, strict=True):
                memory.subtract(self._flat(x), rows_N, self._flat(change))
            # The change says which columns matter; a score would leave others behind for good.
            message.encode(back, key, payload_B)
        else:
            message.encode(tensors, key, payload_B, score_C)
            if self.rates[self.level].exact:
                return 0.0, 0.0
        message.decode(payload_B, key, back)
        self._remember(back, rows_N)
        sums = [squares(x.reshape(-1), y.reshape(-1)) for x, y in zip(tensors, back, strict=True)]
        return sum(s[0] for s in sums), sum(s[1] for s in sums)

    def decode(self, payload_B: Bytes, key: int, out: Sequence[Array], rows_N: Array) -> None:
        """What the sender's rows are now believed to be; raises as Codec.decode."""
        self.message(len(rows_N)).decode(payload_B, key, out)
        if self.memories:
            try:
                self._remember(out, self._rows(rows_N))
            except NonFiniteError:
                raise WireError(
                    "what is remembered of the sender is beyond float32; its payloads diverge"
                ) from None

    def next_level(self, round_index: int, error: float, energy: float) -> int:
        """The sender's choice for the next message, from what this one measured."""
        if self.control is None:
            return 0
        share = error / energy if energy > 0 else 0.0
        return self.control.next_level(round_index, self.level, share)

    def state(self) -> dict[str, Array]:
        """All that this stream remembers, by name; arrays that are its own memory are not copies.

        memory.i : as Memory keeps them; level : int64, shape (1,); and what only the sender needs
        to choose levels, control.left (float64, shape (1,)) and control.expected (one a level, NaN
        where nothing was measured)
        """
        out: dict[str, Array] = {f"memory.{i}": m.state_SP for i, m in enumerate(self.memories)}
        if self.control:
            expected = [self.control.expected.get(i, math.nan) for i in range(len(self.rates))]
            out["level"] = np.array([self.level])
            out["control.left"] = np.array([self.control.left])
            out["control.expected"] = np.array(expected)
        return out

    def restore(self, state: Mapping[str, Array]) -> None:
        """Remember what `state` gave; names that are not there stay as they are.

        Raises DataError for a level that there is not, or an array of another type or shape.
        """
        for name, here in self.state().items():
            value = state.get(name, here)
            if value.shape != here.shape or value.dtype != here.dtype:
                due, came = (f"{v.dtype} {v.shape}" for v in (here, value))
                raise DataError(f"{name} is {came}, due {due}")
        for i, memory in enumerate(self.memories):
            memory.state_SP[...] = state.get(f"memory.{i}", memory.state_SP)
        if self.control and "level" in state:
            level = int(state["level"][0])
            if not 0 <= level < len(self.rates):
                raise DataError(f"level is {level}, {self.codec.spec} has {len(self.rates)} rates")
            self.level = level
        if self.control and "control.left" in state:
            self.control.left = float(state["control.left"][0])
            told = enumerate(state["control.expected"].tolist())
            self.control.expected = {i: v for i, v in told if not math.isnan(v)}

    def warm_up(self, batch_size: int, sender: bool) -> None:
        """Compile what a message needs at the level in force, and remember nothing of it.

        A receiver compiles the encoder only where it must have a payload to decode. `auto` compiles
        another level when it first comes to it.
        """
        # A message like a real one: what is constant may take another path or none. Columns that
        # have something in common are what `best` turns.
        message = self.message(batch_size)
        payload_B = np.zeros(message.nbytes, np.uint8)
        x = [_like_a_message(shape, self.dtype) for shape in message.shapes]
        if sender or not self.rates[self.level].zeros_decode:
            message.encode(x, 0, payload_B)
        message.decode(payload_B, 0, x)
        if sender:
            squares(x[0].reshape(-1), x[0].reshape(-1))
        nobody_N = np.zeros(0, np.int64)
        for memory, tensor in zip(self.memories, x, strict=False):
            none_NP = self._flat(tensor)[:0]
            memory.subtract(none_NP, nobody_N, none_NP)
            memory.add(none_NP, nobody_N, none_NP)

    def _remember(self, changes: Sequence[Array], rows_N: Array) -> None:
        """Add decoded changes to the memories; they become what is remembered, in place."""
        for memory, change in zip(self.memories, changes, strict=False):
            memory.add(self._flat(change), rows_N, self._flat(change))
            require_finite(change)  # each change was; their sum need not be

    def _rows(self, rows_N: Array) -> Array:
        return _WHOLE if self.num_rows is None else rows_N

    def _flat(self, x: Array) -> Array:
        """(rows, values a row); a view, since messages are C-contiguous."""
        return x.reshape(1 if self.num_rows is None else len(x), -1)

    def _buffers(self, message: Message) -> list[Array]:
        """Room for the decoded message, made once per batch size."""
        if message.count not in self._scratch:
            self._scratch[message.count] = [np.empty(s, self.dtype) for s in message.shapes]
        return self._scratch[message.count]


def rates_of(codec: Codec) -> Sequence[Codec]:
    """What a message may be coded by: the rates of `auto`, else one codec; without `ef`."""
    inner = codec.inner if isinstance(codec, FeedbackCodec) else codec
    return inner.rates if isinstance(inner, AutoCodec) else (inner,)


def _like_a_message(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Noise around a pattern that all rows share up to a factor."""
    rng = np.random.default_rng(0)
    width = shape[-1] if shape else 1
    factor = rng.normal(size=(*shape[:-1], 1))
    return (factor * rng.normal(size=width) + 0.3 * rng.normal(size=shape)).astype(dtype)


_WHOLE = np.zeros(1, np.int64)
"""The only row of a tensor that is sent whole."""
