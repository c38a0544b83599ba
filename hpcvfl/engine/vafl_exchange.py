"""The messages of the asynchronous driver (vafl.py), between the server and one party at a time.

    party     a frame "embed": h_k of its batch; the header's round is the number of this message,
              by the party's own count
    server    decodes it into its table, in the rows of these samples, and answers with a frame
              "grad" of the same number: the gradient of the loss at h_k; or with a header alone:
              an evaluation comes first, the gradient after it

tau of an answer's header is the number of updates that the server has made. The first messages of
all parties, one for each batch of an epoch, fill the table: they are gathered and not answered.

Legend: N rows of the batch, P values of an embedding, S training samples, M parties.
"""

from __future__ import annotations

import numpy as np

from hpcvfl.codecs.base import Array, Bytes
from hpcvfl.codecs.frame import HEADER_NBYTES, Header, read_header, rows_hash, write_header
from hpcvfl.engine.blocks import Block, PrivateParty, Server
from hpcvfl.engine.exchange import Agreement
from hpcvfl.engine.private import PrivateExchange
from hpcvfl.errors import WireError
from hpcvfl.transport.base import Transport, aligned_bytes


class VaflExchange(PrivateExchange):
    """Frames of one rank.

    table_M : at the server, what it knows of each party: arrays of shape (S, P), whose row i is the
              embedding of training sample i as it was last decoded; elsewhere empty
    held    : at the server, {party: frame} that came and is not yet served, in order of arrival
    """

    def __init__(
        self,
        transport: Transport,
        agreement: Agreement,
        batch_size: int,
        memory_folder: str | None = None,
    ) -> None:
        """See PrivateExchange; batches have `batch_size` rows, the last of an epoch the rest."""
        super().__init__(transport, agreement, memory_folder)
        num_rows = agreement.num_rows
        at_server = transport.rank == 0
        shape = (num_rows, agreement.embedding_dim)
        parties = range(1, transport.size) if at_server else ()
        self.table_M: list[Array] = [np.zeros(shape, agreement.dtype) for _ in parties]
        self.held: dict[int, Bytes] = {}
        longest = HEADER_NBYTES
        for rows in {min(batch_size, num_rows), num_rows % batch_size or batch_size}:
            layouts_R, slots = self.layout(rows)
            sizes = slots.sizes_R if at_server else [HEADER_NBYTES + layouts_R[0].nbytes]
            longest = max(longest, *sizes)
        self._room_B = aligned_bytes(longest)

    def fill(self, number: int, rows_N: Array, block: Block) -> None:
        """Gather everybody's embeddings of one batch and put them into the table."""
        self.transport.gather(self.layout(len(rows_N))[1])
        if isinstance(block, Server):
            targets = block.targets(len(rows_N))
            self.decode(number, rows_N, targets)
            for table_SP, target in zip(self.table_M, targets[1:], strict=True):
                assert target is not None
                table_SP[rows_N] = target[0]

    def send_embedding(self, batch_size: int) -> None:
        """Party: send the frame that `encode` has written."""
        self.transport.send(self.frame(batch_size, self.transport.rank), 0, "embed")

    def receive_embedding(self, source: int | None) -> None:
        """Server: wait for a message of `source` (None: of any party), and hold it."""
        peer, nbytes = self.transport.receive(self._room_B, source, "embed")
        if peer in self.held:
            raise WireError(
                f"rank 0, update {self.transport.round_index}: rank {peer} sent a second embed"
                " before its first was answered"
            )
        self.held[peer] = self._room_B[:nbytes].copy()

    def take(self, party: int, number: int, rows_N: Array, server: Server) -> None:
        """Server: decode the message held of `party` into the table; what the table knows of these
        samples, of all parties, is then the batch of `server`.
        """
        targets = server.targets(len(rows_N))
        own = targets[party]
        assert own is not None
        layout = self.layout(len(rows_N))[0][party]
        due = self._due(party, number, rows_hash(rows_N), layout)
        key = self.dither_key(number, party)
        self.headers_R = [None] * self.transport.size
        self.headers_R[party] = self._read(
            self.stream(party), self.held.pop(party), due, key, own, rows_N
        )
        self.table_M[party - 1][rows_N] = own[0]
        for table_SP, target in zip(self.table_M, targets[1:], strict=True):
            assert target is not None
            target[0][...] = table_SP[rows_N]

    def encode_gradient(
        self, party: int, number: int, rows_N: Array, gradient_NP: Array, updates: int
    ) -> Bytes:
        """Server: the answer to message `number` of `party`; valid until the next one."""
        due = self._due_gradient(number, rows_N)._replace(tau=updates)
        frame_B = self._scatter_slots[len(rows_N)][party]
        self.headers_R[0] = self._write_gradient(party, frame_B, due, gradient_NP, rows_N)
        return frame_B

    def encode_note(self, party: int, number: int, rows_N: Array, updates: int) -> Bytes:
        """Server: the header that calls `party` to an evaluation before its answer."""
        frame_B = self._scatter_slots[len(rows_N)][party][:HEADER_NBYTES]
        due = self._due_note(number, rows_N)._replace(tau=updates)
        write_header(frame_B, due, self.agreement.checksum_payload)
        return frame_B

    def receive_answer(self) -> Bytes:
        """Party: wait for a frame of the server; valid until the next call."""
        _, nbytes = self.transport.receive(self._room_B, 0, "grad")
        return self._room_B[:nbytes]

    def read_answer(
        self, frame_B: Bytes, number: int, rows_N: Array, party: PrivateParty
    ) -> tuple[int, bool]:
        """Party: (updates of the server so far, whether this is the gradient, now decoded for the
        step of `party`, and no call to an evaluation).
        """
        if frame_B.size != HEADER_NBYTES:
            return self._read_gradient(number, frame_B, rows_N, party).tau, True
        due = self._due_note(number, rows_N)
        try:
            return read_header(frame_B, due, self.agreement.checksum_payload).tau, False
        except WireError as error:
            raise WireError(f"rank {self.transport.rank}, {error}") from None

    def _due_note(self, number: int, rows_N: Array) -> Header:
        return self._due_gradient(number, rows_N)._replace(num_values=0, payload_nbytes=0)
