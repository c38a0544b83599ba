"""How many local steps a block takes in a round: one small class a rule.

A `Plan` knows the steps of every block beforehand (fixed, virtual, script) and what a round costs
in virtual time; `WallClockSteps` finds out as it goes.

Legend: B blocks, the server first.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcvfl.config import Config
from hpcvfl.engine import traces
from hpcvfl.errors import ConfigError, DataError

MAX_STEPS = 1 << 31
"""More local steps than this no log or config may have; a header counts them in 32 bits."""

NEWEST = 0.3
"""Weight of the newest step in the mean time of a step."""


class StepPolicy(ABC):
    """Local steps of one block. In a round: `begin_round`, then for each step `may_start`, the
    step, `end_step`.
    """

    def __init__(self, slow_factor: float = 1.0) -> None:
        """slow_factor : how many times as long as it does a step is made to take"""
        self.slow_factor = slow_factor
        self.step_s = 0.0  # running mean of a step's seconds, 0 before the first
        self._since = 0.0

    def begin_round(self, round_index: int) -> None:
        """The snapshot of a round has arrived; its time runs from here."""
        self._since = time.monotonic()

    @abstractmethod
    def may_start(self, step: int) -> bool:
        """Whether local step number `step` (from 0) of this round may begin."""

    def end_step(self) -> None:
        """A step is over; sleeps if the block is to be slow."""
        if self.slow_factor > 1:
            time.sleep((self.slow_factor - 1) * (time.monotonic() - self._since))
        now = time.monotonic()
        spent, self._since = now - self._since, now
        self.step_s += (spent - self.step_s) * (NEWEST if self.step_s else 1.0)


class PlannedSteps(StepPolicy):
    """As many steps as the plan has for this block and round."""

    def __init__(self, plan: Plan, block: int, slow_factor: float = 1.0) -> None:
        """Of block `block`."""
        super().__init__(slow_factor)
        self.plan, self.block, self.count = plan, block, 0

    def begin_round(self, round_index: int) -> None:
        """See StepPolicy."""
        super().begin_round(round_index)
        self.count = self.plan.steps(round_index)[self.block]

    def may_start(self, step: int) -> bool:
        """See StepPolicy."""
        return step < self.count


class OneStep(StepPolicy):
    """One step a message: of a block of the asynchronous driver."""

    def may_start(self, step: int) -> bool:
        """See StepPolicy."""
        return step == 0


class WallClockSteps(StepPolicy):
    """As many steps as end within a timeout, one at least (Flex-VFL, Algorithm 1).

    The clock is monotonic and starts when the snapshot has arrived and is decoded. A step starts
    only if it should end in time, by the mean time of the steps so far: so the timeout is overrun
    by a part of a step at most, unless one step takes longer than all of it.
    """

    def __init__(self, timeout_s: float, slow_factor: float = 1.0) -> None:
        """Of `timeout_s` seconds a round."""
        super().__init__(slow_factor)
        self.timeout_s, self._deadline = timeout_s, 0.0
        self._rounds = self._too_short = 0

    def begin_round(self, round_index: int) -> None:
        """See StepPolicy."""
        super().begin_round(round_index)
        self._deadline = self._since + self.timeout_s

    def may_start(self, step: int) -> bool:
        """See StepPolicy."""
        if step == 1:
            self._rounds += 1
            self._too_short += time.monotonic() > self._deadline
        return step == 0 or time.monotonic() + self.step_s <= self._deadline

    @property
    def too_short(self) -> bool:
        """Whether in most rounds so far not even one step fitted into the timeout."""
        return 2 * self._too_short > self._rounds


@dataclass(frozen=True)
class Plan:
    """Steps of all blocks, known beforehand.

    steps : round -> tuple of B ints, each at least 1
    units : round -> length of its local phase in steps of a block of full speed, what the virtual
            clock of the papers adds to the cost of communication; None of a replay, whose log does
            not know it
    digest: of all of it; ranks must agree
    expected : steps that a run expected of round 0 before it knew, B ints; adaptive rates begin
               with them
    length : rounds that it is good for; None: any number
    """

    steps: Callable[[int], tuple[int, ...]]
    units: Callable[[int], float] | None
    digest: str
    expected: tuple[int, ...]
    length: int | None = None


def plan_of(config: Config) -> Plan | None:
    """The plan that a config sets; None for wall-clock. Raises DataError for a bad file."""
    num_blocks = config.num_parties + 1
    policy, steps = config.steps.policy, config.steps
    if policy == "fixed":
        count = config.algorithm.local_steps
        return _table_plan(np.full((1, num_blocks), count), np.array([float(count)]))
    if policy == "script":
        assert steps.replay is not None
        taken_RB, expected_B = read_steps(Path(steps.replay), num_blocks)
        return _table_plan(taken_RB, None, again=False, expected=expected_B)
    if policy == "virtual":
        return _virtual_plan(config)
    return None


def _virtual_plan(config: Config) -> Plan:
    """Rules of the papers' simulations: see StepsConfig.sync; a block of speed tau takes
    timeout / tau units a step. A party beside the server has the server's speed.
    """
    steps, num_blocks = config.steps, config.num_parties + 1
    if steps.trace:
        traced_BR = traces.read_trace(steps.trace, num_blocks)
        speed_RB = traces.steps_of(traced_BR, steps.trace_rule).T.astype(float)
    else:
        if len(steps.speeds) != num_blocks:
            raise ConfigError(
                f"steps.speeds: {len(steps.speeds)} numbers, due are {num_blocks}: the server's and"
                f" {config.num_parties} parties'"
            )
        speed_RB = np.array([steps.speeds])
    if config.holder_party:
        speed_RB[:, config.holder_party] = speed_RB[:, 0]
    fastest = traces.most_steps(steps.trace_rule) if steps.trace else float(speed_RB.max())
    timeout = steps.timeout_units or fastest
    own_RB = np.maximum(1, np.floor(speed_RB)).astype(np.int64)
    taken_RB = {
        "none": own_RB,
        "min": np.broadcast_to(own_RB.min(axis=1, keepdims=True), own_RB.shape),
        "max": np.full_like(own_RB, max(1, int(timeout))),
        "one": np.ones_like(own_RB),
    }[steps.sync]
    units_R = (taken_RB * (timeout / speed_RB)).max(axis=1)  # the slowest block is waited for,
    if steps.sync == "none":  # here too, if one step of it takes longer than the timeout
        units_R = np.maximum(timeout, units_R)
    return _table_plan(taken_RB, units_R)


def _table_plan(
    taken_RB: np.ndarray,
    units_R: np.ndarray | None,
    again: bool = True,
    expected: tuple[int, ...] | None = None,
) -> Plan:
    """Row r of a table in round r; `again`: from the start after its end, else ConfigError."""
    rows = [tuple(row) for row in taken_RB.tolist()]
    units = None if units_R is None else units_R.tolist()
    expected = expected or rows[0]
    spelled = json.dumps([rows, units, expected])
    digest = hashlib.blake2b(spelled.encode(), digest_size=16).hexdigest()

    def steps(round_index: int) -> tuple[int, ...]:
        if round_index >= len(rows) and not again:
            raise ConfigError(
                f"steps.replay: {len(rows)} rounds are on record, round {round_index} is not;"
                f" set algorithm.rounds to {len(rows)} or less"
            )
        return rows[round_index % len(rows)]

    length = None if again else len(rows)
    cost = None if units is None else lambda r: units[r % len(units)]
    return Plan(steps, cost, digest, expected, length)


def read_steps(path: Path, num_blocks: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Steps that a run took, int64, shape (rounds, B), and those that it had expected of round 0
    (or took, where that is not on record), from its steps.jsonl or its folder.

    Raises DataError that names the line and what is due.
    """
    path = path / "steps.jsonl" if path.is_dir() else path
    rows: list[Any] = []
    expected: tuple[int, ...] = ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error})") from None
    for number, text in enumerate(lines):
        try:
            line = json.loads(text)
            taus, first = line["tau"], line.get("expected", line["tau"])
            counts = [*taus, *first]
            sound = line["round"] == number and all(
                type(t) is int and 0 < t < MAX_STEPS for t in counts
            )
            sound = sound and len(taus) == len(first) == num_blocks
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            sound, taus, first = False, [], []
        if '"update"' in text and not sound:
            raise DataError(f"{path}: is of an asynchronous run, which cannot be replayed")
        if not sound:
            raise DataError(
                f"{path}, line {number + 1}: {text[:60]!r}; due: round {number} and tau, a positive"
                f" whole number for each of {num_blocks} blocks"
            )
        expected = expected or tuple(first)
        rows.append(taus)
    if not rows:
        raise DataError(f"{path}: holds no rounds")
    return np.array(rows, np.int64), expected


def policy_of(config: Config, block: int, plan: Plan | None) -> StepPolicy:
    """The policy of a block; `config` is that block's own."""
    if config.algorithm.driver == "vafl":
        return OneStep(config.steps.slow_factor)
    if plan is not None:
        return PlannedSteps(plan, block, config.steps.slow_factor)
    assert config.steps.timeout_s is not None
    return WallClockSteps(config.steps.timeout_s, config.steps.slow_factor)
