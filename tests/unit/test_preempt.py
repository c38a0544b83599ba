"""Signals that ask a run to stop, the word to Slurm, and books that go on."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.runs import tiny

from hpcvfl.books import open_book, settle
from hpcvfl.cli import load_config
from hpcvfl.clock import PhaseClock
from hpcvfl.config import digest
from hpcvfl.engine.folder import put_in_place, write_whole
from hpcvfl.engine.lock import RunLock
from hpcvfl.engine.preempt import SIGNALS, Asked, requeue
from hpcvfl.errors import ConfigError
from hpcvfl.ledger import Meter
from hpcvfl.transport.launcher import slurm_job


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_a_flag_and_does_nothing_else(number):
    asked = Asked()
    before = signal.getsignal(number)
    asked.listen()
    try:
        assert asked.reason == ""
        os.kill(os.getpid(), number)
        assert asked.reason == number.name
    finally:
        asked.close()
    assert signal.getsignal(number) == before
    asked.close()


def test_a_signal_that_came_before_the_wish_was_declined_is_not_lost(monkeypatch):
    came = []
    monkeypatch.setattr(signal, "raise_signal", came.append)
    asked = Asked()
    asked.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    asked.decline()
    assert came == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def scontrol(folder, monkeypatch, status, state="RUNNING", show=0):
    """A scontrol that tells a job's state and ends with `show`, notes what else it is to do and
    ends with `status`.
    """
    program = folder / "scontrol"
    program.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *show*) echo "JobId=1234 JobState={state} Reason=No"; exit {show} ;; esac\n'
        f'echo "$@" > {folder}/said\necho "no such job" >&2\nexit {status}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1234")
    for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)


def test_slurm_is_told_to_start_the_job_again(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, 0)
    assert requeue() == "job 1234 is requeued"
    assert (tmp_path / "said").read_text() == "requeue 1234\n"


# As `scontrol show job` has it while the signal before a limit or a preemption is on its way.
def test_a_job_that_is_being_signalled_is_requeued(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, 0, "SIGNALING")
    assert requeue() == "job 1234 is requeued"


def test_a_job_that_was_cancelled_or_preempted_is_left_to_slurm(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, 0, "COMPLETING")
    assert requeue().startswith("not requeued: job 1234 is COMPLETING, ")
    assert not (tmp_path / "said").exists()


def test_a_job_of_unknown_state_is_not_requeued_for_it_may_be_cancelled(tmp_path, monkeypatch):
    for states in ({"state": "RUNNING", "show": 1}, {"state": ""}):
        scontrol(tmp_path, monkeypatch, 0, **states)
        assert requeue().startswith("not requeued: ")
        assert requeue().endswith("; queue it: scontrol requeue 1234")
        assert not (tmp_path / "said").exists()


def test_what_keeps_a_job_from_being_requeued_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert requeue() == "not requeued: this is no Slurm job"
    scontrol(tmp_path, monkeypatch, 1)
    assert requeue() == "not requeued: scontrol requeue 1234: no such job"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert "not requeued: scontrol --oneliner show job 1234: " in requeue()
    assert slurm_job({}) is None


def test_what_scontrol_says_may_be_in_any_encoding_or_nothing(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, 0)
    program = tmp_path / "scontrol"
    program.write_bytes(program.read_bytes().replace(b"Reason=No", b"JobName=n\xe4cht"))
    assert requeue() == "job 1234 is requeued"
    program.write_bytes(program.read_bytes().replace(b"exit 0\n", b"kill -9 $$\n"))
    assert requeue() == "not requeued: scontrol requeue 1234: no such job"
    program.write_bytes(program.read_bytes().replace(b'echo "no such job" >&2', b""))
    assert requeue() == "not requeued: scontrol requeue 1234: status -9"


def test_a_signal_after_a_program_is_done_makes_no_failure_of_it():
    """Python gives signals back before it has ended, which takes a while."""
    code = (
        "import os, signal, sys\n"
        "from hpcvfl.cli import main\n"
        "from hpcvfl.engine.preempt import SIGNALS\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), names=SIGNALS):\n"
        "        [kill(pid, name) for name in names]\n"
        "sys.argv = ['hpcvfl', '--version']\n"
        "late = Late()\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_member_of_an_array_is_named_apart_from_the_array(tmp_path, monkeypatch):
    scontrol(tmp_path, monkeypatch, 0)
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1234")  # the leader has the array's number
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    assert requeue() == "job 1234_0 is requeued"
    assert (tmp_path / "said").read_text() == "requeue 1234_0\n"


def test_a_book_goes_on_after_what_was_kept(tmp_path):
    path = tmp_path / "book"
    first = open_book(path)
    first.write("one\n")
    assert settle(first) == 4
    first.write("two\n")
    first.close()
    again = open_book(path, 4)
    again.write("three\n")
    assert settle(again) == 10
    again.close()
    assert path.read_text() == "one\nthree\n"
    open_book(path).close()
    assert path.read_text() == ""


def test_bookings_and_seconds_of_earlier_parts_are_added():
    before, meter = Meter(), Meter()
    before.phase = meter.phase = "train"
    before.record(1, "embed", "in", 10, 40)
    before.record(2, "head", "out", 5, 20)
    meter.record(1, "embed", "in", 7, 28)
    meter.add(json.loads(json.dumps(before.table())))
    assert meter.received() == (17, 68)
    assert meter.table()[0]["messages"] == 2
    clock = PhaseClock()
    clock.add({"wire": 100.0}, 250.0)
    assert clock.training_s() >= 100
    assert clock.total_s() >= 250 > clock.elapsed()


def test_a_file_is_put_in_place_whole(tmp_path):
    (tmp_path / "aside").write_bytes(b"abc")
    assert put_in_place(tmp_path / "aside", tmp_path / "file") == 3
    write_whole(tmp_path / "file", "text")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(OSError):
        write_whole(tmp_path / "nowhere" / "file", "text")


def test_short_options_are_those_of_the_section():
    config = load_config(["digits", "--resume", "auto", "--max-seconds", "60"])
    assert (config.run.resume, config.run.max_seconds) == ("auto", 60)
    plain = load_config(["digits"])
    assert (plain.run.resume, plain.run.max_seconds, plain.run.checkpoint_s) == ("never", None, 300)
    assert digest(config) == digest(plain)


@pytest.mark.parametrize(
    "over",
    [
        {"run__checkpoint_s": -1.0},
        {"run__checkpoint_rounds": 0},
        {"run__keep_checkpoints": 0},
        {"run__max_seconds": 0.0},
        {"run__resume": ""},
    ],
)
def test_fields_that_make_no_sense_are_refused(over):
    with pytest.raises(ConfigError, match="config: run"):
        tiny("runs", **over)


def test_a_lock_file_says_who_has_it(tmp_path):
    lock = RunLock(tmp_path)
    said = json.loads(Path(tmp_path / "run.lock").read_text())
    assert said["pid"] == os.getpid()
    assert said.keys() == {"pid", "host", "since"}
    lock.release()
    lock.release()
