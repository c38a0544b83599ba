"""`files`: your own data, one .npz a party, which never leaves the party's machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpcvfl.data.shard import Samples
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import DataConfig

ID_KEYS = ("train_ids", "test_ids")
LABEL_KEYS = ("train_y", "test_y")
FEATURE_KEYS = ("train_x", "test_x")


def read(
    config: DataConfig, block: int, num_parties: int, seed: int, labels: bool = True
) -> Samples:
    """Arrays train_x, train_y, train_ids, test_x, test_y, test_ids of this block's own file.

    The server's file needs no x, a party's no y where labels are private (`labels` False). An
    optional scalar `num_classes` gives the number of classes; without it, it is the largest
    training label + 1. Read without pickle: a file cannot run code.
    """
    who = "server" if block == 0 else f"party {block}"
    if config.root is None:
        raise ConfigError(
            f"data.root = None: dataset files needs {who}'s own .npz file;"
            f" set --party {block}.data.root FILE or [party.{block}] data.root in the TOML file"
        )
    keys = ((*FEATURE_KEYS,) if block else ()) + (LABEL_KEYS if labels else ()) + ID_KEYS
    arrays = _arrays(who, Path(config.root), keys)
    train_y = arrays.get("train_y", np.zeros(0, np.int64))
    if "num_classes" in arrays:
        given = arrays["num_classes"]
        if given.size != 1 or given.dtype.kind not in "iu" or int(given.reshape(-1)[0]) < 1:
            raise DataError(f"{who}: num_classes is {given!r}; due is one positive integer")
        num_classes = int(given.reshape(-1)[0])
    else:
        num_classes = int(train_y.max()) + 1 if train_y.size and train_y.dtype.kind in "iu" else 1
    return Samples(
        train_x=arrays.get("train_x"),
        train_y=arrays.get("train_y"),
        train_ids=arrays["train_ids"],
        test_x=arrays.get("test_x"),
        test_y=arrays.get("test_y"),
        test_ids=arrays["test_ids"],
        num_classes=num_classes,
    )


def _arrays(who: str, path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of an .npz, and num_classes if it has one. Raises DataError."""
    try:
        archive = np.load(path, allow_pickle=False)
        if isinstance(archive, np.ndarray):
            raise DataError(f"{who}: {path} holds one array (.npy); save all with np.savez")
        with archive:
            missing = [key for key in keys if key not in archive]
            if missing:
                raise DataError(
                    f"{who}: {path} lacks {', '.join(missing)}; it needs {', '.join(keys)}"
                    f" and has {', '.join(archive.files) or 'nothing'}"
                )
            arrays = {key: archive[key] for key in (*keys, "num_classes") if key in archive}
            for key, array in arrays.items():
                if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufSU":
                    raise DataError(
                        f"{who}: {path}: {key} is no array of numbers or text; save it with"
                        " np.savez"
                    )
            return arrays
    except DataError:
        raise
    except Exception as error:  # a hostile header makes numpy raise nearly anything
        raise DataError(
            f"{who}: cannot read {path.absolute()}: {getattr(error, 'strerror', None) or error};"
            " due is a file written by np.savez, without object arrays"
        ) from None
