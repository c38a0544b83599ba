"""How strongly a config's loss bends at its start: lower bounds on L and L_k of the theory.

Flex-VFL (arXiv 2208.12672) supposes that the gradient of the loss is L-Lipschitz and that the
gradient of block k on every mini-batch is L_k-Lipschitz. Where the Hessian H of a mini-batch's loss
exists, its norm is at most the L of the mini-batch losses (which is at least that of their mean),
and that of the diagonal part H_kk at most L_k. So one batch and one point give a lower bound:

    v random;  repeat: v /= |v|, Hv by a second backward pass, estimate = |Hv|, v = Hv

|Hv| / |v| grows from one step of this power iteration to the next and never exceeds |H|. It is done
in float64, on the rows of round 0, at the initial weights. Elsewhere the loss may bend more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from hpcvfl import seeds
from hpcvfl.config import Config
from hpcvfl.data import Batches
from hpcvfl.engine.agree import require_equal
from hpcvfl.engine.start import build_block, handshake_record
from hpcvfl.errors import ConfigError, NonFiniteError

MOST_STEPS, FEWEST_STEPS, SMALL_GROWTH = 60, 10, 1e-3
"""Of the power iteration: it ends where a step adds less than this part, after the fewest."""

NOISE_BATCHES = 8
"""Batches from which the variance of the gradients is estimated."""

# legend: N rows of the batch, P embedding width, B blocks, the server first


@dataclass(frozen=True)
class Smoothness:
    """L and the L_k of all blocks, and where they are from, as the page says it."""

    joint: float
    of_block_B: tuple[float, ...]
    source: str

    def limit_of(self, block: int) -> float:
        """max{L, L_k}, the constant of every limit."""
        return max(self.joint, self.of_block_B[block])


def given(value: float, num_blocks: int) -> Smoothness:
    """The user's own L, taken as every L_k too."""
    return Smoothness(value, (value,) * num_blocks, "given")


