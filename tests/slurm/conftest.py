"""A Slurm for all tests of this folder; where there can be none, every test says so."""

import shutil
import signal
import tempfile

import pytest
from support.slurm import Slurm, missing


def interrupt(number, frame):
    raise KeyboardInterrupt


@pytest.fixture(scope="session")
def slurm():
    """The daemons, from before the first test to after the last."""
    lack = missing()
    if lack:
        pytest.skip(f"NO SLURM, NOT TESTED: {lack} not found; apt-get install slurm-wlm munge")
    # Not pytest's folder: the path of a Unix socket has 107 bytes at most.
    folder = tempfile.mkdtemp(prefix="hpcvfl-slurm-")
    cluster = Slurm(folder)
    # A time limit on the tests must not leave jobs behind that no daemon knows.
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)
