"""Towers and heads by name or by "package.module:Class", with initial weights keyed by a seed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcvfl.errors import ConfigError
from hpcvfl.models.towers import CNNTower, LSTMTower, MLPHead, MLPTower, resnet18_tower
from hpcvfl.sections import ModelConfig

TOWERS: dict[str, Callable[[tuple[int, ...], ModelConfig], nn.Module]] = {
    "mlp": lambda shape, c: MLPTower(shape, c.embedding_dim, c.hidden_dim),
    "cnn": lambda shape, c: CNNTower(shape, c.embedding_dim),
    "resnet18": lambda shape, c: resnet18_tower(shape, c.embedding_dim),
    "lstm": lambda shape, c: LSTMTower(shape, c.embedding_dim, c.hidden_dim),
}
HEADS: dict[str, Callable[[int, int, ModelConfig], nn.Module]] = {
    "linear": lambda width, classes, c: nn.Linear(width, classes),
    "mlp": lambda width, classes, c: MLPHead(width, classes, c.head_hidden_dim),
}


def build_tower(
    config: ModelConfig, input_shape: tuple[int, ...], dtype: torch.dtype | str, seed_key: int
) -> nn.Module:
    """A party's tower: (B, *input_shape) -> (B, embedding_dim), in train mode.

    dtype    : torch.float32 | torch.float64, or its name; both start from the same weights
    seed_key : int < 2**64, decides the initial weights; torch's global generator is neither read
               nor moved

    A user's class gets the keyword arguments input_shape and embedding_dim. It is tried once, on
    two all-zero samples in eval mode. Raises ConfigError for an unknown name, a class that cannot
    be imported, built or run, and an output of another shape than (B, embedding_dim).
    """
    wanted = {"input_shape": input_shape, "embedding_dim": config.embedding_dim}
    make = TOWERS.get(config.tower)

    def construct() -> nn.Module:
        if make is not None:
            return make(input_shape, config)
        return _construct("model.tower", config.tower, list(TOWERS), wanted)

    field = f"model.tower = {config.tower!r}"
    return _build(field, construct, input_shape, config.embedding_dim, dtype, seed_key)


def build_head(
    config: ModelConfig,
    num_parties: int,
    num_classes: int,
    dtype: torch.dtype | str,
    seed_key: int,
) -> nn.Module:
    """The server's head: embeddings side by side (B, num_parties * P) -> logits (B, num_classes).

    Arguments and errors as for `build_tower`; a user's class gets the keyword
    arguments input_dim and num_classes.
    """
    width = num_parties * config.embedding_dim
    make = HEADS.get(config.head)

    def construct() -> nn.Module:
        if make is not None:
            return make(width, num_classes, config)
        wanted = {"input_dim": width, "num_classes": num_classes}
        return _construct("model.head", config.head, list(HEADS), wanted)

    field = f"model.head = {config.head!r}"
    return _build(field, construct, (width,), num_classes, dtype, seed_key)


def _construct(field: str, name: str, choices: list[str], arguments: dict[str, Any]) -> nn.Module:
    """An instance of "package.module:Class"."""
    module_name, colon, class_name = name.partition(":")
    if not colon or not module_name or not class_name:
        raise ConfigError(
            f"{field} = {name!r}: unknown; choices: {', '.join(choices)}, package.module:Class"
        )
    try:
        target = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:  # a user's file may raise anything; the cause stays attached
        raise ConfigError(
            f"{field} = {name!r}: cannot be imported: {_in_one_line(error)};"
            f" is its folder on PYTHONPATH?"
        ) from error
    try:
        module = target(**arguments)
    except Exception as error:
        raise ConfigError(
            f"{field} = {name!r}: cannot be built with the keyword arguments"
            f" {', '.join(arguments)}: {_in_one_line(error)}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{field} = {name!r}: gives a {type(module).__name__}, must be a torch.nn.Module"
        )
    return module


def _build(
    field: str,
    construct: Callable[[], nn.Module],
    input_shape: tuple[int, ...],
    output_dim: int,
    dtype: torch.dtype | str,
    seed_key: int,
) -> nn.Module:
    """Construct under a generator of its own, convert, and try it."""
    real: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_key)
        try:
            module = construct().to(real)
        except (RuntimeError, MemoryError, OverflowError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"{field}: cannot be built: {reason}") from None
        _try(field, module, input_shape, output_dim, real)
    return module.train()


def _try(
    field: str,
    module: nn.Module,
    input_shape: tuple[int, ...],
    output_dim: int,
    dtype: torch.dtype,
) -> None:
    """Forward two all-zero samples. Raises ConfigError unless the output is (2, output_dim)."""
    module.eval()
    try:
        with torch.no_grad():
            output = module(torch.zeros((2, *input_shape), dtype=dtype))
    except Exception as error:  # a user's forward may raise anything; the cause stays attached
        raise ConfigError(
            f"{field}: cannot take samples of shape {input_shape}: {_in_one_line(error)}"
        ) from error
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != (2, output_dim):
        raise ConfigError(
            f"{field}: gives {shape} for 2 samples of shape {input_shape}, must give"
            f" (2, {output_dim})"
        )


def _in_one_line(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).split()])
