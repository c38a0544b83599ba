"""The README's commands run as they stand; those that need a cluster are read by the real
parser.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.launch import ROOT, environment

from hpcvfl import cli

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash([^\n]*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
RUN = [text for mark, text in BLOCKS if "needs=" not in mark]
PARSED = [text for mark, text in BLOCKS if "needs=cluster" in mark or "needs=gpu" in mark]


@pytest.fixture
def repository():
    """The root of the repository, without what the README's commands leave there."""
    runs, compare = ROOT / "runs", ROOT / "compare"
    before = set(runs.glob("*")) if runs.exists() else set()
    kept = compare.exists()
    yield ROOT
    if compare.exists() and not kept:
        shutil.rmtree(compare)
    for made in set(runs.glob("*")) - before:
        shutil.rmtree(made)
    if runs.exists() and not any(runs.iterdir()):
        runs.rmdir()


def test_there_are_blocks_of_every_sort():
    assert len(RUN) >= 3
    assert len(PARSED) >= 1
    assert {mark.strip() for mark, _ in BLOCKS} == {"", "needs=cluster", "needs=ci"}


@pytest.mark.timeout(320)
@pytest.mark.parametrize("text", RUN, ids=lambda text: text.split("\n")[0][:60])
def test_a_block_runs_as_it_stands(repository, text):
    env = environment() | {"HPCVFL_VENV": sys.prefix}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    here = text.replace(".venv/bin/activate", f"{sys.prefix}/bin/activate")
    script = f"set -euo pipefail\n{here}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=300, env=env,
        cwd=repository, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def words_of_program(words):
    """A verb and its arguments, of a command line that starts ranks or submits a script that does;
    such scripts are run in tests/slurm.
    """
    scripts = [word for word in words if word.endswith(".sbatch")]
    if not scripts:
        return words[len(words) - words[::-1].index("hpcvfl") :]
    (script,) = scripts
    assert (ROOT / script).is_file(), script
    rest = words[words.index(script) + 1 :]
    return ["train", *rest] if script.endswith("array.sbatch") else rest


def test_blocks_for_clusters_are_understood_by_the_command_line():
    read = 0
    for text in PARSED:
        for line in text.splitlines():
            verb, *rest = words_of_program(shlex.split(line))
            assert verb in cli.VERBS, line
            if verb == "train":
                cli.load_config(rest)
            read += 1
    print(f"{len(PARSED)} blocks of the README need a cluster; their {read} lines were parsed only")
    assert read >= 2


def test_every_link_and_named_file_exists():
    for name in re.findall(r"`((?:hpcvfl|launch|bench|tests)/[\w/.-]+)`", README):
        assert (ROOT / name).exists(), name
