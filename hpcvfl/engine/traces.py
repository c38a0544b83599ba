"""Speeds of blocks that change from round to round: CPU utilisation traces and the rules that turn
them into numbers of local steps.

The published code of Flex-VFL reads the utilisation of machines of a Google cluster, one sample a
round, and takes floor(20 (1 - u)) steps (speeds that stay), or int(10 (1 - u) + 1) and
int(19 (1 - u) + 1) (speeds that change). The trace itself is not free to ship; `ar1` stands in.

Legend: B blocks, the server first; S samples.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from hpcvfl import seeds
from hpcvfl.errors import DataError

RULES = {"floor20": (20.0, 0.0), "int10": (10.0, 1.0), "int19": (19.0, 1.0)}
"""Name -> (a, b) of int(a (1 - u) + b)."""

AR1_SAMPLES, AR1_MEAN, AR1_MEMORY, AR1_NOISE = 8351, 0.21, 0.95, 0.03
"""Samples of 29 days at 5 minutes, as the published trace has; mean of its utilisations."""


def steps_of(utilisation: np.ndarray, rule: str) -> np.ndarray:
    """int64: local steps within a timeout at a utilisation in 0..1, at least 1; same shape."""
    a, b = RULES[rule]
    return np.maximum(1, np.floor(a * (1 - utilisation) + b)).astype(np.int64)


def most_steps(rule: str) -> float:
    """Steps of an idle block: the timeout in steps of a block of full speed."""
    return sum(RULES[rule])


def ar1(num_blocks: int, num_samples: int = AR1_SAMPLES, seed: int = 0) -> np.ndarray:
    """Synthetic utilisation, float64, shape (B, S), in 0..1: each block an autoregression of order
    one around the mean, from the stationary distribution on.
    """
    noise_BS = seeds.generator(seed, "ar1").normal(0, AR1_NOISE, (num_samples, num_blocks)).T
    level_BS = np.empty_like(noise_BS)
    level_BS[:, 0] = noise_BS[:, 0] / np.sqrt(1 - AR1_MEMORY**2)
    for s in range(1, num_samples):
        level_BS[:, s] = AR1_MEMORY * level_BS[:, s - 1] + noise_BS[:, s]
    return np.clip(AR1_MEAN + level_BS, 0, 1)


def read_trace(name: str, num_blocks: int) -> np.ndarray:
    """Utilisation, float64, shape (B, S): of `ar1`, or from a .npy or .csv file (no pickle).

    Raises DataError that names place, value and what is due.
    """
    if name == "ar1":
        return ar1(num_blocks)
    path = Path(name)
    try:
        if path.suffix == ".csv":
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of an empty file
                trace = np.loadtxt(path, delimiter=",", ndmin=2, dtype=np.float64)
        else:
            trace = np.load(path, allow_pickle=False)
    except Exception as error:  # a hostile header makes numpy raise nearly anything
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise DataError(f"steps.trace = {name!r}: cannot be read ({reason})") from None
    if not isinstance(trace, np.ndarray) or trace.dtype.kind not in "iuf":
        raise DataError(f"steps.trace = {name!r}: holds no numbers")
    if trace.ndim != 2 or trace.shape[0] != num_blocks or trace.shape[1] == 0:
        raise DataError(
            f"steps.trace = {name!r}: has shape {trace.shape}, due ({num_blocks}, samples): a row"
            " for the server and one for each party"
        )
    trace = trace.astype(np.float64)
    bad = np.argwhere(~((trace >= 0) & (trace <= 1)))  # NaN fails too
    if len(bad):
        block, sample = bad[0]
        raise DataError(
            f"steps.trace = {name!r}: block {block}, sample {sample} is {trace[block, sample]}, due"
            f" is a utilisation from 0 to 1 ({len(bad)} such values)"
        )
    return trace
