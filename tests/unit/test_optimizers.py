"""The local optimizers against torch's own; the rows W3 are named in the tests."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

from hpcvfl.config import build
from hpcvfl.engine.optimizers import LocalOptimizer
from hpcvfl.errors import ConfigError
from hpcvfl.sections import OptimizerConfig

SGD_OPTIONS = [
    {"momentum": 0.0},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"momentum": 0.9, "nesterov": True},
]


def small_net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def some_rows(dtype=torch.float32):
    return torch.randn(11, 5, dtype=dtype, generator=torch.Generator().manual_seed(1))


def loss_of(net, x):
    return net(x).square().mean()


def torch_steps(optimizer, net, x, count):
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(net, x).backward()
        optimizer.step()


def same_bits(ours, theirs):
    return all(
        p.detach().numpy().tobytes() == q.detach().numpy().tobytes()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


@pytest.mark.parametrize("options", SGD_OPTIONS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_equal_those_of_torch_bit_for_bit_within_a_round(options, weight_decay, dtype):
    ours = small_net(dtype)
    theirs = copy.deepcopy(ours)
    options = {**options, "weight_decay": weight_decay}
    local = LocalOptimizer(OptimizerConfig(lr=0.1, **options), ours.parameters())
    x = some_rows(dtype)
    for lr in (0.1, 0.05):
        local.begin_round(lr)
        sgd = torch.optim.SGD(theirs.parameters(), lr=lr, **options)  # a fresh state
        torch_steps(sgd, theirs, x, 5)
        for _ in range(5):
            local.step(loss_of(ours, x))
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("options", SGD_OPTIONS[1:])
def test_w3_kept_state_equals_one_optimizer_of_torch_over_all_rounds(options):
    kept, forgot = small_net(), small_net()
    theirs = small_net()
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1, **options)
    locals_ = [
        LocalOptimizer(OptimizerConfig(keep_state=keep, **options), net.parameters())
        for net, keep in ((kept, True), (forgot, False))
    ]
    x = some_rows()
    for _ in range(3):
        for local in locals_:
            local.begin_round(0.1)
        for _ in range(2):
            locals_[0].step(loss_of(kept, x))
            locals_[1].step(loss_of(forgot, x))
        torch_steps(sgd, theirs, x, 2)
    assert same_bits(kept, theirs)
    assert not same_bits(forgot, theirs)


def test_each_parameter_has_a_velocity_of_its_own():
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    local = LocalOptimizer(OptimizerConfig(lr=1.0, momentum=0.5), [a, b])
    local.begin_round(1.0)
    for loss in (100 * a.sum(), b.sum(), a.sum()):
        local.step(loss)
    assert (a.item(), b.item()) == (-100 - 51, -1)


@pytest.mark.parametrize("options", SGD_OPTIONS[1:])
def test_w3_the_buffer_is_zero_at_the_start_of_each_round(options):
    p = nn.Parameter(torch.ones(1))
    local = LocalOptimizer(OptimizerConfig(lr=1.0, **options), [p])
    moved = []
    for _ in range(3):
        local.begin_round(1.0)
        before = p.item()
        local.step(p.sum())
        moved.append(before - p.item())
        local.step(5 * p.sum())  # leaves another velocity behind
    first = 1.9 if options.get("nesterov") else 1.0
    assert moved == pytest.approx([first] * 3, abs=1e-6)


@pytest.mark.parametrize("options", SGD_OPTIONS[1:3])
def test_w3_rounds_of_one_step_with_momentum_equal_sgd_bit_for_bit(options):
    plain, moving = small_net(), small_net()
    locals_ = [
        LocalOptimizer(OptimizerConfig(lr=0.1), plain.parameters()),
        LocalOptimizer(OptimizerConfig(lr=0.1, **options), moving.parameters()),
    ]
    x = some_rows()
    for _ in range(4):
        for local, net in zip(locals_, (plain, moving), strict=True):
            local.begin_round(0.1)
            local.step(loss_of(net, x))
    assert same_bits(plain, moving)
    assert not same_bits(plain, small_net())


def test_the_proximal_term_pulls_to_where_each_round_began():
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    local = LocalOptimizer(OptimizerConfig(proximal=2.0), [p])
    seen = []
    for _ in range(2):
        local.begin_round(0.25)
        for _ in range(2):
            local.step(p.sum())
            seen.append(p.item())
    assert seen == [-0.25, -0.375, -0.625, -0.75]


def test_the_factors_of_the_rate_begin_anew_each_round_and_the_last_repeats():
    p = nn.Parameter(torch.zeros(1))
    local = LocalOptimizer(OptimizerConfig(step_rates=(1.0, 0.5, 2.0), keep_state=True), [p])
    for _ in range(2):
        local.begin_round(1.0)
        moved = []
        for _ in range(4):
            before = p.item()
            local.step(p.sum())
            moved.append(before - p.item())
        assert moved == [1, 0.5, 2, 2]


class Halving(torch.optim.SGD):
    """Changes the gradients that it is given, as a class of torch.optim may."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)
        return super().step(closure)


