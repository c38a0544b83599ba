"""Real processes that go wrong: all are gone in time, and the right words are said.

These tests start mpiexec themselves and run without it.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from support.launch import MPIEXEC, ROOT, alive, run
from support.transport_program import LEAVE_CODE, TIMEOUT_S

from hpcvfl.errors import TransportError, TransportTimeout
from hpcvfl.transport.mpi import LEAVE_S

PROGRAM = ROOT / "tests" / "support" / "transport_program.py"
# Hydra returns the status given to MPI_Abort, or, about as often, that of a rank which it killed.
KILLED = 9


@dataclass
class Ending:
    """What a run printed, its exit status, and seconds from the misdeed to the end of mpiexec."""

    text: str
    status: int
    wrong_s: float
    ended_s: float
    pids: list[int]


def run_until_it_ends(how: str, size: int, net: Sequence[str] = ("-m", "mpi4py")) -> Ending:
    command = [MPIEXEC, "-n", str(size), sys.executable, *net, str(PROGRAM), how]
    done = run(command, timeout_s=60)
    ended_s = time.monotonic()
    text = done.stdout + done.stderr
    wrong = re.search(r"now ([\d.]+)", text)
    assert wrong, text
    pids = [int(pid) for pid in re.findall(r"pid \d+ (\d+)", text)]
    assert len(pids) == size, text
    return Ending(text, done.returncode, float(wrong[1]), ended_s, pids)


def gone_by(pids: list[int], until_s: float) -> bool:
    """Whether all processes end before a moment; mpiexec may return just before them."""
    while time.monotonic() < until_s and any(map(alive, pids)):
        time.sleep(0.01)
    return not any(map(alive, pids))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("how", ["raise", "library", "kill"])
def test_all_ranks_are_gone_5_s_after_one_fails(how: str, size: int) -> None:
    ending = run_until_it_ends(how, size)
    assert ending.ended_s - ending.wrong_s < 5.0, ending.text
    assert gone_by(ending.pids, ending.wrong_s + 5.0)
    assert ending.status != 0, ending.text
    if how == "raise":
        assert ending.status in (TransportError.exit_code, KILLED)
        assert "this rank has had enough" in ending.text
    if how == "library":
        assert "ZeroDivisionError: not one of ours" in ending.text


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 5])
def test_a_stopped_rank_is_named_and_dies_with_the_rest(size: int) -> None:
    ending = run_until_it_ends("stop", size)
    said = re.search(r"said ([\d.]+) (.*)", ending.text)
    assert said, ending.text
    assert re.search(rf"round 3: .*EMBED: rank {size - 1} did not post", said[2]), said[2]
    assert said[2].count("did not post") == 1
    assert float(said[1]) - ending.wrong_s < TIMEOUT_S + 3.0, ending.text
    assert ending.ended_s - float(said[1]) < 5.0, ending.text
    assert gone_by(ending.pids, float(said[1]) + 5.0)
    assert ending.status in (TransportTimeout.exit_code, KILLED)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("net", [("-m", "mpi4py"), ()], ids=["with mpi4py", "plain"])
@pytest.mark.parametrize("size", [2, 5])
def test_a_rank_that_never_starts_is_named_and_ends_the_rest(size: int, net: list[str]) -> None:
    ending = run_until_it_ends("absent", size, net)
    said = re.search(r"said ([\d.]+) (.*)", ending.text)
    assert said, ending.text
    assert f"start-up of {size} ranks: rank {size - 1} did not post" in said[2]
    assert said[2].count("did not post") == 1
    assert gone_by(ending.pids, float(said[1]) + 5.0)
    assert ending.status in (TransportTimeout.exit_code, KILLED)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 5])
def test_nobody_waits_for_ever_for_a_rank_that_does_not_leave(size: int) -> None:
    ending = run_until_it_ends("late", size)
    assert f"barrier: rank {size - 1} did not post" in ending.text
    assert ending.ended_s - ending.wrong_s < LEAVE_S + 5.0, ending.text
    assert gone_by(ending.pids, ending.wrong_s + LEAVE_S + 5.0)
    assert ending.status in (LEAVE_CODE, KILLED)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("size", [2, 5])
def test_a_rank_that_stops_while_leaving_ends_with_the_rest(size: int) -> None:
    """MPI_Finalize would wait for it; Hydra tells of a rank that SIGALRM ended."""
    ending = run_until_it_ends("last", size)
    assert ending.ended_s - ending.wrong_s < LEAVE_S + 5.0, ending.text
    assert gone_by(ending.pids, ending.wrong_s + LEAVE_S + 5.0)
    assert ending.status != 0
