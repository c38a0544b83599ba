"""`digits`: 1,797 real 8x8 scans of handwritten digits, shipped inside scikit-learn's wheel."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from hpcvfl import seeds
from hpcvfl.data.partition import image_patch
from hpcvfl.data.shard import Samples
from hpcvfl.errors import DataError
from hpcvfl.sections import DataConfig

MAX_PIXEL = 16.0  # grey levels are 0..16 (UCI optdigits: counts of on-pixels in 4x4 blocks)
TEST_SHARE = 0.2
NUM_CLASSES = 10


def read(config: DataConfig, block: int, num_parties: int, seed: int) -> Samples:
    """Pixels in 0..1; stratified 80/20 split, equal for all run seeds; ids = rows of the file."""
    table_ND = _table()
    images_NHW = (table_ND[:, :64] / MAX_PIXEL).reshape(-1, 8, 8)
    y_N = table_ND[:, 64].astype(np.int64)
    train_N, test_N = stratified_split(y_N, TEST_SHARE)
    x = None if block == 0 else image_patch(images_NHW, num_parties, block)
    return Samples(
        train_x=None if x is None else x[train_N],
        train_y=y_N[train_N],
        train_ids=train_N,
        test_x=None if x is None else x[test_N],
        test_y=y_N[test_N],
        test_ids=test_N,
        num_classes=NUM_CLASSES,
    )


def stratified_split(y_N: np.ndarray, test_share: float) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) row numbers, ascending; an equal share of every class is test, seed 0."""
    draw = seeds.generator(0, "stratified split")
    is_test_N = np.zeros(len(y_N), dtype=bool)
    for label in np.unique(y_N):
        rows = draw.permutation(np.flatnonzero(y_N == label))
        is_test_N[rows[: round(test_share * len(rows))]] = True
    return np.flatnonzero(~is_test_N), np.flatnonzero(is_test_N)


def _table() -> np.ndarray:
    """64 pixels and the label of each scan, float64, shape (1797, 65).

    Read from scikit-learn's folder without importing it: the import costs each rank 1.3 s of CPU,
    3 s of the start-up of five ranks on two cores.
    """
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("dataset digits: scikit-learn is not installed; pip install scikit-learn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.exists():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits  # for a release that keeps the file elsewhere

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
