"""A whole run on one rank: start, rounds, evaluations, end. Called by every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcvfl.config import Config
from hpcvfl.engine import folder, vafl
from hpcvfl.engine.agree import exchange, together
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.checkpoint import load_block, save_block, save_stream
from hpcvfl.engine.evaluate import evaluate
from hpcvfl.engine.evaluations import evaluate_and_tell, evaluation_is_due
from hpcvfl.engine.keeper import Keeper
from hpcvfl.engine.observer import Observer, Silent
from hpcvfl.engine.preempt import Asked
from hpcvfl.engine.prepare import Run, prepare
from hpcvfl.engine.rates import (
    ADAPTIVE,
    adaptive_rate,
    learning_rate,
    rate_before_the_first,
)
from hpcvfl.engine.resume import choose, passed_over
from hpcvfl.engine.round import RoundResult, run_round
from hpcvfl.engine.start import start
from hpcvfl.engine.state import books_of
from hpcvfl.engine.summary import summarise
from hpcvfl.engine.watch import LAST_WORDS_S, Heart, last_words, within
from hpcvfl.engine.weights import prefix_total, weights_of
from hpcvfl.errors import Preempted
from hpcvfl.ledger import Meter
from hpcvfl.transport.base import Transport
from hpcvfl.transport.metered import Metered


def train(
    config: Config,
    transport: Transport,
    progress: Observer | None = None,
    after_round: Callable[[Run, RoundResult], None] | None = None,
    begun_s: float | None = None,
    asked: Asked | None = None,
) -> dict[str, Any]:
    """Train, evaluate, write the run folder; returns the summary (the same on every rank). With
    `run.resume`, go on with a run; the summary of one that has finished comes back as it is.

    Raises Preempted, on every rank, if the run was asked to stop and has written a checkpoint.

    progress    : shown on rank 0
    after_round : called on every rank after every round, of an asynchronous run after every update
                  of the own block (tests, benches)
    begun_s     : time.perf_counter() when the program started; the time since is booked as start
    asked       : whether a signal asked this process to stop
    """
    shown: Observer = progress if progress and transport.rank == 0 else Silent()
    meter = Meter()
    chosen = choose(config, Metered(transport, meter))
    if chosen and chosen.summary:
        shown.preparing(f"{chosen.path} has finished, nothing is left to do")
        return chosen.summary
    left = None if transport.rank else passed_over(config, chosen)
    run = prepare(config, transport, begun_s, shown, chosen, meter)
    run.warnings += [left] if left else []
    shown.begin(run.total_rounds, run.path, run.rounds)
    for text in run.warnings:
        shown.warning(text)
    heart = Heart(run.path, transport, run.clock, run.processes[transport.rank])
    well = False
    try:
        if config.algorithm.driver == "vafl":
            vafl.drive(run, shown, after_round)
        else:
            drive_rounds(run, shown, after_round, Keeper(asked))
        summary = finish(run)
        well = True
        return summary
    except Preempted:
        well = True
        raise
    except Exception as error:
        told = last_words(error, run.path, heart, run.processes)
        if told is error:
            raise
        raise told from error
    finally:
        shown.end()
        within(LAST_WORDS_S, lambda: leave_folder(run, heart, well))


def leave_folder(run: Run, heart: Heart, well: bool) -> None:
    """Close what is open in the run folder, the lock last."""
    heart.stop(well)
    with suppress(OSError):  # closed in `finish`, or an earlier error is on its way
        close_books(run)
    if run.lock:
        run.lock.release()


def drive_rounds(
    run: Run,
    shown: Observer,
    after_round: Callable[[Run, RoundResult], None] | None,
    keeper: Keeper,
) -> None:
    """Round after round, until the last or until the target is reached; or until the run is asked
    to stop (Preempted).
    """
    if run.ahead and not run.rounds:
        run.meter.phase = "train"
        run.ahead.begin(0, 0, 0.0, 0.0)
        run.ahead.end(0)
        run.messages.note(0, run.exchange.headers_by_block())
    for round_index in range(run.rounds, run.total_rounds):
        keeper.ask(run)
        last = one_round(run, round_index)
        shown.round(last.loss)
        if after_round:
            after_round(run, last)
        if evaluation_is_due(run) and evaluate_and_tell(run, shown):
            return
        if run.rounds < run.total_rounds:
            keeper.after_round(run, shown)


def one_round(run: Run, round_index: int) -> RoundResult:
    """A round with its rate, its timeout and its books."""
    rates = [rate_of(run, block, round_index) for block in run.block.blocks]
    run.meter.phase = "train"
    result = run.last = run_round(
        round_index, run.block, run.exchange, run.batches, run.policy, rates, run.last, run.clock,
        run.ahead,
    )  # fmt: skip
    run.recent.append((round_index, last_steps(run)))
    came = round_index + bool(run.ahead)  # the round of which frames have come last
    with folder.writing(run.path):
        run.meter.end_round(round_index)
        if came < run.total_rounds:
            run.messages.note(came, run.exchange.headers_by_block())
            run.steps.note(round_index, run.exchange.headers_by_block())
    if run.plan and run.plan.units:
        run.units += run.plan.units(round_index)
    run.transport.timeout_s = run.config.transport.timeout_s
    run.rounds = round_index + 1
    return result


def rate_of(run: Run, block: Block, round_index: int) -> float:
    """The rate of a block of this rank in a round."""
    optimizer = block.config.optimizer
    if optimizer.schedule not in ADAPTIVE:
        per_epoch = run.batches.rounds_per_epoch
        return learning_rate(optimizer, round_index, per_epoch, run.total_rounds)
    if round_index == 0:
        # Algorithm 2: tau of round 0 by prior knowledge, or by trying.
        tau = run.expected_B[block.block]
        rate = rate_before_the_first(optimizer.lr, tau)
    else:
        tau, rate = run.last.tau, block.optimizer.lr
    w_bar = weights_of(optimizer, rate, tau).w_bar
    # Quadratic in tau for some rules, so only where it is used.
    by_sum = optimizer.schedule == "adaptive-sum"
    total = prefix_total(optimizer, rate, tau) if by_sum else 0.0
    return adaptive_rate(optimizer.schedule, optimizer.lr, tau, w_bar, total)


def finish(run: Run) -> dict[str, Any]:
    """Write weights, trace and books of every rank, and the summary on rank 0."""
    rank = run.transport.rank

    def save() -> None:
        with folder.writing(run.path):
            for block in run.block.blocks:
                save_block(run.path, block)
            save_stream(run.path, run.block, run.exchange)
            run.clock.write_trace(run.path / f"trace.rank{rank}.json", rank)

    together(run.transport, save)  # whatever fails on one rank, the others have saved
    run.clock.to("other")
    told = exchange(
        run.transport,
        {
            "seconds": run.clock.seconds,
            "total_s": run.clock.total_s(),
            "bytes": run.meter.table(),
            "recent": list(run.recent),
        },
    )
    with folder.writing(run.path):
        for parts in zip(*(t["recent"] for t in told), strict=True):
            blocks = sorted(line for _, lines in parts for line in lines)
            _, *columns = zip(*blocks, strict=True)
            run.steps.write_if_due(parts[0][0], *columns)
        books_of(run)  # on the disk before there is a summary, which says that the run has finished
        close_books(run)
    summary = summarise(run, told)
    if rank == 0:
        text = json.dumps(summary, indent=1) + "\n"
        with folder.writing(run.path):
            folder.write_whole(run.path / "summary.json", text)
    return summary


def last_steps(run: Run) -> list[tuple[int, int, float, float]]:
    """(block, tau, w_bar, seconds) of the round just over, for each block of this rank."""
    tau, seconds = run.last.tau, run.last.seconds
    return [
        (b.block, tau, b.optimizer.weights(tau).w_bar if tau else 0.0, seconds)
        for b in run.block.blocks
    ]


def close_books(run: Run) -> None:
    """Close what is written round by round; again does no harm."""
    run.meter.close()
    run.messages.close()
    run.steps.close()


def evaluate_run(path: Path, config: Config, transport: Transport) -> dict[str, float]:
    """Accuracy and loss of a finished run from its folder and config, computed as at its end."""
    block, _ = start(config, transport)

    def read() -> None:
        for part in block.blocks:
            load_block(path, part)

    together(transport, read)
    result = evaluate(block, transport, 0)
    loss, accuracy = exchange(transport, result)[0]
    return {"loss": loss, "accuracy": accuracy}
