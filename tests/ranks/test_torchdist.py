"""Whole runs under torchrun, which these tests start themselves.

The same numbers as in one process; endings that are named and take all ranks along.
"""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from support.jobs import job, summary_of
from support.launch import ROOT, alive, rank_pids, run, start, torch_words, wait_for
from support.resuming import resumed, same_run
from support.runs import run_threads, same_bits, weights, write_config

from hpcvfl.cli import load_config

pytestmark = pytest.mark.timeout(240)
SCRIPT = str(ROOT / "launch" / "torchrun.sh")
PROGRAM = str(ROOT / "tests" / "support" / "torch_program.py")
CHEAP = {"codec": "none", "head_codec": "none"}  # without kernels to compile
VAFL = {"algorithm.driver": "vafl", "labels.holder": "server", "labels.gradient_codec": "none"}
DIGITS = "digits --num-parties 2 --algorithm.epochs 1 --run.no-plots --run.no-progress"
DIGITS += " --codec none --head-codec none"
RUNS = {
    "digits, hub": DIGITS,
    "digits, allgather": f"{DIGITS} --transport.pattern allgather",
    "private labels": {"labels.holder": "server", "labels.gradient_codec": "none"},
    "one round ahead": {"algorithm.pipeline": 1},
    "vafl": VAFL | {"steps.policy": "virtual", "steps.speeds": [10, 3, 7], "algorithm.rounds": 9},
    # Messages too long to be copied, so that their sender waits for the server.
    "vafl, long": VAFL | {"model.embedding_dim": 6000, "algorithm.rounds": 4},
}


def said(text):
    """Lines of the program itself, without progress and without what torchrun says."""
    return [x for x in text.splitlines() if x.startswith("hpcvfl: ")]


def test_runs_of_every_kind_give_the_bits_of_one_process(tmp_path):
    words, alone = {}, {}
    for name, over in RUNS.items():
        words[name] = over
        if not isinstance(over, str):
            (tmp_path / name).mkdir()
            words[name] = shlex.quote(write_config(tmp_path / name, num_parties=2, **CHEAP | over))
        folder = ["--run.folder", str(tmp_path / "alone")]
        alone[name] = run_threads(load_config([*shlex.split(words[name]), *folder]))
        words[name] += f" --run.folder {shlex.quote(str(tmp_path / 'torch'))}"
    done = run(torch_words(3, PROGRAM, *words.values()))
    assert done.returncode == 0, done.stderr
    folders = re.findall(r"^folder (.*)$", done.stdout, re.MULTILINE)
    for name, folder in zip(RUNS, folders, strict=True):
        summary = json.loads((Path(folder) / "summary.json").read_text())
        assert summary["transport"] == "torchdist"
        if "vafl" not in name:
            assert same_run(alone[name], summary), name
        assert same_bits(weights(alone[name]), weights(summary)), name
        assert alone[name]["metrics"] == summary["metrics"], name
        assert alone[name]["wire_bytes_by"]["train"] == summary["wire_bytes_by"]["train"], name


def test_the_launch_script_says_how_it_is_used():
    done = run([SCRIPT, "train"])
    assert done.returncode == 2
    assert "usage: launch/torchrun.sh N VERB" in done.stderr


def test_a_wrong_number_of_ranks_is_said_once(tmp_path):
    done = run(torch_words(2, "-m", "hpcvfl", "train", write_config(tmp_path)))
    assert done.returncode == 1
    (line,) = said(done.stderr)
    assert "2 ranks came, num_parties = 3 needs 4" in line


def running_job(folder, log, **over):
    """A job that trains for minutes, with its ranks' pids, once it is in its rounds."""
    over = CHEAP | {"num_parties": 2, "algorithm.epochs": 100_000} | over
    job = start(torch_words(3, "-m", "hpcvfl", "train", write_config(folder, **over)), log)
    # After the first evaluation the first round, with its longer timeout, is over.
    wait_for(lambda: any((folder / "runs").glob("*/metrics.jsonl")), 90)
    pids = rank_pids(job.pid, "RANK")
    assert sorted(pids) == [0, 1, 2]
    return job, pids


def end(job, pids):
    """Leave nothing behind, whatever went wrong."""
    for pid in pids.values():
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
    job.kill()
    job.wait()


def test_a_stopped_rank_is_named_and_all_end(tmp_path):
    log = tmp_path / "log"
    over = {"transport.timeout_s": 2.0, "transport.first_timeout_s": 60.0}
    job, pids = running_job(tmp_path, log, **over)
    try:
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: any("did not post" in x for x in said(log.read_text())), 2 + 3)
        wait_for(lambda: not any(alive(pid) for pid in pids.values()), 5)
        wait_for(lambda: job.poll() is not None, 5)
        assert job.returncode == 1
        line = next(x for x in said(log.read_text()) if "did not post" in x)
        assert "rank 2 did not post (no answer to the roll call" in line
        assert f"pid {pids[2]}" in line
    finally:
        end(job, pids)


def by_script(path, *words, **variables):
    """Train with the launch script; rank 2 signals in its forward number 6."""
    signalling = {"TEST_RANK": "2", "TEST_AT": "6", "HPCVFL_PYTHON": sys.executable}
    return run([SCRIPT, "3", "train", path, *words], **signalling, **variables)


def test_a_signal_to_torchrun_leaves_a_checkpoint_from_which_one_process_goes_on(tmp_path):
    """torchrun hands SIGUSR1 on as it does SIGTERM, waits, and returns 1, not 75."""
    path, whole = job(tmp_path, **{"algorithm.epochs": 100, "algorithm.local_steps": 1})
    done = by_script(path, TEST_SIGNAL=str(int(signal.SIGUSR1)), TEST_PARENT="yes")
    assert done.returncode == 1
    (line,) = said(done.stderr)
    assert "stopped after round" in line
    assert "(SIGUSR1 at " in line
    summary = run_threads(resumed(load_config([path])))
    assert len(summary["resumed_after_rounds"]) == 1
    assert same_run(whole, summary)


def test_torchrun_starts_all_again_after_one_was_killed_and_nothing_is_lost(tmp_path):
    path, whole = job(tmp_path, **{"algorithm.local_steps": 1})
    args = {"HPCVFL_TORCHRUN_ARGS": "--standalone --max-restarts 1"}
    done = by_script(path, "--resume", "auto", TEST_SIGNAL=str(int(signal.SIGKILL)), **args)
    assert done.returncode == 0, done.stderr
    assert "the connection to rank 2 is lost" in done.stderr
    summary = summary_of(path)
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)
