"""Everything that a run has before its first round, on one rank."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcvfl.books import open_book
from hpcvfl.clock import PhaseClock
from hpcvfl.codecs.frame import MAX_ROUNDS
from hpcvfl.config import Config
from hpcvfl.data import Batches
from hpcvfl.engine import folder
from hpcvfl.engine.agree import each, exchange, require_equal, together
from hpcvfl.engine.ahead import Ahead
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.exchange import Agreement, Exchange
from hpcvfl.engine.lock import RunLock
from hpcvfl.engine.messages import MessageLog
from hpcvfl.engine.observer import Observer
from hpcvfl.engine.policies import Plan, StepPolicy, WallClockSteps, plan_of, policy_of
from hpcvfl.engine.private import PrivateExchange
from hpcvfl.engine.resume import Chosen, pick
from hpcvfl.engine.round import RoundResult
from hpcvfl.engine.sets import Part
from hpcvfl.engine.start import start
from hpcvfl.engine.state import due_of, restore
from hpcvfl.engine.steplog import StepLog
from hpcvfl.engine.vafl_exchange import VaflExchange
from hpcvfl.engine.watch import Process, this_process
from hpcvfl.errors import ConfigError
from hpcvfl.ledger import Meter
from hpcvfl.transport.base import Transport
from hpcvfl.transport.delayed import Delayed
from hpcvfl.transport.metered import Metered

MOST_EXPECTED = 1_000_000
"""Steps that a block without parameters, say, is expected to take in round 0 at most."""


@dataclass
class Run:
    """What one rank carries from round to round."""

    config: Config
    block: Block
    exchange: Exchange
    transport: Transport
    meter: Meter
    messages: MessageLog
    clock: PhaseClock
    batches: Batches
    path: Path
    total_rounds: int
    policy: StepPolicy
    plan: Plan | None
    expected_B: Sequence[int]  # steps of all blocks in round 0, as far as is known before it
    steps: StepLog
    lock: RunLock | None = None  # of the folder, at rank 0
    name: str = ""  # drawn when the run began: its folder may be copied, its config be another's
    books: dict[str, tuple[int, int]] = field(default_factory=dict)  # at the last checkpoint
    last: RoundResult = field(default_factory=lambda: RoundResult(0, 0.0, 0.0))
    units: float = 0.0  # of virtual time in rounds so far, without communication
    lines: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    warnings: list[str] = field(default_factory=list)
    diverged: set[int] = field(default_factory=set)  # blocks of which that was said
    processes: Sequence[Process] = ()  # of all ranks
    ahead: Ahead | None = None
    # (round, lines of the own blocks) of the rounds that no header may have told of yet
    recent: deque[tuple[int, list[Any]]] = field(default_factory=lambda: deque(maxlen=2))
    resumed: list[int] = field(default_factory=list)  # rounds after which the run was resumed

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds until every row was seen once; of an asynchronous run, updates of the server until
        the parties together saw it once each.
        """
        return self.batches.rounds_per_epoch * served_in_turn(self.config)


def served_in_turn(config: Config) -> int:
    """How many parties the server serves one after the other; 1 where all are served at once."""
    return config.num_parties if config.algorithm.driver == "vafl" else 1


def prepare(
    config: Config,
    transport: Transport,
    begun_s: float | None = None,
    shown: Observer | None = None,
    chosen: Chosen | None = None,
    meter: Meter | None = None,
) -> Run:
    """Handshake, run folder, everything that the first round needs.

    chosen : the run to go on with, as it was after its last checkpoint; None: a fresh one
    meter  : has booked what moved so far; None: nothing did
    """
    clock, meter = PhaseClock(begun_s), meter or Meter()
    transport.timeout_s = config.transport.first_timeout_s
    if config.transport.latency_ms or config.transport.bandwidth_gbps:
        transport = Delayed(transport, config.transport.latency_ms, config.transport.bandwidth_gbps)
    transport = Metered(transport, meter)
    clock.to("load")
    block, agreement = start(config, transport)
    plan = agreed_plan(config, transport)
    part: Part | None = None
    broken: list[str] = []
    if chosen:
        part, broken = pick(chosen.path, due_of(config, block, plan), transport)
    data = config.data
    batches = Batches(block.shard.num_rows, data.batch_size, config.seed, data.shuffle)
    total = each(transport, lambda: rounds_due(config, batches, plan))
    home = chosen or fresh_folder(config, transport)
    messages, steps = open_books(config, transport, meter, home.path, part)
    clock.to("start")
    swap = compiled_exchange(config, transport, agreement, block, shown)
    clock.to("other")
    policy = policy_of(block.config, block.block, plan)
    expected_B = plan.expected if plan else tried_steps(block, policy, batches, transport)
    # Of a plan it is what round 0 takes, but for a replay, which goes on with what its log says.
    steps.expected_B = expected_B if config.steps.policy in ("wall-clock", "script") else ()
    run = Run(
        config, block, swap, transport, meter, messages, clock, batches, home.path, total, policy,
        plan, expected_B, steps, home.lock, home.name, warnings=outside_theory(block, transport),
        processes=[Process(*told) for told in exchange(transport, this_process(block.block))],
    )  # fmt: skip
    if config.algorithm.pipeline:
        run.ahead = each(transport, lambda: Ahead(block, swap, batches, total, clock))
    if part:
        go_on_from(run, part)
    run.warnings += without_lock(home) + broken
    return run


