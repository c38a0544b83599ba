"""Heartbeats and what a timeout says of the ranks that did not come."""

import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from support.runs import run_threads, tiny

from hpcvfl.clock import PhaseClock
from hpcvfl.engine import watch
from hpcvfl.engine.watch import Heart, Process, explained, heartbeat_path, this_process
from hpcvfl.errors import TransportTimeout

PROCESSES = [Process(0, "a", 1), Process(1, "b", 20), Process(2, "c", 300)]


@pytest.fixture
def heart(tmp_path):
    transport = SimpleNamespace(rank=0, name="mpi", round_index=17)
    beating = Heart(tmp_path, transport, PhaseClock(), PROCESSES[0])
    yield beating
    beating.stop(well=False)


def timeout_of(rank, **due):
    return TransportTimeout("rank 0, round 17: gather", [rank], due.get("due"))


def write_sign(folder, rank, age_s, **sign):
    fields = {"round": 16, "phase": "local steps", "phase_s": 3.0} | sign
    path = heartbeat_path(folder, rank)
    path.write_text(json.dumps(fields))
    then = time.time() - age_s
    os.utime(path, (then, then))


def test_a_heartbeat_says_who_and_where(tmp_path, heart):
    heart.beat()
    sign = json.loads(heartbeat_path(tmp_path, 0).read_text())
    assert {k: sign[k] for k in ("rank", "block", "host", "pid", "round", "phase")} == {
        "rank": 0, "block": 0, "host": "a", "pid": 1, "round": 17, "phase": "start",
    }  # fmt: skip
    assert sign["phase_s"] >= 0


def test_it_beats_by_itself_and_no_more_after_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "BEAT_S", 0.001)
    transport = SimpleNamespace(rank=1, name="mpi", round_index=0)
    beating = Heart(tmp_path, transport, PhaseClock(), this_process(1))
    path = heartbeat_path(tmp_path, 1)
    for due in (3, 9):
        transport.round_index = due
        while not path.exists() or json.loads(path.read_text())["round"] != due:
            time.sleep(0.001)
    beating.stop(well=True)
    assert not path.exists()
    assert not list(tmp_path.iterdir())  # an empty file of stacks neither
    assert not beating._thread.is_alive()


def test_a_rank_that_computes_is_told_from_one_that_is_gone(tmp_path, heart):
    write_sign(tmp_path, 1, age_s=2.0)
    text = str(explained(timeout_of(1, due={1: ("embed", 1088)}), tmp_path, heart, PROCESSES))
    assert text == (
        "rank 0, round 17: gather; party 1 (rank 1, host b, pid 20), 1088 bytes of embed due,"
        " last heartbeat 2 s ago, then in round 16, local steps for 3 s"
    )
    write_sign(tmp_path, 2, age_s=100.0)
    text = str(explained(timeout_of(2), tmp_path, heart, PROCESSES))
    assert text.endswith(
        "party 2 (rank 2, host c, pid 300), no heartbeat for 100 s (last in round 16, local steps):"
        " stopped or gone"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"round": 1, "phase": "x", "phase_s": "y"}'])
def test_a_heartbeat_that_is_missing_or_broken_takes_no_words_away(tmp_path, heart, text):
    if text:
        heartbeat_path(tmp_path, 1).write_text(text)
    told = explained(timeout_of(1), tmp_path, heart, PROCESSES)
    assert str(told).endswith("pid 20), without a heartbeat that can be read here")
    assert told.missing == (1,)
    assert told.exit_code == TransportTimeout.exit_code


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path):
    transport = SimpleNamespace(rank=0, name="mpi", round_index=0)
    beating = Heart(tmp_path / "none", transport, PhaseClock(), this_process(0))
    beating.beat()
    beating.stop(well=True)
    assert not (tmp_path / "none").exists()


def test_last_words_do_not_wait_for_a_file_system_that_hangs(tmp_path, heart, monkeypatch):
    hung = threading.Event()
    monkeypatch.setattr(watch, "explained", lambda *_: hung.wait())
    monkeypatch.setattr(watch, "LAST_WORDS_S", 0.05)
    error = timeout_of(1)
    assert watch.last_words(error, tmp_path, heart, PROCESSES) is error
    hung.set()


def test_last_words_stand_in_the_run_folder_too(tmp_path, heart):
    told = watch.last_words(timeout_of(1), tmp_path, heart, PROCESSES)
    assert (tmp_path / "error.rank0.txt").read_text() == f"TransportTimeout: {told}\n"
    assert "party 1 (rank 1, host b, pid 20)" in str(told)
    fault = ValueError("of a module")
    assert watch.last_words(fault, tmp_path, heart, PROCESSES) is fault


def test_what_is_done_within_a_time_gives_its_result_or_its_error():
    assert watch.within(60.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        watch.within(60.0, lambda: 1 // 0)


def test_a_run_that_ended_well_leaves_no_signs_and_one_that_failed_does(tmp_path):
    summary = run_threads(tiny(tmp_path / "well"))
    names = {p.name for p in (tmp_path / "well").glob("*/*")}
    assert summary["rounds"]
    assert not {n for n in names if n.startswith(("heartbeat", "stack"))}

    def fail(run, result):
        raise RuntimeError("of a module")

    with pytest.raises(RuntimeError):
        run_threads(tiny(tmp_path / "ill"), after_round=fail)
    assert list((tmp_path / "ill").glob("*/heartbeat.rank0.json"))
