"""Accuracy on the test rows: uncompressed embeddings, eval mode, messages booked as "eval"."""

from __future__ import annotations

import math

import numpy as np
import torch

from hpcvfl.codecs.base import Message
from hpcvfl.codecs.floats import NoneCodec
from hpcvfl.codecs.frame import HEADER_NBYTES, Header, read_header, write_header
from hpcvfl.engine.blocks import Block, Server, Tower
from hpcvfl.engine.holder import Holder
from hpcvfl.errors import NonFiniteError, WireError
from hpcvfl.transport.base import Slots, Transport


def evaluate(block: Block, transport: Transport, round_index: int) -> tuple[float, float] | None:
    """(mean loss, accuracy) at the server, None elsewhere; called by every rank.

    Each party sends its embedding of all test rows as they are (the run's dtype); one gather.
    """
    config, num_rows = block.config, block.shard.num_test_rows
    shape = (num_rows, config.model.embedding_dim)
    layout = Message(NoneCodec(), [shape], np.dtype(config.dtype))
    size = HEADER_NBYTES + layout.nbytes
    senders = transport.size - 1
    slots = Slots(
        [0, *[size] * senders],
        ["control", *["eval"] * senders],
        [0, *[4 * layout.count] * senders],
    )

    summed = config.wire.checksum == "payload"

    def due(rank: int) -> Header:
        return Header(
            "eval", 0, config.block_of_rank[rank], round_index, layout.count, layout.nbytes
        )

    if isinstance(block, Tower):
        frame_B = slots[transport.rank]
        try:
            layout.encode([block.test_embedding()], 0, frame_B[HEADER_NBYTES:])
        except NonFiniteError as error:
            raise NonFiniteError(
                f"block {block.block}, round {round_index}, evaluation: {error}"
            ) from None
        write_header(frame_B, due(transport.rank), summed)
    transport.gather(slots)
    if not isinstance(block, Server):
        return None
    embeddings = {}
    if isinstance(block, Holder):
        embeddings[block.own.block] = torch.from_numpy(block.own.test_embedding())
    for rank in range(1, transport.size):
        embedding = torch.empty(shape, dtype=block.dtype)
        try:
            read_header(slots[rank], due(rank), summed)
            layout.decode(slots[rank][HEADER_NBYTES:], 0, [embedding.numpy()])
        except WireError as error:
            raise WireError(f"rank 0, evaluation, embedding of rank {rank}: {error}") from None
        embeddings[config.block_of_rank[rank]] = embedding
    loss, accuracy = block.evaluate([embeddings[party] for party in sorted(embeddings)])
    if not math.isfinite(loss):
        raise NonFiniteError(f"block 0, round {round_index}, evaluation: the loss is {loss}")
    return loss, accuracy
