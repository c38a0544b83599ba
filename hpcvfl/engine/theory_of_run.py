"""Flex-VFL's theory in the numbers of a config or of a run: rates, weights, limits, terms.

The limits on the rate eta of block k in a round of tau steps (arXiv 2208.12672; W^, the prefix
total of weights.py, is W unless a proximal term or weight decay pulls back):

    (14)   eta <= 1 / (16 max{L, L_k} tau w_bar)                                       quoted
    W      eta <= 1 / (16 max{L, L_k} W^), all that the proof needs                     derived
    A      A <= 1 / (16 alpha max{L, L_k}), alpha the largest growth of tau w_bar from a round to
           the next: then eta = A / (tau w_bar of the round before) keeps (14)          derived
           (for A / W: the growth from W to the next W^, and W's limit)

and, where W's limit is kept, with message errors E_j and C-VFL's constants H_k, G_k (derived):

    1/S sum eta W E|grad_k F|^2  <=  3 dF / S
                                   + 6.5 / S sum max{L, L_k} (eta W^)^2 sigma_k^2
                                   + 3.5 / S sum eta W^ H_k^2 G_k^2 sum over j != k of E_j

with sums over rounds and blocks, S = sum eta W, dF = F at the start less F at the end; the right
side times the largest W^ / W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcvfl.config import Config
from hpcvfl.engine import folder
from hpcvfl.engine.checkpoint import load_block
from hpcvfl.engine.policies import plan_of, read_steps
from hpcvfl.engine.rates import (
    ADAPTIVE,
    adaptive_rate,
    learning_rate,
    rate_before_the_first,
)
from hpcvfl.engine.smoothness import JointModel, Smoothness, gradient_variance
from hpcvfl.engine.weights import Weights, prefix_total, weights_of
from hpcvfl.errors import DataError
from hpcvfl.sections import OptimizerConfig

MEASURED_ROWS = 2000
"""Training rows, at most, on which dF is measured."""

# legend: R rounds, B blocks, the server first


@dataclass(frozen=True)
class BlockRounds:
    """What one block does in R rounds.

    tau_R               : int64, local steps
    rate_R              : float64, eta
    w_bar_R, total_R    : float64, largest of the weights and their sum W
    prefix_R            : float64, W^
    least_weight        : of all rounds; the proof is for none below 0
    alpha, alpha_sum    : largest growth from a round to the next of tau w_bar; from W to W^
    """

    optimizer: OptimizerConfig
    tau_R: np.ndarray
    rate_R: np.ndarray
    w_bar_R: np.ndarray
    total_R: np.ndarray
    prefix_R: np.ndarray
    least_weight: float
    alpha: float
    alpha_sum: float

    def excess(self, constant: float) -> tuple[float, float]:
        """The rate as a part of its limit in the worst round, by (14) and by W; constant is
        max{L, L_k}. At most 1 where the limit is kept.
        """
        by_max = (self.rate_R * self.tau_R * self.w_bar_R).max()
        return 16 * constant * float(by_max), 16 * constant * float(self.moved().max())

    def moved(self) -> np.ndarray:
        """eta W^ of every round, float64, shape (R,)."""
        return self.rate_R * self.prefix_R

    def largest_a(self, constant: float) -> float:
        """The bound on A for the block's schedule; that of `adaptive` where it is neither."""
        growth = self.alpha_sum if self.optimizer.schedule == "adaptive-sum" else self.alpha
        return 1 / (16 * growth * constant)


def rounds_of_block(
    optimizer: OptimizerConfig,
    tau_R: np.ndarray,
    expected: int,
    rounds_per_epoch: int,
    total_rounds: int,
) -> BlockRounds:
    """Rates and weights of a block that takes tau_R steps in rounds 0, 1, .. of `total_rounds`.

    expected : steps that adaptive rates begin with, as if of a round before the first
    """
    shrinks = bool(optimizer.proximal + optimizer.weight_decay)
    known: dict[tuple[int, float], tuple[Weights, float]] = {}

    def of_round(tau: int, rate: float) -> tuple[Weights, float]:
        key = (tau, rate if shrinks else 0.0)
        if key not in known:
            known[key] = weights_of(optimizer, rate, tau), prefix_total(optimizer, rate, tau)
        return known[key]

    adaptive = optimizer.schedule in ADAPTIVE
    first = rate_before_the_first(optimizer.lr, expected) if adaptive else optimizer.lr
    tau_before, before = expected, of_round(expected, first)[0]
    rows, alpha, alpha_sum = [], 0.0, 0.0
    for r, tau in enumerate(tau_R.tolist()):
        if adaptive:
            rate = adaptive_rate(
                optimizer.schedule, optimizer.lr, tau_before, before.w_bar, before.total
            )
        else:
            rate = learning_rate(optimizer, r, rounds_per_epoch, total_rounds)
        now, prefix = of_round(tau, rate)
        alpha = max(alpha, tau * now.w_bar / (tau_before * before.w_bar))
        alpha_sum = max(alpha_sum, prefix / before.total)
        rows.append((rate, now.w_bar, now.total, prefix, min(now.w)))
        tau_before, before = tau, now
    rate_R, w_bar_R, total_R, prefix_R, least_R = np.array(rows).T
    return BlockRounds(
        optimizer, tau_R, rate_R, w_bar_R, total_R, prefix_R, float(least_R.min()), alpha, alpha_sum
    )


