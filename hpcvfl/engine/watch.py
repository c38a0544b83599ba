"""Signs of life, for who looks at a job that hangs.

    heartbeat.rankK.json   written anew every few seconds, by a thread of its own: where rank K is
    stack.rankK.txt        the stacks of all threads of rank K, each time it gets SIGUSR2
    explained              a timeout with what is known of the ranks that did not come

After a run that ended well they are gone, but for stacks that were asked for. Before there is a run
folder, and after the run, stacks go to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TextIO, TypeVar

from hpcvfl.clock import PhaseClock
from hpcvfl.errors import TransportTimeout, out_of_memory
from hpcvfl.transport.base import Transport

BEAT_S = 5.0
"""Seconds between two heartbeats."""
STALE_BEATS = 2.5
"""A heartbeat that is so many times as old as it should be has stopped."""
LAST_WORDS_S = 2.0
"""Longest time for files of a run that ends: where the run hangs since its file system does, all
must still end.
"""

STDERR = 2  # sys.stderr may be a stand-in that has no file descriptor
T = TypeVar("T")


class Process(NamedTuple):
    """Where a rank runs, as all are told at start-up."""

    block: int
    host: str
    pid: int

    @property
    def name(self) -> str:
        """server or party k."""
        return f"party {self.block}" if self.block else "server"


def this_process(block: int) -> Process:
    """Of the block of this rank."""
    return Process(block, platform.node(), os.getpid())


class Heart:
    """The heartbeat and the stacks of one rank, from here to `stop`."""

    def __init__(
        self, path: Path, transport: Transport, clock: PhaseClock, process: Process
    ) -> None:
        """Begin to beat into the run folder `path`; a file that cannot be written ends no run."""
        self._path, self._transport, self._clock, self._process = path, transport, clock, process
        self._file = heartbeat_path(path, transport.rank)
        self._over = threading.Event()
        self._stacks = self._dump_stacks()
        # A daemon: nothing of it may keep a rank from ending.
        self._thread = threading.Thread(target=self._beat_on, name="heartbeat", daemon=True)
        self._thread.start()

    @property
    def rank(self) -> int:
        """Whose heart this is."""
        return self._transport.rank

    @property
    def round_index(self) -> int:
        """The round in which it is."""
        return self._transport.round_index

    def beat(self) -> None:
        """Write the heartbeat now."""
        aside = self._file.with_suffix(".tmp")
        with suppress(OSError):
            aside.write_text(json.dumps(self._sign()) + "\n", encoding="utf-8")
            aside.replace(self._file)

    def stop(self, well: bool) -> None:
        """Beat no more; again does no harm.

        well : remove what was written, for the run has nothing to explain
        """
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(timeout=1.0)
        if self._stacks:
            stacks_on_stderr()
            self._stacks.close()
        with suppress(OSError):
            stacks = self._path / f"stack.rank{self._transport.rank}.txt"
            if stacks.exists() and not stacks.stat().st_size:
                stacks.unlink()
            if well:
                self._file.unlink()

    def _beat_on(self) -> None:
        while not self._over.is_set():
            self.beat()
            self._over.wait(BEAT_S)

    def _sign(self) -> dict[str, Any]:
        phase, since_s = self._clock.now()
        return {
            "rank": self._transport.rank,
            **self._process._asdict(),
            "round": self._transport.round_index,
            "phase": phase,
            "phase_s": round(since_s, 3),
            "at": f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}",
        }

    def _dump_stacks(self) -> TextIO | None:
        """Of this process, into a file of the run folder; ranks that are threads share rank 0's."""
        if self._transport.name == "threads" and self._transport.rank:
            return None
        try:
            name = f"stack.rank{self._transport.rank}.txt"
            file = (self._path / name).open("a", encoding="utf-8")
        except OSError:
            return None
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        return file


def stacks_on_stderr() -> None:
    """From now on SIGUSR2 has this process write the stacks of all threads to stderr and go on."""
    with suppress(OSError, ValueError):  # it is closed
        faulthandler.register(signal.SIGUSR2, STDERR, all_threads=True)


def within(seconds: float, work: Callable[[], T]) -> T | None:
    """The result of `work`, or None where it takes longer; what it raises is raised."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # raised again below
            failed.append(error)

    # A daemon: where a file system hangs it must not keep the process from ending.
    thread = threading.Thread(target=run, name="last words", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # without memory there is no thread either
        return work()
    thread.join(seconds)
    if failed:
        raise failed[0]
    return done[0] if done else None


def last_words(
    error: Exception, path: Path, heart: Heart, processes: Sequence[Process]
) -> Exception:
    """The error that ends this rank, a timeout with what is known of the ranks that did not come,
    memory that ran out with how much there was; it stands in the run folder too, as
    error.rankK.txt, for who looks there in the morning.
    """

    def note() -> Exception:
        told = out_of_memory(error, heart.rank, heart.round_index) or error
        if isinstance(error, TransportTimeout):
            told = explained(error, path, heart, processes)
        with suppress(OSError):
            file = path / f"error.rank{heart.rank}.txt"
            file.write_text(f"{type(told).__name__}: {told}\n", encoding="utf-8")
        return told

    return within(LAST_WORDS_S, note) or error


def explained(
    error: TransportTimeout, path: Path, heart: Heart, processes: Sequence[Process]
) -> TransportTimeout:
    """The same error with a few words on each rank that did not come.

    path : the run folder, where their heartbeats are if it is shared
    """
    heart.beat()  # its age is that of a heartbeat of this moment, by the clock of the file system
    parts = []
    for rank in error.missing:
        process = processes[rank]
        words = [f"{process.name} (rank {rank}, host {process.host}, pid {process.pid})"]
        if rank in error.due:
            kind, nbytes = error.due[rank]
            words.append(f"{nbytes} bytes of {kind} due")
        words.append(_last_sign(path, heart, rank))
        parts.append(", ".join(words))
    text = "; ".join([str(error), *parts])
    return TransportTimeout(text, error.missing, error.due)


def _last_sign(path: Path, heart: Heart, rank: int) -> str:
    """What the heartbeat of `rank` says."""
    file = heartbeat_path(path, rank)
    try:
        sign = json.loads(file.read_text(encoding="utf-8"))
        age_s = heartbeat_path(path, heart.rank).stat().st_mtime - file.stat().st_mtime
        at = f"round {sign['round']}" if sign["round"] >= 0 else "start-up"
        where = f"{at}, {sign['phase']}"
        in_phase_s = float(sign["phase_s"])
    except (OSError, ValueError, LookupError, TypeError):
        return "without a heartbeat that can be read here"
    if age_s > STALE_BEATS * BEAT_S:
        return f"no heartbeat for {age_s:.0f} s (last in {where}): stopped or gone"
    # Not "alive": it may have stopped since.
    return f"last heartbeat {max(age_s, 0.0):.0f} s ago, then in {where} for {in_phase_s:.0f} s"


def heartbeat_path(folder: Path, rank: int) -> Path:
    """The heartbeat of a rank in a run folder."""
    return folder / f"heartbeat.rank{rank}.json"
