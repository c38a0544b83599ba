"""A block on disk: safetensors, one file a rank, written aside and renamed.

What all ranks remember of a sender's messages (stream.py of the codecs) is saved once, by the
sender.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from hpcvfl.config import digest
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.exchange import Exchange
from hpcvfl.engine.folder import make_folder
from hpcvfl.engine.tensors import KEY, write_tensors
from hpcvfl.errors import DataError


def block_path(folder: Path, rank: int) -> Path:
    """Where the final weights of block `rank` lie in a run folder."""
    return folder / "checkpoints" / "final" / f"rank{rank}.safetensors"


def identity(block: Block) -> str:
    """What a file is of: block number, digest of all that decides its numbers."""
    parts = (f"block {block.block}", digest(block.config), digest(block.config, ("local",)))
    return " ".join(parts)


def save_block(folder: Path, block: Block) -> Path:
    """Write parameters and buffers of the block; a file is there in whole or not at all."""
    return _save(block_path(folder, block.block), block.module.state_dict(), block)


def save_stream(folder: Path, block: Block, exchange: Exchange) -> Path | None:
    """Write what lasts of this rank's messages from round to round; None if nothing does.

    What all ranks remember is written here alone, by its sender; a score of columns besides.
    """
    state = {name: torch.from_numpy(value) for name, value in exchange.own_state().items()}
    score_C = block.score()
    if score_C is not None:
        state["score"] = torch.from_numpy(score_C)
    return _save(stream_path(folder, block.block), state, block) if state else None


def stream_path(folder: Path, rank: int) -> Path:
    """Where the stream of block `rank` lies in a run folder."""
    return block_path(folder, rank).with_name(f"stream.rank{rank}.safetensors")


def _save(path: Path, state: dict[str, torch.Tensor], block: Block) -> Path:
    make_folder(path.parent, 2)
    write_tensors(path, state, identity(block))
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
            came = (file.metadata() or {}).get(KEY, "")
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read ({error}); did the run finish?") from None
    if came != identity(block):
        raise DataError(
            f"{path}: written by {came or 'another program'}, config.toml says {identity(block)};"
            " it was changed after the run"
        )
    return state
