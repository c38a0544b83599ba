"""What a round of a local optimizer adds up to, against the optimizer that really runs.

The rows W1, W2, W4, A3, E5 and E6 are named in the tests. tau local steps on the linear problem
g = H theta - b; rho momentum, d dampening, mu proximal, lambda weight decay.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from hpcvfl.engine.optimizers import LocalOptimizer
from hpcvfl.engine.weights import Weights, prefix_total, weights_of, why_not
from hpcvfl.errors import ConfigError
from hpcvfl.sections import OptimizerConfig

RHO, D, MU, LAMBDA, LR = 0.9, 0.3, 2.0, 1.5, 0.05
FACTORS = (1.0, 0.5, 2.0, 0.25)
TAUS = (1, 2, 3, 7, 20)


def sgd(tau):
    return [1.0] * tau


def momentum(tau):
    return [(1 - RHO ** (tau - t)) / (1 - RHO) for t in range(tau)]


def dampening(tau):
    return [(1 - D) ** (t > 0) * w for t, w in enumerate(momentum(tau))]


def nesterov(tau):
    return [(1 - RHO ** (tau + 1 - t)) / (1 - RHO) for t in range(tau)]


def proximal(tau, mu=MU):
    return [(1 - LR * mu) ** (tau - 1 - t) for t in range(tau)]


def variable_rate(tau):
    return [FACTORS[min(t, len(FACTORS) - 1)] for t in range(tau)]


def momentum_and_proximal(tau):
    h = [0.0, 1.0]
    for _ in range(tau):
        h.append((1 + RHO - LR * MU) * h[-1] - RHO * h[-2])
    return [h[tau - t] for t in range(tau)]


def weight_decay(tau):
    return proximal(tau, LAMBDA)


ROWS = {
    "sgd": ({}, sgd),
    "momentum": ({"momentum": RHO}, momentum),
    "dampening": ({"momentum": RHO, "dampening": D}, dampening),
    "nesterov": ({"momentum": RHO, "nesterov": True}, nesterov),
    "proximal": ({"proximal": MU}, proximal),
    "variable-rate": ({"step_rates": FACTORS}, variable_rate),
    "momentum-proximal": ({"momentum": RHO, "proximal": MU}, momentum_and_proximal),
    "weight-decay": ({"weight_decay": LAMBDA}, weight_decay),
}
MOMENTA = (
    {},
    {"momentum": 0.5},
    {"momentum": RHO, "dampening": D},
    {"momentum": RHO, "nesterov": True},
)
COMBINATIONS = [
    {**rule, "proximal": mu, "weight_decay": decay, "step_rates": factors}
    for rule, mu, decay, factors in itertools.product(
        MOMENTA, (0.0, MU), (0.0, LAMBDA), ((), FACTORS)
    )
]
each_row = pytest.mark.parametrize(("fields", "closed_form"), ROWS.values(), ids=list(ROWS))
each_tau = pytest.mark.parametrize("tau", TAUS)


def optimizer_of(fields, parameters, lr=LR):
    return LocalOptimizer(OptimizerConfig(lr=lr, **fields), parameters)


def problem(size=6, seed=0):
    """H (largest eigenvalue 3), b and a start, float64."""
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((size, size))
    h = root @ root.T
    h *= 3 / np.linalg.eigvalsh(h)[-1]
    return h, rng.standard_normal(size), rng.standard_normal(size)


def run_round(fields, tau, seed=0):
    """One round: (theta^0, theta^tau, the tau gradients H theta^t - b, the round's weights)."""
    h, b, start = problem(seed=seed)
    h_t, b_t = torch.from_numpy(h), torch.from_numpy(b)
    theta = nn.Parameter(torch.from_numpy(start.copy()))
    local = optimizer_of(fields, [theta])
    local.begin_round(LR)
    gradients = []
    for _ in range(tau):
        gradients.append(h @ theta.detach().numpy() - b)
        local.step(0.5 * theta @ h_t @ theta - b_t @ theta)
    return start, theta.detach().numpy(), gradients, local.weights(tau)


def impulses(fields, tau):
    """w of the running optimizer: the gradient is 1 at one step and 0 at the others, in turn."""
    w = []
    for at in range(tau):
        x = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        local = optimizer_of(fields, [x])
        local.begin_round(LR)
        for step in range(tau):
            local.step(float(step == at) * x.sum())
        w.append(-x.item() / LR)
    return w


def error_of(w, start, end, gradients):
    return np.abs(start - LR * sum(a * g for a, g in zip(w, gradients, strict=True)) - end).max()


@each_tau
@each_row
def test_w1_a_round_is_the_weighted_sum_of_its_gradients(fields, closed_form, tau):
    start, end, gradients, weights = run_round(fields, tau)
    gradients = [g + fields.get("weight_decay", 0.0) * start for g in gradients]
    assert np.abs(end - start).max() > 1e-3
    assert error_of(weights.w, start, end, gradients) < 1e-12
    assert error_of(closed_form(tau), start, end, gradients) < 1e-12


@pytest.mark.parametrize("fields", COMBINATIONS)
def test_w1_holds_for_every_combination_of_rules(fields):
    start, end, gradients, weights = run_round(fields, 7)
    gradients = [g + fields["weight_decay"] * start for g in gradients]
    assert error_of(weights.w, start, end, gradients) < 1e-12


@each_tau
@each_row
def test_w2_unit_impulses_equal_the_closed_forms(fields, closed_form, tau):
    came = weights_of(OptimizerConfig(lr=LR, **fields), LR, tau)
    due = closed_form(tau)
    np.testing.assert_allclose(came.w, due, rtol=0, atol=1e-12)
    np.testing.assert_allclose(impulses(fields, tau), due, rtol=0, atol=1e-12)
    assert came.w_bar == max(came.w)
    assert came.total == pytest.approx(sum(due), abs=1e-12 * tau)


@pytest.mark.parametrize("fields", COMBINATIONS)
def test_w2_unit_impulses_equal_the_weights_of_every_combination(fields):
    came = weights_of(OptimizerConfig(lr=LR, **fields), LR, 9)
    np.testing.assert_allclose(came.w, impulses(fields, 9), rtol=0, atol=1e-12)


@each_tau
def test_w2_largest_weight_and_sum_have_their_closed_forms(tau):
    def came(name):
        return weights_of(OptimizerConfig(lr=LR, **ROWS[name][0]), LR, tau)

    power, kept = RHO**tau, 1 - LR * MU
    due = {
        "sgd": (1, tau),
        "momentum": ((1 - power) / (1 - RHO), (tau - RHO * (1 - power) / (1 - RHO)) / (1 - RHO)),
        "nesterov": ((1 - RHO * power) / (1 - RHO), sum(nesterov(tau))),
        "proximal": (1, (1 - kept**tau) / (LR * MU)),
        "weight-decay": (1, (1 - (1 - LR * LAMBDA) ** tau) / (LR * LAMBDA)),
        "variable-rate": (max(FACTORS[:tau]), sum(variable_rate(tau))),
    }
    for name, (w_bar, total) in due.items():
        assert came(name).w_bar == pytest.approx(w_bar, abs=1e-12), name
        assert came(name).total == pytest.approx(total, abs=1e-11), name


def test_w2_momentum_has_the_values_of_the_table():
    table = {1: (1, 1), 5: (4.095, 13.14), 10: (6.513, 41.38), 11: (6.862, 48.24)}
    table[20] = (8.784, 120.94)
    for tau, (w_bar, total) in table.items():
        came = weights_of(OptimizerConfig(momentum=RHO), 0.1, tau)
        assert (round(came.w_bar, 3), round(came.total, 2)) == (w_bar, total)
    assert round(20 * weights_of(OptimizerConfig(momentum=RHO), 0.1, 20).w_bar, 2) == 175.68


@each_tau
def test_w4_the_exponent_that_is_two_too_large_fails_w1(tau):
    start, end, gradients, _ = run_round({"proximal": MU}, tau)
    wrong = [(1 - LR * MU) ** (tau - t + 1) for t in range(tau)]
    assert error_of(wrong, start, end, gradients) > 1e-4


def test_a3_the_largest_weight_of_momentum_follows_the_number_of_steps():
    x = nn.Parameter(torch.zeros(1))
    local = optimizer_of({"momentum": RHO}, [x])
    came = []
    for tau in range(1, 12):
        local.begin_round(LR)
        for _ in range(tau):
            local.step(x.sum())
        came.append(local.weights(tau).w_bar)
    due = [(1 - RHO**tau) / (1 - RHO) for tau in range(1, 12)]
    np.testing.assert_allclose(came, due, rtol=0, atol=1e-12)
    assert (came[0], round(came[-1], 3)) == (1, 6.862)


@each_tau
def test_e5_a_round_on_a_quadratic_is_the_affine_map_to_the_power_of_its_steps(tau):
    h, b, _ = problem(seed=3)
    start, end, _, _ = run_round({}, tau, seed=3)
    best = np.linalg.solve(h, b)
    due = best + np.linalg.matrix_power(np.eye(len(b)) - LR * h, tau) @ (start - best)
    np.testing.assert_allclose(end, due, rtol=1e-10, atol=1e-10)


def test_e6_blocks_of_different_rules_and_step_counts_reach_the_least_squares_solution():
    rng = np.random.default_rng(1)
    columns = [torch.from_numpy(rng.standard_normal((60, 2)) / 8) for _ in range(4)]
    target = torch.from_numpy(rng.standard_normal(60))
    blocks = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in columns]
    rules = ({}, {"momentum": 0.5}, {"proximal": 0.5}, {"step_rates": (1.0, 0.5)})
    locals_ = [optimizer_of(rule, [b], lr=0.1) for rule, b in zip(rules, blocks, strict=True)]
    for _ in range(400):
        with torch.no_grad():
            parts = [c @ b for c, b in zip(columns, blocks, strict=True)]
        for k, (local, block) in enumerate(zip(locals_, blocks, strict=True)):
            others = sum(part for j, part in enumerate(parts) if j != k)
            local.begin_round(0.1)
            for _ in range(rng.integers(1, 6)):
                local.step(0.5 * (columns[k] @ block + others - target).square().sum())
    best = torch.linalg.lstsq(torch.cat(columns, dim=1), target).solution
    assert (torch.cat([b.detach() for b in blocks]) - best).abs().max() < 1e-10


