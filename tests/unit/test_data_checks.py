"""Data that cannot be trained on: one line with who, row, column, value and what to do."""

from dataclasses import replace

import numpy as np
import pytest

from hpcvfl.data import Samples, check
from hpcvfl.data.shard import ids_digest
from hpcvfl.errors import DataError

GOOD = Samples(
    train_x=np.arange(12.0).reshape(4, 3),
    train_y=np.array([0, 1, 2, 0]),
    train_ids=np.array([10, 11, 12, 13]),
    test_x=np.ones((2, 3)),
    test_y=np.array([2, 1]),
    test_ids=np.array([20, 21]),
    num_classes=3,
)


def with_value(array, index, value):
    changed = np.array(array)
    changed[index] = value
    return changed


CASES = {
    "nan feature": (
        {"train_x": with_value(GOOD.train_x, (2, 1), np.nan)},
        r"party 2: train_x row 2, column 1 is nan \(1 such values\); fill or drop",
    ),
    "infinite feature of an image": (
        {
            "train_x": with_value(np.zeros((4, 1, 2, 2), np.float32), (3, 0, 1, 0), -np.inf),
            "test_x": np.zeros((2, 1, 2, 2)),
        },
        r"party 2: train_x row 3, column 2 is -inf",
    ),
    "nan in the test set": (
        {"test_x": with_value(GOOD.test_x, (1, 2), np.nan)},
        r"party 2: test_x row 1, column 2 is nan",
    ),
    "label too large": (
        {"test_y": np.array([2, 3])},
        r"party 2: test_y row 1 is 3, labels must be 0\.\.2 \(1 such rows\); correct",
    ),
    "label negative": (
        {"train_y": np.array([0, -1, 2, -5])},
        r"party 2: train_y row 1 is -1, labels must be 0\.\.2 \(2 such rows\)",
    ),
    "label not an integer": (
        {"train_y": np.array([0.0, 1.0, 0.5, 2.0])},
        r"party 2: train_y has type float64; labels must be integers from 0",
    ),
    "features not numbers": (
        {"train_x": np.full((4, 3), "a")},
        r"party 2: train_x has type <U1; features must be real numbers",
    ),
    "empty training set": (
        {"train_x": np.zeros((0, 3)), "train_y": np.zeros(0, int), "train_ids": np.zeros(0, int)},
        r"party 2: train_y has 0 rows, an empty shard",
    ),
    "no columns": (
        {"train_x": np.zeros((4, 0))},
        r"party 2: train_x has shape \(4, 0\), an empty shard",
    ),
    "features without a column axis": (
        {"train_x": np.zeros(4)},
        r"party 2: train_x has shape \(4,\)",
    ),
    "rows of x and y differ": (
        {"train_x": np.zeros((5, 3))},
        r"party 2: train_x has 5 rows and train_y 4; row i of both must be the same sample",
    ),
    "rows of ids and y differ": (
        {"test_ids": np.arange(3)},
        r"party 2: test_ids has 3 rows and test_y 2",
    ),
    "labels with two axes": (
        {"train_y": np.zeros((4, 1), int)},
        r"party 2: train_y has shape \(4, 1\)",
    ),
    "columns of train and test differ": (
        {"test_x": np.ones((2, 4))},
        r"party 2: a sample has shape \(3,\) in train_x and \(4,\) in test_x",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_data_is_one_line_that_names_party_row_column_and_value(name):
    changes, message = CASES[name]
    with pytest.raises(DataError, match=message) as caught:
        check(replace(GOOD, **changes), 2)
    assert "\n" not in str(caught.value)


def test_good_data_passes_on_party_and_server():
    check(GOOD, 1)
    check(replace(GOOD, train_x=None, test_x=None), 0)
    check(replace(GOOD, train_x=GOOD.train_x.astype(np.uint8)), 1)


def test_the_server_is_called_server():
    bad = replace(GOOD, train_x=None, test_x=None, train_y=np.array([0, 1, 2, 7]))
    with pytest.raises(DataError, match=r"^server: train_y row 3 is 7"):
        check(bad, 0)


def test_the_digest_sees_order_split_type_and_every_id():
    a, b = np.array([1, 2, 3]), np.array([4, 5])
    variants = [
        (a, b),
        (a[::-1], b),
        (np.array([1, 2]), np.array([3, 4, 5])),
        (b, a),
        (a, np.array([4, 6])),
        (a.astype(str), b.astype(str)),
        (np.array(["12", "3"]), np.array(["4"])),
        (np.array(["1", "23"]), np.array(["4"])),
    ]
    assert len({ids_digest(*ids) for ids in variants}) == len(variants)


def test_the_digest_does_not_see_how_wide_ids_are_stored():
    a, b = np.array([1, 2, 3]), np.array([4, 5])
    assert ids_digest(a.astype(np.int32), b) == ids_digest(a, b.astype(np.uint8))
    names = np.array(["a", "bcd"])
    assert ids_digest(names.astype("U40"), names) == ids_digest(names, names)
