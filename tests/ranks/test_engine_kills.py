"""A process that is gone at its n-th operation on a file, as of a kill, and goes on; its ranks are
threads."""

import os
import shutil
import sys
import traceback
import warnings

import pytest
import torch
from support.resuming import resumed, same_run
from support.runs import run_threads, tiny

pytestmark = pytest.mark.timeout(300)
OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
OVER = {
    "algorithm__local_steps": 2,
    "codec": "ef(scalar:bits=2,range=gauss)",
    "optimizer__momentum": 0.9,
    "optimizer__keep_state": True,
    "run__checkpoint_rounds": 2,
}
KILLED = 9
POINTS = 10


def gone_at(config, number):
    """(exit status, operations so far) of a process that runs `config` and ends, with nothing
    cleaned up, before its operation `number` in the folder of runs.
    """
    told, tell = os.pipe()
    with warnings.catch_warnings():
        # From 3.12 on Python warns of the threads that the child does not have; it needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        count = 0

        def look(event, arguments):
            nonlocal count
            if event in OPERATIONS and config.run.folder in str(arguments[0]):
                count += 1
                if count == number:
                    os._exit(KILLED)

        status = 1
        try:
            sys.addaudithook(look)
            run_threads(config)
            os.write(tell, str(count).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(tell)
    with open(told, "rb") as pipe:
        count = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), int(count or 0)


@pytest.mark.parametrize("pipeline", [0, 1])
def test_a_run_killed_twice_at_one_of_its_opens_and_renames_ends_the_same(tmp_path, pipeline):
    torch.set_num_threads(1)  # threads do not survive a fork
    over = OVER | {"algorithm__pipeline": pipeline}
    whole = run_threads(tiny(tmp_path / "whole", **over))
    status, operations = gone_at(tiny(tmp_path / "counted", **over), 0)
    assert (status, operations > 100) == (0, True)
    for point in range(POINTS):
        config = tiny(tmp_path / "cut", **over)
        number = 1 + (operations - 1) * point // POINTS
        assert gone_at(config, number)[0] == KILLED
        again, _ = gone_at(resumed(config), 3 + 5 * point)
        assert again in (0, KILLED)  # a run that was nearly over has fewer
        summary = run_threads(resumed(config))
        assert same_run(whole, summary), number
        shutil.rmtree(tmp_path / "cut")