def test_gradients_that_share_memory_are_left_alone(monkeypatch):
    """Autograd gives both terms of a sum one tensor, of one element in memory."""
    monkeypatch.setattr(torch.optim, "Halving", Halving, raising=False)
    for fields, due in (({"momentum": 0.5}, 1 - 2.5), ({"name": "Halving"}, 1 - 1)):
        a, b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        local = LocalOptimizer(OptimizerConfig(**fields), [a, b])
        local.begin_round(1.0)
        for _ in range(2):
            local.step((a + b).sum())
        assert a.tolist() == b.tolist() == [due] * 3


def test_an_unused_or_frozen_parameter_stays():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    local = LocalOptimizer(OptimizerConfig(lr=0.5), [used, unused, frozen])
    local.begin_round(0.5)
    local.step((used * frozen).sum())
    assert used.tolist() == [0.5, 0.5]
    assert unused.tolist() == frozen.tolist() == [1, 1]


NEWCOMERS = ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop"]


@pytest.mark.parametrize("name", NEWCOMERS)
@pytest.mark.parametrize("keep_state", [False, True])
def test_a_class_of_torch_is_made_anew_each_round_unless_its_state_is_kept(name, keep_state):
    ours, theirs = small_net(torch.float64), small_net(torch.float64)
    config = OptimizerConfig(name=name, lr=0.01, keep_state=keep_state)
    local = LocalOptimizer(config, ours.parameters())
    decay = {} if name == "Rprop" else {"weight_decay": 0.0}
    x, other = some_rows(torch.float64), None
    for lr in (0.01, 0.02, 0.005):
        local.begin_round(lr)
        if other is None or not keep_state:
            made_with = 0.01 if keep_state else lr
            other = getattr(torch.optim, name)(theirs.parameters(), lr=made_with, **decay)
        other.param_groups[0]["lr"] = lr
        torch_steps(other, theirs, x, 3)
        for _ in range(3):
            local.step(loss_of(ours, x))
        assert same_bits(ours, theirs)


def test_weight_decay_reaches_a_class_of_torch():
    ours, theirs = small_net(), small_net()
    config = OptimizerConfig(name="AdamW", lr=0.01, weight_decay=0.3)
    local = LocalOptimizer(config, ours.parameters())
    local.begin_round(0.01)
    x = some_rows()
    torch_steps(torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.3), theirs, x, 3)
    for _ in range(3):
        local.step(loss_of(ours, x))
    assert same_bits(ours, theirs)


def test_a_class_of_torch_leaves_an_unused_parameter_and_no_gradients_behind():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    local = LocalOptimizer(OptimizerConfig(name="Adam"), [used, unused])
    local.begin_round(0.5)
    local.step(used.sum())
    assert used.tolist() == pytest.approx([0.5, 0.5])
    assert unused.tolist() == [1, 1]
    assert used.grad is None


