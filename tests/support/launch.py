"""Start the command line as a user does, under mpiexec or alone, with a hard time limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import hpcvfl
from hpcvfl.transport.launcher import mpiexec_path

ROOT = Path(hpcvfl.__file__).parent.parent
MPIEXEC = mpiexec_path()
LAUNCHER_PREFIXES = ("PMI", "OMPI", "MPI_", "SLURM_", "TORCHELASTIC_", "ROLE_")


def environment(**variables):
    """This environment with the package and the tests' modules importable and no launcher's
    variables, but for those given.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_PREFIXES)}
    kept |= {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    return kept | variables


def mpi_words(num_ranks, *words):
    """Command line of `hpcvfl words..` on num_ranks ranks."""
    return [MPIEXEC, "-n", str(num_ranks), sys.executable, "-m", "mpi4py", "-m", "hpcvfl", *words]


def torch_words(num_ranks, *words):
    """Command line of torchrun with num_ranks ranks of `words..`, a script or -m and a module."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(num_ranks), *words]


def run(command, timeout_s=100, **variables):
    """Finished process with stdout and stderr as text; it sees these environment variables too."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**variables),
        check=False,
    )


def start(command, log):
    """A running process whose output goes to the file `log`."""
    with Path(log).open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment())


def rank_pids(launcher_pid, variable="PMI_RANK"):
    """{rank: pid} of the ranks below a launcher that tells each its rank in a variable."""
    found, beginning = {}, f"{variable}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if not below(int(entry.name), launcher_pid):
                continue
            pairs = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended meanwhile
        for pair in pairs:
            if pair.startswith(beginning):
                found[int(pair[len(beginning) :])] = int(entry.name)
    return found


def below(pid, ancestor):
    """Whether `ancestor` is among the parents of `pid`."""
    while pid > 1 and pid != ancestor:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def alive(pid):
    """Whether a process runs or is stopped; one that only waits to be collected is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition, timeout_s):
    """Seconds until condition(), or an AssertionError after timeout_s."""
    begun_s = time.monotonic()
    while not condition():
        assert time.monotonic() - begun_s < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - begun_s