class JointModel:
    """All blocks of a config in one process, at their initial weights, with nothing between them.

    blocks  : B of them, built as every rank of a run builds its own
    batches : the rounds of the run
    """

    def __init__(self, config: Config) -> None:
        """Load and build; raises what a run's start raises for the same config."""
        self.config = config
        self.blocks = [build_block(config.for_block(k), k) for k in range(config.num_parties + 1)]
        require_equal([handshake_record(b.config, b.shard) for b in self.blocks])
        data, num_rows = config.data, self.blocks[0].shard.num_rows
        self.batches = Batches(num_rows, data.batch_size, config.seed, data.shuffle)

    @property
    def modules(self) -> list[nn.Module]:
        """Head and towers."""
        return [block.module for block in self.blocks]

    def forward(
        self, rows_N: np.ndarray, modules: Sequence[nn.Module], dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(mean loss of these rows, the parties' embeddings (N, P)) through `modules`.

        Random layers draw the same numbers at every call.
        """
        rows, labels = torch.from_numpy(rows_N), self.blocks[0].shard.train_y
        assert labels is not None
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seeds.key64(self.config.seed, "theory") >> 1)
            embeddings = []
            for block, module in zip(self.blocks[1:], modules[1:], strict=True):
                assert block.shard.train_x is not None
                embeddings.append(module(block.shard.train_x[rows].to(dtype)))
            logits = modules[0](torch.cat(embeddings, dim=1))
        loss = F.cross_entropy(logits, labels[rows])
        if not math.isfinite(float(loss.detach())):
            raise NonFiniteError(f"theory: the loss of the model is {float(loss.detach())}")
        return loss, embeddings

    def loss_of(self, rows_N: np.ndarray) -> float:
        """Mean loss of these rows at the weights as they are, in training mode."""
        with torch.no_grad():
            return float(self.forward(rows_N, self.modules, self.blocks[0].dtype)[0])


def estimate(model: JointModel) -> Smoothness:
    """Lower bounds on L and every L_k from the rows of round 0; nothing in `model` is changed.

    With private labels a party steps down a frozen gradient at its embedding, and its L_k is that
    of the sum of h_k times it.

    Raises ConfigError for a module that cannot take float64 or has no second derivative, and
    where the loss does not bend at all.
    """
    seed = model.config.seed
    modules = [copy.deepcopy(module).double() for module in model.modules]
    parameters = [trainable(module) for module in modules]
    everything = [p for own in parameters for p in own]
    try:
        loss, embeddings = model.forward(model.batches.rows(0), modules, torch.float64)
        _require_second_derivative(loss, everything)
        joint = curvature(loss, everything, seeds.generator(seed, "theory", 0))
        losses = [loss] * len(modules)
        if model.config.private_labels:
            pulls = torch.autograd.grad(loss, embeddings, retain_graph=True)
            losses[1:] = [(h * c).sum() for h, c in zip(embeddings, pulls, strict=True)]
        of_block = [
            curvature(own, parameters[k], seeds.generator(seed, "theory", k + 1))
            for k, own in enumerate(losses)
        ]
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"theory: L cannot be estimated on this model ({reason}); give it with --smoothness"
        ) from None
    if not 0 < max(joint, *of_block) < math.inf:
        raise ConfigError(
            f"theory: L was estimated as {joint:g} at the start; give it with --smoothness"
        )
    return Smoothness(joint, tuple(of_block), "estimated, a lower bound")


def _require_second_derivative(loss: torch.Tensor, parameters: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError if an operation of the model has none.

    torch.autograd.grad passes over such an operation in silence; backward() does not.
    """
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    bent = [g.sum() for g in gradients if g is not None and g.requires_grad]
    if bent:
        torch.stack(bent).sum().backward(retain_graph=True)


def curvature(
    loss: torch.Tensor, parameters: Sequence[nn.Parameter], draw: np.random.Generator
) -> float:
    """A lower bound on the norm of the Hessian of `loss` by `parameters`, by power iteration.

    draw : of the direction that it begins with
    """
    if not parameters or not loss.requires_grad:
        return 0.0
    gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    bent = [g for _, g in used if g.requires_grad]
    if not bent:
        return 0.0
    found, total = [p for p, _ in used], sum(p.numel() for p, _ in used)
    flat = torch.cat([g.reshape(-1) for _, g in used])
    direction = torch.from_numpy(draw.normal(size=total)).to(flat.dtype)
    best = 0.0
    for step in range(MOST_STEPS):
        direction = direction / direction.norm()
        parts = torch.autograd.grad(
            flat, found, direction, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        direction = torch.cat([part.reshape(-1) for part in parts])
        size = float(direction.norm())
        grown, best = size > best * (1 + SMALL_GROWTH), max(best, size)
        if size == 0 or (not grown and step >= FEWEST_STEPS):
            break
    return best


def gradient_variance(model: JointModel) -> tuple[float, ...]:
    """Estimate of sigma_k^2 of each block at the weights as they are: the mean squared distance of
    a mini-batch's gradient from the mean one, over the first NOISE_BATCHES rounds; 0 where a batch
    is all rows.
    """
    count = min(NOISE_BATCHES, model.batches.rounds_per_epoch)
    if count == 1:
        return (0.0,) * len(model.blocks)
    sums: list[torch.Tensor] = []
    squares = np.zeros(len(model.blocks))
    for round_index in range(count):
        gradients = _gradients(model, model.batches.rows(round_index))
        squares += [float(g.square().sum()) for g in gradients]
        sums = [s + g for s, g in zip(sums, gradients, strict=True)] if sums else gradients
    means = np.array([float(s.square().sum()) / count for s in sums])
    return tuple(np.maximum(0.0, (squares - means) / (count - 1)).tolist())


def _gradients(model: JointModel, rows_N: np.ndarray) -> list[torch.Tensor]:
    """The gradient of every block on these rows, flat, in float64."""
    loss, _ = model.forward(rows_N, model.modules, model.blocks[0].dtype)
    parameters = [trainable(module) for module in model.modules]
    everything = [p for own in parameters for p in own]
    got = iter(torch.autograd.grad(loss, everything, allow_unused=True, materialize_grads=True))
    return [
        torch.cat([torch.zeros(0, dtype=torch.float64), *(next(got).reshape(-1) for _ in own)])
        for own in parameters
    ]


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a local optimizer moves."""
    return [p for p in module.parameters() if p.requires_grad]
