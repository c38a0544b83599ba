"""A whole run on one rank: start, rounds, evaluations, end. Called by every rank."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcvfl import __version__
from hpcvfl.clock import WORKING_PHASES, PhaseClock
from hpcvfl.codecs.feedback import FeedbackCodec
from hpcvfl.codecs.frame import MAX_ROUNDS
from hpcvfl.config import Config, digest
from hpcvfl.data import Batches
from hpcvfl.engine import folder
from hpcvfl.engine.agree import each, exchange, together
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.checkpoint import load_block, save_block, save_stream
from hpcvfl.engine.evaluate import evaluate
from hpcvfl.engine.exchange import Exchange
from hpcvfl.engine.messages import MessageLog
from hpcvfl.engine.observer import Observer, Silent
from hpcvfl.engine.policies import FixedSteps, learning_rate
from hpcvfl.engine.round import RoundResult, run_round
from hpcvfl.engine.start import start
from hpcvfl.errors import ConfigError
from hpcvfl.ledger import Meter
from hpcvfl.transport.base import Transport
from hpcvfl.transport.delayed import Delayed
from hpcvfl.transport.metered import Metered


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
    lines: list[dict[str, Any]] = field(default_factory=list)
    rounds: int = 0
    warnings: dict[int, str] = field(default_factory=dict)  # by block, each said once


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
    try:
        last = RoundResult(0, 0.0, 0.0)
        for round_index in range(run.total_rounds):
            last = one_round(run, round_index, last)
            shown.round(last.loss)
            if after_round:
                after_round(run, last)
            if evaluation_is_due(run, round_index):
                line = evaluate_now(run, last.loss)
                shown.evaluation(line)
                for text in new_warnings(run, line):
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
            run.meter.close()
            run.messages.close()
        shown.end()


def prepare(
    config: Config,
    transport: Transport,
    begun_s: float | None = None,
    shown: Observer | None = None,
) -> Run:
    """Handshake, run folder, everything that the first round needs."""
    clock, meter = PhaseClock(begun_s), Meter()
    transport.timeout_s = config.transport.first_timeout_s
    if config.transport.latency_ms or config.transport.bandwidth_gbps:
        transport = Delayed(transport, config.transport.latency_ms, config.transport.bandwidth_gbps)
    transport = Metered(transport, meter)
    clock.to("load")
    block, agreement = start(config, transport)

    def make_folder() -> str | None:
        return str(folder.create(config)) if transport.rank == 0 else None

    path = Path(together(transport, make_folder)[0])

    def open_books() -> MessageLog:
        with folder.writing(path):
            path.mkdir(parents=True, exist_ok=True)  # a host may lack the shared folder
            meter.open(path / f"ledger.rank{transport.rank}.jsonl")
            return MessageLog(transport.size, None if transport.rank else path / "messages.jsonl")

    messages = each(transport, open_books)
    clock.to("start")
    data = config.data
    batches = Batches(block.shard.num_rows, data.batch_size, config.seed, data.shuffle)
    total = config.algorithm.epochs * batches.rounds_per_epoch
    total = min(total, config.algorithm.rounds or total)
    if total >= MAX_ROUNDS:
        raise ConfigError(f"algorithm: {total} rounds; a header counts fewer than {MAX_ROUNDS}")
    pattern, memory_folder = config.transport.pattern, config.run.memory_folder
    # On all ranks or none: the memories of error feedback may not fit.
    swap = each(transport, lambda: Exchange(transport, agreement, pattern, memory_folder))
    if shown:
        shown.preparing(f"compiling the kernels of {', '.join(agreement.table)}")
    swap.compile_codecs(min(data.batch_size, block.shard.num_rows))
    clock.to("other")
    return Run(config, block, swap, transport, meter, messages, clock, batches, path, total)


def one_round(run: Run, round_index: int, last: RoundResult) -> RoundResult:
    """A round with its rate, its timeout and its books."""
    rate = learning_rate(
        run.block.config.optimizer, round_index, run.batches.rounds_per_epoch, run.total_rounds
    )
    policy = FixedSteps(run.config.algorithm.local_steps)
    run.meter.phase = "train"
    result = run_round(
        round_index, run.block, run.exchange, run.batches, policy, rate, last, run.clock
    )
    run.meter.end_round(round_index)
    run.messages.note(round_index, run.exchange.headers_R)
    run.transport.timeout_s = run.config.transport.timeout_s
    run.rounds = round_index + 1
    return result


def evaluation_is_due(run: Run, round_index: int) -> bool:
    """After every `evaluate_every` epochs, and after the last round."""
    done = round_index + 1
    if done == run.total_rounds:
        return True
    epochs, rest = divmod(done, run.batches.rounds_per_epoch)
    return rest == 0 and epochs % run.config.algorithm.evaluate_every == 0


def evaluate_now(run: Run, train_loss: float) -> dict[str, Any]:
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
        "own": [train_loss, training_s],
        "messages": run.messages.means(),
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
        **told[0]["messages"],
    }
    run.lines.append(line)
    if run.transport.rank == 0:
        metrics = run.path / "metrics.jsonl"
        with folder.writing(run.path), metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    run.clock.to("other")
    return line


def new_warnings(run: Run, line: dict[str, Any]) -> list[str]:
    """Blocks whose messages since the last evaluation had more error than energy, told once each.

    Error feedback around a codec whose error is larger than its message diverges, and the accuracy
    alone does not say why.
    """
    said = []
    for block, (error, energy) in enumerate(
        zip(line["squared_error"], line["energy"], strict=True)
    ):
        if error > energy and block not in run.warnings:
            codec = run.exchange.agreement.codecs_R[block]
            advice = (
                "error feedback diverges around this codec (README, Codecs)"
                if isinstance(codec, FeedbackCodec)
                else "it loses more than it sends"
            )
            run.warnings[block] = (
                f"block {block}, {codec.spec}: up to round {run.rounds} the error of its messages"
                f" is {error / energy if energy else math.inf:.3g} times their energy; {advice}"
            )
            said.append(run.warnings[block])
    return said


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
            save_block(run.path, run.block)
            save_stream(run.path, run.block, run.exchange.streams_R[rank])
            run.meter.close()
            run.messages.close()
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
        },
    )
    summary = summarise(run, told)
    if rank == 0:
        text = json.dumps(summary, indent=1) + "\n"
        with folder.writing(run.path):
            (run.path / "summary.json").write_text(text, encoding="utf-8")
    return summary


def summarise(run: Run, told: list[dict[str, Any]]) -> dict[str, Any]:
    """summary.json from what every rank told at the end."""
    last = run.lines[-1]
    config = run.config
    return {
        "name": config.name,
        "folder": str(run.path),
        "metrics": {
            "accuracy": last["test_accuracy"],
            "loss": last["test_loss"],
            "train_loss": last["train_loss"],
        },
        "evaluated_on": "held-out rows" if config.data.validation_rows else "test",
        "rounds": run.rounds,
        "epochs": last["epoch"],
        "local_steps": config.algorithm.local_steps,
        "wire_bytes": last["wire_bytes"],
        "raw_bytes": last["raw_bytes"],
        "wire_bytes_by": bytes_by(told),
        "accounting": "measured",
        "clock": "wall",
        "seconds": {
            "total": told[0]["total_s"],
            "training": last["seconds"],
            "server": told[0]["seconds"],
            "slowest_party": max((t["seconds"] for t in told[1:]), key=busy_s),
        },
        "codec": [codec.spec for codec in run.exchange.agreement.codecs_R],
        "warnings": list(run.warnings.values()),
        "transport": run.transport.name,
        "pattern": config.transport.pattern,
        "threads": config.threads,
        "config_digest": digest(config),
        "hosts": [t["host"] for t in told],
        "versions": versions(),
    }


def busy_s(seconds: dict[str, float]) -> float:
    """Seconds of own work of a rank, from its phases."""
    return sum(seconds[phase] for phase in WORKING_PHASES)


def bytes_by(told: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Received bytes over all ranks: {phase: {"uplink head": n, "downlink embed": n, ..}}.

    uplink = received by the server, downlink = received by a party.
    """
    out: dict[str, dict[str, int]] = {}
    for rank, t in enumerate(told):
        for row in t["bytes"]:
            if row["direction"] == "in":
                key = f"{'downlink' if rank else 'uplink'} {row['kind']}"
                phase = out.setdefault(row["phase"], {})
                phase[key] = phase.get(key, 0) + row["wire_bytes"]
    return out


def versions() -> dict[str, str]:
    """Versions of what decides the numbers and the speed."""
    out = {"hpcvfl": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "numba", "mpi4py"):
        try:
            out[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def evaluate_run(path: Path, config: Config, transport: Transport) -> dict[str, float]:
    """Accuracy and loss of a finished run from its folder and config, computed as at its end."""
    block, _ = start(config, transport)
    together(transport, lambda: load_block(path, block))
    result = evaluate(block, transport, 0)
    loss, accuracy = exchange(transport, result)[0]
    return {"loss": loss, "accuracy": accuracy}
