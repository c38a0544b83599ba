"""Where codecs and transport meet: a block's message becomes a frame, moves, and is decoded by the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcvfl import seeds
from hpcvfl.codecs.base import Array, Bytes, Codec, Message
from hpcvfl.codecs.frame import HEADER_NBYTES, Header, read_header, write_header
from hpcvfl.errors import NonFiniteError, WireError
from hpcvfl.transport.base import Slots, Transport

RAW_ITEMSIZE = 4
"""raw_bytes counts 4 bytes an element, whatever the dtype."""


@dataclass(frozen=True)
class Agreement:
    """What the handshake fixed: enough to know the size of every frame of a run beforehand.

    codecs_R     : the codec of each rank's frames, rank 0's for the head
    table        : distinct codec strings in sorted order; a header names a codec by its index
    head_shapes  : shapes of the head's parameters, in the module's order
    """

    codecs_R: Sequence[Codec]
    head_shapes: Sequence[tuple[int, ...]]
    embedding_dim: int
    dtype: np.dtype
    seed: int
    checksum_payload: bool = False

    @property
    def table(self) -> list[str]:
        """Distinct codec strings, sorted."""
        return sorted({codec.spec for codec in self.codecs_R})


class Exchange:
    """Frames of one rank, for any batch size; buffers are made once per batch size and reused.

    A payload is encoded once by its owner and relayed unchanged: what the far side decodes is what
    the owner would decode at home, bit for bit.
    """

    def __init__(self, transport: Transport, agreement: Agreement, pattern: str) -> None:
        """`pattern` is hub (gather, then broadcast) or allgather."""
        self.transport, self.agreement, self.pattern = transport, agreement, pattern
        self._codec_index_R = [agreement.table.index(c.spec) for c in agreement.codecs_R]
        self._layouts: dict[int, tuple[list[Message], Slots]] = {}
        self.headers_R: list[Header | None] = [None] * transport.size

    def encode(
        self,
        round_index: int,
        rows_hash: int,
        batch_size: int,
        message: Sequence[Array],
        tau: int = 0,
        w_bar: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Write the own frame; tau, w_bar and seconds tell the others about the previous round."""
        rank = self.transport.rank
        layouts_R, slots = self.layout(batch_size)
        frame_B = slots[rank]
        key = self.dither_key(round_index, rank)
        try:
            layouts_R[rank].encode(message, key, frame_B[HEADER_NBYTES:])
        except NonFiniteError as error:
            raise NonFiniteError(f"block {rank}, round {round_index}: {error}") from None
        due = self._due(rank, round_index, rows_hash, layouts_R[rank])
        header = due._replace(tau=tau, w_bar=w_bar, seconds=seconds)
        write_header(frame_B, header, self.agreement.checksum_payload)

    def swap(self, batch_size: int) -> None:
        """Bring everybody's frames here: uplink and downlink, or one allgather."""
        _, slots = self.layout(batch_size)
        if self.pattern == "allgather":
            self.transport.allgather(slots)
        else:
            self.transport.gather(slots)
            self.transport.broadcast(slots)

    def decode(
        self,
        round_index: int,
        rows_hash: int,
        batch_size: int,
        targets: Sequence[list[Array] | None],
    ) -> None:
        """Check every other frame and decode it into `targets`; the own frame is left alone."""
        layouts_R, slots = self.layout(batch_size)
        for rank, target in enumerate(targets):
            if target is None:
                continue
            due = self._due(rank, round_index, rows_hash, layouts_R[rank])
            try:
                header = read_header(slots[rank], due, self.agreement.checksum_payload)
            except WireError as error:
                raise WireError(f"rank {self.transport.rank}, {error}") from None
            try:
                layouts_R[rank].decode(
                    slots[rank][HEADER_NBYTES:], self.dither_key(round_index, rank), target
                )
            except WireError as error:
                raise WireError(
                    f"rank {self.transport.rank}, round {round_index}: {due.kind} from rank {rank}:"
                    f" {error}"
                ) from None
            self.headers_R[rank] = header

    def compile_codecs(self, batch_size: int) -> None:
        """Encode and decode a message of zeros once, so that no round waits for a compiler."""
        layouts_R, _ = self.layout(batch_size)
        for rank, layout in enumerate(layouts_R):
            payload_B = np.zeros(layout.nbytes, np.uint8)
            zeros = [np.zeros(shape, self.agreement.dtype) for shape in layout.shapes]
            if rank == self.transport.rank:
                layout.encode(zeros, 0, payload_B)
            else:
                layout.decode(payload_B, 0, zeros)

    def layout(self, batch_size: int) -> tuple[list[Message], Slots]:
        """Payload layout of every rank and the buffer of all frames, for this batch size."""
        if batch_size not in self._layouts:
            a = self.agreement
            shapes_R = [a.head_shapes, *([(batch_size, a.embedding_dim)],) * (len(a.codecs_R) - 1)]
            layouts_R = [
                Message(codec, shapes, a.dtype)
                for codec, shapes in zip(a.codecs_R, shapes_R, strict=True)
            ]
            slots = Slots(
                [HEADER_NBYTES + m.nbytes for m in layouts_R],
                ["head", *["embed"] * (len(layouts_R) - 1)],
                [RAW_ITEMSIZE * m.count for m in layouts_R],
            )
            self._layouts[batch_size] = layouts_R, slots
        return self._layouts[batch_size]

    def frame(self, batch_size: int, rank: int) -> Bytes:
        """The frame of `rank` as it stands in the buffer."""
        return self.layout(batch_size)[1][rank]

    def dither_key(self, round_index: int, rank: int) -> int:
        """Key of a message: what its sender and every receiver derive alike."""
        return seeds.key64(self.agreement.seed, "dither", round_index, rank)

    def _due(self, rank: int, round_index: int, rows_hash: int, layout: Message) -> Header:
        kind = "embed" if rank else "head"
        codec = self._codec_index_R[rank]
        return Header(
            kind, codec, rank, round_index, layout.count, layout.nbytes, batch_hash=rows_hash
        )
