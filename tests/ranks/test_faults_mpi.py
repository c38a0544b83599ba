"""What a shared machine does to a job under mpiexec: late ranks, no memory, no disk, a stop."""

import json
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.jobs import go_on, job, signalled, summary_of
from support.launch import mpi_words, run
from support.resuming import same_run

from hpcvfl.engine import sets

pytestmark = pytest.mark.timeout(240)
KILLED = 9  # what Hydra returns at times: the status of a rank that it had to kill
FAST = {"transport.timeout_s": 3.0, "transport.first_timeout_s": 60.0}


def said(done):
    """The lines of the program on stderr."""
    return [x for x in done.stderr.splitlines() if x.startswith("hpcvfl: ")]


def late(num_ranks, rank, seconds, *words):
    """A command line whose rank number `rank` starts so many seconds after the others."""
    mpiexec, _, _, *program = mpi_words(num_ranks, *words)
    script = f'[ "$PMI_RANK" = {rank} ] && sleep {seconds}; exec "$@"'
    return [mpiexec, "-n", str(num_ranks), "sh", "-c", script, "sh", *program]


def test_a_rank_that_starts_20_s_late_is_waited_for(tmp_path):
    path, whole = job(tmp_path)
    done = run(late(3, 2, 20, "train", path))
    assert done.returncode == 0, done.stderr
    assert same_run(whole, summary_of(path))


def test_a_rank_that_does_not_start_in_time_ends_the_others_who_say_where_they_wait(tmp_path):
    path, _ = job(tmp_path, **{"transport.first_timeout_s": 6.0})
    begun_s = time.monotonic()
    done = run(late(3, 2, 100, "train", path))
    assert time.monotonic() - begun_s < 60
    assert done.returncode in (1, KILLED), done.stderr
    assert "Timeout (0:00:06)!" in done.stderr
    assert "in wait_in_mpi_init_for_all_ranks" in done.stderr


def test_a_rank_that_stops_is_given_up_and_the_run_goes_on_later(tmp_path):
    path, whole = job(tmp_path, **FAST)
    stopped = signalled(path, 2, 15, signal.SIGSTOP)
    assert stopped.returncode in (6, KILLED)
    assert any("rank 2 did not post" in line for line in said(stopped))
    summary = go_on(path)
    assert summary["resumed_after_rounds"] == [6]
    assert same_run(whole, summary)


def test_a_rank_without_memory_says_so_and_the_run_goes_on_later(tmp_path):
    path, whole = job(tmp_path, **{"model.head": "support.modules:HungryHead"})
    hungry = run(mpi_words(3, "train", path), TEST_RANK="2", TEST_AT="15")
    assert hungry.returncode == 8, hungry.stderr
    (line,) = said(hungry)
    assert line.startswith("hpcvfl: rank 2, round 7: out of memory on ")
    assert "536870912 bytes" in line
    (folder,) = (Path(path).parent / "runs").iterdir()
    in_the_folder = (folder / "error.rank2.txt").read_text()
    assert in_the_folder == f"OutOfMemory: {line.removeprefix('hpcvfl: ')}\n"
    summary = go_on(path)
    assert summary["resumed_after_rounds"] == [6]
    assert same_run(whole, summary)


def mounts():
    """Why no file system can be mounted here; empty if one can."""
    words = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "there is no unshare"
    return done.stderr.strip()


def in_space(kilobytes, folder, script, **variables):
    """Run a script in which `folder` is a disk of its own of that size; what is in it is copied to
    `folder`.kept.
    """
    text = f"""
        mount -t tmpfs -o size={kilobytes}k none {folder} || exit 99
        {script}
        cp -r {folder} {folder}.kept
        exit $status"""
    return run(["unshare", "-m", "sh", "-c", text], **variables)


needs_mounts = pytest.mark.skipif(
    bool(mounts()), reason=f"a small disk needs a mount, which is refused here: {mounts()}"
)


@needs_mounts
def test_a_disk_too_small_for_checkpoints_costs_them_and_not_the_run(tmp_path):
    # A checkpoint holds the momentum too, the final weights do not: twice 0.36 MB against once.
    path, whole = job(tmp_path, **{"model.hidden_dim": 4096})
    runs = Path(path).parent / "runs"
    runs.mkdir()
    train = shlex.join(mpi_words(3, "train", path))
    done = in_space(700, runs, f"{train}; status=$?")
    assert done.returncode == 0, done.stderr
    (folder,) = Path(f"{runs}.kept").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert sum("No space left on device" in text for text in summary["warnings"]) == 3
    assert not sets.all_rounds(folder)
    assert same_run(whole, summary | {"folder": str(folder)})


def on_a_disk(path, during, between):
    """A job in whose round 5 `during` happens at rank 0, on a disk of its own; `between`, where $1
    is the disk and $train the command, says how it came to `first`; then it is resumed. (process,
    summary of the last run)
    """
    runs = Path(path).parent / "runs"
    runs.mkdir()
    train = shlex.join(mpi_words(3, "train", path))
    script = f"""
        set -- {runs}
        TEST_RANK=0 TEST_AT=10 TEST_SHELL={shlex.quote(during.format(runs))} {train}; first=$?
        train="{train} --resume auto"
        {between}
        $train; status=$?
        echo "first $first" >&2"""
    done = in_space(4000, runs, script)
    assert done.returncode == 0, done.stderr
    (folder,) = Path(f"{runs}.kept").glob("tiny-*")
    summary = json.loads((folder / "summary.json").read_text())
    return done, summary | {"folder": str(folder)}


@needs_mounts
def test_a_disk_that_is_full_ends_the_run_which_goes_on_once_there_is_room(tmp_path):
    path, whole = job(tmp_path, **{"model.head": "support.modules:DiskHead"})
    fill = "cat /dev/zero > {0}/filler 2>/dev/null"
    done, summary = on_a_disk(path, fill, "rm $1/filler")
    assert "first 2\n" in done.stderr
    (line,) = said(done)
    assert "cannot be written" in line
    assert "No space left on device" in line
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)


@needs_mounts
def test_a_read_only_folder_is_refused_and_the_run_goes_on_once_it_is_not(tmp_path):
    path, whole = job(tmp_path, **{"model.head": "support.modules:DiskHead"})
    # Under files that are open only a fault of its own makes a disk read-only; so before a resume.
    between = "mount $1 -o remount,ro; $train; first=$?; mount $1 -o remount,rw"
    done, summary = on_a_disk(path, "kill -9 $PPID", between)
    assert "first 2\n" in done.stderr
    (line,) = said(done)
    assert "cannot be written (Read-only file system)" in line
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)