def compiled_exchange(
    config: Config,
    transport: Transport,
    agreement: Agreement,
    block: Block,
    shown: Observer | None,
) -> Exchange:
    """The exchange, its kernels compiled for this config's messages."""
    # On all ranks or none: the memories of error feedback may not fit.
    swap = each(transport, lambda: make_exchange(config, transport, agreement))
    if shown:
        shown.preparing(f"compiling the kernels of {', '.join(agreement.table)}")
    swap.compile_codecs(min(config.data.batch_size, block.shard.num_rows))
    return swap


def without_lock(home: Chosen) -> list[str]:
    """A warning where the run folder has no lock, for rank 0, which would hold it."""
    if not home.lock or home.lock.held:
        return []
    return [
        f"run folder {home.path}: its file system has no locks; a second job in it would not be"
        " refused"
    ]


def fresh_folder(config: Config, transport: Transport) -> Chosen:
    """A new run folder, the same on every rank, locked by rank 0."""
    locks: list[RunLock] = []

    def make() -> tuple[str, str] | None:
        if transport.rank:
            return None
        path = folder.create(config)
        with folder.writing(path):
            locks.append(RunLock(path))
        return str(path), secrets.token_hex(8)

    path, name = together(transport, make)[0]
    return Chosen(Path(path), locks[0] if locks else None, name=name)


def open_books(
    config: Config, transport: Transport, meter: Meter, path: Path, part: Part | None
) -> tuple[MessageLog, StepLog]:
    """Open what is written line by line; of a resumed run, cut to what it was at the checkpoint."""
    rank = transport.rank
    kept = part.record["books"] if part else {}
    name = f"ledger.rank{rank}.jsonl"

    def open_all() -> tuple[MessageLog, StepLog]:
        with folder.writing(path):
            folder.make_folder(path)  # a host may lack the shared one
            (path / f"error.rank{rank}.txt").unlink(missing_ok=True)
            meter.open(path / name, kept[name][0] if part else 0)
            if rank:
                return MessageLog(config.num_parties + 1, None), StepLog(None)
            if part:
                open_book(path / "metrics.jsonl", kept["metrics.jsonl"][0]).close()
            messages, steps = "messages.jsonl", "steps.jsonl"
            lengths = [kept[name][0] if part else 0 for name in (messages, steps)]
            log = MessageLog(config.num_parties + 1, path / messages, lengths[0])
            return log, StepLog(path / steps, lengths[1])

    return each(transport, open_all)


def rounds_due(config: Config, batches: Batches, plan: Plan | None) -> int:
    """Rounds of the whole run; ConfigError if a header cannot count them or a replay lacks some."""
    total = config.algorithm.epochs * batches.rounds_per_epoch
    total = min(total, config.algorithm.rounds or total) * served_in_turn(config)
    if total + batches.rounds_per_epoch >= MAX_ROUNDS:
        raise ConfigError(f"algorithm: {total} rounds; a header counts fewer than {MAX_ROUNDS}")
    if plan and plan.length and total > plan.length:
        raise ConfigError(
            f"steps.replay: {plan.length} rounds are on record, {total} are due; set"
            f" algorithm.rounds to {plan.length} or less"
        )
    return total


def go_on_from(run: Run, part: Part) -> None:
    """Bring a run that is prepared to where its checkpoint was; called by every rank."""
    each(run.transport, lambda: restore(run, part))
    run.exchange.share_state()


def make_exchange(config: Config, transport: Transport, agreement: Agreement) -> Exchange:
    """The exchange of a config; ConfigError for a pattern that private labels do not have."""
    pattern, memory_folder = config.transport.pattern, config.run.memory_folder
    if not agreement.private:
        return Exchange(transport, agreement, pattern, memory_folder)
    if pattern != "hub":
        raise ConfigError(
            f"transport.pattern = {pattern!r}: with private labels each party gets a frame of its"
            " own from the server; use hub"
        )
    if config.algorithm.driver == "vafl":
        return VaflExchange(transport, agreement, config.data.batch_size, memory_folder)
    return PrivateExchange(transport, agreement, memory_folder)


def tried_steps(
    block: Block, policy: StepPolicy, batches: Batches, transport: Transport
) -> list[int]:
    """Steps of each block that may fit into the timeout, from a step that is not taken; none where
    there is no timeout.
    """
    if not isinstance(policy, WallClockSteps):
        return []
    step_s = block.trial_step_s(batches.rows(0)) * policy.slow_factor
    steps = min(max(1, int(policy.timeout_s / max(step_s, 1e-9))), MOST_EXPECTED)
    told = exchange(transport, [(b.block, steps) for b in block.blocks])
    return [count for _, count in sorted(pair for pairs in told for pair in pairs)]


def outside_theory(block: Block, transport: Transport) -> list[str]:
    """A line for each block whose optimizer Flex-VFL's theory does not cover."""
    told = exchange(transport, [(b.block, b.optimizer.why_not) for b in block.blocks])
    found = sorted(pair for pairs in told for pair in pairs)
    return [f"block {number}: {text}" for number, text in found if text]


def agreed_plan(config: Config, transport: Transport) -> Plan | None:
    """The plan of everybody's steps, the same on every rank; ConfigError, everywhere, if not."""
    if config.steps.policy == "wall-clock" and transport.name == "threads":
        raise ConfigError(
            "steps.policy = 'wall-clock': in one process ranks take turns, so that a timeout means"
            " nothing; start it with mpiexec, or use steps.policy = 'virtual'"
        )
    plan = each(transport, lambda: plan_of(config))
    told = exchange(transport, {"digest of the steps planned": plan.digest if plan else "none"})
    require_equal(told)
    return plan
