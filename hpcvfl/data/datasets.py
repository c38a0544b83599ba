"""The table of datasets, and `load`: from a config to the shard of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcvfl.data import digits, fashion_mnist, files, synthetic
from hpcvfl.data.shard import Samples, Shard, check, check_batch_size, hold_out, to_shard
from hpcvfl.errors import ConfigError
from hpcvfl.sections import DataConfig

Reader = Callable[[DataConfig, int, int, int], Samples]  # (config, block, num_parties, seed)

READERS: dict[str, Reader] = {
    "digits": digits.read,
    "fashion-mnist": fashion_mnist.read,
    "synthetic": synthetic.read,
    "files": files.read,
}


def load(
    config: DataConfig,
    block: int,
    num_parties: int,
    seed: int,
    dtype: torch.dtype | str,
    labels: bool = True,
) -> Shard:
    """The training and test rows of one block, checked.

    config      : the block's own data section
    block       : 0 = server (labels and ids only), k = 1..num_parties = party k
    seed        : the run's seed; used by dataset = synthetic alone, all other splits use seed 0
    dtype       : torch.float32 | torch.float64, or its name
    labels      : whether this block is to hold them

    `validation_rows` > 0 puts that many training rows in place of the test set.
    Raises ConfigError for an unknown dataset or more parties than columns, DataError for data that
    is missing or cannot be trained on.
    """
    reader = READERS.get(config.dataset)
    if reader is None:
        raise ConfigError(
            f"data.dataset = {config.dataset!r}: unknown; choices: {', '.join(READERS)}"
        )
    if reader is files.read:
        samples = files.read(config, block, num_parties, seed, labels)
    else:
        samples = reader(config, block, num_parties, seed)
    if not labels:
        samples = samples.without_labels()
    check(samples, block)
    if config.validation_rows:
        samples = hold_out(samples, config.validation_rows)
    check_batch_size(len(samples.train_ids), config.batch_size, block)
    return to_shard(samples, block, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
