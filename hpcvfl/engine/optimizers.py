"""The local optimizer of a block: SGD whose state is forgotten at each round.

Written out rather than taken from torch.optim, whose first use imports the compiler (2.5 s of CPU a
rank, measured 2026-11-29): with five ranks on two cores that is 6 s of every start.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from hpcvfl.config import OptimizerConfig
from hpcvfl.errors import ConfigError


class LocalOptimizer:
    """SGD, with momentum inside a round if asked for: v = m v + g, p = p - lr v, from v = 0.

    The same arithmetic as torch.optim.SGD, bit for bit. Flex-VFL forgets the buffer at each round.
    """

    def __init__(self, config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> None:
        """Optimize `parameters` by the rule that `config` names."""
        self._parameters = [p for p in parameters if p.requires_grad]
        self._momentum, self._lr = config.momentum, config.lr
        self._velocities: dict[int, torch.Tensor] = {}  # by position of the parameter

    def begin_round(self, lr: float) -> None:
        """Forget the momentum of the last round; steps of this round use `lr`."""
        self._velocities = {}
        self._lr = lr

    def step(self, loss: torch.Tensor, where: str = "") -> None:
        """One step down the gradient of `loss`; a parameter that it does not depend on stays.

        Raises ConfigError, which starts with `where`, if the loss depends on no parameter at all.
        """
        if not self._parameters:
            return
        if not loss.requires_grad:
            raise ConfigError(
                f"{where}: the loss does not depend on the block's parameters; does its forward"
                " detach them?"
            )
        gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            for at, (parameter, gradient) in enumerate(
                zip(self._parameters, gradients, strict=True)
            ):
                if gradient is not None:
                    direction = self._velocity(at, gradient) if self._momentum else gradient
                    parameter.add_(direction, alpha=-self._lr)

    def _velocity(self, at: int, gradient: torch.Tensor) -> torch.Tensor:
        """v = m v + g, and v = g at the parameter's first step of the round, as torch has it."""
        if at in self._velocities:
            return self._velocities[at].mul_(self._momentum).add_(gradient)
        return self._velocities.setdefault(at, gradient.clone())
