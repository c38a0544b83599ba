"""One rank's part of a dataset, and the checks that it can be trained on.

N rows, D columns of one party (all axes but the first taken together).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hpcvfl import seeds
from hpcvfl.errors import ConfigError, DataError


@dataclass(frozen=True)
class Samples:
    """What a dataset reader returns: the rows of one block as numpy arrays.

    train_x, test_x     : any real type, shape (N, ...); None on the server
    train_y, test_y     : integers, shape (N,), 0 <= y < num_classes; None where labels are private
    train_ids, test_ids : integers or strings, shape (N,); equal on all ranks, in the same order
    num_classes         : int; 1 where labels are private
    """

    train_x: np.ndarray | None
    train_y: np.ndarray | None
    train_ids: np.ndarray
    test_x: np.ndarray | None
    test_y: np.ndarray | None
    test_ids: np.ndarray
    num_classes: int

    def without_labels(self) -> Samples:
        """The same for a party that is not to hold labels."""
        return replace(self, train_y=None, test_y=None, num_classes=1)

    def parts(
        self,
    ) -> Iterator[tuple[str, np.ndarray | None, np.ndarray | None, np.ndarray]]:
        """("train", x, y, ids), then ("test", x, y, ids)."""
        yield "train", self.train_x, self.train_y, self.train_ids
        yield "test", self.test_x, self.test_y, self.test_ids


@dataclass(frozen=True)
class Shard:
    """The rows of one block as tensors: its own columns, in memory of its own, and no others.

    train_x, test_x : run's dtype, contiguous, shape (N, *input_shape); None on the server
    train_y, test_y : int64, shape (N,), 0 <= y < num_classes; None where labels are private
    num_classes     : int; 1 where labels are private
    num_rows, num_test_rows : number of training and test rows
    input_shape     : shape of one sample of this party, () on the server
    ids_digest      : BLAKE2b (hex) of the train and test sample ids in order; ranks must agree
    block           : 0 = server, k = party k
    """

    train_x: Tensor | None
    train_y: Tensor | None
    test_x: Tensor | None
    test_y: Tensor | None
    num_rows: int
    num_test_rows: int
    num_classes: int
    input_shape: tuple[int, ...]
    ids_digest: str
    block: int = 0


def to_shard(samples: Samples, block: int, dtype: torch.dtype) -> Shard:
    """Tensors of `dtype` in memory of their own; nothing of `samples` stays reachable."""
    return Shard(
        train_x=_features(samples.train_x, dtype, block, "train"),
        train_y=_labels(samples.train_y),
        test_x=_features(samples.test_x, dtype, block, "test"),
        test_y=_labels(samples.test_y),
        num_rows=len(samples.train_ids),
        num_test_rows=len(samples.test_ids),
        num_classes=samples.num_classes,
        input_shape=() if samples.train_x is None else samples.train_x.shape[1:],
        ids_digest=ids_digest(samples.train_ids, samples.test_ids),
        block=block,
    )


def _labels(y: np.ndarray | None) -> Tensor | None:
    return None if y is None else torch.from_numpy(y.astype(np.int64))


def _features(x: np.ndarray | None, dtype: torch.dtype, block: int, part: str) -> Tensor | None:
    if x is None:
        return None
    real = np.float64 if dtype == torch.float64 else np.float32
    with np.errstate(over="ignore"):
        cast = np.array(x, dtype=real, order="C")
    if cast.dtype != x.dtype:  # a float64 beyond float32 became Inf
        _check_features(f"party {block}: {part}_x as {cast.dtype}", cast)
    return torch.from_numpy(cast).to(dtype)


def hold_out(samples: Samples, num_rows: int) -> Samples:
    """Put `num_rows` training rows, drawn with seed 0, in place of the test set.

    The draw depends on the number of rows alone, so it is the same on all ranks and for all run
    seeds. Both sides keep the file's order. Raises ConfigError if no training row would be left.
    """
    total = len(samples.train_ids)
    if num_rows >= total:
        raise ConfigError(
            f"data.validation_rows = {num_rows}: the training set has {total} rows,"
            f" at least one must be left; choose 0 to {total - 1}"
        )
    order = seeds.generator(0, "validation").permutation(total)
    held, kept = np.sort(order[:num_rows]), np.sort(order[num_rows:])
    x, y = samples.train_x, samples.train_y
    return replace(
        samples,
        train_x=None if x is None else x[kept],
        train_y=None if y is None else y[kept],
        train_ids=samples.train_ids[kept],
        test_x=None if x is None else x[held],
        test_y=None if y is None else y[held],
        test_ids=samples.train_ids[held],
    )


def ids_digest(train_ids: np.ndarray, test_ids: np.ndarray) -> str:
    """BLAKE2b, 32 hex digits, of the ids in order; the split point counts as well."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in (train_ids, test_ids):
        digest.update(f"{len(ids)} {'int' if ids.dtype.kind in 'iu' else 'str'};".encode())
        if ids.dtype.kind in "iu":
            digest.update(ids.astype("<i8").tobytes())
        else:  # the padding of numpy strings differs between files: spell each with its length
            for name in ids.astype(str).tolist():
                digest.update(f"{len(name)}:{name}".encode())
    return digest.hexdigest()


