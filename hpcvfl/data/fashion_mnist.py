"""`fashion-mnist`: 70,000 real 28x28 grey images of ten kinds of clothing (Xiao et al. 2017).

Files: the four *-ubyte[.gz] of the dataset, in the IDX format (big-endian header, then bytes).
"""

from __future__ import annotations

import fcntl
import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from hpcvfl.data.partition import image_patch
from hpcvfl.data.shard import Samples
from hpcvfl.errors import DataError
from hpcvfl.sections import DataConfig

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # Debian package dataset-fashion-mnist
FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
MEAN, STD = 0.2860406, 0.3530242  # of all pixels / 255 of the 60,000 training images
NUM_CLASSES = 10
WAYS = (
    "install the Debian package dataset-fashion-mnist, or set data.root to a folder with the four"
    " idx .gz files, or run once with internet access (torchvision downloads them)"
)


def read(config: DataConfig, block: int, num_parties: int, seed: int) -> Samples:
    """Pixels normalised by the mean and deviation of the training set; ids = rows of the files.

    Looks in `root` if set (and nowhere else); otherwise in the Debian package's folder, then in
    ~/.cache/hpcvfl, then downloads with torchvision into the latter.
    """
    paths = _find(config.root)
    train_y, test_y = (read_idx(paths[i], 1) for i in (1, 3))
    train_x = test_x = None
    if block > 0:
        train_x, test_x = (_patches(read_idx(paths[i], 3), num_parties, block) for i in (0, 2))
    return Samples(
        train_x=train_x,
        train_y=train_y,
        train_ids=np.arange(len(train_y), dtype=np.int64),
        test_x=test_x,
        test_y=test_y,
        test_ids=np.arange(len(test_y), dtype=np.int64),
        num_classes=NUM_CLASSES,
    )


def _patches(images_NHW: np.ndarray, num_parties: int, party: int) -> np.ndarray:
    """float32, shape (N, 1, h, w); cut first, so that no more than a patch is ever widened."""
    patch = image_patch(images_NHW, num_parties, party)
    return (patch.astype(np.float32) / np.float32(255) - np.float32(MEAN)) / np.float32(STD)


def read_idx(path: Path, ndim: int) -> np.ndarray:
    """The array of an IDX file of bytes, plain or gzipped: uint8, `ndim` axes. Raises DataError."""
    try:
        data = (gzip.open if path.suffix == ".gz" else open)(path, "rb").read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"dataset fashion-mnist: cannot read {path}: {error}; {WAYS}") from None
    header = 4 + 4 * ndim
    magic = bytes([0, 0, 8, ndim])  # 8 = unsigned bytes
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, header, 4))
    if data[:4] != magic or len(data) != header + math.prod(shape):
        raise DataError(
            f"dataset fashion-mnist: {path} is no IDX file of {ndim} axes (starts with"
            f" {data[:4].hex()}, {len(data)} bytes, header says {shape}); replace it: {WAYS}"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)


def _find(root: str | None) -> list[Path]:
    if root is not None:
        paths = _files_in(Path(root)) or _files_in(Path(root) / "FashionMNIST" / "raw")
        if paths is None:
            raise DataError(
                f"dataset fashion-mnist: data.root = {root} lacks one of"
                f" {', '.join(f'{name}-ubyte.gz' for name in FILES)}; {WAYS}"
            )
        return paths
    return _files_in(DEBIAN_FOLDER) or _download(Path.home() / ".cache" / "hpcvfl")


def _files_in(folder: Path) -> list[Path] | None:
    """The four files in the order of FILES, gzipped or plain, or None if one is missing."""
    found = []
    for name in FILES:
        choices = [folder / f"{name}-ubyte.gz", folder / f"{name}-ubyte"]
        found += [path for path in choices if path.is_file()][:1]
    return found if len(found) == len(FILES) else None


def _download(cache: Path) -> list[Path]:
    """Fetch with torchvision unless the cache has the files; one rank a host does, others wait."""
    folder = cache / "FashionMNIST" / "raw"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, also if the rank dies
            if _files_in(folder) is None:
                from torchvision.datasets import FashionMNIST  # 1.3 s of CPU, so only when needed

                FashionMNIST(str(cache), train=True, download=True)
    except (OSError, RuntimeError) as error:  # URLError is an OSError; RuntimeError: bad checksum
        reason = str(error).strip().splitlines()[:1]
        raise DataError(
            f"dataset fashion-mnist: not in {DEBIAN_FOLDER} and the download failed"
            f" ({': '.join([type(error).__name__, *reason])}); {WAYS}"
        ) from None
    paths = _files_in(folder)
    if paths is None:
        raise DataError(f"dataset fashion-mnist: the download left no files in {folder}; {WAYS}")
    return paths
