"""Where codecs and transport meet: a block's message becomes a frame, moves, and is decoded by the
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpcvfl import seeds
from hpcvfl.clock import PhaseClock
from hpcvfl.codecs.base import Array, Bytes, Codec, Message
from hpcvfl.codecs.frame import (
    HEADER_NBYTES,
    MAX_VALUES,
    Header,
    read_header,
    rows_hash,
    write_header,
)
from hpcvfl.codecs.stream import Stream, rates_of
from hpcvfl.engine.blocks import Block
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.transport.base import Slots, Transport

RAW_ITEMSIZE = 4
"""raw_bytes counts 4 bytes an element, whatever the dtype."""


@dataclass(frozen=True)
class Agreement:
    """What the handshake fixed: enough to know the size of every frame of a run beforehand.

    codecs_R     : the codec of each rank's frames, rank 0's for the head, or for the gradients
                   where labels are private
    table        : distinct codec strings in sorted order; a header names a codec by its index
    head_shapes  : shapes of the head's parameters, in the module's order
    num_rows     : training samples, which batches number from 0
    num_blocks    : the server and all parties
    block_of_rank : the block that a rank's frames are of
    private      : whether labels are; then no head travels
    """

    codecs_R: Sequence[Codec]
    head_shapes: Sequence[tuple[int, ...]]
    embedding_dim: int
    dtype: np.dtype
    seed: int
    num_rows: int
    num_blocks: int
    block_of_rank: Sequence[int]
    checksum_payload: bool = False
    private: bool = False

    def codec_of(self, block: int) -> Codec | None:
        """Codec of a block's messages; None where it sends none."""
        ranks = [r for r, b in enumerate(self.block_of_rank) if b == block]
        return self.codecs_R[ranks[0]] if ranks else None

    @property
    def table(self) -> list[str]:
        """Distinct codec strings, sorted."""
        return sorted({codec.spec for codec in self.codecs_R})

    def stream(self, rank: int, memory_folder: str | None) -> Stream:
        """The messages of `rank`: the head whole, or values of the rows of a batch."""
        codec = self.codecs_R[rank]
        if rank == 0 and not self.private:
            return Stream(codec, self.head_shapes, self.dtype, None, memory_folder)
        return Stream(codec, [(self.embedding_dim,)], self.dtype, self.num_rows, memory_folder)

    def stream_rates(self, rank: int) -> Sequence[Codec]:
        """What messages of `rank` may be coded by."""
        return rates_of(self.codecs_R[rank])