@pytest.mark.parametrize("name", ["sgd", "Adam"])
def test_a_block_without_parameters_takes_no_step(name):
    local = LocalOptimizer(OptimizerConfig(name=name), [])
    local.begin_round(0.1)
    local.step(torch.zeros(()))
    assert local.weights(2).total == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "adam"}, "optimizer.name = 'adam': no such optimizer; due is sgd or .*Adam"),
        ({"name": "lr_scheduler"}, "optimizer.name = 'lr_scheduler': no such optimizer"),
        ({"name": "Optimizer"}, "optimizer.name = 'Optimizer': no such optimizer"),
        ({"name": "SGD"}, "optimizer.name = 'SGD': due is 'sgd'"),
        ({"name": "LBFGS"}, "optimizer.name = 'LBFGS': its step needs a closure"),
        ({"name": "SparseAdam"}, "'SparseAdam': cannot train this block .*dense gradients"),
        ({"name": "Muon"}, "'Muon': cannot train this block .*2D"),
        ({"name": "Rprop", "weight_decay": 0.1}, "weight_decay = 0.1: 'Rprop' of torch.optim has"),
    ],
)
def test_an_optimizer_that_cannot_train_the_block_is_refused_in_one_line(fields, words):
    with pytest.raises(ConfigError, match=words) as caught:
        LocalOptimizer(OptimizerConfig(**fields), small_net().parameters())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"momentum": 0.9, "name": "Adam"}, "optimizer.momentum = 0.9: a rule of .*'sgd'"),
        ({"dampening": 0.1, "name": "Adam"}, "optimizer.dampening = 0.1: a rule of .*'sgd'"),
        ({"nesterov": True, "name": "Adam"}, "optimizer.nesterov = True: a rule of .*'sgd'"),
        ({"step_rates": [1.0], "name": "Adam"}, "optimizer.step_rates = .*: a rule of .*'sgd'"),
        ({"proximal": 0.1, "name": "Adam"}, "optimizer.proximal = 0.1: a rule of .*'sgd'"),
        ({"nesterov": True}, "optimizer.nesterov = True: needs optimizer.momentum > 0"),
        ({"dampening": 0.5}, "optimizer.dampening = 0.5: needs optimizer.momentum > 0"),
        (
            {"momentum": 0.9, "dampening": 0.5, "nesterov": True},
            "optimizer.nesterov = True: needs dampening = 0, it is 0.5",
        ),
        ({"dampening": 1.0}, "optimizer.dampening = 1.0: .*less than 1"),
        ({"proximal": -1}, "optimizer.proximal = -1: .*greater than or equal to 0"),
        ({"weight_decay": -1}, "optimizer.weight_decay = -1: .*greater than or equal to 0"),
        ({"step_rates": [1.0, 0.0]}, "optimizer.step_rates.1 = 0.0: .*greater than 0"),
        ({"proximal": 10, "lr": 0.1}, "optimizer.proximal = 10: due is lr .* < 1, it is 0.1 .* 1;"),
        ({"weight_decay": 20}, "optimizer.weight_decay = 20: due is lr .* it is 0.1 . 20 = 2;"),
        ({"weight_decay": 6, "proximal": 5}, "optimizer.proximal = 5: .* it is 0.1 . 11 = 1.1;"),
        ({"proximal": 3, "step_rates": [1, 4]}, "optimizer.proximal = 3: .* it is 0.4 . 3 = 1.2;"),
    ],
)
def test_rules_that_do_not_fit_are_refused_in_one_line(fields, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build({"optimizer": fields})
    assert "\n" not in str(caught.value)


def test_a_rate_that_grows_too_large_for_the_proximal_term_is_refused():
    config = OptimizerConfig(lr=0.1, proximal=4.0, step_rates=(1.0, 2.0))
    local = LocalOptimizer(config, [nn.Parameter(torch.zeros(1))])
    local.begin_round(0.12)
    with pytest.raises(ConfigError, match=r"optimizer.proximal = 4: the rate .* is 0.26, due is"):
        local.begin_round(0.13)
    decaying = OptimizerConfig(lr=0.1, weight_decay=4.0)
    with pytest.raises(ConfigError, match=r"optimizer.weight_decay = 4: the rate .* is 0.3, due"):
        LocalOptimizer(decaying, [nn.Parameter(torch.zeros(1))]).begin_round(0.3)


def test_every_rule_of_sgd_leaves_the_compiler_alone():
    program = (
        "import sys, torch; from torch import nn\n"
        "from hpcvfl.sections import OptimizerConfig\n"
        "from hpcvfl.engine.optimizers import LocalOptimizer\n"
        "net = nn.Linear(2, 2)\n"
        "rules = [{}, dict(momentum=.9, dampening=.1), dict(momentum=.9, nesterov=True),\n"
        "         dict(proximal=1, weight_decay=1, step_rates=(1, 2), keep_state=True)]\n"
        "for name in ('sgd', 'Adam'):\n"
        "    for rule in rules if name == 'sgd' else [{}]:\n"
        "        opt = LocalOptimizer(OptimizerConfig(name=name, **rule), net.parameters())\n"
        "        opt.begin_round(0.1); opt.step(net(torch.ones(1, 2)).sum()); opt.weights(1)\n"
        "    print(name, 'torch._dynamo' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines() == ["sgd False", "Adam True"]
