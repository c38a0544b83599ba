"""When a run is evaluated, what is written of it, and what its user is told."""

from __future__ import annotations

import json
import math
from typing import Any

from hpcvfl.codecs.feedback import FeedbackCodec
from hpcvfl.engine import folder
from hpcvfl.engine.agree import exchange
from hpcvfl.engine.evaluate import evaluate
from hpcvfl.engine.observer import Observer
from hpcvfl.engine.policies import WallClockSteps
from hpcvfl.engine.prepare import Run, served_in_turn


def evaluation_is_due(run: Run) -> bool:
    """After every `evaluate_every` epochs or `evaluate_rounds` rounds, and after the last round."""
    algorithm = run.config.algorithm
    between = algorithm.evaluate_every * run.rounds_per_epoch
    if algorithm.evaluate_rounds:
        between = algorithm.evaluate_rounds * served_in_turn(run.config)
    return run.rounds == run.total_rounds or run.rounds % between == 0


def evaluate_and_tell(run: Run, shown: Observer) -> bool:
    """Evaluate, show the line and what is to be warned of; whether the target is reached."""
    before = len(run.warnings)
    shown.evaluation(evaluate_now(run))
    for text in run.warnings[before:]:
        shown.warning(text)
    return target_reached(run)


def evaluate_now(run: Run) -> dict[str, Any]:
    """Evaluate, add up everybody's bytes, write a line of metrics.jsonl; the line, on every
    rank.
    """
    if run.config.algorithm.driver == "rounds":
        # The slowest block's local steps are training: who waits for them does not wait for the
        # evaluation.
        run.clock.to("wait")
        run.transport.barrier()
    run.clock.to("eval")
    wire_bytes, raw_bytes = run.meter.received()
    training_s = run.clock.training_s()
    run.meter.phase = "eval"
    result = evaluate(run.block, run.transport, run.rounds)
    report: dict[str, Any] = {
        "result": result,
        "bytes": [wire_bytes, raw_bytes],
        "own": [run.last.loss, training_s, run.units],
        "messages": run.messages.means(),
        "note": note_of_policy(run),
    }
    told = exchange(run.transport, report)
    loss, accuracy = told[0]["result"]
    train_loss, training_s, units = told[0]["own"]  # the server's: every rank has the same line
    line = {
        "round": run.rounds,
        "epoch": run.rounds / run.rounds_per_epoch,
        "train_loss": train_loss,
        "test_loss": loss,
        "test_accuracy": accuracy,
        "wire_bytes": sum(t["bytes"][0] for t in told),
        "raw_bytes": sum(t["bytes"][1] for t in told),
        "seconds": training_s,
        **({"units": units} if run.plan and run.plan.units else {}),
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
            f"block {run.block.block}: in most rounds the first local step takes longer than"
            f" steps.timeout_s = {policy.timeout_s:g} s, and is then the only one"
        )
    return ""


def target_reached(run: Run) -> bool:
    """Whether the last evaluation met `algorithm.target_accuracy`; the same answer on every
    rank.
    """
    target = run.config.algorithm.target_accuracy
    return target is not None and run.lines[-1]["test_accuracy"] >= target
