"""A block on disk: safetensors, one file a rank, written aside and renamed.

The memory that all ranks keep of a sender's messages (error feedback) is saved once, by the sender.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hpcvfl.codecs.stream import Stream
from hpcvfl.config import digest
from hpcvfl.engine.agree import together
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.exchange import Exchange
from hpcvfl.errors import DataError
from hpcvfl.transport.base import Slots


def block_path(folder: Path, rank: int) -> Path:
    """Where the final weights of block `rank` lie in a run folder."""
    return folder / "checkpoints" / "final" / f"rank{rank}.safetensors"


def identity(block: Block) -> dict[str, str]:
    """What a file is of: block number, digest of all that decides its numbers."""
    parts = (f"block {block.block}", digest(block.config), digest(block.config, ("local",)))
    return {"hpcvfl": " ".join(parts)}  # one key: the order of several is not fixed


def save_block(folder: Path, block: Block) -> Path:
    """Write parameters and buffers of the block; a file is there in whole or not at all."""
    # Copies, since safetensors refuses tensors that share memory (tied parameters).
    state = {name: value.clone().contiguous() for name, value in block.module.state_dict().items()}
    return _save(block_path(folder, block.block), state, block)


def save_memory(folder: Path, block: Block, stream: Stream) -> Path | None:
    """Write what all ranks remember of this block's messages; None if that is nothing."""
    if not stream.memories:
        return None
    state = {f"memory.{i}": torch.from_numpy(m.state_SP) for i, m in enumerate(stream.memories)}
    return _save(memory_path(folder, block.block), state, block)


def load_memories(folder: Path, block: Block, exchange: Exchange) -> None:
    """Read the own memory and receive everybody else's from them; called by every rank.

    Raises DataError, on every rank, where a file is missing, broken or of another run.
    """
    transport = exchange.transport
    own = exchange.streams_R[transport.rank]

    def read_own() -> None:
        if not own.memories:
            return
        path = memory_path(folder, block.block)
        state = _load(path, block)
        for i, memory in enumerate(own.memories):
            value = state.get(f"memory.{i}")
            due = memory.state_SP
            if value is None or value.shape != due.shape or value.numpy().dtype != due.dtype:
                raise DataError(f"{path}: memory.{i} is not of {due.dtype} {due.shape}")
            due[...] = value.numpy()

    together(transport, read_own)
    for rank, stream in enumerate(exchange.streams_R):
        for memory in stream.memories:
            sizes = [0] * transport.size
            sizes[rank] = memory.state_SP.nbytes
            slots = Slots(sizes, ["control"] * transport.size, [0] * transport.size)
            bytes_B = memory.state_SP.reshape(-1).view(np.uint8)
            slots[rank][:] = bytes_B
            transport.broadcast(slots, root=rank)
            bytes_B[:] = slots[rank]


def memory_path(folder: Path, rank: int) -> Path:
    """Where the memory of the messages of block `rank` lies in a run folder."""
    return block_path(folder, rank).with_name(f"memory.rank{rank}.safetensors")


def _save(path: Path, state: dict[str, torch.Tensor], block: Block) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    try:
        save_file(state, aside, metadata=identity(block))
    except SafetensorError as error:
        raise OSError(str(error)) from None
    os.replace(aside, path)
    return path


def load_block(folder: Path, block: Block) -> None:
    """Read what `save_block` wrote; DataError if it is missing, broken or of another
    architecture.
    """
    path = block_path(folder, block.block)
    state = _load(path, block)
    try:
        block.module.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[-1].strip()
        raise DataError(f"{path}: does not fit the model of config.toml: {first}") from None


def _load(path: Path, block: Block) -> dict[str, torch.Tensor]:
    """Tensors of a file of this very block; DataError if it is missing, broken or another's."""
    try:
        with safe_open(path, framework="pt") as file:
            came = file.metadata() or {}
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}); did the run finish?") from None
    if came != identity(block):
        raise DataError(
            f"{path}: written by {came or 'another program'}, config.toml says {identity(block)};"
            " it was changed after the run"
        )
    return state
