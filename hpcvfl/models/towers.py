"""Towers: a party's columns of a sample in, its embedding of P values out.

Shapes: B samples in a batch, C channels, H x W pixels, T time steps of F values, P = embedding_dim.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from hpcvfl.errors import ConfigError


class MLPTower(nn.Module):
    """Flatten, one hidden layer with ReLU, linear embedding. Takes any input shape."""

    def __init__(self, input_shape: tuple[int, ...], embedding_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, embedding_dim),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, P)."""
        return self.layers(x)


class CNNTower(nn.Module):
    """Two convolutions of stride 2, ReLU, a linear embedding, layer normalisation; small and quick.

    For patches of 14x14 or 16x16 pixels; works from 4x4 up. Each embedding has mean 0 and variance
    1 over its P values (no trained scale): no party's range runs away between two exchanges.
    """

    def __init__(self, input_shape: tuple[int, ...], embedding_dim: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < 4:
            raise ConfigError(
                f"model.tower = 'cnn': needs images (channels, height, width) of at least 4x4,"
                f" this party's samples have shape {input_shape}; choose mlp"
            )
        channels, height, width = input_shape
        # Strides, not pooling: with 3x3, pooling and the same widths a round of 4 towers costs
        # 34 ms on one core at B = 100, with strides 7-9 ms (bench/LOG.md).
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * -(-height // 4) * -(-width // 4), embedding_dim),
            # Fashion-MNIST, B = 1000, rate 0.5, five epochs: 86.9 % with, 83.2 % without.
            # A single value has no variance to divide by.
            nn.LayerNorm(embedding_dim, elementwise_affine=False)
            if embedding_dim > 1
            else nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, P)."""
        return self.layers(x)


class LSTMTower(nn.Module):
    """One LSTM layer; the output at the last time step, then a linear embedding.

    Takes sequences (T, F), or images (C, H, W) read as H time steps of C*W values.
    """

    def __init__(self, input_shape: tuple[int, ...], embedding_dim: int, hidden_dim: int) -> None:
        super().__init__()
        if len(input_shape) not in (2, 3):
            raise ConfigError(
                f"model.tower = 'lstm': needs sequences (steps, features) or images (channels,"
                f" height, width), this party's samples have shape {input_shape}; choose mlp"
            )
        num_features = input_shape[-1] * (input_shape[0] if len(input_shape) == 3 else 1)
        self.lstm = nn.LSTM(num_features, hidden_dim, batch_first=True)
        self.embed = nn.Linear(hidden_dim, embedding_dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, F) or (B, C, H, W) -> (B, P)."""
        if x.ndim == 4:
            x = x.transpose(1, 2).flatten(2)
        return self.embed(self.lstm(x)[0][:, -1])


def resnet18_tower(input_shape: tuple[int, ...], embedding_dim: int) -> nn.Module:
    """torchvision's ResNet-18 with the CIFAR stem: 3x3 convolution of stride 1, no pooling."""
    if len(input_shape) != 3:
        raise ConfigError(
            f"model.tower = 'resnet18': needs images (channels, height, width), this party's"
            f" samples have shape {input_shape}; choose mlp"
        )
    from torchvision.models import resnet18  # 1.3 s of CPU a rank, so only when used

    network = resnet18(num_classes=embedding_dim)
    network.conv1 = nn.Conv2d(input_shape[0], 64, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    network.maxpool = nn.Identity()
    return network


class MLPHead(nn.Module):
    """One hidden layer with ReLU on the concatenated embeddings, then the logits."""

    def __init__(self, input_dim: int, num_classes: int, hidden_dim: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(input_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_classes)
        )

    def forward(self, h: Tensor) -> Tensor:
        """(B, M*P) -> logits (B, num_classes)."""
        return self.layers(h)
