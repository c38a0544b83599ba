"""Towers a user might bring, for `model.tower = "support.modules:..."`."""

import math
import os
import resource
import signal
import subprocess
from pathlib import Path

import torch
from support.launch import wait_for
from torch import nn

from hpcvfl.transport.launcher import expected_rank


class DropoutTower(nn.Module):
    """Draws from torch's global generator in every training forward."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        width = int(torch.Size(input_shape).numel())
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(width, 24),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(24, embedding_dim),
        )

    def forward(self, x):
        return self.net(x)


class BatchNormTower(nn.Module):
    """Keeps running statistics of its inputs."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        width = int(torch.Size(input_shape).numel())
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, embedding_dim)

    def forward(self, x):
        return self.out(self.norm(x.flatten(1)))


class ExplodingTower(nn.Module):
    """Gives NaN in training from the third forward on (the first is the trial at construction)."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        self.out = nn.Linear(int(torch.Size(input_shape).numel()), embedding_dim)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        h = self.out(x.flatten(1))
        return h * float("nan") if self.training and self.calls > 3 else h


class CrashingTower(ExplodingTower):
    """Raises in training, as a fault in a user's code would."""

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 3:
            raise RuntimeError("a fault in the tower")
        return self.out(x.flatten(1))


class DropoutHead(nn.Module):
    """Draws from torch's generator in every training forward, and keeps running statistics."""

    def __init__(self, input_dim, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm1d(input_dim)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(input_dim, num_classes)

    def forward(self, h):
        return self.out(self.drop(self.norm(h)))


class TransposedHead(nn.Module):
    """A head whose weight lies column by column in memory."""

    def __init__(self, input_dim, num_classes):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(num_classes, input_dim).t())

    def forward(self, x):
        return x @ self.weight


class InstanceNormTower(nn.Module):
    """A normalisation without running statistics, beside one with a head of its own."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        self.norm = nn.InstanceNorm1d(1)
        self.out = nn.Linear(int(torch.Size(input_shape).numel()), embedding_dim)

    def forward(self, x):
        return self.out(self.norm(x.flatten(1).unsqueeze(1)).squeeze(1))


class WideInTraining(ExplodingTower):
    """Gives more columns in training than in the trial at its construction."""

    def forward(self, x):
        h = self.out(x.flatten(1))
        return torch.cat([h] * 64, dim=1) if self.training else h


class DoubleTower(ExplodingTower):
    """Gives another dtype than the run's in training."""

    def forward(self, x):
        h = self.out(x.flatten(1))
        return h.double() if self.training else h


class DetachedTower(ExplodingTower):
    """Gives an output without a graph."""

    def forward(self, x):
        return self.out(x.flatten(1)).detach()


class FrozenTower(ExplodingTower):
    """Nothing in it is trained."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__(input_shape, embedding_dim)
        self.requires_grad_(False)

    def forward(self, x):
        return self.out(x.flatten(1))


class TiedTower(nn.Module):
    """Two layers share their weight."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        width = int(torch.Size(input_shape).numel())
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.out = nn.Linear(width, embedding_dim)

    def forward(self, x):
        return self.out(self.second(self.first(x.flatten(1))))


class SpectralTower(nn.Module):
    """Every training forward moves buffers that its weight is made of (a power iteration)."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        width = int(torch.Size(input_shape).numel())
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(width, embedding_dim))

    def forward(self, x):
        return self.out(x.flatten(1))


class QuittingTower(ExplodingTower):
    """Calls sys.exit(0) in the middle of training."""

    def forward(self, x):
        self.calls += 1
        if self.training and self.calls > 3:
            raise SystemExit(0)
        return self.out(x.flatten(1))


class LinearTower(nn.Module):
    """Linear in its parameters, so that its Jacobian never changes."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__()
        self.layer = nn.Linear(math.prod(input_shape), embedding_dim)

    def forward(self, x):
        return self.layer(x.flatten(1))


class OddStateTower(LinearTower):
    """Buffers of odd kinds; it counts its forwards in one that has more places than memory."""

    def __init__(self, input_shape, embedding_dim):
        super().__init__(input_shape, embedding_dim)
        self.register_buffer("counted", torch.zeros(1, 4).expand(3, 4))
        self.register_buffer("counted_too", self.counted)
        self.register_buffer("turned", torch.arange(6).reshape(2, 3).T)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.empty(0, 2))

    def forward(self, x):
        if self.training:
            self.counted.add_(1)
        return super().forward(x) * (1 + 1e-3 * self.counted.mean())


class OnceTower(LinearTower):
    """Its backward pass has no derivative of its own."""

    class Double(torch.autograd.Function):
        """x -> 2 x."""

        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, gradient):
            return 2 * gradient

    def forward(self, x):
        return self.Double.apply(super().forward(x))


class SignallingHead(nn.Module):
    """A linear head that signals its own process in its forward number TEST_AT of training, where
    this is rank TEST_RANK: in the middle of the local steps of a round. With TEST_PARENT it signals
    the process that started it.
    """

    def __init__(self, input_dim, num_classes):
        super().__init__()
        self.out = nn.Linear(input_dim, num_classes)
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        asked = os.environ.get("TEST_RANK", "none") == str(expected_rank())
        if self.training and asked and self.calls == int(os.environ["TEST_AT"]):
            self.fault()
        return self.out(x)

    def fault(self):
        """What happens then."""
        whom = os.getppid() if "TEST_PARENT" in os.environ else os.getpid()
        os.kill(whom, int(os.environ["TEST_SIGNAL"]))


class HungryHead(SignallingHead):
    """One that takes more memory than its process may have, there and then."""

    def fault(self):
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**26, resource.RLIM_INFINITY))
        self.out(torch.ones(2**24, self.out.in_features))


class SavedHead(SignallingHead):
    """One whose process gets the signal when its tensors are asked for the TEST_AT-th time."""

    saved = 0

    def forward(self, x):
        return self.out(x)

    def state_dict(self, *args, **kwargs):
        self.saved += 1
        if os.environ.get("TEST_RANK") == str(expected_rank()) and self.saved == int(
            os.environ["TEST_AT"]
        ):
            self.fault()
        return super().state_dict(*args, **kwargs)


class DiskHead(SignallingHead):
    """One in whose forward something happens to the disk: the command TEST_SHELL is run."""

    def fault(self):
        subprocess.run(["sh", "-c", os.environ["TEST_SHELL"]], check=False)


class WaitingHead(nn.Module):
    """A linear head that waits in its forward number TEST_AT of training until its process has been
    asked to stop, or with TEST_SIGNAL sends it that; in the first start of a Slurm job only, of an
    array only in member TEST_MEMBER.
    """

    def __init__(self, input_dim, num_classes):
        super().__init__()
        self.out = nn.Linear(input_dim, num_classes)
        self.calls = 0
        member = os.environ.get("SLURM_ARRAY_TASK_ID") == os.environ.get("TEST_MEMBER")
        first = "SLURM_RESTART_COUNT" not in os.environ
        self.at = int(os.environ.get("TEST_AT", "0")) if member and first else 0

    def forward(self, x):
        self.calls += self.training
        if self.training and self.calls == self.at:
            os.kill(os.getpid(), int(os.environ.get("TEST_SIGNAL", "0")))
            asked = signal.getsignal(signal.SIGUSR1).__self__  # the Asked whose method it is
            wait_for(lambda: asked.reason, 120)
        return self.out(x)
