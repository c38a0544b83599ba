"""How a run is asked to stop before its end: by a signal, or by a limit on its time.

A handler sets a flag and does nothing else: what is asked rides on the next header, so that all
ranks stop after the same round (round.py), whoever of them was asked.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Mapping
from types import FrameType
from typing import Any

from hpcvfl.transport import launcher

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What batch systems send before they end a job: Slurm SIGTERM, or `--signal=USR1@60`."""
ALIVE = ("RUNNING", "SIGNALING")
"""States of a Slurm job that nobody has ended; the second one while a signal is on its way."""
REQUEUE_S = 60.0
"""Longest wait for scontrol, in seconds."""


class Asked:
    """Whether this process was asked to stop, and by what; "" until then."""

    def __init__(self) -> None:
        self.reason = ""
        self._before: Mapping[signal.Signals, Any] = {}

    def listen(self) -> None:
        """Take SIGTERM and SIGUSR1 for a wish to stop from now on; in the main thread."""
        self._before = handlers()
        for number in SIGNALS:
            signal.signal(number, self._note)

    def close(self) -> None:
        """Give the signals back; again does no harm."""
        give_back(self._before)
        self._before = {}

    def decline(self) -> None:
        """Give the signals back, and with them one that has come meanwhile."""
        self.close()
        if self.reason:
            signal.raise_signal(signal.Signals[self.reason])

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = signal.Signals(number).name


def handlers() -> dict[signal.Signals, Any]:
    """Who has the signals now."""
    return {number: signal.getsignal(number) for number in SIGNALS}


def give_back(before: Mapping[signal.Signals, Any]) -> None:
    """Let those have the signals who had them; in the main thread if they have changed hands."""
    for number, handler in before.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def heed_no_more() -> None:
    """Nothing is left to stop: the signals do nothing from now on, to the end of the process."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def requeue() -> str:
    """Have Slurm start this job again; a few words about what came of it.

    Only a job that still runs: one that Slurm is ending already was cancelled, and then must not
    come back, or preempted or requeued, and then comes back by itself.
    """
    job = launcher.slurm_job()
    if job is None:
        return "not requeued: this is no Slurm job"
    status, said = _scontrol("--oneliner", "show", "job", job)
    state = re.search(r"\bJobState=(\w+)", said)
    if status or not state:
        return f"not requeued: {said or 'scontrol says nothing'}; queue it: scontrol requeue {job}"
    if state[1] not in ALIVE:
        return f"not requeued: job {job} is {state[1]}, Slurm ends it or has queued it again itself"
    status, said = _scontrol("requeue", job)
    return f"not requeued: {said}" if status else f"job {job} is requeued"


def _scontrol(*words: str) -> tuple[int, str]:
    """Exit status and output of scontrol; of one that failed, the command and what it said."""
    command = ["scontrol", *words]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=REQUEUE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, f"{' '.join(command)}: {error}"
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"status {done.returncode}"
        return done.returncode, f"{' '.join(command)}: {said}"
    return 0, done.stdout
