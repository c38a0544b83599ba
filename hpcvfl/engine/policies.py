"""How many local steps a block takes, and at which rate: one function or small class a rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpcvfl.config import OptimizerConfig


@dataclass(frozen=True)
class FixedSteps:
    """Exactly `count` local steps a round (C-VFL's Q)."""

    count: int

    def may_start(self, step: int) -> bool:
        """Whether local step number `step` (from 0) of this round may begin."""
        return step < self.count


def learning_rate(
    optimizer: OptimizerConfig, round_index: int, rounds_per_epoch: int, total_rounds: int
) -> float:
    """The rate of a round, constant inside it.

    milestones : lr * gamma ** (milestone epochs reached)
    cosine     : lr/2 * (1 + cos(pi * r / R)), which is lr at round 0 and tends to 0 at the last
    """
    if optimizer.schedule == "milestones":
        epoch = round_index // rounds_per_epoch
        return optimizer.lr * optimizer.gamma ** sum(epoch >= m for m in optimizer.milestones)
    if optimizer.schedule == "cosine":
        return 0.5 * optimizer.lr * (1 + math.cos(math.pi * round_index / total_rounds))
    return optimizer.lr
