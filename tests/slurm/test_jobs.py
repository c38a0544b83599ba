"""The shipped batch scripts under a real Slurm: jobs that end, are taken away, are queued again."""

import json
import signal

import pytest
import tomli_w
from support.resuming import same_run
from support.runs import TINY, run_threads
from support.slurm import until

from hpcvfl.cli import load_config
from hpcvfl.config import merge, nest

pytestmark = pytest.mark.timeout(420)
WAITING = {
    "num_parties": 2,
    "codec": "none",  # no kernels to compile
    "head_codec": "none",
    "model.head": "support.modules:WaitingHead",
    "algorithm.local_steps": 2,
    "optimizer.momentum": 0.9,
    "optimizer.keep_state": True,
    "run.checkpoint_rounds": 2,
}
AT = "6"  # forward, of two a round: in the third round, after the first checkpoint
STOPPED = [4]  # what is asked for in round 3 rides on the headers of round 4
DONE = ("COMPLETED", "0:0")


def config_file(folder, **over):
    folder.mkdir(exist_ok=True)
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(merge(TINY, nest({"run.folder": str(folder / "runs")} | over))))
    return str(path)


def undisturbed(folder):
    """Summary of the waiting run in one process, where nothing is to be waited for."""
    return run_threads(load_config([config_file(folder / "whole", **WAITING)]))


def summary_of(folder, name="tiny"):
    """Of the only run of that name under folder/runs."""
    (path,) = (folder / "runs").glob(f"{name}-[0-9]*")
    return json.loads((path / "summary.json").read_text())


def states(jobs):
    return [(one["JobState"], one["ExitCode"]) for one in jobs]


def start_waiting(slurm, folder, options, script="cpu.sbatch", words=("train",), **variables):
    """A job that has a checkpoint and waits in round 3, or will in a moment."""
    path = config_file(folder, **WAITING)
    job = slurm.submit(folder, options, script, *words, path, TEST_AT=AT, **variables)
    sets = "runs/*/checkpoints/round-*/complete.json"
    until(lambda: any(folder.glob(sets)), 200, lambda: slurm.told(job))
    return job


def test_a_run_of_five_ranks_ends_with_its_folder(slurm, tmp_path):
    plain = ["--codec", "none", "--head-codec", "none"]  # no kernels to compile
    words = ["train", "digits", "--name", "night", "--algorithm.epochs", "1", *plain]
    job = slurm.submit(tmp_path, ["-n", "5"], "cpu.sbatch", *words)
    assert states(slurm.wait(job)) == [DONE], slurm.told(job)
    assert summary_of(tmp_path, "night")["rounds"] == 15
    log = (tmp_path / f"hpcvfl-{job}.log").read_text()
    assert log.count("test accuracy") == 2  # of the only epoch, and of the closing table


@pytest.mark.parametrize("partition", ["low", "hasty"])  # with a time of grace, and without
def test_a_preempted_run_goes_on_to_the_same_weights(slurm, tmp_path, partition):
    job = start_waiting(slurm, tmp_path, ["-n", "3", "-p", partition])
    everything = ["-p", "high", "-N", "2", "--exclusive", "-o", "urgent.log"]
    urgent = slurm.submit(tmp_path, everything, "--wrap", "true")
    assert states(slurm.wait(urgent)) == [DONE], slurm.told(urgent)
    ended = slurm.wait(job)
    assert states(ended) == [DONE], slurm.told(job)
    assert ended[0]["Restarts"] == "1"
    summary = summary_of(tmp_path)
    assert summary["resumed_after_rounds"] == STOPPED
    assert same_run(undisturbed(tmp_path), summary)


def test_a_run_stops_before_its_wall_time_limit_and_goes_on_in_another_job_time(slurm, tmp_path):
    job = start_waiting(slurm, tmp_path, ["-n", "3", "--time=10", "--signal=USR1@60"])
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")  # nearly over, then
    until(lambda: slurm.jobs(job)[0]["Restarts"] == "1", 100, lambda: slurm.told(job))
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    assert states(slurm.wait(job)) == [DONE], slurm.told(job)
    assert "(SIGUSR1 at " in (tmp_path / f"hpcvfl-{job}.log").read_text()
    summary = summary_of(tmp_path)
    assert summary["resumed_after_rounds"] == STOPPED
    assert same_run(undisturbed(tmp_path), summary)


