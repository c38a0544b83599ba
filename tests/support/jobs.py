"""Jobs of three ranks under mpiexec to which something happens, and that go on."""

import json
from pathlib import Path

from support.launch import mpi_words, run
from support.runs import run_threads, write_config

from hpcvfl.cli import load_config

OVER = {  # without kernels to compile: three ranks start a dozen times here
    "num_parties": 2,
    "codec": "none",
    "head_codec": "none",
    "model.head": "support.modules:SignallingHead",
    "algorithm.local_steps": 2,
    "optimizer.momentum": 0.9,
    "optimizer.keep_state": True,
    "run.checkpoint_rounds": 2,
}


def job(folder, **over):
    """(path of a config, the summary of its run in one process, without a cut)."""
    for name in ("whole", "cut"):
        (folder / name).mkdir()
    whole = load_config([write_config(folder / "whole", **OVER | over)])
    return write_config(folder / "cut", **OVER | over), run_threads(whole)


def signalled(path, rank, at, number, *words):
    """Train under mpiexec, a rank signalling itself in its forward number `at`."""
    at_rank = {"TEST_RANK": str(rank), "TEST_AT": str(at), "TEST_SIGNAL": str(int(number))}
    return run(mpi_words(3, "train", path, *words), **at_rank)


def go_on(path, *words):
    """Resume under mpiexec; the summary."""
    done = run(mpi_words(3, "train", path, "--resume", "auto", *words))
    assert done.returncode == 0, done.stderr
    return summary_of(path)


def summary_of(path):
    (folder,) = (Path(path).parent / "runs").iterdir()
    return json.loads((folder / "summary.json").read_text())
