"""The page of `hpcvfl theory CONFIG_OR_RUN`: theory_of_run.py in aligned text.

Every line of numbers is marked: quoted (printed in the paper), derived (ours), measured (of this
run), estimated (on this model), given (by the user).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hpcvfl.config import Config
from hpcvfl.engine import theory_of_run as numbers
from hpcvfl.engine.smoothness import JointModel, Smoothness, estimate, given
from hpcvfl.engine.theory_of_run import BlockRounds, Measured, Terms
from hpcvfl.engine.weights import why_not
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import OptimizerConfig

ROUNDING = 1 + 1e-9
"""A rate that is its limit keeps it."""

DECAY = (
    "Weight decay [derived]: F stands for F + weight_decay |theta|^2 / 2, whose L is larger by that"
    " much at most."
)

READING = (
    "How to read it [derived]: a round counts through eta W alone, and eta W is capped at"
    " 1/(16 max{L, L_k}).",
    "In this theory more local steps never beat a larger rate with one step; they help where the"
    " rate is small.",
)


def page(config: Config, run: Path | None = None, smoothness: float | None = None) -> str:
    """The page of a config, or of the run in folder `run`, whose config it is.

    smoothness : L and every L_k, > 0; None: estimated on the config's data and model

    Raises ConfigError for another smoothness, and what a run's start raises for the config.
    """
    if config.algorithm.driver != "rounds":
        raise ConfigError(
            f"theory: algorithm.driver = {config.algorithm.driver!r}; this is about runs in rounds"
        )
    num_blocks = config.num_parties + 1
    if smoothness is not None and not 0 < smoothness < math.inf:
        raise ConfigError(f"theory: --smoothness {smoothness:g}; due is a positive number")
    model = JointModel(config)
    per_epoch = model.batches.rounds_per_epoch
    blocks = numbers.recorded(config, run, per_epoch) if run else numbers.planned(config, per_epoch)
    found = given(smoothness, num_blocks) if smoothness is not None else estimate(model)
    lines = [f"theory of {config.name}: {_what(config, run, blocks)}", *_about(found)]
    if blocks is None:
        lines += _without_steps(config, found)
    else:
        lines += ["", *_weights(blocks, found, "measured" if run else "planned"), ""]
        lines += _limits(blocks, found)
    if run and blocks:
        error_RB = numbers.read_errors(run, len(blocks[0].tau_R), num_blocks)
        terms = numbers.terms_of(blocks, found, error_RB)
        lines += ["", *_bound(blocks, found, terms, _measured(model, run), config.private_labels)]
    return "\n".join([*lines, "", *READING])


def _what(config: Config, run: Path | None, blocks: Sequence[BlockRounds] | None) -> str:
    rounds = f"{len(blocks[0].tau_R)} rounds" if blocks else "rounds of unknown steps"
    source = f"as {run} records them" if run else f"as steps.policy = {config.steps.policy!r} plans"
    return f"{config.num_parties + 1} blocks, {rounds}, {source if blocks else 'wall-clock'}"


def _about(found: Smoothness) -> list[str]:
    if found.source == "given":
        return [f"L = L_k = {found.joint:.4g} [given]"]
    return [
        f"L = {found.joint:.4g} [{found.source}: power iteration on the Hessian of the first"
        " batch's loss at the",
        "initial weights], for the mini-batch losses; that of their mean F may be smaller. With"
        " this L a limit that is",
        "broken is broken; one that is kept may not be, since L may be larger elsewhere.",
    ]


def _weights(blocks: Sequence[BlockRounds], found: Smoothness, mark: str) -> list[str]:
    rows = [["block", "optimizer", "L_k", "tau", "w_bar", "W", "W^", "alpha", "eta W"]]
    for k, b in enumerate(blocks):
        spans = [_span(v) for v in (b.tau_R, b.w_bar_R, b.total_R, b.prefix_R)]
        moved = _span(b.rate_R * b.total_R)
        rows.append(
            [
                *(str(k), rule(b.optimizer), f"{found.of_block_B[k]:.3g}"),
                *(*spans, f"{b.alpha:.3g}", moved),
            ]
        )
    source = found.source.split(",")[0]
    decays = any(b.optimizer.weight_decay for b in blocks)
    return [
        *aligned(rows),
        f"L_k [{source}], tau [{mark}], the others [derived]; W^: W with each weight at its largest"
        " in the round",
        *([DECAY] * decays),
    ]


def _limits(blocks: Sequence[BlockRounds], found: Smoothness) -> list[str]:
    rows = [["block", "rate", "limit (14)", "limit W", "A", "bound on A", "kept"]]
    for k, b in enumerate(blocks):
        constant = found.limit_of(k)
        excess, excess_sum = b.excess(constant)
        limit = 1 / (16 * constant * (b.tau_R * b.w_bar_R).max())
        adaptive = b.optimizer.schedule in numbers.ADAPTIVE
        rows.append(
            [
                *(str(k), _span(b.rate_R), f"{limit:.3g}"),
                f"{1 / (16 * constant * b.prefix_R.max()):.3g}",
                f"{b.optimizer.lr:.3g}" if adaptive else "-",
                f"{b.largest_a(constant):.3g}",
                _verdict(b.optimizer, excess, excess_sum),
            ]
        )
    return [
        *aligned(rows),
        "limit (14): eta <= 1 / (16 max{L, L_k} tau w_bar) [quoted, Flex-VFL (14)], at the round"
        " of most tau w_bar",
        "limit W:    eta <= 1 / (16 max{L, L_k} W^) [derived: weaker; all that the proof needs]",
        "bound on A: 1 / (16 alpha max{L, L_k}), alpha the largest growth of tau w_bar to the next"
        " round",
        "            [derived from Algorithm 2; for A / W that of W]. kept: in every round, at that"
        " round's rate",
    ]


def _verdict(optimizer: OptimizerConfig, excess: float, excess_sum: float) -> str:
    if why_not(optimizer):
        return "outside the theory"
    kept = {"(14)": excess, "W": excess_sum}
    broken = [f"{value:.3g} x {name}" for name, value in kept.items() if value > ROUNDING]
    if len(broken) == 1:
        return f"{next(n for n, v in kept.items() if v <= ROUNDING)} alone; {broken[0]}"
    return f"neither; {', '.join(broken)}" if broken else "(14) and W"


def _without_steps(config: Config, found: Smoothness) -> list[str]:
    rows = [["block", "optimizer", "L_k", "limit on eta W^", "rate or A"]]
    for k in range(config.num_parties + 1):
        optimizer = config.for_block(k).optimizer
        cap = f"{1 / (16 * found.limit_of(k)):.3g}"
        rows.append(
            [str(k), rule(optimizer), f"{found.of_block_B[k]:.3g}", cap, f"{optimizer.lr:.3g}"]
        )
    return [
        "",
        *aligned(rows),
        "limit on eta W^: 1 / (16 max{L, L_k}) [derived]",
        "The steps of a wall-clock round are not known before it, so neither are w_bar, W and"
        " alpha: give the folder of",
        "a run, whose steps.jsonl has them.",
    ]


def _measured(model: JointModel, run: Path) -> Measured | None:
    """None for a run that has left no final weights."""
    try:
        return numbers.measure(model, run)
    except DataError:
        return None


def _bound(
    blocks: Sequence[BlockRounds],
    found: Smoothness,
    terms: Terms,
    measured: Measured | None,
    private: bool,
) -> list[str]:
    rows = [["block", "E_k", "noise", "sigma_k^2", "compression"]]
    for k in range(len(blocks)):
        variance = f"{measured.variance_B[k]:.3g}" if measured else "sigma_k^2"
        third = "-" if private else f"{terms.compression_B[k]:.3g}"
        rows.append([str(k), f"{terms.error_B[k]:.3g}", f"{terms.noise_B[k]:.3g}", variance, third])
    weakest = min(found.limit_of(k) for k in range(len(blocks)))
    most = len(blocks[0].tau_R) * len(blocks) / (16 * weakest)
    third = (
        "not of this bound: with private labels the gradients are what is compressed"
        if private
        else "sum of compression H_k^2 G_k^2"
    )
    return [
        "bound on the mean of |grad_k F|^2, weighted with eta W [derived: Flex-VFL's and C-VFL's"
        " proofs joined]",
        *_whether_it_holds(blocks, found, private and bool(terms.error_B.any())),
        *aligned(rows),
        "E_k: mean squared error of a message [measured]; noise, compression: factors of sigma_k^2"
        " and H_k^2 G_k^2 [derived]",
        "sigma_k^2: variance of a batch's gradient; H_k, G_k: bounds on the derivatives of F and"
        " h_k (C-VFL), not measured",
        f"S = sum of eta W = {terms.descent:.4g} [measured tau, derived weights]; the limits let it"
        f" be {most:.4g} at most [derived]",
        f"1  {_first_term(terms, measured)}",
        f"2  6.5/S sum max{{L, L_k}} (eta W^)^2 sigma_k^2: {_second_term(terms, measured)}",
        f"3  3.5/S sum eta W^ H_k^2 G_k^2 sum of the others' E_j: {third}",
        *([f"All three hold the factor W^ / W = {terms.stretch:.3g}."] * (terms.stretch > 1)),
    ]


def _first_term(terms: Terms, measured: Measured | None) -> str:
    if measured is None:
        return f"3 dF / S = {terms.per_descent:.3g} dF; dF unknown: the run left no final weights"
    return (
        f"3 dF / S = {terms.per_descent * (measured.start - measured.end):.3g}, dF ="
        f" {measured.start:.4g} - {measured.end:.4g} [measured on {measured.num_rows} training"
        " rows]"
    )


def _second_term(terms: Terms, measured: Measured | None) -> str:
    if measured is None:
        return "sum of noise sigma_k^2"
    total = float(np.dot(terms.noise_B, measured.variance_B))
    return f"{total:.3g} with sigma_k^2 [estimated at the start]"


def _whether_it_holds(
    blocks: Sequence[BlockRounds], found: Smoothness, lossy_gradients: bool
) -> list[str]:
    """lossy_gradients : private labels with messages that lose something; no term counts that."""
    outside = [str(k) for k, b in enumerate(blocks) if why_not(b.optimizer)]
    if outside:
        return [f"It does not hold for this run: block {', '.join(outside)} outside the theory."]
    if lossy_gradients:
        return ["It is not proven for this run: with private labels it is for codecs without loss."]
    negative = [str(k) for k, b in enumerate(blocks) if b.least_weight < 0]
    if negative:
        return [
            f"It is not proven for this run: block {', '.join(negative)} has weights below 0"
            " (momentum with a proximal term or weight decay)."
        ]
    worst = max(b.excess(found.limit_of(k))[1] for k, b in enumerate(blocks))
    if worst > ROUNDING:
        return [f"It is not proven for this run: a rate is {worst:.3g} times limit W."]
    proviso = "for this L" if found.source == "given" else "if L and L_k are no larger than that"
    return [f"Limit W is kept, so it holds {proviso}."]


def rule(optimizer: OptimizerConfig) -> str:
    """An optimizer in a few words."""
    o = optimizer
    named = "nesterov" if o.nesterov else "momentum"
    parts = [
        f"{named} {o.momentum:g}" if o.momentum else "",
        f"dampening {o.dampening:g}" if o.dampening else "",
        f"proximal {o.proximal:g}" if o.proximal else "",
        f"decay {o.weight_decay:g}" if o.weight_decay else "",
        "step_rates" if o.step_rates else "",
    ]
    return " ".join(part for part in parts if part) if o.name == "sgd" and any(parts) else o.name


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, columns two spaces apart."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _span(values_R: np.ndarray) -> str:
    """Smallest to largest value, one number where they are the same."""
    low, high = f"{values_R.min():.3g}", f"{values_R.max():.3g}"
    return low if low == high else f"{low}..{high}"
