"""Start the ranks of a benchmark, or of the program itself, from a plain process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hpcvfl
from hpcvfl.errors import TransportError
from hpcvfl.transport.launcher import mpiexec_path


def run_ranks(num_ranks: int, module: str, words: Sequence[object], timeout_s: float) -> None:
    """`python -m mpi4py -m MODULE WORDS` on that many ranks, one thread each.

    Raises TransportError with what the ranks printed, if they fail, or if there is no mpiexec.
    """
    mpiexec = mpiexec_path()
    if mpiexec is None:
        raise TransportError("bench: no mpiexec here; pip install 'hpcvfl[mpich]'")
    paths = [str(Path(hpcvfl.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    command = [mpiexec, "-n", str(num_ranks), sys.executable, "-m", "mpi4py", "-m", module]
    command += [str(word) for word in words]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode:
        said = (done.stdout + done.stderr)[-2000:]
        raise TransportError(f"bench: {' '.join(command)} failed:\n{said}")


def measured_by_ranks(
    num_ranks: int, module: str, words: Sequence[object], timeout_s: float
) -> dict[str, Any]:
    """What rank 0 of a worker module wrote to the JSON file that its first argument names."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        run_ranks(num_ranks, module, [out, *words], timeout_s)
        result: dict[str, Any] = json.loads(out.read_text())
        return result
