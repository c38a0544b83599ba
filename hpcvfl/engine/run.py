"""A whole run on one rank: start, rounds, evaluations, end. Called by every rank."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcvfl.codecs.feedback import FeedbackCodec
from hpcvfl.config import Config
from hpcvfl.engine import folder
from hpcvfl.engine.agree import exchange, together
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.checkpoint import load_block, save_block, save_stream
from hpcvfl.engine.evaluate import evaluate
from hpcvfl.engine.observer import Observer, Silent
from hpcvfl.engine.policies import WallClockSteps
from hpcvfl.engine.prepare import Run, prepare
from hpcvfl.engine.rates import ADAPTIVE, adaptive_rate, learning_rate
from hpcvfl.engine.round import RoundResult, run_round
from hpcvfl.engine.start import start
from hpcvfl.engine.summary import summarise
from hpcvfl.engine.weights import weights_of
from hpcvfl.transport.base import Transport


def train(
    config: Config,
    transport: Transport,
    progress: Observer | None = None,
    after_round: Callable[[Run, RoundResult], None] | None = None,
    begun_s: float | None = None,
) -> dict[str, Any]:
    """Train, evaluate, write the run folder; returns the summary (the same on every rank).

    progress    : shown on rank 0
    after_round : called on every rank after every round (tests, benches)
    begun_s     : time.perf_counter() when the program started; the time since is booked as start
    """
    shown: Observer = progress if progress and transport.rank == 0 else Silent()
    run = prepare(config, transport, begun_s, shown)
    shown.begin(run.total_rounds, run.path)
    for text in run.warnings:
        shown.warning(text)
    try:
        for round_index in range(run.total_rounds):
            last = one_round(run, round_index)
            shown.round(last.loss)
            if after_round:
                after_round(run, last)
            if evaluation_is_due(run, round_index):
                before = len(run.warnings)
                shown.evaluation(evaluate_now(run))
                for text in run.warnings[before:]:
                    shown.warning(text)
                if target_reached(run):
                    break
        return finish(run)
    except Exception as error:
        # Beside the books of the rounds that went well, for who finds the folder in the morning.
        with suppress(OSError):
            text = f"{type(error).__name__}: {error}\n"
            (run.path / f"error.rank{transport.rank}.txt").write_text(text, encoding="utf-8")
        raise
    finally:
        with suppress(OSError):  # closed in `finish`; here an earlier error is on its way
            close_books(run)
        shown.end()


def one_round(run: Run, round_index: int) -> RoundResult:
    """A round with its rate, its timeout and its books."""
    rates = [rate_of(run, block, round_index) for block in run.block.blocks]
    run.meter.phase = "train"
    result = run.last = run_round(
        round_index, run.block, run.exchange, run.batches, run.policy, rates, run.last, run.clock
    )
    run.meter.end_round(round_index)
    run.messages.note(round_index, run.exchange.headers_by_block())
    run.steps.note(round_index, run.exchange.headers_by_block())
    run.units += run.plan.units(round_index) if run.plan else 0.0
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
        weights = weights_of(optimizer, optimizer.lr, tau)
    else:
        tau = run.last.tau
        weights = block.optimizer.weights(tau)
    return adaptive_rate(optimizer.schedule, optimizer.lr, tau, weights.w_bar, weights.total)


def evaluation_is_due(run: Run, round_index: int) -> bool:
    """After every `evaluate_every` epochs, and after the last round."""
    done = round_index + 1
    if done == run.total_rounds:
        return True
    epochs, rest = divmod(done, run.batches.rounds_per_epoch)
    return rest == 0 and epochs % run.config.algorithm.evaluate_every == 0


def evaluate_now(run: Run) -> dict[str, Any]:
    """Evaluate, add up everybody's bytes, write a line of metrics.jsonl; the line, on every
    rank.
    """
    run.clock.to("eval")
    wire_bytes, raw_bytes = run.meter.received()
    training_s = run.clock.training_s()
    run.meter.phase = "eval"
    result = evaluate(run.block, run.transport, run.rounds)
    report: dict[str, Any] = {
        "result": result,
        "bytes": [wire_bytes, raw_bytes],
        "own": [run.last.loss, training_s],
        "messages": run.messages.means(),
        "note": note_of_policy(run),
    }
    told = exchange(run.transport, report)
    loss, accuracy = told[0]["result"]
    train_loss, training_s = told[0]["own"]  # the server's, so that every rank has the same line
    line = {
        "round": run.rounds,
        "epoch": run.rounds / run.batches.rounds_per_epoch,
        "train_loss": train_loss,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "wire_bytes": sum(t["bytes"][0] for t in told),
        "raw_bytes": sum(t["bytes"][1] for t in told),
        "seconds": training_s,
        **({"units": run.units} if run.plan else {}),
        **told[0]["messages"],
    }
    run.lines.append(line)
    for text in [t["note"] for t in told] + divergences(run, line):
        if text and text not in run.warnings:
            run.warnings.append(text)
    if run.transport.rank == 0:
        metrics = run.path / "metrics.jsonl"
        with folder.writing(run.path), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    run.clock.to("other")
    return line


def divergences(run: Run, line: dict[str, Any]) -> list[str]:
    """Blocks whose messages since the last evaluation had more error than energy, each told once.

    Error feedback around a codec whose error is larger than its message diverges, and the accuracy
    alone does not say why.
    """
    said = []
    for block, (error, energy) in enumerate(
        zip(line["squared_error"], line["energy"], strict=True)
    ):
        if error > energy and block not in run.diverged:
            run.diverged.add(block)
            codec = run.exchange.agreement.codec_of(block)
            assert codec  # who sends nothing loses nothing
            advice = (
                "error feedback diverges around this codec (README, Codecs)"
                if isinstance(codec, FeedbackCodec)
                else "it loses more than it sends"
            )
            said.append(
                f"block {block}, {codec.spec}: up to round {run.rounds} the error of its messages"
                f" is {error / energy if energy else math.inf:.3g} times their energy; {advice}"
            )
    return said


def note_of_policy(run: Run) -> str:
    """What the user should know of this block's steps; empty if there is nothing."""
    policy = run.policy
    if isinstance(policy, WallClockSteps) and policy.too_short:
        return (
            f"block {run.block.block}: a local step takes longer than steps.timeout_s ="
            f" {policy.timeout_s:g} s; it takes one a round"
        )
    return ""


def target_reached(run: Run) -> bool:
    """Whether the last evaluation met `algorithm.target_accuracy`; the same answer on every
    rank.
    """
    target = run.config.algorithm.target_accuracy
    return target is not None and run.lines[-1]["test_accuracy"] >= target


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
            "host": platform.node(),
            "seconds": run.clock.seconds,
            "total_s": run.clock.elapsed(),
            "bytes": run.meter.table(),
            "last": last_steps(run),
        },
    )
    with folder.writing(run.path):
        if run.rounds:
            _, *columns = zip(*sorted(line for t in told for line in t["last"]), strict=True)
            run.steps.write(run.rounds - 1, *columns)
        close_books(run)
    summary = summarise(run, told)
    if rank == 0:
        text = json.dumps(summary, indent=1) + "\n"
        with folder.writing(run.path):
            (run.path / "summary.json").write_text(text, encoding="utf-8")
    return summary


def last_steps(run: Run) -> list[tuple[int, int, float, float]]:
    """(block, tau, w_bar, seconds) of the last round, for each block of this rank."""
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
