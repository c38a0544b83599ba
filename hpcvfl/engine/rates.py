"""The learning rate of a round, constant inside it."""

from __future__ import annotations

import math

from hpcvfl.sections import OptimizerConfig

ADAPTIVE = ("adaptive", "adaptive-sum")
"""Schedules that follow the steps of the round before."""


def learning_rate(
    optimizer: OptimizerConfig, round_index: int, rounds_per_epoch: int, total_rounds: int
) -> float:
    """The rate of a round by one of the schedules that know nothing of steps.

    milestones : lr * gamma ** (milestone epochs reached)
    cosine     : lr/2 * (1 + cos(pi * r / R)), which is lr at round 0 and tends to 0 at the last
    inverse    : lr / (1 + r / rounds of an epoch)
    """
    if optimizer.schedule == "milestones":
        epoch = round_index // rounds_per_epoch
        return optimizer.lr * optimizer.gamma ** sum(epoch >= m for m in optimizer.milestones)
    if optimizer.schedule == "cosine":
        return 0.5 * optimizer.lr * (1 + math.cos(math.pi * round_index / total_rounds))
    if optimizer.schedule == "inverse":
        return optimizer.lr / (1 + round_index / rounds_per_epoch)
    return optimizer.lr


def rate_before_the_first(a: float, tau: int) -> float:
    """The rate whose weights stand for those of the round before round 0, of which tau is expected:
    A / tau. Only a proximal term and weight decay make weights depend on it.
    """
    return a / tau


def adaptive_rate(schedule: str, a: float, tau: int, w_bar: float, total: float) -> float:
    """The rate of a round from the steps of the one before.

    adaptive     : A / (tau w_bar), Algorithm 2 of Flex-VFL (arXiv 2208.12672)
    adaptive-sum : A / W^ with W^ the sum of the weights, each at its largest in the round
                   (weights.prefix_total; W itself without proximal term and weight decay), at most
                   tau w_bar: the proof needs no more than that A bounds eta W^, so the step may be
                   larger (ours)
    """
    return a / total if schedule == "adaptive-sum" else a / (tau * w_bar)
