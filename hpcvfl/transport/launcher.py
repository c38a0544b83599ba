"""What the launcher says about this process, without starting MPI.

A launcher that does not reach the MPI library (`srun --mpi=none`, an mpiexec of another MPI) starts
N processes that each think they are rank 0 of 1. They would train N times, silently: refused here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcvfl.errors import ConfigError

SRUN, TORCHRUN, OPEN_MPI = "srun", "torchrun", "mpirun of Open MPI"
# (name, variable of the size, variable of the rank), the most specific first. PMI_*: MPICH, Intel
# MPI, MVAPICH, HPE's PALS, `srun --mpi=pmi2`; jsrun sets OMPI_* besides its own.
LAUNCHERS = (
    (TORCHRUN, "ROLE_WORLD_SIZE", "ROLE_RANK"),  # WORLD_SIZE and RANK are set by many scripts
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun_rsh of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpiexec", "PMI_SIZE", "PMI_RANK"),
    (SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("a PMIx launcher", "PMIX_SIZE", "PMIX_RANK"),
    ("mpiexec", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
OF_ONE_HOST = "MPI_LOCALNRANKS"
# Words in what `mpiexec --version` and the library say of themselves; Hydra starts MPICH and its
# relatives (Intel MPI, MVAPICH, Cray MPICH).
OF_OPEN_MPI = ("Open MPI", "OpenRTE", "PRRTE", "Spectrum")
OF_MPICH = ("HYDRA", "MPICH", "Intel", "MVAPICH")
ASK_S = 10.0  # longest wait for an answer of mpiexec, in seconds
# What doctor shows: beginnings of the names above, local ranks, and who else may have a say.
VARIABLES = (
    "OMPI_COMM_WORLD_", "PMI_", "PMIX_RANK", "PMIX_NAMESPACE", "MPI_LOCAL", "MV2_COMM_WORLD_",
    "MVP_COMM_WORLD_", "PALS_RANKID", "PALS_LOCAL_", "JSM_NAMESPACE_", "ROLE_",
    "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "PBS_JOBID",
    "LSB_JOBID", "MPI4PY_",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """Who started this process, and as what; size or rank None: the launcher does not say.

    at_least : bool   size counts the processes of this host only, so there may be more
    """

    name: str
    size: int | None
    rank: int | None
    at_least: bool = False

    @property
    def said(self) -> tuple[int | None, int | None]:
        """Size and rank."""
        return self.size, self.rank

    @property
    def complete(self) -> bool:
        """Whether it says both how many there are and which of them this is."""
        return None not in self.said

    def fits(self, comm_size: int, comm_rank: int) -> bool:
        """Whether a communicator may be this launch; what the launcher does not say fits all."""
        size_fits = self.size in (None, comm_size) or (self.at_least and comm_size > self.size)
        return size_fits and self.rank in (None, comm_rank)


def launches(environ: Mapping[str, str] = os.environ) -> list[Launch]:
    """All launchers that left their variables, the most specific first; none for a plain start.

    There are several in a launch within a launch. Of srun and another one srun is left out where
    they differ (mpiexec starts its helpers with srun, and SLURM_* then counts the nodes), and the
    other one where they say the same (srun --mpi=pmi2 sets PMI_*).
    """
    found = []
    for name, size_variable, rank_variable in LAUNCHERS:
        size, rank = _integer(environ, size_variable), _integer(environ, rank_variable)
        if size_variable == OF_ONE_HOST and size is not None:
            found.append(Launch(name, size, None, at_least=True))
        elif size is not None or (rank is not None and rank_variable == "PMIX_RANK"):
            found.append(Launch(name, size, rank))
    steps = [launch for launch in found if launch.name == SRUN]
    others = [launch for launch in found if launch.complete and launch.name != SRUN]
    same = [launch for launch in others for step in steps if launch.said == step.said]
    dropped = same if same else steps if others else []
    return [launch for launch in found if launch not in dropped]


def detect(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """The launcher that started this process, or None for a plain start.

    Of several it is the first that started more than one process: `mpiexec -n 5` in a shell
    that was itself started as the only process of another launcher.
    """
    found = launches(environ)
    several = [launch for launch in found if launch.complete and launch.size != 1]
    return next(iter([*several, *found]), None)


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
    """The Slurm job that this process belongs to, as scontrol takes it, or None.

    A member of an array is ARRAY_INDEX: one of them has the number of the whole array for its own
    (Lightning-AI/pytorch-lightning#15022), which would mean all of them.
    """
    array, index = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else environ.get("SLURM_JOB_ID") or None


def check(
    comm_size: int, comm_rank: int, environ: Mapping[str, str] = os.environ, library: str = ""
) -> None:
    """Refuse a communicator that the launchers' variables contradict.

    Every launcher must fit a communicator of one process, which any process has that no launcher
    reaches. A larger one was made by a launcher: one of those that say all of it must fit, and
    what is left of a launch around that one does not count.

    library : how the MPI library names itself, "" if unknown
    Raises ConfigError that names both sides and the command that fixes it.
    """
    found = launches(environ)
    contrary = [launch for launch in found if not launch.fits(comm_size, comm_rank)]
    made_by = [launch for launch in found if launch.complete and launch not in contrary]
    if contrary and not (comm_size > 1 and made_by):
        nearest = detect(environ)
        launch = nearest if nearest in contrary else contrary[0]
        raise ConfigError(_complaint(launch, comm_size, comm_rank, library))


def warn(library: str, environ: Mapping[str, str] = os.environ) -> None:
    """Say on stderr that this MPI library may not start under Open MPI's mpirun.

    For the moment before MPI_Init, which such a library may not survive; every rank says it, since
    the first one to end takes the others with it. The other way round each rank thinks that it is
    alone, and `check` refuses.
    """
    launch = detect(environ)
    if launch and launch.name == OPEN_MPI and not is_open_mpi(library):
        fix = _fix(launch, str(launch.size), library)
        text = f"launch: {launch.name} started {launch.size} processes with the MPI library of"
        sys.stderr.write(f"hpcvfl: {text} mpi4py ({short(library)}); if they fail, use {fix}\n")
        sys.stderr.flush()


def mpiexec_path(anywhere: bool = True) -> str | None:
    """The mpiexec beside this Python, which a pip-installed MPI brings; else the first on the PATH.

    anywhere : bool   False: only the one beside this Python, which surely fits mpi4py
    Returns None if there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    if beside.exists():
        return str(beside)
    return shutil.which("mpiexec") if anywhere else None


def _complaint(launch: Launch, comm_size: int, comm_rank: int, library: str) -> str:
    said = "several processes" if launch.size is None else f"{launch.size} processes"
    said = said.removesuffix("es") if launch.size == 1 else said
    mine = "" if launch.rank is None else f", this one as rank {launch.rank}"
    count = "N" if launch.size is None else str(launch.size)
    whose = f" ({short(library)})" if library else ""
    return (
        f"launch: {launch.name} started {said}{mine}, but MPI says rank {comm_rank} of {comm_size}:"
        f" the launcher does not belong to the MPI library of mpi4py{whose};"
        f" use {_fix(launch, count, library)}"
    )


def _fix(launch: Launch, count: str, library: str) -> str:
    command = "python -m mpi4py -m hpcvfl ..."
    if launch.name == SRUN:
        first, second = ("pmix", "pmi2") if is_open_mpi(library) else ("pmi2", "pmix")
        other = f"(or --mpi={second}, see `srun --mpi=list`)"
        return f"`srun --mpi={first} -n {count} {command}` {other}"
    # Without the library's name, not the one on the PATH: that may be the very one which does not
    # reach this MPI.
    mpiexec = mpiexec_of(library) if library else mpiexec_path(anywhere=False)
    kind = "the mpiexec of the MPI that mpi4py was built for:"
    return f"`{mpiexec or kind} -n {count} {command}`"


def mpiexec_of(library: str) -> str | None:
    """An mpiexec that belongs to an MPI library, which names itself so; None if none is found.

    Asks those beside this Python and on the PATH, also by the names that Debian gives them, for
    their versions.
    """
    names = ("mpiexec", "mpirun", "mpiexec.openmpi", "mpiexec.mpich", "mpiexec.hydra")
    beside = [str(Path(sys.executable).with_name(name)) for name in names]
    for path in filter(None, map(shutil.which, [*beside, *names])):
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=ASK_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        version = done.stdout + done.stderr
        known = is_open_mpi(version) or any(word in version for word in OF_MPICH)
        if known and is_open_mpi(version) == is_open_mpi(library):
            return path
    return None


def short(library: str) -> str:
    """What an MPI library says of itself, as far as the first comma or the end of the line."""
    return " ".join(library.partition("\n")[0].partition(",")[0].strip("\0").split())


def is_open_mpi(version: str) -> bool:
    """Whether an MPI library or launcher that names itself so is Open MPI."""
    return any(word in version for word in OF_OPEN_MPI)


def _integer(environ: Mapping[str, str], variable: str) -> int | None:
    text = environ.get(variable, "")
    # Beyond some thousand digits int() would raise; no launcher starts so many.
    return int(text) if text.isdecimal() and len(text) < 10 else None
