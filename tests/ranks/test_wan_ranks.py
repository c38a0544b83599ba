"""Ranks in namespaces of their own, with real delay between them, from end to end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import MPIEXEC, ROOT, alive, environment, rank_pids, wait_for

from wan.run import Wan, emulate
from wan.spaces import missing

LACK = missing() or ("no mpiexec" if MPIEXEC is None else None)
pytestmark = pytest.mark.skipif(LACK is not None, reason=f"the emulated network: {LACK}")


def exchanges(folder, latency_ms, rounds):
    """(seconds of so many gathers and broadcasts of 3 ranks, what the router saw)."""
    out, log = folder / f"out{rounds}.json", folder / "log"
    words = [sys.executable, "-m", "mpi4py", "-m", "wan.exchanges", str(out), str(rounds), "1000"]
    with log.open("w") as output:
        seen = emulate(Wan(latency_ms), 3, words, output, 60)
    assert seen["returncode"] == 0, log.read_text()
    return json.loads(out.read_text())["total_s"], seen


def test_an_exchange_takes_a_round_trip_and_the_router_saw_its_bytes(tmp_path):
    seconds, some = exchanges(tmp_path, latency_ms=40, rounds=5)
    # From one broadcast to the next nothing can be sooner than the light that the router is; how
    # much later is the machine's affair (bench/results/wan.md).
    assert seconds >= 4 * 0.040
    _, more = exchanges(tmp_path, latency_ms=40, rounds=15)
    assert some["dropped"] == more["dropped"] == 0
    bytes_of = [
        {(r["source"], r["dest"]): r["payload_bytes"] for r in x["pairs"]} for x in (some, more)
    ]
    grown = {pair: nbytes - bytes_of[0].get(pair, 0) for pair, nbytes in bytes_of[1].items()}
    for party in (1, 2):
        # Ten more messages: of one frame on the way up, of three on the way down.
        assert 10 * 1000 < grown[party, 0] < 10 * 1200
        assert 10 * 3000 < grown[0, party] < 10 * 3200
        assert grown.get((party, 3 - party), 0) < 1000  # parties hand on nothing


def hpcvfl_wan(*words):
    """The words of a command line of bench/wan."""
    return [sys.executable, str(Path(ROOT) / "bench" / "wan"), *words]


def test_the_exit_status_is_that_of_the_ranks():
    words = hpcvfl_wan("-n", "2", "--exec", "--", sys.executable, "-c", "raise SystemExit(7)")
    done = subprocess.run(
        words, env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_the_router_ends(end):
    words = hpcvfl_wan("-n", "2", "--exec", "--", "sleep", "300")
    router = subprocess.Popen(words, env=environment(), stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: len(sleepers(router.pid)) == 2, 30)
        ranks = sleepers(router.pid)
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in ranks}
        assert len(spaces) == 2
        assert os.readlink("/proc/self/ns/net") not in spaces
        router.send_signal(end)
        router.wait(30)
        wait_for(lambda: not any(alive(pid) for pid in ranks), 30)
        assert not spaces & namespaces()
    finally:
        if router.poll() is None:
            router.kill()
            router.wait()


def sleepers(router_pid):
    """Pids of the ranks that have become their program."""
    found = []
    for pid in rank_pids(router_pid).values():
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                found.append(pid)
        except OSError:
            continue
    return found


def namespaces():
    """The network namespaces of all processes, and those held by open files of any."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        for link in (entry / "ns/net", *(entry / "fd").glob("*")):
            try:
                target = os.readlink(link)
            except OSError:
                continue
            if target.startswith("net:"):
                found.add(target)
    return found


def test_a_rank_without_its_launcher_is_told_so(tmp_path):
    enter = Path(ROOT) / "bench" / "wan" / "enter.sh"
    done = subprocess.run(
        [str(enter), str(tmp_path), "true"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "no launcher says which rank this is" in done.stderr
