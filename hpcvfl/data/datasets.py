"""The table of datasets, and `load`: from a config to the shard of one rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpcvfl.config import DataConfig
from hpcvfl.data import digits, fashion_mnist, files, synthetic
from hpcvfl.data.shard import Samples, Shard, check, check_batch_size, hold_out, to_shard
from hpcvfl.errors import ConfigError

Reader = Callable[[DataConfig, int, int, int], Samples]  # (config, block, num_parties, seed)

READERS: dict[str, Reader] = {
    "digits": digits.read,
    "fashion-mnist": fashion_mnist.read,
    "synthetic": synthetic.read,
    "files": files.read,
}


def load(
    config: DataConfig, block: int, num_parties: int, seed: int, dtype: torch.dtype | str
) -> Shard:
    """The training and test rows of one block, checked.

    config      : the block's own data section
    block       : 0 = server (labels and ids only), k = 1..num_parties = party k
    seed        : the run's seed; used by dataset = synthetic alone, all other splits use seed 0
    dtype       : torch.float32 | torch.float64, or its name

    `validation_rows` > 0 puts that many training rows in place of the test set.
    Raises ConfigError for an unknown dataset or more parties than columns, DataError for data that
    is missing or cannot be trained on.
    """
    reader = READERS.get(config.dataset)
    if reader is None:
        raise ConfigError(
            f"data.dataset = {config.dataset!r}: unknown; choices: {', '.join(READERS)}"
        )
    samples = reader(config, block, num_parties, seed)
    check(samples, block)
    if config.validation_rows:
        samples = hold_out(samples, config.validation_rows)
    check_batch_size(len(samples.train_y), config.batch_size, block)
    return to_shard(samples, block, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