def planned(config: Config, rounds_per_epoch: int) -> list[BlockRounds] | None:
    """The rounds of every block as the config plans them; None for wall-clock, which plans none."""
    plan = plan_of(config)
    if plan is None:
        return None
    total = config.algorithm.epochs * rounds_per_epoch
    total = min(total, config.algorithm.rounds or total)
    tau_RB = np.array([plan.steps(r) for r in range(total)], np.int64)
    return _all_blocks(config, tau_RB, plan.expected, rounds_per_epoch)


def recorded(config: Config, path: Path, rounds_per_epoch: int) -> list[BlockRounds]:
    """The rounds of every block as a run's steps.jsonl has them; rates are computed anew.

    Raises DataError for a record that is missing or broken.
    """
    tau_RB, told = read_steps(path / "steps.jsonl", config.num_parties + 1)
    expected = told or tuple(tau_RB[0].tolist())
    return _all_blocks(config, tau_RB, expected, rounds_per_epoch)


def _all_blocks(
    config: Config, tau_RB: np.ndarray, expected_B: Sequence[int], rounds_per_epoch: int
) -> list[BlockRounds]:
    total = config.algorithm.epochs * rounds_per_epoch
    total = min(total, config.algorithm.rounds or total)
    return [
        rounds_of_block(
            config.for_block(k).optimizer, tau_RB[:, k], expected, rounds_per_epoch, total
        )
        for k, expected in enumerate(expected_B)
    ]


@dataclass(frozen=True)
class Terms:
    """The compressed bound in a run's numbers; sigma, H, G are left to the reader.

    descent       : S, the sum over rounds and blocks of eta W
    stretch       : largest W^ / W; all of the following hold it
    per_descent   : the first term by dF
    noise_B       : the second term of each block by sigma_k^2
    error_B       : mean over rounds of E_k, squared error of a message
    compression_B : the third term of each block by H_k^2 G_k^2
    """

    descent: float
    stretch: float
    per_descent: float
    noise_B: np.ndarray
    error_B: np.ndarray
    compression_B: np.ndarray


def terms_of(blocks: Sequence[BlockRounds], smoothness: Smoothness, error_RB: np.ndarray) -> Terms:
    """The terms from rounds that are done and their message errors, float64, shape (R, B)."""
    moved_RB = np.array([b.moved() for b in blocks]).T
    descent = float(sum((b.rate_R * b.total_R).sum() for b in blocks))
    stretch = float(max((b.prefix_R / b.total_R).max() for b in blocks))
    constant_B = np.array([smoothness.limit_of(k) for k in range(len(blocks))])
    others_RB = error_RB.sum(axis=1, keepdims=True) - error_RB
    return Terms(
        descent,
        stretch,
        3 * stretch / descent,
        6.5 * stretch / descent * (constant_B * moved_RB**2).sum(axis=0),
        error_RB.mean(axis=0),
        3.5 * stretch / descent * (moved_RB * others_RB).sum(axis=0),
    )


def read_errors(path: Path, num_rounds: int, num_blocks: int) -> np.ndarray:
    """Squared error of every message of a run's first rounds, float64, shape (R, B).

    Raises DataError if messages.jsonl lacks a round or is not of this program.
    """
    lines = folder.read_messages(path)
    rows: list[Any] = [line.get("squared_error") for line in lines[:num_rounds]]
    try:
        error_RB = np.array(rows, np.float64)
        sound = error_RB.shape == (num_rounds, num_blocks) and bool((error_RB >= 0).all())
    except (TypeError, ValueError):
        sound = False
    if not sound:
        raise DataError(
            f"{path}/messages.jsonl: due is squared_error, a number for each of {num_blocks}"
            f" blocks, in each of the {num_rounds} rounds of steps.jsonl"
        )
    return error_RB


@dataclass(frozen=True)
class Measured:
    """What the model itself tells of a finished run.

    variance_B : estimates of sigma_k^2 at the start
    num_rows   : training rows on which the losses were taken
    start, end : mean loss there at the initial and at the final weights
    """

    variance_B: tuple[float, ...]
    num_rows: int
    start: float
    end: float


def measure(model: JointModel, path: Path) -> Measured:
    """Variance and losses of a finished run; `model` is at its start, and at its end afterwards.

    Raises DataError if the run has left no final weights.
    """
    rounds = range(model.batches.rounds_per_epoch)
    rows_N = np.concatenate([model.batches.rows(r) for r in rounds])[:MEASURED_ROWS]
    variance_B, start = gradient_variance(model), model.loss_of(rows_N)
    for block in model.blocks:
        load_block(path, block)
    return Measured(variance_B, len(rows_N), start, model.loss_of(rows_N))
