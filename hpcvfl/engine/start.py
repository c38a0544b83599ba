"""From a config to blocks that have agreed on everything: loading, building, the handshake."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcvfl import seeds
from hpcvfl.codecs import table
from hpcvfl.codecs.frame import WIRE_VERSION
from hpcvfl.config import Config, all_fields, flatten
from hpcvfl.data import Shard, load
from hpcvfl.engine.agree import require_equal, together
from hpcvfl.engine.blocks import Block, Party, PrivateParty, Server
from hpcvfl.engine.exchange import Agreement
from hpcvfl.engine.holder import Holder
from hpcvfl.engine.tensors import DTYPES
from hpcvfl.errors import ConfigError, WireError
from hpcvfl.models import build_head, build_tower
from hpcvfl.transport.base import Transport


def check_size(config: Config, size: int) -> None:
    """Raise ConfigError unless `size` ranks fit the config; names both ways to mend it."""
    due = len(config.block_of_rank)
    if size != due:
        fitting = size - due + config.num_parties
        other = f" or set --num-parties {fitting}" if size > 1 else ""
        server = "the server is with a party" if config.holder_party else "one server"
        raise ConfigError(
            f"start-up: {size} rank{'s' * (size != 1)} came, num_parties = {config.num_parties}"
            f" needs {due} ({server}, {config.num_parties} parties); start {due} ranks"
            f" (mpiexec -n {due} ..){other}"
        )


def start(config: Config, transport: Transport) -> tuple[Block, Agreement]:
    """Build this rank's block and compare with the others.

    An error on any rank (data, model, codec) and any difference between ranks is raised on all of
    them, before the first round.
    """
    blocks: list[Block] = []

    def work() -> dict[str, Any]:
        check_size(config, transport.size)
        own = config.for_block(config.block_of_rank[transport.rank])
        block = build_block(config, config.block_of_rank[transport.rank])
        blocks.append(block)
        for unused in (own.codec, own.head_codec, own.labels.gradient_codec):
            table.parse(unused)  # a typing error shows, whether it is used in this run or not
        codec = own.codec if transport.rank else codec_of_server(own)
        return {
            "codec": table.parse(codec).spec,
            "head": head_shapes(block),
            "compare": handshake_record(own, block.shard),
        }

    records = together(transport, work)
    for rank, record in enumerate(records):
        if not isinstance(record, dict) or record.keys() != {"codec", "head", "compare"}:
            raise WireError(
                f"start-up: rank {rank} sent {str(record)[:80]!r}, due are codec, head and compare;"
                " do all ranks run the same version?"
            )
    require_equal([record["compare"] for record in records])
    require_equal([{"head shapes": record["head"]} for record in records])
    agreement = Agreement(
        codecs_R=[table.parse(record["codec"]) for record in records],
        head_shapes=[tuple(shape) for shape in records[0]["head"]],
        embedding_dim=config.model.embedding_dim,
        dtype=np.dtype(config.dtype),
        seed=config.seed,
        num_rows=blocks[0].shard.num_rows,
        num_blocks=config.num_parties + 1,
        block_of_rank=config.block_of_rank,
        checksum_payload=config.wire.checksum == "payload",
        private=config.private_labels,
    )
    return blocks[0], agreement


def codec_of_server(config: Config) -> str:
    """Codec of what the server sends: the head, or gradients."""
    return config.labels.gradient_codec if config.private_labels else config.head_codec


def head_shapes(block: Block) -> list[list[int]]:
    """Shapes of the head's parameters as everybody knows them; of none where no head travels."""
    if block.config.private_labels:
        return []
    head = block.head_copy if isinstance(block, Party) else block.module
    return [list(p.shape) for p in head.parameters()]


