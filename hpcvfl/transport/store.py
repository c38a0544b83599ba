"""What processes under torchrun tell each other beside the frames, through torch's store.

    here/K     host and process number of rank K, since it came
    where/K    where rank K waits, and up to which question that is the answer
    asked      number of questions asked so far
    ending     how many ranks have begun to end all of them
    status     the exit status that all end with

The store is a server in torchrun's agent, or in rank 0 without one; each call is one round trip.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hpcvfl.errors import TransportError
from hpcvfl.transport.rollcall import SECONDS, Whereabouts

LOOK_EVERY_S = 0.5  # for a rank that ends all: an abort has 5 s
GONE_BY_S = 2.0  # a rank that runs has seen by then that all end; one that has not is stopped
ALL_QUESTIONS = 2**62
LOST = TransportError.exit_code  # of a rank that has lost the store: torchrun's agent is gone


class StoreRoll:
    """The roll call over the store: a rank writes where it waits, who asked reads it.

    A rank that asked and gave up answers no more, but what it said when asking still counts.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Nothing is written before `call` or `answer`."""
        self._store, self._rank = store, rank
        self._peers = [k for k in range(size) if k != rank]
        self._answered = 0

    def answer(self, mine: Whereabouts) -> None:
        """Tell every rank that asked since the last time where this one is."""
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._say(asked, mine)
            self._answered = asked

    def call(self, mine: Whereabouts, seconds: float = SECONDS) -> dict[int, Whereabouts]:
        """Ask all others; return what those said who answered within `seconds`, by rank."""
        question = self._store.add("asked", 1)
        self._say(ALL_QUESTIONS, mine)
        said: dict[int, Whereabouts] = {}
        until = time.monotonic() + seconds
        while time.monotonic() < until and len(said) < len(self._peers):
            for peer in self._peers:
                if peer not in said and self._store.check([f"where/{peer}"]):
                    answer = json.loads(self._store.get(f"where/{peer}"))
                    if answer["question"] >= question:
                        said[peer] = Whereabouts(answer["calls"], answer["text"])
            time.sleep(0.02)
        return said

    def _say(self, question: int, mine: Whereabouts) -> None:
        note = {"question": question, "calls": mine.calls, "text": mine.text}
        self._store.set(f"where/{self._rank}", json.dumps(note))


class Ending:
    """That all ranks end when one of them ends all: one rank's part in it.

    A thread looks for it twice a second and ends this process, wherever its other threads are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        """Say that this rank is here."""
        self._store, self._rank, self._size = store, rank, size
        self._neighbours: list[int] = []  # pidfds of the other ranks on this host
        self._over = threading.Event()
        # A daemon: after an error nothing may keep the process from ending.
        self._thread = threading.Thread(target=self._look, name="ending", daemon=True)
        store.set(f"here/{rank}", json.dumps({"host": host_mark(), "pid": os.getpid()}))

    def absent(self) -> list[int]:
        """The ranks that are not here yet."""
        return [k for k in range(self._size) if not self._store.check([f"here/{k}"])]

    def all_here(self) -> bool:
        """Whether no rank is missing."""
        return bool(self._store.check([f"here/{k}" for k in range(self._size)]))

    def watch(self) -> None:
        """Begin to look; once all are here."""
        for rank in range(self._size):
            here = json.loads(self._store.get(f"here/{rank}"))
            if here["host"] == host_mark() and here["pid"] != os.getpid():
                with suppress(OSError, AttributeError):  # no Linux, or one without pidfds
                    self._neighbours.append(os.pidfd_open(here["pid"]))
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Look no more: this rank has ended well; again does no harm.

        A thread in torch's code must not outlive the interpreter, it would end the process badly.
        """
        atexit.unregister(self.stop)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        while self._neighbours:
            os.close(self._neighbours.pop())

    def end_all(self, code: int) -> NoReturn:
        """End every rank with this exit status, this one when the others on this host are gone.

        Of several that do so at once, the first does it. What does not end by itself within 2 s is
        stopped, or deep in a call that lets no other thread run, and is killed; on other hosts that
        is left to torchrun's agent, which takes 30 s over it.
        """
        self._over.set()  # for the thread: this process ends below, after the others
        flush()
        with suppress(RuntimeError):  # without a store the agent is gone and looks after nobody
            first = self._store.add("ending", 1) == 1
            if first:
                self._store.set("status", str(code))
                until = time.monotonic() + GONE_BY_S
                while time.monotonic() < until and any(map(runs, self._neighbours)):
                    time.sleep(0.05)
                for pidfd in filter(runs, self._neighbours):
                    with suppress(OSError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os._exit(code)

    def _look(self) -> None:
        # Nothing is flushed here: the thread that prints may be in the middle of it.
        while not self._over.wait(LOOK_EVERY_S):
            try:
                if self._store.check(["status"]) and not self._over.is_set():
                    os._exit(int(self._store.get("status")))
            except RuntimeError:
                if not self._over.is_set():
                    text = f"hpcvfl: rank {self._rank}: torchrun's agent is gone, and its store\n"
                    os.write(2, text.encode())
                    os._exit(LOST)


def runs(pidfd: int) -> bool:
    """Whether the process of a pidfd has not ended; a stopped one has not."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    return not ended.poll(0)


def host_mark() -> str:
    """The same text for two processes if a process number means the same to both."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"process {os.getpid()}"


def flush() -> None:
    """See that what was printed is out."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
