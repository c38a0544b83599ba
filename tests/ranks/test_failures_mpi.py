"""Failures under mpiexec, as a user meets them: named, non-zero, all processes gone in time."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import MPIEXEC, alive, environment, mpi_words, rank_pids, run, start, wait_for
from support.runs import write_config

pytestmark = pytest.mark.timeout(180)


def said(text):
    """Lines of the program itself, without progress and without what MPI adds to an abort."""
    return [x for x in text.splitlines() if x.startswith("hpcvfl: ")]


def test_wrong_number_of_ranks_names_both_fixes(tmp_path):
    done = run(mpi_words(2, "train", write_config(tmp_path)))
    assert done.returncode == 2
    (line,) = said(done.stderr)
    assert "2 ranks came, num_parties = 3 needs 4" in line
    assert "mpiexec -n 4" in line
    assert "--num-parties 1" in line
    assert "Abort" not in done.stderr


@pytest.mark.parametrize(
    ("words", "due"),
    [
        (["--codec", "scalar:bits=9"], "bits = '9'"),
        (["--foo", "1"], "Unrecognized options: --foo"),
        (["--run.folder", "/proc/none"], "run.folder = '/proc/none': cannot be written"),
    ],
)
def test_bad_input_is_said_once_for_all_ranks(tmp_path, words, due):
    done = run(mpi_words(4, "train", write_config(tmp_path), *words))
    assert done.returncode == 2
    (line,) = said(done.stderr)
    assert due in line
    assert "Abort" not in done.stderr


def test_different_configs_on_two_ranks_are_named_by_field(tmp_path):
    path = write_config(tmp_path)
    one = [sys.executable, "-m", "mpi4py", "-m", "hpcvfl", "train", path]
    command = [MPIEXEC, "-n", "3", *one, ":", "-n", "1", *one, "--seed", "7"]
    done = run(command)
    assert done.returncode == 2
    (line,) = said(done.stderr)
    assert "rank 3: seed: 7, rank 0 has 0" in line


def test_a_different_number_of_parties_on_one_rank_is_said_at_once(tmp_path):
    path = write_config(tmp_path)
    one = [sys.executable, "-m", "mpi4py", "-m", "hpcvfl", "train", path]
    done = run([MPIEXEC, "-n", "3", *one, ":", "-n", "1", *one, "--num-parties", "2"])
    assert done.returncode == 2
    (line,) = said(done.stderr)
    assert "rank 3: start-up: 4 ranks came, num_parties = 2 needs 3" in line


def test_a_launcher_that_does_not_reach_mpi_is_refused_by_every_verb(tmp_path):
    """What `srun --mpi=none` leaves: Slurm's variables, and an MPI that knows one process."""
    path = write_config(tmp_path)
    for words in (["train", path], ["doctor"], ["report", "x"]):
        command = [sys.executable, "-m", "hpcvfl", *words]
        slurm = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, env=environment() | slurm,
            check=False,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        (line,) = said(done.stderr)
        assert "srun started 3 processes, this one as rank 0, but MPI says rank 0 of 1" in line
        assert "srun --mpi=pmi2" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "due"),
    [(["fly"], "unknown verb 'fly'"), (["train"], "train: which config?")],
)
def test_a_rank_that_fails_before_it_starts_mpi_ends_the_others(tmp_path, words, due):
    path = write_config(tmp_path)
    one = [sys.executable, "-m", "mpi4py", "-m", "hpcvfl"]
    done = run([MPIEXEC, "-n", "3", *one, "train", path, ":", "-n", "1", *one, *words])
    assert done.returncode == 2, done.stderr
    assert any(f"rank 3: {due}" in line for line in said(done.stderr)), done.stderr


@pytest.mark.parametrize("tower", ["CrashingTower", "ExplodingTower"])
def test_an_exception_on_one_rank_ends_all_within_5_s(tmp_path, tower):
    path = write_config(tmp_path, party={"2": {"model": {"tower": f"support.modules:{tower}"}}})
    log = tmp_path / "log"
    job = start(mpi_words(4, "train", path), log)
    try:
        words = {"CrashingTower": "a fault in the tower", "ExplodingTower": "block 2, round"}[tower]
        wait_for(lambda: words in log.read_text(), 90)
        wait_for(lambda: job.poll() is not None, 5)
        assert job.returncode != 0
    finally:
        job.kill()


def running_job(folder, log, **over):
    """A job that trains for minutes, with its ranks' pids, once it is in its rounds."""
    path = write_config(folder, algorithm__epochs=100_000, **over)
    job = start(mpi_words(4, "train", path), log)
    runs = folder / "runs"
    # After the first evaluation the first round, with its longer timeout, is over.
    wait_for(lambda: any(runs.glob("*/metrics.jsonl")), 90)
    pids = rank_pids(job.pid)
    assert sorted(pids) == [0, 1, 2, 3]
    return job, pids


def test_a_stopped_rank_is_named_in_time_and_all_end(tmp_path):
    log = tmp_path / "log"
    job, pids = running_job(
        tmp_path, log, transport__timeout_s=3.0, transport__first_timeout_s=60.0
    )
    try:
        os.kill(pids[2], signal.SIGSTOP)
        seconds = wait_for(lambda: "rank 2" in log.read_text(), 3 + 3)
        assert seconds >= 2
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), 5)
        wait_for(lambda: job.poll() is not None, 5)
        assert job.returncode in (6, 9)  # 9: of a rank that mpiexec had to kill
        named = [x for x in said(log.read_text()) if "did not post" in x]
        assert named
        assert "rank 2" in named[0]
        whose = [x for line in named for x in line.split("; ") if x.startswith("party 2")]
        assert len(whose) == len(named)
        for line, words in zip(named, whose, strict=True):
            gathers = ": gather of" in line or ": allgather of" in line
            assert gathers == (" bytes of " in words and " due, " in words)
            assert words.startswith(f"party 2 (rank 2, host {platform.node()}, pid {pids[2]})")
            # The last heartbeat may be older than the first round.
            assert " in round " in words or " in start-up, " in words
    finally:
        for pid in pids.values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        job.kill()


def test_a_signal_makes_a_rank_write_its_stacks_and_go_on(tmp_path):
    log = tmp_path / "log"
    job, pids = running_job(tmp_path, log)
    try:
        (folder,) = (tmp_path / "runs").iterdir()
        assert json.loads((folder / "heartbeat.rank3.json").read_text())["pid"] == pids[3]
        stacks = folder / "stack.rank3.txt"
        os.kill(pids[3], signal.SIGUSR2)
        wait_for(lambda: "in drive_rounds" in stacks.read_text(), 5)
        assert all(alive(pid) for pid in pids.values())
    finally:
        job.terminate()
        job.wait(timeout=10)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_rank_ends_the_job(tmp_path, victim):
    log = tmp_path / "log"
    job, pids = running_job(tmp_path, log)
    try:
        os.kill(pids[victim], signal.SIGKILL)
        wait_for(lambda: job.poll() is not None, 5)
        assert job.returncode != 0
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), 5)
        assert (next(Path(tmp_path / "runs").iterdir()) / "config.toml").exists()
    finally:
        job.kill()
