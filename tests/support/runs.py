"""Tiny runs and what is read from them."""

from pathlib import Path

import tomli_w
from safetensors.numpy import load_file

from hpcvfl.config import build, merge, nest
from hpcvfl.engine.run import train
from hpcvfl.transport.threads import ThreadsWorld

TINY = {
    "name": "tiny",
    "num_parties": 3,
    "codec": "scalar:bits=4",
    "head_codec": "scalar:bits=8",
    "data": {
        "dataset": "synthetic",
        "num_samples": 130,
        "num_features": 12,
        "num_classes": 3,
        "batch_size": 30,
    },
    "model": {"embedding_dim": 4, "hidden_dim": 8},
    "algorithm": {"epochs": 2},
    "run": {"progress": False, "plots": False},
}


def tiny(folder, **over):
    """A config of a few seconds; `over` by path with __ for the dot: tiny(d,
    data__batch_size=7).
    """
    paths = {"run.folder": str(folder)} | {k.replace("__", "."): v for k, v in over.items()}
    return build(merge(TINY, nest(paths)))


def write_config(folder, **over):
    """The path of a config.toml of such a run in `folder`, `over` as for `tiny`."""
    paths = {"run.folder": str(folder / "runs")} | {
        k.replace("__", "."): v for k, v in over.items()
    }
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(merge(TINY, nest(paths))))
    return str(path)


def run_threads(config, order=None, after_round=None):
    """Summary of a run in this process."""
    world = ThreadsWorld(len(config.block_of_rank), order=order)
    return world.run(lambda t: train(config, t, after_round=after_round))[0]


def weights(summary):
    """{"rank0.weight": array, ..}: the final weights of all blocks."""
    out = {}
    for path in sorted((Path(summary["folder"]) / "checkpoints" / "final").iterdir()):
        out |= {f"{path.stem}.{name}": value for name, value in load_file(path).items()}
    return out


def same_bits(a, b):
    """Whether two results of `weights` are equal bit for bit, names included."""
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() for k in a)
