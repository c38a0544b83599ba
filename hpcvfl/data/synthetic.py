"""`synthetic`: a mixture of Gaussians of any size, for benches and for tests without files."""

from __future__ import annotations

import numpy as np

from hpcvfl import seeds
from hpcvfl.data.partition import bounds
from hpcvfl.data.shard import Samples
from hpcvfl.errors import ConfigError
from hpcvfl.sections import DataConfig

CLASS_DISTANCE = 6.0  # typical distance of two class means, in standard deviations of the noise
TEST_SHARE = 0.2


def read(config: DataConfig, block: int, num_parties: int, seed: int) -> Samples:
    """Classes of equal size around random means with unit noise; columns split evenly over parties.

    The first parties hold one column more. Every column is drawn from a generator of its own,
    keyed by (seed, column): a party draws its columns alone, and a column does not depend on M.
    """
    if num_parties > config.num_features:
        raise ConfigError(
            f"num_parties = {num_parties}: data.num_features = {config.num_features} columns leave"
            f" some party without any; choose at most {config.num_features} parties"
        )
    total = config.num_samples
    draw = seeds.generator(seed, "synthetic", "labels")
    y_N = draw.permutation(np.arange(total, dtype=np.int64) % config.num_classes)
    ids_N = np.arange(total, dtype=np.int64)
    cut = total - max(1, int(TEST_SHARE * total))
    x_ND = None if block == 0 else _columns(config, block, num_parties, seed, y_N)
    return Samples(
        train_x=None if x_ND is None else x_ND[:cut],
        train_y=y_N[:cut],
        train_ids=ids_N[:cut],
        test_x=None if x_ND is None else x_ND[cut:],
        test_y=y_N[cut:],
        test_ids=ids_N[cut:],
        num_classes=config.num_classes,
    )


def _columns(
    config: DataConfig, block: int, num_parties: int, seed: int, y_N: np.ndarray
) -> np.ndarray:
    start, stop = bounds(config.num_features, num_parties, block - 1)
    x_ND = np.empty((len(y_N), stop - start), dtype=np.float32)
    spread = CLASS_DISTANCE / np.sqrt(2 * config.num_features)
    for column in range(start, stop):
        draw = seeds.generator(seed, "synthetic", "column", column)
        mean_C = spread * draw.standard_normal(config.num_classes)
        x_ND[:, column - start] = mean_C[y_N] + draw.standard_normal(len(y_N))
    return x_ND