def build_block(config: Config, number: int) -> Block:
    """Load the data of block `number` and build its module; block 0 of a config whose labels a
    party holds has that party's tower beside it.
    """
    own = config.for_block(number)
    if number == 0 and config.holder_party and own.data.root is None:
        # The labels are that party's, and so is their file.
        root = config.for_block(config.holder_party).data.root
        own = own.model_copy(update={"data": own.data.model_copy(update={"root": root})})
    torch.set_num_threads(own.threads)
    dtype = getattr(torch, own.dtype)
    labels = number == 0 or not own.private_labels
    shard = load(own.data, number, own.num_parties, own.seed, own.dtype, labels)
    if labels:
        head_key = seeds.key64(own.seed, "weights", 0)
        head = build_head(own.model, own.num_parties, shard.num_classes, dtype, head_key)
        check_state(contiguous(head), "model.head")
    if number == 0:
        check_last_batch(head, shard.num_rows, own.data.batch_size, "model.head")
        if config.holder_party:
            return Holder(own, shard, head, build_block(config, config.holder_party))
        return Server(0, own, shard, head)
    key = seeds.key64(own.seed, "weights", number)
    tower = contiguous(build_tower(own.model, shard.input_shape, dtype, key))
    check_state(tower, "model.tower")
    check_last_batch(tower, shard.num_rows, own.data.batch_size, "model.tower")
    if not labels:
        return PrivateParty(number, own, shard, tower)
    return Party(number, own, shard, tower, head)


def contiguous(module: nn.Module) -> nn.Module:
    """Lay every parameter and buffer out row by row: messages are read from and decoded into that
    memory, and checkpoints into all of it (an expanded tensor has less than it shows).
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()
    own: dict[int, torch.Tensor] = {}  # a buffer that has two names keeps them
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False, remove_duplicate=False):
            setattr(part, name, own.setdefault(id(buffer), buffer.contiguous()))
    return module


def check_state(module: nn.Module, field: str) -> None:
    """Raise ConfigError if the module's state cannot be saved; better now than after training."""
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise ConfigError(f"{field}: state {name!r} is no tensor and cannot be saved")
        if value.dtype not in DTYPES or value.layout != torch.strided:
            kind = f"{value.dtype} ({value.layout})"
            raise ConfigError(f"{field}: state {name!r} is of {kind}, which cannot be saved")


def check_last_batch(module: nn.Module, num_rows: int, batch_size: int, field: str) -> None:
    """Raise ConfigError if batch normalisation would meet a batch of one row, which it cannot."""
    last = num_rows % batch_size or batch_size
    normed = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in module.modules())
    if normed and last == 1:
        raise ConfigError(
            f"data.batch_size = {batch_size}: the last batch of {num_rows} rows has 1 row, which"
            f" batch normalisation in {field} cannot take; choose {batch_size + 1}, or another"
            " kind of normalisation"
        )


def handshake_record(config: Config, shard: Shard) -> dict[str, Any]:
    """What every rank must have in common, by the name that an error shows."""
    values = dict(flatten(config.model_dump(mode="json", exclude={"party"})))
    record: dict[str, Any] = {"wire version": WIRE_VERSION, "label policy": config.labels.holder}
    record |= {path: values[path] for path, scope in all_fields() if scope == "shared"}
    # None means "no such field here" in a record, so an unset option is spelled out.
    record = {field: "unset" if value is None else value for field, value in record.items()}
    record["transport.pattern"] = config.transport.pattern
    record["number of training rows"] = shard.num_rows
    record["number of test rows"] = shard.num_test_rows
    record["digest of the sample ids"] = shard.ids_digest
    if not config.private_labels:
        record["number of classes"] = shard.num_classes
        record["digest of the labels"] = labels_digest(shard)
    return record


def labels_digest(shard: Shard) -> str:
    """BLAKE2b (hex) of training and test labels in order; all ranks hold the same ones."""
    digest = hashlib.blake2b(digest_size=16)
    for labels_N in (shard.train_y, shard.test_y):
        assert labels_N is not None
        digest.update(f"{len(labels_N)};".encode())
        digest.update(labels_N.numpy().astype("<i8").tobytes())
    return digest.hexdigest()
