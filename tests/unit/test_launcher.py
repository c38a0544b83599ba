"""Launcher variables that disagree with the communicator are refused, with what helps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.launch import MPIEXEC, run

from hpcvfl.errors import ConfigError
from hpcvfl.transport.launcher import (
    Launch,
    check,
    detect,
    expected_rank,
    expected_size,
    is_launched,
    mpiexec_path,
)

HYDRA = {"PMI_SIZE": "5", "PMI_RANK": "3", "MPI_LOCALNRANKS": "5", "MPI_LOCALRANKID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
SRUN_NONE = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
SRUN_PMI2 = {**SRUN_NONE, "PMI_SIZE": "4", "PMI_RANK": "2"}
MPIEXEC_IN_SBATCH = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **HYDRA}
TORCHRUN = {"ROLE_WORLD_SIZE": "5", "ROLE_RANK": "2", "WORLD_SIZE": "5", "RANK": "2"}
SBATCH_SHELL = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, None, None),
        (HYDRA, 5, 3),
        (OPEN_MPI, 4, 1),
        (SRUN_NONE, 4, 2),
        (SRUN_PMI2, 4, 2),
        (MPIEXEC_IN_SBATCH, 5, 3),
        (SRUN_NONE | TORCHRUN, 5, 2),
        ({"WORLD_SIZE": "5", "RANK": "2"}, None, None),
        (SBATCH_SHELL, None, None),
        ({"PMIX_RANK": "2"}, None, 2),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, 2, None),
        ({"PMI_SIZE": "many", "PMI_RANK": ""}, None, None),
    ],
)
def test_size_and_rank_are_read_from_the_launcher(environ, size, rank) -> None:
    assert (expected_size(environ), expected_rank(environ)) == (size, rank)


def test_a_plain_start_has_no_launcher() -> None:
    assert detect({"PATH": "/bin", "SLURM_JOB_ID": "7"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        HYDRA,
        OPEN_MPI,
        SRUN_NONE,
        MPIEXEC_IN_SBATCH,
        {"PMIX_RANK": "2"},
        {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
def test_any_launcher_counts_also_one_that_names_no_size_or_one_process(environ) -> None:
    assert is_launched(environ)


@pytest.mark.parametrize("environ", [{}, SBATCH_SHELL, {"PMI_SIZE": "many", "PMI_RANK": ""}])
def test_a_shell_or_a_plain_start_is_not_launched(environ) -> None:
    assert not is_launched(environ)


def test_the_size_of_one_host_is_a_lower_bound() -> None:
    environ = {"MPI_LOCALNRANKS": "2"}
    assert detect(environ) == Launch("mpiexec", 2, None, at_least=True)
    check(4, 3, environ)
    with pytest.raises(ConfigError, match="started 2 processes"):
        check(1, 0, environ)


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [({}, 1, 0), (HYDRA, 5, 3), (OPEN_MPI, 4, 1), (SRUN_PMI2, 4, 2), ({"PMIX_RANK": "2"}, 3, 2)],
)
def test_agreement_passes(environ, size, rank) -> None:
    check(size, rank, environ)


@pytest.mark.parametrize("environ", [HYDRA, OPEN_MPI, SRUN_NONE, SRUN_PMI2, {"PMIX_RANK": "1"}])
def test_a_rank_that_thinks_it_is_alone_is_refused(environ) -> None:
    with pytest.raises(ConfigError, match="MPI says rank 0 of 1"):
        check(1, 0, environ)


def test_even_the_first_of_n_single_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="started 5 processes, this one as rank 0"):
        check(1, 0, {**HYDRA, "PMI_RANK": "0"})


@pytest.mark.parametrize(("size", "rank"), [(3, 2), (5, 1)])
def test_another_size_or_rank_is_refused(size: int, rank: int) -> None:
    with pytest.raises(ConfigError, match=f"rank 3, but MPI says rank {rank} of {size}"):
        check(size, rank, HYDRA)


def test_the_complaint_tells_the_command_that_helps() -> None:
    with pytest.raises(ConfigError, match=r"srun --mpi=pmi2 -n 4 python -m mpi4py -m hpcvfl"):
        check(1, 0, SRUN_NONE)
    with pytest.raises(ConfigError, match=r"mpi\w*:?.* -n 5 python -m mpi4py -m hpcvfl"):
        check(1, 0, HYDRA)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of a Python, and the only one on the PATH, each with an mpiexec in it."""
    beside, on_path = tmp_path / "venv", tmp_path / "bin"
    for folder in (beside, on_path):
        folder.mkdir()
        (folder / "mpiexec").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    return beside, on_path


def test_the_mpiexec_beside_python_goes_before_the_one_on_the_path(folders) -> None:
    beside, on_path = folders
    assert mpiexec_path() == mpiexec_path(anywhere=False) == str(beside / "mpiexec")
    (beside / "mpiexec").unlink()
    assert mpiexec_path() == str(on_path / "mpiexec")
    assert mpiexec_path(anywhere=False) is None
    (on_path / "mpiexec").unlink()
    assert mpiexec_path() is None


def test_the_complaint_does_not_recommend_just_any_mpiexec(folders) -> None:
    beside, _ = folders
    with pytest.raises(ConfigError, match=f"`{beside}/mpiexec -n 5 python"):
        check(1, 0, HYDRA)
    (beside / "mpiexec").unlink()
    with pytest.raises(ConfigError, match="`the mpiexec of the MPI that mpi4py was built for: -n"):
        check(1, 0, HYDRA)


CHECKED = """
from mpi4py import MPI
from hpcvfl.errors import ConfigError
from hpcvfl.transport import launcher
world = MPI.COMM_WORLD
try:
    launcher.check(world.Get_size(), world.Get_rank())
    print(f"passed {world.Get_rank()}\\n", end="", flush=True)
except ConfigError as error:
    print(f"refused {error}\\n", end="", flush=True)
    raise SystemExit(error.exit_code)
"""


@pytest.mark.timeout(90)
def test_a_real_launch_passes() -> None:
    done = run([MPIEXEC, "-n", "3", sys.executable, "-m", "mpi4py", "-c", CHECKED])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "passed 0", "passed 1", "passed 2"]


@pytest.mark.timeout(90)
def test_real_processes_that_the_launcher_does_not_reach_are_refused() -> None:
    """mpiexec whose variables the MPI library does not get: each rank is 0 of 1."""
    hide = ["env", "-u", "PMI_FD", "-u", "PMI_RANK", "-u", "PMI_SIZE", "-u", "PMI_PORT"]
    done = run([MPIEXEC, "-n", "2", *hide, sys.executable, "-c", CHECKED])
    assert done.stdout.count("refused launch: mpiexec started 2 processes") == 2, done.stdout
    assert done.returncode != 0


@pytest.mark.timeout(90)
def test_srun_without_mpi_is_refused() -> None:
    done = run([sys.executable, "-c", CHECKED], **SRUN_NONE)
    assert "srun started 4 processes, this one as rank 2, but MPI says rank 0 of 1" in done.stdout
    assert done.returncode == ConfigError.exit_code
