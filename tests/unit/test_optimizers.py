"""The local optimizer against torch's own."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from hpcvfl.config import OptimizerConfig
from hpcvfl.engine.optimizers import LocalOptimizer


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_those_of_torch_bit_for_bit_within_a_round(momentum, dtype):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    theirs = copy.deepcopy(ours)
    local = LocalOptimizer(OptimizerConfig(lr=0.1, momentum=momentum), ours.parameters())
    x = torch.randn(11, 5, dtype=dtype)
    for lr in (0.1, 0.05):
        local.begin_round(lr)
        sgd = torch.optim.SGD(theirs.parameters(), lr=lr, momentum=momentum)  # a fresh state
        for _ in range(4):
            local.step(ours(x).square().mean())
            sgd.zero_grad()
            theirs(x).square().mean().backward()
            sgd.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.detach().numpy().tobytes() == q.detach().numpy().tobytes()


def test_each_parameter_has_a_velocity_of_its_own():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    local = LocalOptimizer(OptimizerConfig(lr=1.0, momentum=0.5), [a, b])
    local.begin_round(1.0)
    for loss in (100 * a.sum(), b.sum(), a.sum()):
        local.step(loss)
    assert (a.item(), b.item()) == (-100 - 51, -1)


def test_momentum_is_forgotten_at_a_round():
    p = nn.Parameter(torch.ones(1))
    local = LocalOptimizer(OptimizerConfig(lr=1.0, momentum=0.5), [p])
    moved = []
    for _ in range(3):
        local.begin_round(1.0)
        before = p.item()
        local.step(p.sum())
        moved.append(before - p.item())
    assert moved == [1, 1, 1]


def test_an_unused_or_frozen_parameter_stays():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    local = LocalOptimizer(OptimizerConfig(lr=0.5), [used, unused, frozen])
    local.begin_round(0.5)
    local.step((used * frozen).sum())
    assert used.tolist() == [0.5, 0.5]
    assert unused.tolist() == frozen.tolist() == [1, 1]


def test_training_does_not_import_the_compiler():
    program = (
        "import sys, torch; from torch import nn\n"
        "from hpcvfl.config import OptimizerConfig\n"
        "from hpcvfl.engine.optimizers import LocalOptimizer\n"
        "net = nn.Linear(2, 2); opt = LocalOptimizer(OptimizerConfig(), net.parameters())\n"
        "opt.begin_round(0.1); opt.step(net(torch.ones(1, 2)).sum())\n"
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "False"
