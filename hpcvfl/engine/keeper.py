"""When a run is checkpointed and when it leaves: decided on headers, done by all ranks at once.

    before a round   the server may find a checkpoint due, any rank may have been asked to stop:
                     both ride on the headers of that round
    after it         every rank knows both: a checkpoint is written, and where a stop was asked
                     every rank leaves with Preempted

A checkpoint counts when every rank has written its file and rank 0 has said so; then, and not
before, older ones go.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hpcvfl.engine import folder, preempt, sets
from hpcvfl.engine.agree import together
from hpcvfl.engine.observer import Observer
from hpcvfl.engine.preempt import Asked
from hpcvfl.engine.state import part_of
from hpcvfl.errors import HpcvflError, Preempted

if TYPE_CHECKING:
    from hpcvfl.engine.prepare import Run


class Keeper:
    """Of one rank of one run."""

    def __init__(self, asked: Asked | None = None) -> None:
        """The clock of checkpoints starts now; `asked`: by signals, if anybody listens."""
        self._asked = asked or Asked()
        self._since = time.monotonic()
        self._reason = ""

    def ask(self, run: Run) -> None:
        """Before a round: put what this rank asks for on its next header."""
        limit_s = run.config.run.max_seconds
        self._reason = self._asked.reason
        if not self._reason and limit_s is not None and run.clock.elapsed() >= limit_s:
            self._reason = f"run.max_seconds = {limit_s:g}"
        run.exchange.stop_asked = bool(self._reason)
        run.exchange.save_due = run.transport.rank == 0 and self._due(run)

    def _due(self, run: Run) -> bool:
        config = run.config.run
        by_rounds = config.checkpoint_rounds and (run.rounds + 1) % config.checkpoint_rounds == 0
        by_clock = 0 < config.checkpoint_s <= time.monotonic() - self._since
        return bool(by_rounds) or by_clock

    def after_round(self, run: Run, shown: Observer) -> None:
        """After a round that was not the last: do what was agreed on its headers.

        Raises Preempted, on every rank, where a stop was asked. A checkpoint that cannot be written
        is a warning, since the older ones stay; before a stop it is the end, a ConfigError.
        """
        stop, due = run.exchange.agreed()
        if not stop and not due:
            return
        try:
            reasons = self._save(run)
        except HpcvflError as error:
            if stop or not error.everywhere:
                raise
            text = f"no checkpoint after round {run.rounds}: {error}"
            if text not in run.warnings:
                run.warnings.append(text)
            shown.warning(text)
            reasons = []
        self._since = time.monotonic()
        if stop:
            raise self._preempted(run, reasons)

    def _save(self, run: Run) -> list[str]:
        """Write a set and drop those that are too many; what each rank was asked to stop by."""
        transport, path, rounds = run.transport, run.path, run.rounds
        run.clock.to("checkpoint")
        run.meter.phase = "checkpoint"
        # A large memory on a slow disk takes its time.
        transport.timeout_s = max(transport.timeout_s, run.config.transport.first_timeout_s)
        rank = transport.rank

        def write() -> str:
            with folder.writing(path):
                sets.write_part(path, rounds, rank, part_of(run))
            return self._reason

        def seal() -> list[int]:
            if rank:
                return []
            with folder.writing(path):
                sets.seal(path, rounds, self._said(run))
            return sets.to_keep(path, rounds, run.config.run.keep_checkpoints)

        try:
            reasons = together(transport, write)
            kept = together(transport, seal)[0]
        except HpcvflError as error:
            if error.everywhere:
                sets.drop_part(path, rounds, rank)
            raise
        finally:
            transport.timeout_s = run.config.transport.timeout_s
            run.clock.to("other")
        sets.drop_older(path, rounds, rank, kept)
        return reasons

    def _said(self, run: Run) -> dict[str, object]:
        """complete.json, for people: what counts stands in the files of the ranks."""
        return {
            "round": run.rounds,
            "of": run.total_rounds,
            "ranks": run.transport.size,
            "blocks": run.config.block_of_rank,
            "written": time.strftime("%Y-%m-%d %H:%M:%S"),
            "after_s": round(run.clock.total_s(), 3),
        }

    def _preempted(self, run: Run, reasons: list[str]) -> Preempted:
        asked: dict[str, list[str]] = {}
        for rank, reason in enumerate(reasons):
            if reason:
                asked.setdefault(reason, []).append(str(rank))
        by = "; ".join(
            f"{reason} at {'all ranks' if len(who) == len(reasons) else 'rank ' + ', '.join(who)}"
            for reason, who in asked.items()
        )
        text = (
            f"stopped after round {run.rounds} of {run.total_rounds} ({by}); the checkpoint is"
            f" {sets.set_path(run.path, run.rounds)}; go on with --resume {run.path}, or auto"
        )
        if run.config.run.requeue:
            # The others wait for the answer of Slurm's controller, which may be busy.
            run.transport.timeout_s = max(run.transport.timeout_s, 3 * preempt.REQUEUE_S)
            said = together(run.transport, lambda: "" if run.transport.rank else preempt.requeue())
            text += f"; {said[0]}"
        error = Preempted(text)
        error.everywhere = True
        return error
