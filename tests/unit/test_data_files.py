"""`files`: one .npz a party, read without pickle."""

import numpy as np
import pytest
import torch

from hpcvfl import data
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import DataConfig

ARRAYS = {
    "train_x": np.arange(20, dtype=np.int16).reshape(10, 2),
    "train_y": np.arange(10) % 3,
    "train_ids": np.array([f"patient-{i}" for i in range(10)]),
    "test_x": np.ones((3, 2), dtype=np.float32),
    "test_y": np.array([0, 1, 2]),
    "test_ids": np.array(["a", "b", "c"]),
}


def write(path, **changes):
    """An .npz of ARRAYS with changes (None drops a key); returns its path for the config."""
    arrays = {key: value for key, value in {**ARRAYS, **changes}.items() if value is not None}
    np.savez(path, **arrays)
    return str(path)


def load(root, block=1, **fields):
    config = DataConfig(dataset="files", root=root, batch_size=2, **fields)
    return data.load(config, block, 2, 0, "float32")


def test_a_partys_file_is_read_as_it_was_written(tmp_path):
    shard = load(write(tmp_path / "party1.npz"))
    assert torch.equal(shard.train_x, torch.arange(20.0).reshape(10, 2))
    assert shard.train_x.dtype == torch.float32
    assert shard.train_y.tolist() == ARRAYS["train_y"].tolist()
    assert shard.num_classes == 3
    assert shard.input_shape == (2,)


def test_the_servers_file_holds_labels_and_ids_only(tmp_path):
    server = load(write(tmp_path / "server.npz", train_x=None, test_x=None), block=0)
    assert server.train_x is None
    assert server.input_shape == ()
    assert server.ids_digest == load(write(tmp_path / "party1.npz")).ids_digest


def test_the_server_does_not_load_features_that_its_file_has(tmp_path):
    assert load(write(tmp_path / "party1.npz"), block=0).train_x is None


def test_another_order_of_ids_is_another_digest(tmp_path):
    swapped = ARRAYS["train_ids"][[1, 0, *range(2, 10)]]
    there = load(write(tmp_path / "party2.npz", train_ids=swapped))
    assert there.ids_digest != load(write(tmp_path / "party1.npz")).ids_digest


def test_num_classes_in_the_file_wins_over_the_largest_label(tmp_path):
    assert load(write(tmp_path / "p.npz", num_classes=np.array(7))).num_classes == 7
    with pytest.raises(DataError, match=r"party 1: train_y row 2 is 2, labels must be 0\.\.1"):
        load(write(tmp_path / "p.npz", num_classes=np.array(2)))


def test_validation_rows_keep_rows_and_labels_together(tmp_path):
    shard = load(write(tmp_path / "p.npz"), validation_rows=4)
    for x, y in ((shard.train_x, shard.train_y), (shard.test_x, shard.test_y)):
        assert y.tolist() == [int(first / 2) % 3 for first in x[:, 0]]
    assert len(shard.test_y) == 4


@pytest.mark.parametrize("key", ARRAYS)
def test_a_missing_key_is_named_together_with_what_is_needed(tmp_path, key):
    path = write(tmp_path / "p.npz", **{key: None})
    with pytest.raises(DataError, match=rf"party 1: .*p\.npz lacks {key}; it needs train_x, "):
        load(path)


def test_no_file_set_is_a_config_error_that_says_how_to_set_it():
    with pytest.raises(ConfigError, match=r"data.root = None: .* party 1's .*\[party\.1\] data\.r"):
        load(None)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"party 1: cannot read .*none\.npz: .*No such file"):
        load(str(tmp_path / "none.npz"))


@pytest.mark.parametrize("share", [0.02, 0.5, 0.98])
def test_a_file_cut_short_is_refused(tmp_path, share):
    write(tmp_path / "p.npz")
    whole = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=r"party 1: cannot read .*cut\.npz"):
        load(str(tmp_path / "cut.npz"))


def test_a_compressed_file_with_a_flipped_byte_is_refused_or_read_right(tmp_path):
    path = tmp_path / "p.npz"
    np.savez_compressed(path, **ARRAYS)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            shard = load(str(path))
        except DataError:
            refused += 1
        else:
            assert torch.equal(shard.train_x, torch.arange(20.0).reshape(10, 2))
    assert refused > 100


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"col1,col2\n1,2\n"])
def test_a_file_that_is_no_npz_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "p.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"party 1: cannot read .*p\.npz") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


def test_a_single_array_is_refused(tmp_path):
    np.save(tmp_path / "p.npy", ARRAYS["train_x"])
    with pytest.raises(DataError, match=r"holds one array .*np\.savez"):
        load(str(tmp_path / "p.npy"))


def test_a_file_with_pickled_objects_is_refused_and_nothing_of_it_runs(tmp_path):
    ran = tmp_path / "ran"

    class Bomb:
        def __reduce__(self):
            return (open, (str(ran), "w"))

    path = write(tmp_path / "p.npz", train_ids=np.array([Bomb()] * 10, dtype=object))
    ran.unlink(missing_ok=True)
    with pytest.raises(DataError, match="without object arrays"):
        load(path)
    assert not ran.exists()


def test_an_image_shaped_array_keeps_its_axes(tmp_path):
    shape = {"train_x": np.zeros((10, 1, 4, 5)), "test_x": np.zeros((3, 1, 4, 5))}
    assert load(write(tmp_path / "p.npz", **shape)).input_shape == (1, 4, 5)
