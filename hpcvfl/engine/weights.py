"""The weights of a local optimizer: what one round makes of its gradients.

Flex-VFL (Castiglia et al. 2022, arXiv 2208.12672, eq. (8)) covers the optimizers whose tau local
steps move a block by a fixed combination of its gradients:

    theta^tau = theta^0 - lr * sum over t of w^t g^t,    t = 0 .. tau - 1.

Its step-size limit takes w_bar = max w^t, its adaptive rate A / (tau w_bar); W = sum w^t is how far
a round goes. With momentum rho, dampening d, proximal mu, factors c_t and rate lr:

    rule            w^t                                              w_bar                  W
    SGD             1                                                1                      tau
    momentum        (1 - rho^(tau-t)) / (1 - rho)                    w^0                    below
    dampening       as momentum at t = 0, times 1 - d after it       the largest            sum
    Nesterov        (1 - rho^(tau+1-t)) / (1 - rho)                  w^0                    sum
    proximal        (1 - lr mu)^(tau-1-t)                            1                      below
    step_rates      c_t                                              max c_t                sum
    momentum, mu    h_(tau-t)                                        the largest            sum

    momentum: W = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho)
    proximal: W = (1 - (1 - lr mu)^tau) / (lr mu)
    h_0 = 0, h_1 = 1, h_(n+1) = (1 + rho - lr mu) h_n - rho h_(n-1)

Weight decay lambda is proximal with mu = lambda, for the gradients g^t + lambda theta^0. The last
step's gradient is not pulled back by any step after it, hence the exponent 0 at t = tau - 1; the
exponent tau - t + 1, which is also met, is two too large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcvfl.errors import ConfigError
from hpcvfl.sections import OptimizerConfig


@dataclass(frozen=True)
class Weights:
    """The weights of one finished round of tau local steps, in float64.

    w     : w^t of eq. (8), t = 0 .. tau - 1; momentum that meets a pull back may make some negative
    w_bar : the largest of them
    total : W, their sum
    """

    w: tuple[float, ...]
    w_bar: float
    total: float


def why_not(config: OptimizerConfig) -> str:
    """Why the rule is not of the form of eq. (8), as one line for a warning; empty where it is."""
    if config.name != "sgd":
        return (
            f"optimizer.name = {config.name!r}: Flex-VFL's theory covers the rules of sgd, not"
            " torch.optim; weights of 1 are reported"
        )
    if config.keep_state and config.momentum:
        return (
            f"optimizer.keep_state = true with momentum = {config.momentum:g}: Flex-VFL's theory"
            " forgets the momentum at each round; weights of 1 are reported"
        )
    return ""


def weights_of(config: OptimizerConfig, lr: float, num_steps: int) -> Weights:
    """The weights of a round of `num_steps` >= 1 local steps at the round's rate `lr`.

    For every combination of the rules of sgd; 1 each where eq. (8) does not hold (`why_not`).
    They hold for a parameter on which the loss of every local step depends. Raises ConfigError if
    they are beyond what a float holds.
    """
    assert num_steps >= 1, num_steps
    w = (1.0,) * num_steps if why_not(config) else _unit_impulses(config, lr, num_steps)
    return Weights(w, max(w), _sum(w, lr))


def prefix_total(config: OptimizerConfig, lr: float, num_steps: int) -> float:
    """The sum over s of the largest weight that gradient s has after any t <= num_steps steps.

    The proof of the step-size limit bounds every iterate of a round, not the last one alone. Where
    no step pulls back weights only grow with t, and this is W; with a proximal term or weight decay
    it is larger (proximal alone: tau).
    """
    if why_not(config) or not config.proximal + config.weight_decay:
        return weights_of(config, lr, num_steps).total
    if not config.step_rates and not config.dampening:
        # The weight depends on the steps since the gradient only: a running maximum from the end.
        maxima = [0.0]
        for w in reversed(_unit_impulses(config, lr, num_steps)):
            maxima.append(max(maxima[-1], w))
        return _sum(maxima, lr)
    largest = [0.0] * num_steps
    for t in range(1, num_steps + 1):
        for s, w in enumerate(_unit_impulses(config, lr, t)):
            largest[s] = max(largest[s], w)
    return _sum(largest, lr)


def _sum(w: Sequence[float], lr: float) -> float:
    """The sum of finite weights; ConfigError if there is none."""
    try:
        total = math.fsum(w)
    except OverflowError:
        total = math.inf
    if not math.isfinite(total):
        raise ConfigError(
            f"optimizer: the weights of {len(w)} local steps at rate {lr:g} are beyond what a float"
            " holds; lower optimizer.lr, step_rates, proximal or weight_decay"
        )
    return total


def _unit_impulses(config: OptimizerConfig, lr: float, num_steps: int) -> tuple[float, ...]:
    """w^t = what a gradient of 1 at step t, and 0 elsewhere, has moved the block by at the end.

    With x = (theta^0 - theta) / lr, a step is G = g - lr (mu + lambda) x, u = rho u + a G,
    x += c (alpha G + beta u). All tau impulses at once, from the last step to the first: `of_x` and
    `of_u` are the derivatives of the final x by the x and u that a step leaves behind. That is tau
    scalar steps in place of tau**2.
    """
    shrink = lr * (config.proximal + config.weight_decay)
    alpha = 1.0 if config.nesterov or not config.momentum else 0.0
    beta = config.momentum if config.nesterov else 1.0 - alpha
    of_x, of_u = 1.0, 0.0
    w = []
    for step in reversed(range(num_steps)):
        moved = of_x * step_rate(config, step)
        of_u += beta * moved
        enters = 1.0 if step == 0 else 1.0 - config.dampening
        w.append(alpha * moved + enters * of_u)
        of_x -= shrink * w[-1]
        of_u *= config.momentum
    return tuple(reversed(w))


def step_rate(config: OptimizerConfig, step: int) -> float:
    """c_t, the factor of the rate at local step `step` (from 0)."""
    rates = config.step_rates
    return rates[min(step, len(rates) - 1)] if rates else 1.0
