"""launch/mpirun.sh: the options that each MPI understands, and whole runs with the MPI of this
environment.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import MPIEXEC, ROOT, environment
from support.runs import write_config

pytestmark = pytest.mark.timeout(120)
SCRIPT = ROOT / "launch" / "mpirun.sh"
OVER = {"num_parties": 2, "codec": "none", "head_codec": "none"}  # nothing to compile
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPICH = "HYDRA build details:\n    Version:                                 5.0.2"
OPEN_MPI_4 = "mpirun (Open MPI) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/"
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701"
# Starts nothing: answers --version, otherwise prints its arguments, one a line.
STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then cat "$0.version"; else printf '%s\\n' "$@"; fi
"""


def launched(*words, script=SCRIPT, **variables):
    """The script, finished; with this environment's launcher unless a variable says otherwise."""
    given = {"HPCVFL_MPIEXEC": MPIEXEC, "HPCVFL_PYTHON": sys.executable} | variables
    return subprocess.run(
        [str(script), *words], capture_output=True, text=True, timeout=100,
        env=environment(**{k: v for k, v in given.items() if v}), check=False,
    )  # fmt: skip


def stand_in_launcher(path, version):
    """An executable that stands in for an mpiexec of which only the arguments matter."""
    path.write_text(STAND_IN)
    path.chmod(0o755)
    path.with_name(path.name + ".version").write_text(version)
    return str(path)


def options_of(done):
    """What the stand-in got before `-n N python ..`, and the rest."""
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    at = words.index("-n")
    return words[:at], words[at:]


@pytest.mark.parametrize(
    ("version", "due", "name"),
    [
        (MPICH, ["-bind-to", "none"], "(MPICH)"),
        (OPEN_MPI_4, ["--bind-to", "none", "--oversubscribe"], "(Open MPI)"),
        (OPEN_MPI_5, ["--bind-to", "none", "--oversubscribe"], "(Open MPI)"),
        (INTEL, ["-genv", "I_MPI_PIN", "0"], "(Intel MPI)"),
        ("a launcher of another kind", [], "(unknown MPI)"),
    ],
)
def test_a_stand_in_launcher_gets_the_options_of_its_mpi(tmp_path, version, due, name):
    path = stand_in_launcher(tmp_path / "mpiexec", version)
    words = ["train", "digits", "--codec", "scalar:bits=2,range=gauss", "--name", "two words"]
    done = launched("5", *words, HPCVFL_MPIEXEC=path, **AS_ROOT)
    options, rest = options_of(done)
    assert options[: len(due)] == due
    handed_on = options[len(due) :]
    assert handed_on[::2] == ["-x"] * (len(handed_on) // 2)
    assert ("OMP_NUM_THREADS" in handed_on) == ("Open MPI" in version)
    assert rest == ["-n", "5", sys.executable, "-m", "mpi4py", "-m", "hpcvfl", *words]
    assert f"{path} {name}, 5 ranks of {sys.executable}" in done.stderr


def test_more_options_go_to_a_stand_in_launcher_as_they_are(tmp_path):
    path = stand_in_launcher(tmp_path / "mpiexec", MPICH)
    more = {"HPCVFL_MPIEXEC": path, "HPCVFL_MPIEXEC_OPTIONS": "-f hosts -ppn 2"}
    options, _ = options_of(launched("3", "doctor", **more))
    assert options == ["-bind-to", "none", "-f", "hosts", "-ppn", "2"]


def test_the_launcher_beside_the_clone_goes_before_the_one_on_the_path(tmp_path):
    """With stand-ins for both, in a copy of launch/ that has a .venv beside it."""
    script = shutil.copytree(ROOT / "launch", tmp_path / "launch") / "mpirun.sh"
    for folder in (tmp_path / ".venv" / "bin", tmp_path / "path"):
        folder.mkdir(parents=True)
        stand_in_launcher(folder / "mpiexec", MPICH)
        (folder / "python").symlink_to(sys.executable)
    path = {"PATH": f"{tmp_path / 'path'}:/usr/bin:/bin", "HPCVFL_MPIEXEC": "", "HPCVFL_PYTHON": ""}
    done = launched("3", "doctor", script=script, **path)
    beside = str(tmp_path / "launch" / ".." / ".venv" / "bin")
    assert f"{beside}/mpiexec (MPICH), 3 ranks of {beside}/python" in done.stderr
    shutil.rmtree(tmp_path / ".venv")
    done = launched("3", "doctor", script=script, **path)
    assert f"{tmp_path / 'path'}/mpiexec (MPICH), 3 ranks of" in done.stderr


def test_root_is_told_what_open_mpi_asks_for(tmp_path):
    """As root or not: stand-ins for `id` and for Open MPI's launcher."""
    path = stand_in_launcher(tmp_path / "mpiexec", OPEN_MPI_4)
    (tmp_path / "id").write_text("#!/bin/sh\necho 0\n")
    (tmp_path / "id").chmod(0o755)
    root = {"HPCVFL_MPIEXEC": path, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = launched("5", "doctor", **root)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1" in done.stderr
    assert launched("5", "doctor", **root, **AS_ROOT).returncode == 0
    more = {"HPCVFL_MPIEXEC_OPTIONS": "--allow-run-as-root"}
    options, _ = options_of(launched("5", "doctor", **root, **more))
    assert options[-1] == "--allow-run-as-root"
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    assert launched("5", "doctor", **root).returncode == 0


@pytest.mark.parametrize(
    ("words", "variables", "due"),
    [
        ([], {}, "usage: launch/mpirun.sh N VERB"),
        (["train", "digits"], {}, "usage: launch/mpirun.sh N VERB"),
        (["0", "doctor"], {}, "usage: launch/mpirun.sh N VERB"),
        (["3", "doctor"], {"HPCVFL_MPIEXEC": "no-such-mpiexec"}, "no-such-mpiexec is no command"),
        (["3", "doctor"], {"HPCVFL_PYTHON": "/no/python"}, "HPCVFL_PYTHON=/no/python is no"),
    ],
)
def test_what_cannot_be_started_is_said_and_nothing_else_starts_in_its_place(words, variables, due):
    done = launched(*words, **variables)
    assert done.returncode == 2
    assert due in done.stderr


def test_a_run_is_carried_to_the_end_with_the_mpi_of_this_environment(tmp_path):
    path = write_config(tmp_path, **OVER)
    done = launched("3", "train", path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(list(Path(folder / "checkpoints" / "final").glob("rank*.safetensors"))) == 3
    assert summary["rounds"] > 0


def test_the_status_of_the_run_is_that_of_the_script(tmp_path):
    path = write_config(tmp_path, algorithm__epochs=100_000, **OVER)
    stopped = launched("3", "train", path, "--max-seconds", "0.1")
    assert stopped.returncode == 75, stopped.stderr
    refused = launched("2", "train", path)
    assert refused.returncode == 2
    assert "2 ranks came, num_parties = 2 needs 3" in refused.stderr
