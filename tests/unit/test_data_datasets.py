"""The readers and `load`: right rows, own columns only, the same on every rank."""

import numpy as np
import pytest
import torch

from hpcvfl import data
from hpcvfl.data import digits
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import DataConfig


def blocks_of(config, num_parties=4, seed=0, dtype=torch.float32):
    """The shards of all blocks, server first."""
    return [data.load(config, block, num_parties, seed, dtype) for block in range(num_parties + 1)]


def quadrants_to_images(shards):
    """(train, test) images put together again from the shards of four parties."""
    out = []
    for name in ("train_x", "test_x"):
        q = [getattr(shard, name)[:, 0].numpy() for shard in shards[1:]]
        rows = [np.concatenate(q[:2], axis=2), np.concatenate(q[2:], axis=2)]
        out.append(np.concatenate(rows, axis=1))
    return out


def test_digits_of_four_parties_are_scikit_learns_images_in_every_row():
    from sklearn.datasets import load_digits

    truth = load_digits()
    config = DataConfig(dataset="digits")
    images = dict(zip(("train", "test"), quadrants_to_images(blocks_of(config)), strict=True))
    samples = digits.read(config, 0, 4, 0)
    for part, _, y, ids in samples.parts():
        assert np.array_equal(images[part], (truth.images[ids] / 16).astype(np.float32))
        assert np.array_equal(y, truth.target[ids])
    both = np.concatenate([samples.train_ids, samples.test_ids])
    assert sorted(both) == list(range(len(truth.target)))


def test_digits_split_is_80_to_20_in_every_class():
    samples = digits.read(DataConfig(), 0, 4, 0)
    train, test = (np.bincount(y, minlength=10) for y in (samples.train_y, samples.test_y))
    assert np.all(np.abs(test - 0.2 * (train + test)) <= 0.5)
    assert abs(len(samples.test_y) - 0.2 * 1797) <= 2


def test_digits_split_does_not_depend_on_the_seed_of_the_run():
    first, second = (data.load(DataConfig(), 1, 4, seed, "float32") for seed in (0, 1))
    assert torch.equal(first.train_x, second.train_x)
    assert first.ids_digest == second.ids_digest


def test_digits_of_a_release_without_the_file_are_the_same_numbers(monkeypatch, tmp_path):
    class Spec:
        origin = str(tmp_path / "__init__.py")

    table = digits._table()
    monkeypatch.setattr(digits, "find_spec", lambda name: Spec)
    assert np.array_equal(digits._table(), table)


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch):
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install scikit-learn"):
        data.load(DataConfig(), 0, 4, 0, "float32")


@pytest.mark.parametrize("dataset", ["digits", "synthetic"])
def test_all_blocks_hold_the_same_labels_and_ids_and_the_server_no_features(dataset):
    server, *parties = blocks_of(DataConfig(dataset=dataset))
    assert server.train_x is None
    assert server.test_x is None
    assert server.input_shape == ()
    for k, party in enumerate(parties, start=1):
        assert party.block == k
        assert party.ids_digest == server.ids_digest
        assert torch.equal(party.train_y, server.train_y)
        assert torch.equal(party.test_y, server.test_y)
        assert party.num_rows == len(party.train_x) == server.num_rows
        assert party.train_x.shape[1:] == party.test_x.shape[1:] == party.input_shape


@pytest.mark.parametrize("dataset", ["digits", "synthetic"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_shards_tensors_are_contiguous_of_the_runs_dtype_and_no_view_of_more(dataset, dtype):
    shard = data.load(DataConfig(dataset=dataset, validation_rows=50), 2, 4, 0, dtype)
    for x in (shard.train_x, shard.test_x):
        assert x.dtype == getattr(torch, dtype)
        assert x.is_contiguous()
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
    assert shard.train_y.dtype == shard.test_y.dtype == torch.int64


def test_synthetic_columns_do_not_depend_on_the_number_of_parties():
    config = DataConfig(dataset="synthetic", num_features=10, num_samples=50, batch_size=8)
    whole = data.load(config, 1, 1, 5, "float64").train_x
    for num_parties, widths in ((3, [4, 3, 3]), (4, [3, 3, 2, 2]), (10, [1] * 10)):
        shards = [data.load(config, k + 1, num_parties, 5, "float64") for k in range(num_parties)]
        assert [shard.input_shape for shard in shards] == [(w,) for w in widths]
        assert torch.equal(torch.cat([shard.train_x for shard in shards], dim=1), whole)


def test_synthetic_depends_on_the_seed_and_on_nothing_else():
    config = DataConfig(dataset="synthetic")
    a, again, b = (data.load(config, 1, 4, seed, "float32") for seed in (3, 3, 4))
    assert torch.equal(a.train_x, again.train_x)
    assert not torch.equal(a.train_x, b.train_x)


def test_synthetic_has_equal_classes_that_nearest_mean_tells_apart():
    config = DataConfig(dataset="synthetic", num_classes=4, num_samples=1000)
    shard = data.load(config, 1, 1, 0, "float64")
    assert np.bincount(torch.cat([shard.train_y, shard.test_y]).numpy()).tolist() == [250] * 4
    means = torch.stack([shard.train_x[shard.train_y == c].mean(0) for c in range(4)])
    guess = torch.cdist(shard.test_x, means).argmin(1)
    assert (guess == shard.test_y).double().mean() > 0.9


def test_more_parties_than_synthetic_columns_is_refused():
    config = DataConfig(dataset="synthetic", num_features=3, batch_size=1)
    with pytest.raises(ConfigError, match=r"num_parties = 4: data.num_features = 3 .* at most 3"):
        data.load(config, 1, 4, 0, "float32")


def test_an_unknown_dataset_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'mnist': unknown; choices: digits, fashion-mnist, syn"):
        data.load(DataConfig(dataset="mnist"), 0, 4, 0, "float32")


def test_validation_rows_come_from_the_training_set_and_replace_the_test_set():
    plain = digits.read(DataConfig(), 1, 4, 0)
    held = data.load(DataConfig(validation_rows=300), 1, 4, 0, "float64")
    assert held.num_rows == len(plain.train_y) - 300
    assert len(held.test_y) == 300
    rows = {x.tobytes() for x in plain.train_x}
    kept = {x.numpy().tobytes() for x in held.train_x}
    out = {x.numpy().tobytes() for x in held.test_x}
    assert kept <= rows
    assert out <= rows
    both = torch.cat([held.train_x, held.test_x]).flatten(1).sum(0).numpy()
    assert np.allclose(both, plain.train_x.reshape(len(plain.train_x), -1).sum(0), rtol=1e-12)


def test_validation_rows_are_the_same_for_every_rank_and_seed_and_change_the_digest():
    config = DataConfig(validation_rows=100)
    shards = blocks_of(config) + blocks_of(config, seed=9)
    assert len({shard.ids_digest for shard in shards}) == 1
    assert all(torch.equal(shard.test_y, shards[0].test_y) for shard in shards)
    assert shards[0].ids_digest != data.load(DataConfig(), 0, 4, 0, "float32").ids_digest


def test_holding_out_all_rows_is_refused():
    with pytest.raises(ConfigError, match=r"validation_rows = 1438: .* choose 0 to 1437"):
        data.load(DataConfig(validation_rows=1438), 0, 4, 0, "float32")


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(DataError, match=r"party 3: data.batch_size = 1439 .* 1438 training rows"):
        data.load(DataConfig(batch_size=1439), 3, 4, 0, "float32")
    assert data.load(DataConfig(batch_size=1438), 3, 4, 0, "float32").num_rows == 1438
