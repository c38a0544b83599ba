"""The local optimizer of a block: torch's, with its state forgotten at each round."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hpcvfl.config import OptimizerConfig


class LocalOptimizer:
    """SGD, with momentum inside a round if asked for (Flex-VFL: the buffer starts at zero each
    round).
    """

    def __init__(self, config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> None:
        """Optimize `parameters` by the rule that `config` names."""
        self._sgd = torch.optim.SGD(list(parameters), lr=config.lr, momentum=config.momentum)

    def begin_round(self, lr: float) -> None:
        """Forget the momentum of the last round; steps of this round use `lr`."""
        self._sgd.state.clear()
        for group in self._sgd.param_groups:
            group["lr"] = lr

    def step(self, loss: torch.Tensor) -> None:
        """One step down the gradient of `loss`."""
        self._sgd.zero_grad(set_to_none=True)
        loss.backward()
        self._sgd.step()