class Exchange:
    """Frames of one rank, for any batch size; buffers are made once per batch size and reused.

    A payload is encoded once by its owner and relayed unchanged: what the far side decodes is what
    the owner would decode at home, bit for bit.
    """

    def __init__(
        self,
        transport: Transport,
        agreement: Agreement,
        pattern: str,
        memory_folder: str | None = None,
    ) -> None:
        """`pattern` is hub (gather, then broadcast) or allgather.

        memory_folder : for the memories of error feedback; None keeps them in memory
        """
        self.transport, self.agreement, self.pattern = transport, agreement, pattern
        self.streams_R = [self._stream(rank, memory_folder) for rank in range(transport.size)]
        self._codec_index_R = [agreement.table.index(c.spec) for c in agreement.codecs_R]
        self._layouts: dict[int, tuple[list[Message], Slots]] = {}
        self.headers_R: list[Header | None] = [None] * transport.size
        self.stop_asked = self.save_due = False  # told with the next frame

    def agreed(self) -> tuple[bool, bool]:
        """(whether anybody was asked to stop, whether a checkpoint is due after this round), the
        same on every rank once a round's frames are here.
        """
        server = self.headers_R[0]
        return any(h.stop for h in self.headers_R if h), bool(server and server.save)

    def encode(
        self,
        round_index: int,
        rows_N: Array,
        message: Sequence[Array],
        score_C: Array | None = None,
        tau: int = 0,
        w_bar: float = 0.0,
        seconds: float = 0.0,
    ) -> None:
        """Write the own frame; tau, w_bar and seconds tell the others about the previous round.

        rows_N  : int64, the samples of the batch
        score_C : how much each column of the message matters, for codecs that want to know
        """
        rank = self.transport.rank
        layouts_R, slots = self.layout(len(rows_N))
        due = self._due(rank, round_index, rows_hash(rows_N), layouts_R[rank])
        due = due._replace(tau=tau, w_bar=w_bar, seconds=seconds)
        due = due._replace(stop=self.stop_asked, save=self.save_due)
        key = self.dither_key(round_index, rank)
        self.headers_R[rank] = self._write(
            self.stream(rank), slots[rank], due, key, message, rows_N, score_C
        )

    def _write(
        self,
        stream: Stream,
        frame_B: Bytes,
        due: Header,
        key: int,
        message: Sequence[Array],
        rows_N: Array,
        score_C: Array | None,
    ) -> Header:
        """Fill a frame; its header is `due` and what the encoder measured."""
        try:
            error, energy = stream.encode(message, key, frame_B[HEADER_NBYTES:], rows_N, score_C)
        except (NonFiniteError, ConfigError) as refused:
            raise type(refused)(f"block {due.sender}, round {due.round_index}: {refused}") from None
        header = due._replace(
            squared_error=error,
            energy=energy,
            next_level=stream.next_level(due.round_index, error, energy),
        )
        write_header(frame_B, header, self.agreement.checksum_payload)
        return header

    def _read(
        self,
        stream: Stream,
        frame_B: Bytes,
        due: Header,
        key: int,
        out: Sequence[Array],
        rows_N: Array,
    ) -> Header:
        """Check a frame against what is due and decode it; WireError says on which rank."""
        here = f"rank {self.transport.rank}"
        try:
            header = read_header(frame_B, due, self.agreement.checksum_payload)
        except WireError as error:
            raise WireError(f"{here}, {error}") from None
        try:
            stream.decode(frame_B[HEADER_NBYTES:], key, out, rows_N)
        except WireError as error:
            raise WireError(
                f"{here}, round {due.round_index}: {due.kind} from rank {due.sender}: {error}"
            ) from None
        return header

    def deliver(self, round_index: int, rows_N: Array, block: Block, clock: PhaseClock) -> None:
        """Move the frames and decode what is for `block`; the snapshot of the round is then
        there.
        """
        waited_s = self.transport.waited_s
        self.swap(len(rows_N))
        clock.to("decode", waited_s=self.transport.waited_s - waited_s)
        self.decode(round_index, rows_N, block.targets(len(rows_N)))

    def swap(self, batch_size: int) -> None:
        """Bring everybody's frames here: uplink and downlink, or one allgather."""
        _, slots = self.layout(batch_size)
        if self.pattern == "allgather":
            self.transport.allgather(slots)
        else:
            self.transport.gather(slots)
            self.transport.broadcast(slots)

    def decode(
        self, round_index: int, rows_N: Array, targets: Sequence[list[Array] | None]
    ) -> None:
        """Check every other frame and decode it into `targets`; the own frame is left alone.

        From here on, sizes are those of the next round, whose levels the headers announce.
        """
        layouts_R, slots = self.layout(len(rows_N))
        hash_of_rows = rows_hash(rows_N)
        for rank, target in enumerate(targets):
            if target is None:
                continue
            due = self._due(rank, round_index, hash_of_rows, layouts_R[rank])
            key = self.dither_key(round_index, rank)
            self.headers_R[rank] = self._read(
                self.stream(rank), slots[rank], due, key, target, rows_N
            )
        self._follow(round_index)

    def _follow(self, round_index: int) -> None:
        """Take over the levels of the next round; the sizes of frames may change with them."""
        for rank, (stream, header) in enumerate(zip(self.streams_R, self.headers_R, strict=True)):
            if header is None or stream is None or header.next_level == stream.level:
                continue
            if header.next_level >= len(stream.rates):
                raise WireError(
                    f"rank {self.transport.rank}, round {round_index}: next_level from rank {rank}"
                    f" is {header.next_level}, {stream.codec.spec} has {len(stream.rates)} rates"
                )
            stream.level = header.next_level
            self._layouts.clear()

    def compile_codecs(self, batch_size: int) -> None:
        """Do once what a round does with every sender's message, so that none waits for a
        compiler.
        """
        for rank in range(self.transport.size):
            self.stream(rank).warm_up(batch_size, sender=rank == self.transport.rank)

    def layout(self, batch_size: int) -> tuple[list[Message], Slots]:
        """Payload layout of every rank and the buffer of all frames, for this batch size."""
        if batch_size not in self._layouts:
            layouts_R = [self.stream(r).message(batch_size) for r in range(self.transport.size)]
            check_counts(layouts_R)
            slots = Slots(
                [HEADER_NBYTES + m.nbytes for m in layouts_R],
                ["head", *["embed"] * (len(layouts_R) - 1)],
                [RAW_ITEMSIZE * m.count for m in layouts_R],
            )
            self._layouts[batch_size] = layouts_R, slots
        return self._layouts[batch_size]

    def _stream(self, rank: int, memory_folder: str | None) -> Stream | None:
        return self.agreement.stream(rank, memory_folder)

    def stream(self, rank: int) -> Stream:
        """What this rank remembers of the messages of `rank`."""
        stream = self.streams_R[rank]
        assert stream is not None, rank
        return stream

    def headers_by_block(self) -> list[Header | None]:
        """Headers of the messages of the last round, by block."""
        return self.headers_R

    def own_state(self) -> dict[str, Array]:
        """What lasts of the messages that this rank sends, by name; see Stream.state."""
        return self.stream(self.transport.rank).state()

    def restore_own(self, state: Mapping[str, Array]) -> None:
        """Remember what `own_state` gave; raises as Stream.restore."""
        self.stream(self.transport.rank).restore(state)

    def share_state(self) -> None:
        """Give every receiver what the sender of a stream remembers; called by every rank."""
        transport = self.transport
        self._layouts.clear()  # levels, and so sizes, may be others
        for rank in range(transport.size):
            stream = self.stream(rank)
            for name, value in shared_state(stream).items():
                sizes = [value.nbytes if r == rank else 0 for r in range(transport.size)]
                slots = Slots(sizes, ["control"] * transport.size, [0] * transport.size)
                slots[rank][:] = value.reshape(-1).view(np.uint8)
                transport.broadcast(slots, root=rank)
                stream.restore({name: slots[rank].view(value.dtype).reshape(value.shape)})

    def frame(self, batch_size: int, rank: int) -> Bytes:
        """The frame of `rank` as it stands in the buffer."""
        return self.layout(batch_size)[1][rank]

    def dither_key(self, round_index: int, rank: int) -> int:
        """Key of a message: what its sender and every receiver derive alike."""
        block = self.agreement.block_of_rank[rank]
        return seeds.key64(self.agreement.seed, "dither", round_index, block)

    def _due(self, rank: int, round_index: int, hash_of_rows: int, layout: Message) -> Header:
        return Header(
            "embed" if rank else "head",
            self._codec_index_R[rank],
            self.agreement.block_of_rank[rank],
            round_index,
            layout.count,
            layout.nbytes,
            batch_hash=hash_of_rows,
            level=self.stream(rank).level,
        )


def check_counts(layouts_R: Sequence[Message]) -> None:
    """Raise ConfigError for a message of more values than a header counts."""
    for rank, message in enumerate(layouts_R):
        if message.count > MAX_VALUES:
            raise ConfigError(
                f"rank {rank}: a message of {message.count} values, at most {MAX_VALUES};"
                " choose a smaller data.batch_size or model.embedding_dim"
            )


def shared_state(stream: Stream) -> dict[str, Array]:
    """What both ends of a stream remember; the sender's choice of levels is its own."""
    return {n: v for n, v in stream.state().items() if not n.startswith("control.")}
