"""Jobs under mpiexec that are killed or asked to stop, as a batch system does it, and go on."""

import json
import os
import signal
from pathlib import Path

import pytest
from support.jobs import OVER, go_on, job, signalled
from support.launch import alive, mpi_words, rank_pids, run, start, wait_for
from support.resuming import interrupted, resumed, same_run
from support.runs import same_bits, weights, write_config

from hpcvfl.cli import load_config
from hpcvfl.engine import sets

pytestmark = pytest.mark.timeout(240)
GAUSS = "scalar:bits=2,range=gauss,scope=column"


# Of two forwards a round, number 10 is in the fifth round, after the checkpoint of round 4.
@pytest.mark.parametrize(("victim", "at", "after"), [(0, 10, 4), (2, 15, 6)])
def test_a_killed_rank_costs_the_rounds_since_the_last_checkpoint(tmp_path, victim, at, after):
    path, whole = job(tmp_path)
    killed = signalled(path, victim, at, signal.SIGKILL)
    assert killed.returncode not in (0, 75)
    summary = go_on(path)
    assert summary["resumed_after_rounds"] == [after]
    assert same_run(whole, summary)


def test_an_interrupt_ends_all_with_130_and_the_run_goes_on_later(tmp_path):
    path, whole = job(tmp_path)
    assert signalled(path, 1, 15, signal.SIGINT).returncode == 130
    summary = go_on(path)
    assert summary["resumed_after_rounds"] == [6]
    assert same_run(whole, summary)


def test_a_job_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(tmp_path):
    path, whole = job(tmp_path, **{"model.head": "support.modules:SavedHead"})
    # The second checkpoint: the first time is for the shapes of the head, at the start.
    assert signalled(path, 0, 3, signal.SIGKILL).returncode not in (0, 75)
    (folder,) = (Path(path).parent / "runs").iterdir()
    assert sets.rounds_here(folder, 0) == [2]
    summary = go_on(path)
    assert summary["resumed_after_rounds"] == [2]
    assert same_run(whole, summary)


def test_a_job_killed_before_its_first_checkpoint_starts_afresh(tmp_path):
    path, whole = job(tmp_path)
    assert signalled(path, 2, 3, signal.SIGKILL).returncode not in (0, 75)
    done = run(mpi_words(3, "train", path, "--resume", "auto"))
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "cut" / "runs").iterdir())
    assert len(folders) == 2
    assert f"{folders[0]} has not finished and holds no complete checkpoint" in done.stdout
    assert same_run(whole, json.loads((folders[1] / "summary.json").read_text()))


@pytest.mark.parametrize(
    ("rank", "number", "holder"),
    [(2, signal.SIGUSR1, "all"), (0, signal.SIGTERM, "server")],  # no head at a private party
)
def test_a_signal_in_local_steps_stops_all_with_75_and_the_run_ends_the_same(
    tmp_path, rank, number, holder
):
    over = {"labels.holder": holder, "labels.gradient_codec": "none"}
    path, whole = job(tmp_path, **over)
    stopped = signalled(path, rank, 6, number)
    assert stopped.returncode == 75, stopped.stderr
    (line,) = [x for x in stopped.stderr.splitlines() if x.startswith("hpcvfl: ")]
    assert f"({number.name} at rank {rank}); the checkpoint is" in line
    assert "Abort" not in stopped.stderr
    summary = go_on(path)
    assert len(summary["resumed_after_rounds"]) == 1
    assert summary["resumed_after_rounds"][0] in (3, 4)
    assert same_run(whole, summary)


def test_a_run_moves_from_mpi_to_one_process_and_back(tmp_path):
    path, whole = job(tmp_path, codec=f"ef({GAUSS})")
    assert signalled(path, 1, 6, signal.SIGTERM).returncode == 75
    config = load_config([path])
    interrupted(resumed(config), 7)
    summary = go_on(path, "--transport.pattern", "allgather")
    assert summary["resumed_after_rounds"][1:] == [6]
    # What moved in the last rounds moved by another pattern; all else is the same.
    assert whole["metrics"] == summary["metrics"]
    assert same_bits(weights(whole), weights(summary))


def test_a_wall_clock_run_goes_on_without_the_promise_of_the_same_bits(tmp_path):
    over = {"steps.policy": "wall-clock", "steps.timeout_s": 0.02, "algorithm.local_steps": 1}
    over["optimizer.lr"] = 1e-5  # however many steps with kept momentum that is here
    path = write_config(tmp_path, **OVER | over)
    assert signalled(path, 2, 9, signal.SIGUSR1).returncode == 75
    summary = go_on(path)
    assert summary["rounds"] == 8
    assert len(summary["resumed_after_rounds"]) == 1
    steps = [json.loads(x) for x in Path(summary["folder"], "steps.jsonl").read_text().splitlines()]
    assert [line["round"] for line in steps] == list(range(8))


def test_sigterm_to_every_rank_from_outside_leaves_a_checkpoint_and_nobody(tmp_path):
    path = write_config(tmp_path, algorithm__epochs=100_000, **OVER)
    log = tmp_path / "log"
    job = start(mpi_words(3, "train", path), log)
    try:
        runs = tmp_path / "runs"
        wait_for(lambda: any(runs.glob("*/metrics.jsonl")), 90)
        pids = rank_pids(job.pid)
        assert sorted(pids) == [0, 1, 2]
        for pid in pids.values():
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: job.poll() is not None, 20)
        assert job.returncode == 75, log.read_text()
        assert not any(alive(pid) for pid in pids.values())
    finally:
        job.kill()
        job.wait()
    (folder,) = runs.iterdir()
    newest = sets.rounds_here(folder, 0)[0]
    assert f"round-{newest:08d}" in log.read_text()
    again = run(mpi_words(3, "train", path, "--resume", str(folder), "--max-seconds", "0.1"))
    assert again.returncode == 75, again.stderr
    assert f"stopped after round {newest + 1} of" in again.stderr


def test_a_second_job_in_the_folder_of_a_running_one_is_refused(tmp_path):
    path = write_config(tmp_path, algorithm__epochs=100_000, **OVER)
    job = start(mpi_words(3, "train", path), tmp_path / "log")
    try:
        runs = tmp_path / "runs"
        wait_for(lambda: any(runs.glob("*/checkpoints/round-*/complete.json")), 90)
        (folder,) = runs.iterdir()
        second = run(mpi_words(3, "train", path, "--resume", "auto"))
        assert second.returncode == 2
        (line,) = [x for x in second.stderr.splitlines() if x.startswith("hpcvfl: ")]
        assert f"run folder {folder}: another job is in it (pid {rank_pids(job.pid)[0]} on" in line
    finally:
        for pid in rank_pids(job.pid).values():
            os.kill(pid, signal.SIGTERM)
        wait_for(lambda: job.poll() is not None, 20)
    assert job.returncode == 75
