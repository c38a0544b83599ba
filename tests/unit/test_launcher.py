"""Launcher variables that disagree with the communicator are refused, with what helps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.launch import MPIEXEC, run

from hpcvfl.errors import ConfigError
from hpcvfl.transport.launcher import TORCHRUN as TORCHRUN_NAME
from hpcvfl.transport.launcher import (
    Launch,
    check,
    detect,
    expected_rank,
    expected_size,
    is_launched,
    mpiexec_of,
    mpiexec_path,
    short,
    warn,
)

HYDRA = {"PMI_SIZE": "5", "PMI_RANK": "3", "MPI_LOCALNRANKS": "5", "MPI_LOCALRANKID": "3"}
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1"}
SRUN_NONE = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
SRUN_PMI2 = {**SRUN_NONE, "PMI_SIZE": "4", "PMI_RANK": "2"}
MPIEXEC_IN_SBATCH = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **HYDRA}
TORCHRUN = {"ROLE_WORLD_SIZE": "5", "ROLE_RANK": "2", "WORLD_SIZE": "5", "RANK": "2"}
SBATCH_SHELL = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SRUN_PMIX = {**SRUN_NONE, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.pmix.7.0"}
# Debian's Open MPI starts its daemons with srun: one task a node, this one on the second.
OPEN_MPI_IN_SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **OPEN_MPI}
MVAPICH = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3", "MV2_COMM_WORLD_LOCAL_RANK": "1"}
PALS = {"PMI_SIZE": "6", "PMI_RANK": "4", "PALS_RANKID": "4", "PALS_LOCAL_RANKID": "0"}
JSRUN = {"JSM_NAMESPACE_SIZE": "6", "JSM_NAMESPACE_RANK": "5", "PMIX_RANK": "5"}
JSRUN |= {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": "5"}
TORCHRUN_IN_SLURM = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **TORCHRUN}
RANK_BY_HAND = {"WORLD_SIZE": "5", "RANK": "2"}
ALONE_IN_OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
MPIEXEC_IN_ONE_OF_OPEN_MPI = {**ALONE_IN_OPEN_MPI, **HYDRA}


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, None, None),
        (HYDRA, 5, 3),
        (OPEN_MPI, 4, 1),
        (SRUN_NONE, 4, 2),
        (SRUN_PMI2, 4, 2),
        (MPIEXEC_IN_SBATCH, 5, 3),
        (SBATCH_SHELL, None, None),
        ({"PMIX_RANK": "2"}, None, 2),
        (SRUN_PMIX, 4, 2),
        (OPEN_MPI_IN_SLURM, 4, 1),
        (MVAPICH, 4, 3),
        (PALS, 6, 4),
        (JSRUN, 6, 5),
        (TORCHRUN, 5, 2),
        (TORCHRUN_IN_SLURM, 5, 2),
        (RANK_BY_HAND, None, None),
        (MPIEXEC_IN_ONE_OF_OPEN_MPI, 5, 3),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"}, 2, None),
        ({"PMI_SIZE": "many", "PMI_RANK": ""}, None, None),
    ],
)
def test_size_and_rank_are_read_from_the_launcher(environ, size, rank) -> None:
    assert (expected_size(environ), expected_rank(environ)) == (size, rank)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (HYDRA, "mpiexec"),
        (OPEN_MPI_IN_SLURM, "mpirun of Open MPI"),
        (MVAPICH, "mpirun_rsh of MVAPICH"),
        (JSRUN, "jsrun"),
        (SRUN_PMI2, "srun"),  # which sets PMI_* itself
        (SRUN_PMIX, "srun"),
        (MPIEXEC_IN_SBATCH, "mpiexec"),
        (MPIEXEC_IN_ONE_OF_OPEN_MPI, "mpiexec"),
        (TORCHRUN_IN_SLURM, TORCHRUN_NAME),
    ],
)
def test_of_several_launchers_the_one_that_started_this_process_is_named(environ, name) -> None:
    launch = detect(environ)
    assert launch is not None
    assert launch.name == name


def test_a_plain_start_has_no_launcher() -> None:
    assert detect({"PATH": "/bin", "SLURM_JOB_ID": "7"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        HYDRA,
        OPEN_MPI,
        SRUN_NONE,
        MPIEXEC_IN_SBATCH,
        MVAPICH,
        JSRUN,
        TORCHRUN,
        {"PMIX_RANK": "2"},
        {"MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
def test_any_launcher_counts_also_one_that_names_no_size_or_one_process(environ) -> None:
    assert is_launched(environ)


@pytest.mark.parametrize(
    "environ", [{}, SBATCH_SHELL, RANK_BY_HAND, {"PMI_SIZE": "many", "PMI_RANK": ""}]
)
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
    [
        ({}, 1, 0),
        (HYDRA, 5, 3),
        (OPEN_MPI, 4, 1),
        (SRUN_PMI2, 4, 2),
        (SRUN_PMIX, 4, 2),
        (PALS, 6, 4),
        (MVAPICH, 4, 3),
        (JSRUN, 6, 5),
        ({"PMIX_RANK": "2"}, 3, 2),
        # what is left of the launch or the job around this one does not count
        (MPIEXEC_IN_SBATCH, 5, 3),
        (OPEN_MPI_IN_SLURM, 4, 1),
        (MPIEXEC_IN_ONE_OF_OPEN_MPI, 5, 3),
        (ALONE_IN_OPEN_MPI, 1, 0),
        ({**SRUN_NONE, "PMI_SIZE": "1", "PMI_RANK": "0"}, 1, 0),  # `mpiexec -n 1`, on four nodes
    ],
)
def test_agreement_passes(environ, size, rank) -> None:
    check(size, rank, environ)


@pytest.mark.parametrize(
    "environ",
    [
        HYDRA,
        OPEN_MPI,
        SRUN_NONE,
        SRUN_PMI2,
        SRUN_PMIX,
        PALS,
        MVAPICH,
        JSRUN,
        TORCHRUN,
        TORCHRUN_IN_SLURM,
        MPIEXEC_IN_SBATCH,
        OPEN_MPI_IN_SLURM,
        {"PMIX_RANK": "1"},
        # one of the two says that there are more
        MPIEXEC_IN_ONE_OF_OPEN_MPI,
        {**OPEN_MPI, "PMI_SIZE": "1", "PMI_RANK": "0"},
    ],
)
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


@pytest.mark.parametrize("environ", [SRUN_PMIX, OPEN_MPI_IN_SLURM, MPIEXEC_IN_ONE_OF_OPEN_MPI])
def test_a_communicator_that_no_launcher_has_made_is_refused(environ) -> None:
    with pytest.raises(ConfigError, match="but MPI says rank 6 of 7"):
        check(7, 6, environ)


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


def launcher_that_says(path: Path, version: str) -> Path:
    """A stand-in for an mpiexec, of which only the version is asked."""
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


MPICH_LIBRARY = "MPICH Version:      5.0.2"
OPEN_MPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI"


@pytest.mark.parametrize(
    ("library", "due"), [(MPICH_LIBRARY, "venv/mpiexec"), (OPEN_MPI_LIBRARY, "bin/mpiexec")]
)
def test_the_mpiexec_that_is_recommended_belongs_to_the_library(folders, library, due) -> None:
    beside, on_path = folders
    launcher_that_says(beside / "mpiexec", "HYDRA build details:")
    launcher_that_says(on_path / "mpiexec", "mpiexec (Open MPI) 4.1.4")
    with pytest.raises(ConfigError, match=f"{due} -n 5 python -m mpi4py -m hpcvfl") as caught:
        check(1, 3, HYDRA, library)
    assert f"({short(library)})" in str(caught.value)


def test_a_library_is_named_in_a_few_words() -> None:
    assert short(MPICH_LIBRARY) == "MPICH Version: 5.0.2"
    assert short(OPEN_MPI_LIBRARY) == "Open MPI v5.0.11"
    assert short("Intel(R) MPI Library 2021.13 for Linux* OS\n\0") == (
        "Intel(R) MPI Library 2021.13 for Linux* OS"
    )


def test_debians_names_are_asked_too_and_nothing_is_recommended_that_does_not_fit(folders) -> None:
    beside, on_path = folders
    launcher_that_says(beside / "mpiexec", "mpiexec (Open MPI) 5.0.11")
    launcher_that_says(on_path / "mpiexec", "some other launcher")
    assert mpiexec_of(MPICH_LIBRARY) is None
    with pytest.raises(ConfigError, match="`the mpiexec of the MPI that mpi4py was built for: -n"):
        check(1, 3, HYDRA, MPICH_LIBRARY)
    due = launcher_that_says(on_path / "mpiexec.mpich", "HYDRA build details:")
    assert mpiexec_of(MPICH_LIBRARY) == str(due)


def test_srun_is_recommended_with_what_the_library_speaks() -> None:
    with pytest.raises(ConfigError, match=r"`srun --mpi=pmix -n 4 .* \(or --mpi=pmi2, see"):
        check(1, 0, SRUN_NONE, OPEN_MPI_LIBRARY)
    with pytest.raises(ConfigError, match=r"`srun --mpi=pmi2 -n 4 .* \(or --mpi=pmix, see"):
        check(1, 0, SRUN_NONE, MPICH_LIBRARY)


def test_a_library_that_may_not_start_under_open_mpi_is_named_before_it_starts(
    folders, capsys
) -> None:
    beside, _ = folders
    launcher_that_says(beside / "mpiexec", "HYDRA build details:")
    warn(MPICH_LIBRARY, OPEN_MPI)
    said = capsys.readouterr().err
    assert "mpirun of Open MPI started 4 processes with the MPI library of mpi4py (MPICH" in said
    assert f"if they fail, use `{beside}/mpiexec -n 4 python -m mpi4py -m hpcvfl" in said
    for library, environ in [(OPEN_MPI_LIBRARY, OPEN_MPI), (MPICH_LIBRARY, HYDRA)]:
        warn(library, environ)
    assert capsys.readouterr().err == ""


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
@pytest.mark.parametrize(
    ("environ", "said"), [(SRUN_NONE, "srun started 4"), (TORCHRUN, "torchrun started 5")]
)
def test_a_launcher_that_mpi_does_not_hear_of_is_refused(environ, said) -> None:
    """What srun --mpi=none and torchrun leave: their variables, and an MPI of one process."""
    done = run([sys.executable, "-c", CHECKED], **environ)
    assert f"{said} processes, this one as rank 2, but MPI says rank 0 of 1" in done.stdout
    assert done.returncode == ConfigError.exit_code
