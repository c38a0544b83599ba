"""The local optimizers of a block: rules of SGD written out, or a class of torch.optim by name.

The rules are not taken from torch.optim, whose first use imports the compiler (2.5 s of CPU a rank,
measured 2026-11-29): with five ranks on two cores that is 6 s of every start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpcvfl.engine.weights import Weights, step_rate, weights_of, why_not
from hpcvfl.errors import ConfigError
from hpcvfl.sections import OptimizerConfig


class LocalOptimizer:
    """Moves the parameters of a block, step by step, and knows what its steps add up to.

    covered : whether Flex-VFL's theory holds for it (weights.py)
    why_not : one line that says why it does not, for a warning; empty where it does
    """

    def __init__(self, config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> None:
        """Optimize `parameters` by the rule that `config` names; a first round has begun.

        Raises ConfigError for a name that torch.optim does not have, or a class that cannot step
        these parameters.
        """
        self._config = config
        self._parameters = [p for p in parameters if p.requires_grad]
        self.why_not = why_not(config)
        self.covered = not self.why_not
        rule = SgdRule if config.name == "sgd" else TorchRule
        self._rule: SgdRule | TorchRule = rule(config, self._parameters)
        self._lr = config.lr
        self._rule.begin_round(config.lr)  # of an adaptive schedule no rate, hence unchecked

    def begin_round(self, lr: float, where: str = "") -> None:
        """Forget the state of the last round, unless it is to be kept; this round's rate is `lr`.

        Raises ConfigError, which starts with `where`, if `lr` is too large for the proximal term
        and the weight decay.
        """
        if self._config.name == "sgd":
            require_no_step_too_far(self._config, lr, where)
        self._lr = lr
        self._rule.begin_round(lr)

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
            self._rule.step(gradients)

    def state(self) -> dict[str, torch.Tensor]:
        """What is kept from round to round, by name; nothing without `keep_state`.

        Raises ConfigError if a class of torch.optim keeps something that is no tensor or number.
        """
        return self._rule.state() if self._config.keep_state else {}

    def restore(self, state: Mapping[str, torch.Tensor], lr: float) -> None:
        """Go on from what `state` gave, after a round at rate `lr`."""
        self._lr = lr
        self._rule.restore(state)

    @property
    def lr(self) -> float:
        """The rate of the round that has begun."""
        return self._lr

    def weights(self, num_steps: int) -> Weights:
        """w^t, w_bar and W of this round after its `num_steps` steps (weights.py)."""
        return weights_of(self._config, self._lr, num_steps)


def require_no_step_too_far(config: OptimizerConfig, lr: float, where: str) -> None:
    """Raise ConfigError unless every step of a round at rate `lr` ends short of where the proximal
    term and the weight decay pull to.
    """
    rate = lr * max(config.step_rates, default=1.0)
    shrink = config.proximal + config.weight_decay
    if not rate * shrink < 1:  # nor if it is NaN
        field = "proximal" if config.proximal else "weight_decay"
        raise ConfigError(
            f"{where}: optimizer.{field} = {getattr(config, field):g}: the rate of a step of this"
            f" round is {rate:g}, due is rate * (proximal + weight_decay) < 1, it is"
            f" {rate * shrink:g}; lower one of them"
        )


class SgdRule:
    """SGD with any of its rules. At local step t of a round, for each parameter p with gradient g:

        G = g + weight_decay p + proximal (p - p at the round's start)
        u = G at its first step, then momentum u + (1 - dampening) G
        D = G without momentum, u with it, G + momentum u with Nesterov's
        p = p - lr c_t D

    The same arithmetic as torch.optim.SGD, bit for bit, where torch has the rule.
    """

    def __init__(self, config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
        """Rules and parameters; `begin_round` comes before the first step."""
        self._config, self._parameters = config, parameters
        self._velocities: dict[int, torch.Tensor] = {}  # u, by position of the parameter
        self._starts = [p.detach().clone() for p in parameters] if config.proximal else []

    def begin_round(self, lr: float) -> None:
        """Zero the velocities, unless they are kept; note where the parameters are now."""
        if not self._config.keep_state:
            self._velocities = {}
        if self._starts:
            for start, parameter in zip(self._starts, self._parameters, strict=True):
                start.copy_(parameter.detach())
        self._lr, self._step = lr, 0

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Move each parameter by its gradient, which is not changed; None: the parameter stays."""
        rate = self._lr * step_rate(self._config, self._step)
        for at, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is not None:
                parameter.add_(self._direction(at, parameter, gradient), alpha=-rate)
        self._step += 1

    def state(self) -> dict[str, torch.Tensor]:
        """velocity.i: u of the parameter at position i."""
        return {f"velocity.{at}": value for at, value in self._velocities.items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """See LocalOptimizer."""
        self._velocities = {int(n.partition(".")[2]): v.clone() for n, v in state.items()}

    def _direction(self, at: int, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """D of the parameter at position `at`."""
        # Never in place: autograd may give two parameters one tensor.
        config = self._config
        if config.weight_decay:
            gradient = gradient.add(parameter, alpha=config.weight_decay)
        if config.proximal:
            gradient = gradient.add(parameter - self._starts[at], alpha=config.proximal)
        if not config.momentum:
            return gradient
        velocity = self._velocity(at, gradient)
        return gradient.add(velocity, alpha=config.momentum) if config.nesterov else velocity

    def _velocity(self, at: int, gradient: torch.Tensor) -> torch.Tensor:
        """u, which is the gradient itself at the parameter's first step, as torch has it."""
        if at in self._velocities:
            velocity = self._velocities[at].mul_(self._config.momentum)
            return velocity.add_(gradient, alpha=1 - self._config.dampening)
        return self._velocities.setdefault(at, gradient.clone())


class TorchRule:
    """A class of torch.optim, made anew each round unless its state is kept."""

    def __init__(self, config: OptimizerConfig, parameters: Sequence[nn.Parameter]) -> None:
        """Finds the class and tries it; ConfigError if it is unknown or cannot step these."""
        self._config, self._parameters = config, parameters
        self._class = torch_class(config)
        self._optimizer: torch.optim.Optimizer | None = None
        if parameters:
            self._try()

    def begin_round(self, lr: float) -> None:
        """Make the optimizer anew with this rate, or give the kept one this rate."""
        if not self._parameters:
            return
        if self._optimizer is None or not self._config.keep_state:
            self._optimizer = self._make(self._parameters, lr)
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def step(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """One step of the class; a parameter without a gradient stays."""
        assert self._optimizer is not None
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            # The class may change it, and autograd may give two parameters one tensor.
            parameter.grad = None if gradient is None else gradient.clone()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """i.TYPE.name: what the class keeps of the parameter at position i."""
        if self._optimizer is None:
            return {}
        out = {}
        for at, parameter in enumerate(self._parameters):
            for name, value in self._optimizer.state.get(parameter, {}).items():
                kind = type(value).__name__
                if not isinstance(value, torch.Tensor | int | float | None):
                    raise ConfigError(
                        f"optimizer.name = {self._config.name!r}: keeps a {kind} ({name}), which a"
                        " checkpoint cannot hold; set run.checkpoint_s = 0"
                    )
                out[f"{at}.{kind}.{name}"] = _as_tensor(value)
        return out

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """See LocalOptimizer."""
        if not self._parameters:
            return
        self._optimizer = self._make(self._parameters, self._config.lr)
        for key, value in state.items():
            at, kind, name = key.split(".", 2)
            kept = self._optimizer.state[self._parameters[int(at)]]
            kept[name] = _FROM_TENSOR.get(kind, torch.Tensor.clone)(value)

    def _make(self, parameters: Sequence[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": lr, "weight_decay": self._config.weight_decay}
        takes = inspect.signature(self._class).parameters
        return self._class(parameters, **{k: v for k, v in options.items() if k in takes})

    def _try(self) -> None:
        """One step of parameters like these: some classes say only there what they cannot do."""
        trial = [nn.Parameter(torch.zeros_like(p)) for p in self._parameters]
        for parameter in trial:
            parameter.grad = torch.zeros_like(parameter)
        try:
            self._make(trial, self._config.lr).step()
        except Exception as error:
            raise ConfigError(
                f"optimizer.name = {self._config.name!r}: cannot train this block"
                f" ({' '.join(str(error).split())}); due is {CHOICES}"
            ) from error


def _as_tensor(value: torch.Tensor | int | float | None) -> torch.Tensor:
    """A number as a tensor that holds it exactly; of None, an empty one."""
    if isinstance(value, torch.Tensor):
        return value
    if value is None:
        return torch.empty(0)
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


_FROM_TENSOR: dict[str, Callable[[torch.Tensor], Any]] = {
    "bool": bool,
    "int": int,
    "float": float,
    "NoneType": lambda value: None,
}

CHOICES = "sgd or a class of torch.optim such as Adam, AdamW, RMSprop, Adagrad, Adamax"


def torch_class(config: OptimizerConfig) -> type[torch.optim.Optimizer]:
    """The class of torch.optim that `config.name` names.

    Raises ConfigError for a name that is none, for SGD, for a class whose step needs a closure, and
    where weight decay is asked of a class that has none.
    """
    named = f"optimizer.name = {config.name!r}"
    found = getattr(torch.optim, config.name, None)
    base = torch.optim.Optimizer
    if not isinstance(found, type) or not issubclass(found, base) or found is base:
        raise ConfigError(f"{named}: no such optimizer; due is {CHOICES}")
    if found is torch.optim.SGD:
        raise ConfigError(f"{named}: due is 'sgd', the same arithmetic, with Flex-VFL's weights")
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"{named}: its step needs a closure; due is {CHOICES}")
    if config.weight_decay and "weight_decay" not in inspect.signature(found).parameters:
        raise ConfigError(
            f"optimizer.weight_decay = {config.weight_decay:g}: {config.name!r} of torch.optim has"
            " none; due is 0"
        )
    return found
