"""What the launcher says about this process, without starting MPI.

A launcher that does not reach the MPI library (`srun --mpi=none`, an mpiexec of another MPI) starts
N processes that each think they are rank 0 of 1. They would train N times, silently: refused here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcvfl.errors import ConfigError

# (name, variable of the size, variable of the rank), the most specific first: under Slurm, mpiexec
# starts its helpers with srun, so SLURM_* then counts nodes and PMI_* the processes.
LAUNCHERS = (
    ("torchrun", "ROLE_WORLD_SIZE", "ROLE_RANK"),  # WORLD_SIZE and RANK are set by many scripts
    ("mpirun of Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("a PMIx launcher", "PMIX_SIZE", "PMIX_RANK"),
    ("mpiexec", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class Launch:
    """Who started this process, and as what; size or rank None: the launcher does not say.

    at_least : bool   size counts the processes of this host only, so there may be more
    """

    name: str
    size: int | None
    rank: int | None
    at_least: bool = False


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher that started this process, or None for a plain start."""
    for name, size_variable, rank_variable in LAUNCHERS:
        size, rank = _integer(environ, size_variable), _integer(environ, rank_variable)
        if size_variable == "MPI_LOCALNRANKS" and size is not None:
            return Launch(name, size, None, at_least=True)
        if size is not None or (rank is not None and rank_variable == "PMIX_RANK"):
            return Launch(name, size, rank)
    return None


def is_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether any launcher started this process, also one that does not say how many it started.

    True even for `mpiexec -n 1`: such a process takes its ranks from MPI, never makes its own.
    """
    return detect(environ) is not None


def expected_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of processes the launcher started, or None if none says so."""
    launch = detect(environ)
    return None if launch is None else launch.size


def expected_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Number of this process according to the launcher, or None if none says so."""
    launch = detect(environ)
    return None if launch is None else launch.rank


def slurm_job(environ: Mapping[str, str] = os.environ) -> str | None:
    """Number of the Slurm job that this process belongs to, or None."""
    return environ.get("SLURM_JOB_ID") or None


def check(comm_size: int, comm_rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a communicator that the launcher's variables contradict.

    Raises ConfigError that names both sides and the command that fixes it.
    """
    launch = detect(environ)
    if launch is None:
        return
    size, rank = launch.size, launch.rank
    fits = size is None or comm_size == size or (launch.at_least and comm_size > size)
    if not fits or rank not in (None, comm_rank):
        raise ConfigError(_complaint(launch, comm_size, comm_rank))


def mpiexec_path(anywhere: bool = True) -> str | None:
    """The mpiexec beside this Python, which a pip-installed MPI brings; else the first on the PATH.

    anywhere : bool   False: only the one beside this Python, which surely fits mpi4py
    Returns None if there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return str(beside)
    return shutil.which("mpiexec") if anywhere else None


def _complaint(launch: Launch, comm_size: int, comm_rank: int) -> str:
    said = "several processes" if launch.size is None else f"{launch.size} processes"
    mine = "" if launch.rank is None else f", this one as rank {launch.rank}"
    count = "N" if launch.size is None else str(launch.size)
    return (
        f"launch: {launch.name} started {said}{mine}, but MPI says rank {comm_rank} of {comm_size}:"
        f" the launcher does not belong to the MPI library of mpi4py; use {_fix(launch, count)}"
    )


def _fix(launch: Launch, count: str) -> str:
    command = "python -m mpi4py -m hpcvfl ..."
    if launch.name == "srun":
        return f"`srun --mpi=pmi2 -n {count} {command}` (or --mpi=pmix, see `srun --mpi=list`)"
    # Not the one on the PATH: that may be the very one which does not reach this MPI.
    beside = mpiexec_path(anywhere=False)
    mpiexec = beside or "the mpiexec of the MPI that mpi4py was built for:"
    return f"`{mpiexec} -n {count} {command}`"


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    return int(text) if text.isdecimal() else None
