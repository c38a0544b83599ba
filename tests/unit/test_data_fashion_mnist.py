"""`fashion-mnist` on small files of the same format, made here: no test needs the real ones."""

import gzip

import numpy as np
import pytest

from hpcvfl import data
from hpcvfl.data import fashion_mnist
from hpcvfl.errors import DataError
from hpcvfl.sections import DataConfig

DRAW = np.random.default_rng(1)
ARRAYS = {
    "train-images-idx3-ubyte": DRAW.integers(0, 256, (30, 28, 28), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.arange(30, dtype=np.uint8) % 10,
    "t10k-images-idx3-ubyte": DRAW.integers(0, 256, (10, 28, 28), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.arange(10, dtype=np.uint8)[::-1].copy(),
}


def idx_bytes(array):
    """IDX as its authors state it: 0 0 type axes, each size big-endian, then the bytes."""
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return head + array.tobytes()


def write(folder, zipped=True):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ARRAYS.items():
        if zipped:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx_bytes(array)))
        else:
            (folder / name).write_bytes(idx_bytes(array))
    return folder


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    """A machine without the Debian package and with an empty home."""
    monkeypatch.setattr(fashion_mnist, "DEBIAN_FOLDER", tmp_path / "debian")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def load(root=None, block=1, **fields):
    config = DataConfig(dataset="fashion-mnist", root=root, batch_size=5, **fields)
    return data.load(config, block, 4, 0, "float32")


def assert_is_the_dataset(party2, server):
    """Party 2's upper right quadrants, normalised as by the mean and deviation in bytes."""
    images = ARRAYS["train-images-idx3-ubyte"][:, :14, 14:].astype(np.float64)
    due = (images - 255 * 0.2860406) / (255 * 0.3530242)
    assert party2.input_shape == (1, 14, 14)
    assert np.allclose(party2.train_x[:, 0].numpy(), due, atol=1e-6)
    assert server.train_x is None
    for shard in (party2, server):
        assert shard.train_y.tolist() == ARRAYS["train-labels-idx1-ubyte"].tolist()
        assert shard.test_y.tolist() == ARRAYS["t10k-labels-idx1-ubyte"].tolist()
        assert shard.num_classes == 10


@pytest.mark.parametrize("zipped", [True, False])
def test_files_in_root_are_read_cut_and_normalised(tmp_path, zipped):
    root = str(write(tmp_path / "raw", zipped))
    assert_is_the_dataset(load(root, block=2), load(root, block=0))


def test_a_folder_in_torchvisions_layout_is_found(tmp_path):
    write(tmp_path / "FashionMNIST" / "raw", zipped=False)
    assert_is_the_dataset(load(str(tmp_path), block=2), load(str(tmp_path), block=0))


def test_without_root_the_debian_packages_folder_is_read(no_files):
    write(no_files / "debian")
    assert_is_the_dataset(load(block=2), load(block=0))


def test_without_files_torchvision_downloads_once_into_the_cache(no_files, monkeypatch):
    calls = []

    def download(root, train, download):
        calls.append(root)
        write(no_files / "home" / ".cache" / "hpcvfl" / "FashionMNIST" / "raw")

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", download)
    assert_is_the_dataset(load(block=2), load(block=0))
    assert calls == [str(no_files / "home" / ".cache" / "hpcvfl")]


@pytest.mark.parametrize("error", [OSError("no route to host"), RuntimeError("File not found")])
def test_a_failed_download_says_all_three_ways_in_one_line(no_files, monkeypatch, error):
    def download(root, train, download):
        raise error

    monkeypatch.setattr("torchvision.datasets.FashionMNIST", download)
    with pytest.raises(DataError) as caught:
        load()
    message = str(caught.value)
    for words in ("dataset-fashion-mnist", "data.root", "torchvision", str(error)):
        assert words in message
    assert "\n" not in message


def test_a_root_without_the_files_is_refused_and_nothing_else_is_searched(no_files):
    write(no_files / "debian")
    with pytest.raises(DataError, match=r"data\.root = .*empty lacks one of train-images"):
        load(str(no_files / "empty"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        idx_bytes(ARRAYS["train-labels-idx1-ubyte"]),
        idx_bytes(ARRAYS["train-images-idx3-ubyte"])[:-1],
        idx_bytes(ARRAYS["train-images-idx3-ubyte"]) + b"\x00",
        b"\x00\x00\x09\x03" + idx_bytes(ARRAYS["train-images-idx3-ubyte"])[4:],
    ],
)
def test_a_file_that_is_no_idx_of_images_is_named(tmp_path, content):
    root = write(tmp_path / "raw")
    (root / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is no IDX file of 3 axes"):
        load(str(root))


@pytest.mark.parametrize("content", [b"not gzip at all", gzip.compress(b"x" * 5000, mtime=0)[:30]])
def test_a_file_that_does_not_unzip_is_named(tmp_path, content):
    root = write(tmp_path / "raw")
    (root / "train-labels-idx1-ubyte.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"cannot read .*train-labels-idx1-ubyte\.gz"):
        load(str(root))