def test_a_cancelled_run_keeps_a_checkpoint_and_does_not_come_back(slurm, tmp_path):
    job = start_waiting(slurm, tmp_path, ["-n", "3"])
    slurm.run("scancel", job)
    (ended,) = slurm.wait(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), slurm.told(job)
    log = (tmp_path / f"hpcvfl-{job}.log").read_text()
    assert "stopped after round 4 of 8 (SIGTERM at " in log
    assert f"not requeued: job {job} is COMPLETING" in log


def test_a_killed_run_that_is_queued_again_goes_on_from_its_checkpoint(slurm, tmp_path):
    path = config_file(tmp_path, **WAITING)
    kill = {"TEST_AT": AT, "TEST_SIGNAL": str(int(signal.SIGKILL))}
    job = slurm.submit(tmp_path, ["-n", "3"], "cpu.sbatch", "train", path, **kill)
    assert states(slurm.wait(job)) == [("FAILED", "137:0")], slurm.told(job)
    slurm.run("scontrol", "requeue", job)
    assert states(slurm.wait(job)) == [DONE], slurm.told(job)
    summary = summary_of(tmp_path)
    assert summary["resumed_after_rounds"] == [2]
    assert same_run(undisturbed(tmp_path), summary)


def test_of_an_array_each_member_has_its_run_and_only_the_one_that_stopped_is_requeued(
    slurm, tmp_path
):
    options = ["-n", "3", "--array=0-3%2", "--job-name=sweep"]
    sweep = {"HPCVFL_STEPS": "1 2", "HPCVFL_BITS": "2 32", "TEST_MEMBER": "3"}
    path = config_file(tmp_path, **WAITING)
    job = slurm.submit(tmp_path, options, "array.sbatch", path, TEST_AT=AT, **sweep)
    waiting = "runs/sweep-q2-b32-*/checkpoints/round-*/complete.json"
    until(lambda: any(tmp_path.glob(waiting)), 300, lambda: slurm.told(job))
    (last,) = (one for one in slurm.jobs(job) if one["ArrayTaskId"] == "3")
    assert last["JobId"] == job  # to Slurm the number of this member, and of the whole array
    slurm.run("scancel", "--signal=USR1", f"{job}_3")
    ended = slurm.wait(job)
    assert states(ended) == [DONE] * 4, slurm.told(job)
    restarts = {one["ArrayTaskId"]: one["Restarts"] for one in ended}
    assert restarts == {"0": "0", "1": "0", "2": "0", "3": "1"}
    pairs = {(1, 2): [], (1, 32): [], (2, 2): [], (2, 32): STOPPED}
    for (q, bits), resumed in pairs.items():
        summary = summary_of(tmp_path, f"sweep-q{q}-b{bits}")
        assert summary["codec"][1:] == ["none" if bits == 32 else f"scalar:bits={bits}"] * 2
        assert summary["resumed_after_rounds"] == resumed


def test_server_and_parties_with_different_resources_are_one_run(slurm, tmp_path):
    path = config_file(tmp_path, **WAITING)
    parts = ["-n", "1", "--mem-per-cpu=2G", ":", "-n", "2", "--mem-per-cpu=1G"]
    job = slurm.submit(tmp_path, parts, "hetjob.sbatch", "train", path)
    server, parties = slurm.wait(job)
    assert states([server, parties]) == [DONE] * 2, slurm.told(job)
    assert (server["NodeList"], parties["NodeList"]) == ("one", "two")
    assert same_run(undisturbed(tmp_path), summary_of(tmp_path))


def test_srun_that_does_not_reach_mpi_is_refused_with_what_helps(slurm, tmp_path):
    job = slurm.submit(tmp_path, ["-n", "2"], "cpu.sbatch", "doctor", SLURM_MPI_TYPE="none")
    (ended,) = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "2:0"), slurm.told(job)
    log = (tmp_path / f"hpcvfl-{job}.log").read_text()
    assert "srun started 2 processes, this one as rank 0, but MPI says rank 0 of 1" in log
    assert "use `srun --mpi=pmi2 -n 2 python -m mpi4py -m hpcvfl ...`" in log