def check(samples: Samples, block: int) -> None:
    """Refuse data that cannot be trained on.

    Raises DataError, one line with who (server or party), array, row, column, value and what to do:
    empty arrays, rows that differ between x, y and ids, labels that are no integers or outside
    0..num_classes - 1, features that are no finite real numbers.
    """
    who = "server" if block == 0 else f"party {block}"
    for part, x, y, ids in samples.parts():
        _check_rows(who, part, x, y, ids)
        if y is not None:
            _check_labels(f"{who}: {part}_y", y, samples.num_classes)
        if x is not None:
            _check_features(f"{who}: {part}_x", x)
    train_x, test_x = samples.train_x, samples.test_x
    if train_x is not None and test_x is not None and train_x.shape[1:] != test_x.shape[1:]:
        raise DataError(
            f"{who}: a sample has shape {train_x.shape[1:]} in train_x and {test_x.shape[1:]} in"
            f" test_x; both must hold the same columns"
        )


def check_batch_size(num_rows: int, batch_size: int, block: int) -> None:
    """Raises DataError if a batch would hold more rows than there are."""
    if batch_size > num_rows:
        who = "server" if block == 0 else f"party {block}"
        raise DataError(
            f"{who}: data.batch_size = {batch_size} is larger than the {num_rows} training rows;"
            f" choose 1 to {num_rows}"
        )


def _check_rows(
    who: str, part: str, x: np.ndarray | None, y: np.ndarray | None, ids: np.ndarray
) -> None:
    for name, values in (("y", y), ("ids", ids)):
        if values is not None and values.ndim != 1:
            raise DataError(
                f"{who}: {part}_{name} has shape {values.shape}; it needs one value a row, shape"
                " (rows,)"
            )
    if y is not None and len(y) == 0:
        raise DataError(f"{who}: {part}_y has 0 rows, an empty shard cannot be used; add rows")
    if y is not None and len(ids) != len(y):
        raise DataError(
            f"{who}: {part}_ids has {len(ids)} rows and {part}_y {len(y)};"
            f" every sample needs one id and one label"
        )
    if len(ids) == 0:
        raise DataError(f"{who}: {part}_ids has 0 rows, an empty shard cannot be used; add rows")
    if x is None:
        return
    if x.ndim < 2 or x[:1].size == 0:
        raise DataError(
            f"{who}: {part}_x has shape {x.shape}, an empty shard cannot be used;"
            f" it needs at least one row and one column"
        )
    if len(x) != len(ids):
        raise DataError(
            f"{who}: {part}_x has {len(x)} rows and {part}_{'y' if y is not None else 'ids'}"
            f" {len(ids)}; row i of both must be the same sample"
        )


def _check_labels(what: str, y: np.ndarray, num_classes: int) -> None:
    if y.dtype.kind not in "iu":
        raise DataError(f"{what} has type {y.dtype}; labels must be integers from 0")
    bad = np.flatnonzero((y < 0) | (y >= num_classes))
    if len(bad):
        raise DataError(
            f"{what} row {bad[0]} is {y[bad[0]]}, labels must be 0..{num_classes - 1}"
            f" ({len(bad)} such rows); correct the label or num_classes"
        )


def _check_features(what: str, x: np.ndarray) -> None:
    if x.dtype.kind not in "iufb":
        raise DataError(f"{what} has type {x.dtype}; features must be real numbers")
    if x.dtype.kind != "f" or np.isfinite(x).all():
        return
    flat = x.reshape(len(x), -1)
    rows, columns = np.nonzero(~np.isfinite(flat))
    raise DataError(
        f"{what} row {rows[0]}, column {columns[0]} is {flat[rows[0], columns[0]]}"
        f" ({len(rows)} such values); fill or drop them, nothing is replaced silently"
    )