def test_a_round_keeps_the_rate_that_it_began_with():
    config = OptimizerConfig(lr=LR, proximal=MU)
    local = LocalOptimizer(config, [nn.Parameter(torch.zeros(1))])
    local.begin_round(LR / 2)
    assert local.weights(5) == weights_of(config, LR / 2, 5) != weights_of(config, LR, 5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"name": "Adam"}, "optimizer.name = 'Adam': Flex-VFL's theory covers the rules of sgd"),
        ({"momentum": RHO, "keep_state": True}, "optimizer.keep_state = true with momentum = 0.9"),
    ],
)
def test_a_rule_outside_the_theory_says_so_and_reports_ones(fields, words):
    config = OptimizerConfig(**fields)
    assert why_not(config).startswith(words)
    assert weights_of(config, 0.1, 4) == Weights((1.0,) * 4, 1.0, 4.0)
    local = LocalOptimizer(config, [nn.Parameter(torch.zeros(2, 2))])
    assert (local.covered, local.why_not) == (False, why_not(config))
    assert local.weights(4).total == 4


@pytest.mark.parametrize("fields", [*COMBINATIONS, {"keep_state": True}])
def test_every_rule_of_sgd_is_covered(fields):
    """Without momentum there is no state that could be kept."""
    local = optimizer_of(fields, [nn.Parameter(torch.zeros(1))])
    assert (local.covered, local.why_not) == (True, "")


@pytest.mark.parametrize(
    ("fields", "lr", "tau"),
    [
        ({"proximal": 1.0}, 10.0, 400),
        ({"weight_decay": 1.0, "momentum": 0.9}, 10.0, 400),
        ({"step_rates": (1e308, 1e308)}, 1e-309, 4),
    ],
)
def test_weights_beyond_a_float_are_one_line(fields, lr, tau):
    config = OptimizerConfig.model_construct(**{**OptimizerConfig().model_dump(), **fields})
    for weigh in (weights_of, prefix_total):
        with pytest.raises(ConfigError, match=r"weights of \d+ local steps at rate .* beyond"):
            weigh(config, lr, tau)
