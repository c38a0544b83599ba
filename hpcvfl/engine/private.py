"""The exchange of a round where the server alone holds the labels.

    gather    every party's h_k, as ever
    server    the gradient of the batch's loss at each h_k, from the decoded h and the head as they
              are when the round begins
    scatter   party k gets its own gradient, (N, P) through a codec, and nothing else

A party needs neither labels, head nor the others' embeddings: its local steps go down J^T C, J the
Jacobian of its tower and C the gradient, which stays as it is for all steps of the round. With one
step that is the shared-label step bit for bit. (Flex-VFL, arXiv 2208.12672, on private labels,
after FedBCD, arXiv 1912.11187; here with compression and feedback in both directions.)

Legend: N rows of the batch, P values of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from hpcvfl import seeds
from hpcvfl.clock import PhaseClock
from hpcvfl.codecs.base import Array, Bytes, Message
from hpcvfl.codecs.frame import HEADER_NBYTES, Header, rows_hash
from hpcvfl.codecs.stream import Stream
from hpcvfl.engine.blocks import Block, PrivateParty, Server
from hpcvfl.engine.exchange import (
    RAW_ITEMSIZE,
    Agreement,
    Exchange,
    check_counts,
    shared_state,
)
from hpcvfl.engine.holder import Holder
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.transport.base import Slots, Transport


class PrivateExchange(Exchange):
    """Frames of one rank; `agreement.codecs_R[0]` is the codec of the gradients.

    streams_R : of the embeddings, and None where neither end of them is here: a party remembers
                its own messages only
    downs_R   : of the gradients, the same; [0] is None
    """

    def __init__(
        self, transport: Transport, agreement: Agreement, memory_folder: str | None = None
    ) -> None:
        """See Exchange; there is one pattern only."""
        if any(len(agreement.stream_rates(rank)) > 1 for rank in range(transport.size)):
            raise ConfigError(
                "private labels: codec auto tells all ranks of its sizes, and a party's"
                " headers reach the server alone; use a codec with fixed bits"
            )
        super().__init__(transport, agreement, "hub", memory_folder)
        self.downs_R = [
            agreement.stream(0, memory_folder) if self._is_here(rank) else None
            for rank in range(transport.size)
        ]
        self._scatter_slots: dict[int, Slots] = {}
        self._own_w_bar = 0.0

    def _stream(self, rank: int, memory_folder: str | None) -> Stream | None:
        return self.agreement.stream(rank, memory_folder) if self._is_here(rank) else None

    def _is_here(self, rank: int) -> bool:
        return rank > 0 and self.transport.rank in (0, rank)

    def _message(self, rank: int, batch_size: int) -> Message:
        """Layout of embeddings of `rank`, or of any party's gradient for rank 0."""
        agreed = self.agreement
        shape = (batch_size, agreed.embedding_dim)
        codec = agreed.stream_rates(rank)[0]
        return Message(codec, [shape], agreed.dtype)

    def layout(self, batch_size: int) -> tuple[list[Message], Slots]:
        """Layouts and frames of the way up; the server's own frame is empty."""
        if batch_size not in self._layouts:
            layouts_R = [self._message(rank, batch_size) for rank in range(self.transport.size)]
            check_counts(layouts_R)
            self._layouts[batch_size] = layouts_R, self._slots(layouts_R[1:], "embed")
            self._scatter_slots[batch_size] = self._slots(
                [layouts_R[0]] * (self.transport.size - 1), "grad"
            )
        return self._layouts[batch_size]

    def _slots(self, parties: list[Message], kind: str) -> Slots:
        return Slots(
            [0, *(HEADER_NBYTES + m.nbytes for m in parties)],
            ["control", *[kind] * len(parties)],
            [0, *(RAW_ITEMSIZE * m.count for m in parties)],
        )

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
        """See Exchange; the server sends later, in `deliver`."""
        self._told = (tau, w_bar, seconds)
        if self.transport.rank:
            super().encode(round_index, rows_N, message, score_C, tau, w_bar, seconds)

    def deliver(self, round_index: int, rows_N: Array, block: Block, clock: PhaseClock) -> None:
        """Gather, gradients, scatter."""
        transport, batch_size = self.transport, len(rows_N)
        waited_s = transport.waited_s
        transport.gather(self.layout(batch_size)[1])
        clock.to("decode", waited_s=transport.waited_s - waited_s)
        slots = self._scatter_slots[batch_size]
        if isinstance(block, Server):
            self.decode(round_index, rows_N, block.targets(batch_size))
            self._own_w_bar = block.own_w_bar if isinstance(block, Holder) else 0.0
            self._encode_gradients(round_index, rows_N, block, slots)
        clock.to("wire")
        waited_s = transport.waited_s
        transport.scatter(slots)
        clock.to("decode", waited_s=transport.waited_s - waited_s)
        if isinstance(block, PrivateParty):
            frame_B = slots[transport.rank]
            self.headers_R[0] = self._read_gradient(round_index, frame_B, rows_N, block)

    def _encode_gradients(
        self, round_index: int, rows_N: Array, server: Server, slots: Slots
    ) -> None:
        """Write everybody's gradient; the own header is about all of them together."""
        tau, w_bar, seconds = self._told
        due = self._due_gradient(round_index, rows_N)
        due = due._replace(tau=tau, w_bar=w_bar, seconds=seconds)
        # A party's header reaches the server alone, which passes on what it asks.
        stop = self.stop_asked or any(h.stop for h in self.headers_R[1:] if h)
        due = due._replace(stop=stop, save=self.save_due)
        gradients = server.embedding_gradients()
        headers = [
            self._write_gradient(
                rank, slots[rank], due, gradients[self.agreement.block_of_rank[rank] - 1], rows_N
            )
            for rank in range(1, self.transport.size)
        ]
        self.headers_R[0] = due._replace(
            num_values=sum(h.num_values for h in headers),
            payload_nbytes=sum(h.payload_nbytes for h in headers),
            squared_error=math.fsum(h.squared_error for h in headers),
            energy=math.fsum(h.energy for h in headers),
        )

    def _write_gradient(
        self, rank: int, frame_B: Bytes, due: Header, gradient_NP: Array, rows_N: Array
    ) -> Header:
        """Fill the frame of the gradient for party `rank`."""
        stream, key = self.downs_R[rank], self._down_key(due.round_index, rank)
        assert stream is not None
        try:
            return self._write(stream, frame_B, due, key, [gradient_NP], rows_N, None)
        except NonFiniteError as error:
            party = self.agreement.block_of_rank[rank]
            raise NonFiniteError(f"{error}: the gradient for party {party}") from None

    def _read_gradient(
        self, round_index: int, frame_B: Bytes, rows_N: Array, party: PrivateParty
    ) -> Header:
        """Check the own gradient's frame and decode it for the steps of `party`."""
        rank = self.transport.rank
        stream, key = self.downs_R[rank], self._down_key(round_index, rank)
        assert stream is not None
        out = [party.gradient(len(rows_N))]
        return self._read(
            stream, frame_B, self._due_gradient(round_index, rows_N), key, out, rows_N
        )

    def _due_gradient(self, round_index: int, rows_N: Array) -> Header:
        layout = self.layout(len(rows_N))[0][0]
        return Header(
            "grad",
            self._codec_index_R[0],
            0,
            round_index,
            layout.count,
            layout.nbytes,
            batch_hash=rows_hash(rows_N),
        )

    def _down_key(self, round_index: int, rank: int) -> int:
        party = self.agreement.block_of_rank[rank]
        return seeds.key64(self.agreement.seed, "dither", round_index, party, "gradient")

    def headers_by_block(self) -> list[Header | None]:
        """See Exchange; a holder party sends nothing, its steps are those of the server."""
        out: list[Header | None] = [None] * self.agreement.num_blocks
        for block, header in zip(self.agreement.block_of_rank, self.headers_R, strict=True):
            out[block] = header
        first = out[0]
        if first and None in out:
            nothing = Header("embed", 0, out.index(None), first.round_index, 0, 0)
            out[out.index(None)] = nothing._replace(
                tau=first.tau, w_bar=self._own_w_bar, seconds=first.seconds
            )
        return out

    def compile_codecs(self, batch_size: int) -> None:
        """See Exchange."""
        rank = self.transport.rank
        for peer in range(self.transport.size):
            up, down = self.streams_R[peer], self.downs_R[peer]
            if up and down:
                up.warm_up(batch_size, sender=peer == rank)
                down.warm_up(batch_size, sender=rank == 0)

    def _own_streams(self) -> dict[str, Stream]:
        """The streams that this rank sends, by the prefix of their names in `own_state`."""
        rank = self.transport.rank
        streams = [(peer, s) for peer, s in enumerate(self.downs_R) if s]
        if rank:
            return {"": self.stream(rank)}
        return {f"party{self.agreement.block_of_rank[peer]}.": s for peer, s in streams}

    def own_state(self) -> dict[str, Array]:
        """See Exchange; the server's names start with the party: party2.memory.0."""
        return {
            prefix + name: value
            for prefix, stream in self._own_streams().items()
            for name, value in stream.state().items()
        }

    def restore_own(self, state: Mapping[str, Array]) -> None:
        """See Exchange."""
        for prefix, stream in self._own_streams().items():
            own = {n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)}
            stream.restore(own)

    def share_state(self) -> None:
        """See Exchange; between the server and each party alone."""
        for peer in range(1, self.transport.size):
            up, down = self.streams_R[peer], self.downs_R[peer]
            if up and down:
                self._pass(up, sender=peer, receiver=0)
                self._pass(down, sender=0, receiver=peer)

    def _pass(self, stream: Stream, sender: int, receiver: int) -> None:
        for name, value in shared_state(stream).items():
            if self.transport.rank == sender:
                value_B = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                self.transport.send(value_B, receiver, "control")
            else:
                came = np.empty_like(value)
                came_B = came.reshape(-1).view(np.uint8)
                _, nbytes = self.transport.receive(came_B, sender, "control")
                if nbytes != came_B.nbytes:
                    raise WireError(
                        f"rank {receiver}: {name} from rank {sender} has {nbytes} bytes, due are"
                        f" {came_B.nbytes}; do all ranks run the same version?"
                    )
                stream.restore({name: came})
