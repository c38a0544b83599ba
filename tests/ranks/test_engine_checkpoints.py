"""Checkpoints that are broken, in the way, of another run or nowhere; one process."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from support.launch import environment
from support.resuming import full_disk, interrupted, resumed, same_run
from support.runs import run_threads, tiny
from test_bad_input import write_shards

from hpcvfl.cli import load_config
from hpcvfl.engine import sets, start
from hpcvfl.engine.lock import RunLock
from hpcvfl.engine.resume import passed_over
from hpcvfl.errors import ConfigError, DataError, Preempted

EVERY = {"run__checkpoint_rounds": 1}


def cut_run(folder, rounds=6, **over):
    """(config, run folder) of a run with checkpoints after `rounds` - 1 rounds and those before."""
    config = tiny(folder, **{**EVERY, **over})
    return config, interrupted(config, rounds)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def remove(path):
    path.unlink()


# A file that is not there makes a set that is none, without a word; one that is broken is named.
@pytest.mark.parametrize("harm", [truncate, flip, empty, remove])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_set_before_a_broken_one_is_used_with_one_warning(tmp_path, harm, rank):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    harm(sets.part_path(folder, 5, rank))
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)
    named = [text for text in summary["warnings"] if f"rank{rank}.safetensors" in text]
    assert len(named) == len(summary["warnings"]) == (harm is not remove)


def test_a_set_that_was_being_written_is_none(tmp_path):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    (sets.set_path(folder, 5) / "complete.json").unlink()
    part = sets.part_path(folder, 5, 3)
    part.rename(part.with_suffix(".tmp"))
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)


@pytest.mark.parametrize("keep", [1, 2])
def test_what_a_killed_job_left_of_later_sets_costs_no_whole_one(tmp_path, keep):
    over = {"run__keep_checkpoints": keep, "run__max_seconds": 1e-9}
    config, folder = cut_run(tmp_path, 4, **{"run__keep_checkpoints": keep})
    for later in (6, 7):  # whatever it is that nobody of us would remove
        left = sets.set_path(folder, later) / ".tmpaKIRvM"
        left.parent.mkdir()
        left.write_bytes(b"half")
    with pytest.raises(Preempted, match="after round 4 of 8"):
        run_threads(resumed(tiny(tmp_path, **EVERY, **over)))
    assert sets.rounds_here(folder, 0) == [4, 3][:keep]
    assert run_threads(resumed(config))["resumed_after_rounds"] == [3, 4]


def test_hosts_without_a_shared_folder_take_the_newest_set_of_all(tmp_path):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut", run__keep_checkpoints=4)
    sets.part_path(folder, 5, 1).unlink()
    sets.part_path(folder, 4, 3).unlink()
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [3]
    assert same_run(whole, summary)


def test_books_that_lost_lines_before_a_checkpoint_make_it_unusable(tmp_path):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    ledger = folder / "ledger.rank2.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[:4]))
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)


# Lines of the last round that the newest checkpoint has (steps are told a round later), and of the
# one evaluation that both have.
@pytest.mark.parametrize(
    ("name", "last"), [("steps.jsonl", 3), ("messages.jsonl", 4), ("metrics.jsonl", 0)]
)
def test_books_that_were_changed_before_a_checkpoint_make_it_unusable(tmp_path, name, last):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    book = folder / name
    lines = book.read_text().splitlines(keepends=True)
    book.write_text("".join([*lines[:last], lines[last].swapcase(), *lines[last + 1 :]]))
    if name == "metrics.jsonl":
        with pytest.raises(DataError, match=r"no checkpoint is whole .*metrics\.jsonl was changed"):
            run_threads(resumed(config))
        return
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [4]
    assert f"{name} was changed" in "".join(summary["warnings"])
    assert same_run(whole, summary)


def swap_ranks(folder):
    files = [sets.part_path(folder, 5, rank) for rank in (1, 2)]
    first, second = (path.read_bytes() for path in files)
    files[0].write_bytes(second)
    files[1].write_bytes(first)


def from_an_older_round(folder):
    shutil.copy(sets.part_path(folder, 4, 2), sets.part_path(folder, 5, 2))


def from_another_run(folder):
    other = interrupted(tiny(folder.parent / "other", **EVERY), 6)
    shutil.copy(sets.part_path(other, 5, 2), sets.part_path(folder, 5, 2))


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (swap_ranks, "is of round 5, rank 2, due are 5, 1; it was moved here"),
        (from_an_older_round, "is of round 4, rank 2, due are 5, 2; it was moved here"),
        (from_another_run, "the file of rank 2 is of another run than that of rank 0"),
    ],
)
def test_files_that_were_moved_make_a_set_unusable(tmp_path, move, words):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    move(folder)
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [4]
    assert any(words in text for text in summary["warnings"])
    assert same_run(whole, summary)


def test_a_pipe_in_the_place_of_a_file_makes_no_set_and_no_hang(tmp_path):
    config, folder = cut_run(tmp_path)
    part = sets.part_path(folder, 5, 1)
    part.unlink()
    os.mkfifo(part)
    assert run_threads(resumed(config))["resumed_after_rounds"] == [4]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes two users, so root to begin with")
@pytest.mark.parametrize("what", [".", "checkpoints", "checkpoints/round-00000005"])
def test_what_one_may_not_read_is_passed_over_with_a_word(what):
    # Not under tmp_path, which is of one user alone.
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        config, folder = cut_run(Path(place))
        (folder / what).chmod(0)
        os.seteuid(65534)
        try:
            here, left = sets.rounds_here(folder, 0), passed_over(resumed(config), None)
        finally:
            os.seteuid(0)
    assert here == ([4] if "round" in what else [])
    assert "has not finished" in left
    if "round" not in what:
        assert "its checkpoints cannot be read (Permission denied)" in left


def test_no_whole_checkpoint_is_one_clear_error_on_all_ranks(tmp_path):
    config, folder = cut_run(tmp_path)
    written = list(folder.glob("checkpoints/round-*/rank1.safetensors"))
    assert written
    for path in written:
        flip(path)
    with pytest.raises(DataError, match=r"no checkpoint is whole .*rank1\.safetensors: its check"):
        run_threads(resumed(config))
    with pytest.raises(DataError, match=r"no checkpoint is whole .*never"):
        run_threads(resumed(config, folder))


@pytest.mark.parametrize(
    ("over", "words"),
    [
        ({"seed": 7}, "seed is 7, the run has 0"),
        ({"num_parties": 2}, "num_parties is 2, the run has 3"),
        ({"algorithm__epochs": 9}, "algorithm.epochs is 9, the run has 2"),
        ({"head_codec": "none"}, "head_codec is 'none', the run has 'scalar:bits=8'"),
        ({"optimizer__lr": 0.3}, "optimizer.lr of block 0 is 0.3, the run has 0.1"),
        ({"party": {2: {"codec": "none"}}}, "codec of block 2 is 'none', the run has 'scalar"),
    ],
)
@pytest.mark.parametrize("how", ["auto", "path"])
def test_a_run_with_another_config_is_refused_by_field(tmp_path, over, words, how):
    _, folder = cut_run(tmp_path)
    with pytest.raises(ConfigError) as refused:
        run_threads(resumed(tiny(tmp_path, **over), "auto" if how == "auto" else folder))
    assert words in str(refused.value)
    assert str(folder) in str(refused.value)


def test_a_config_that_was_edited_in_the_folder_is_refused_by_the_checkpoint(tmp_path):
    _, folder = cut_run(tmp_path)
    written = folder / "config.toml"
    written.write_text(written.read_text().replace("seed = 0", "seed = 7"))
    with pytest.raises(ConfigError, match="seed is 7, the checkpoint has 0"):
        run_threads(resumed(tiny(tmp_path, seed=7), folder))


@pytest.mark.parametrize(
    ("array", "words"),
    [("train_ids", "digest of the sample ids"), ("test_y", "digest of the labels")],
)
def test_other_samples_or_labels_are_refused(tmp_path, array, words):
    write_shards(tmp_path)
    config = load_config([str(tmp_path / "run.toml"), "--run.checkpoint-rounds", "1"])
    interrupted(config, 3)

    def change(block, arrays):
        arrays[array] = arrays[array][::-1]

    before = np.random.default_rng(0).integers(0, 3, 50)[40:]
    assert (before != before[::-1]).any()
    write_shards(tmp_path, change)
    with pytest.raises(DataError, match=words):
        run_threads(resumed(config))


def test_another_wire_version_or_plan_is_refused(tmp_path, monkeypatch):
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join("0.1,0.5,0.9" for _ in range(4)) + "\n")
    over = {"steps__policy": "virtual", "steps__trace": str(trace)}
    config, _ = cut_run(tmp_path, **over)
    trace.write_text("\n".join("0.1,0.5,0.8" for _ in range(4)) + "\n")
    with pytest.raises(ConfigError, match="digest of the steps planned is"):
        run_threads(resumed(config))
    monkeypatch.setattr(start, "WIRE_VERSION", 99)
    with pytest.raises(ConfigError, match="wire version is 99, the checkpoint has"):
        run_threads(resumed(config))


def test_a_full_disk_costs_a_checkpoint_and_neither_the_run_nor_the_older_ones(
    tmp_path, monkeypatch
):
    whole = run_threads(tiny(tmp_path / "whole"))
    full_disk(monkeypatch, 2, (4, 5, 6))
    config, folder = cut_run(tmp_path / "cut", rounds=7)
    assert sets.rounds_here(folder, 0) == [3, 2]
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [3]
    assert len(summary["warnings"]) == 3
    assert all("No space left" in text and "rank 2" in text for text in summary["warnings"])
    assert same_run(whole, summary)
    assert sets.all_rounds(Path(summary["folder"])) == [7, 3]


def test_something_in_the_way_of_a_checkpoint_is_a_warning_too(tmp_path):
    def block_way(run, result):
        if run.transport.rank == 0 and run.rounds == 1:
            (run.path / "checkpoints").write_text("")
        if run.transport.rank == 0 and run.rounds == 7:
            (run.path / "checkpoints").unlink()

    summary = run_threads(tiny(tmp_path, run__checkpoint_rounds=3), after_round=block_way)
    assert len(summary["warnings"]) == 2
    assert all("cannot be written" in text for text in summary["warnings"])


@pytest.mark.parametrize("text", ["{}", '{"name": "tiny"}', "[]", ""])
def test_a_summary_that_is_none_does_not_make_a_run_finished(tmp_path, text):
    whole = run_threads(tiny(tmp_path / "whole"))
    config, folder = cut_run(tmp_path / "cut")
    (folder / "summary.json").write_text(text)
    assert same_run(whole, run_threads(resumed(config)))


def test_auto_starts_afresh_where_there_is_nothing_to_go_on_with(tmp_path):
    assert run_threads(resumed(tiny(tmp_path / "new")))["resumed_after_rounds"] == []
    interrupted(tiny(tmp_path), 2)  # without a checkpoint
    other, _ = cut_run(tmp_path, name="tiny-2")
    assert run_threads(resumed(tiny(tmp_path)))["resumed_after_rounds"] == []
    assert run_threads(resumed(other))["resumed_after_rounds"] == [5]


@pytest.mark.parametrize(
    "harm",
    [
        lambda file: file.unlink(),
        lambda file: file.write_text(file.read_text()[: len(file.read_text()) // 2]),
        lambda file: file.write_text(file.read_text() + "\n[of_a_later_version]\nx = 1\n"),
    ],
)
def test_checkpoints_under_a_config_that_cannot_be_read_are_not_passed_over(tmp_path, harm):
    config, folder = cut_run(tmp_path)
    harm(folder / "config.toml")
    with pytest.raises(ConfigError, match=r"config\.toml: .* checkpoints: put the file right"):
        run_threads(resumed(config))
    assert list(tmp_path.iterdir()) == [folder]


def test_auto_leaves_a_finished_run_as_it_is(tmp_path):
    config = tiny(tmp_path)
    summary = run_threads(config)
    written = {p: p.stat().st_mtime_ns for p in Path(summary["folder"]).rglob("*")}
    assert run_threads(resumed(config)) == summary
    assert run_threads(resumed(config, summary["folder"])) == summary
    assert {p: p.stat().st_mtime_ns for p in Path(summary["folder"]).rglob("*")} == written
    again = run_threads(resumed(tiny(tmp_path, seed=3)))  # not that run: a fresh one
    assert again["folder"] != summary["folder"]


def test_a_folder_that_is_no_run_or_has_no_checkpoint_is_one_error(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere: is no run folder .*; give a run folder"):
        run_threads(resumed(tiny(tmp_path), tmp_path / "nowhere"))
    folder = interrupted(tiny(tmp_path), 2)
    with pytest.raises(ConfigError, match=rf"is no run folder .*; did you mean {folder}\?"):
        run_threads(resumed(tiny(tmp_path), folder / "checkpoints" / "round-00000001"))
    with pytest.raises(DataError, match="holds no complete checkpoint"):
        run_threads(resumed(tiny(tmp_path), folder))


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path):
    config, folder = cut_run(tmp_path)
    (folder / "run.lock").unlink()
    (folder / "run.lock").mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        run_threads(resumed(config))


HOLD = """
import sys
from pathlib import Path
from hpcvfl.engine.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_jobs_in_one_run_folder_are_refused_until_the_first_is_dead(tmp_path):
    config, folder = cut_run(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "held\n"
        for how in ("auto", folder):
            with pytest.raises(ConfigError, match=rf"another job is in it \(pid {other.pid} on "):
                run_threads(resumed(config, how))
    finally:
        other.kill()  # as a kill -9 of a job: nothing is cleaned up
        other.wait()
        other.stdin.close()
        other.stdout.close()
    assert run_threads(resumed(config))["resumed_after_rounds"] == [5]


def test_a_run_holds_its_lock_to_its_end(tmp_path):
    held = []

    def keep(run, result):
        if run.transport.rank == 0 and run.rounds == 1:
            words = [sys.executable, "-c", HOLD, str(run.path)]
            held.append(
                subprocess.run(
                    words, capture_output=True, text=True, env=environment(), check=False
                )
            )

    summary = run_threads(tiny(tmp_path), after_round=keep)
    assert "another job is in it" in held[0].stderr
    RunLock(Path(summary["folder"])).release()
