"""Runs that are asked to stop, by a signal or a limit, and clocks that jump; one process."""

import itertools
import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from support.resuming import full_disk, interrupted, resumed, same_run
from support.runs import run_threads, tiny, write_config

from hpcvfl.cli import main
from hpcvfl.engine import folder as folder_module
from hpcvfl.engine import preempt, sets, watch
from hpcvfl.engine.preempt import Asked
from hpcvfl.engine.run import train
from hpcvfl.errors import ConfigError, Preempted
from hpcvfl.transport.threads import ThreadsWorld

EVERY = {"run__checkpoint_rounds": 1}


def asked_at(rank, rounds, config, reason="SIGTERM"):
    """Run with a stop asked of `rank` while it is in round number `rounds` (from 1)."""
    asked = [Asked() for _ in config.block_of_rank]

    def ask(run, result):
        if run.transport.rank == rank and run.rounds == rounds:
            asked[rank].reason = reason

    world = ThreadsWorld(len(config.block_of_rank))
    return world.run(lambda t: train(config, t, after_round=ask, asked=asked[t.rank]))[0]


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "over",
    [
        {},
        {"transport__pattern": "allgather"},
        {"labels__holder": "server"},
        {"labels__holder": "party:3"},
    ],
)
def test_a_stop_asked_of_any_rank_ends_all_after_the_same_round(tmp_path, rank, over):
    whole = run_threads(tiny(tmp_path / "whole", **over))
    config = tiny(tmp_path / "cut", run__checkpoint_s=0, **over)
    with pytest.raises(Preempted, match=rf"after round 4 of 8 \(SIGTERM at rank {rank}\)") as stop:
        asked_at(rank, 3, config)
    assert stop.value.exit_code == 75
    (folder,) = Path(config.run.folder).iterdir()
    assert f"--resume {folder}" in str(stop.value)
    assert not list(folder.glob("error.*"))
    summary = run_threads(resumed(config, folder))
    assert summary["resumed_after_rounds"] == [4]
    assert same_run(whole, summary)


def test_every_rank_does_the_last_of_a_stop_also_where_ranks_are_threads(tmp_path):
    config = tiny(tmp_path, run__keep_checkpoints=1, **EVERY)
    with pytest.raises(Preempted):
        asked_at(1, 3, config)
    (folder,) = tmp_path.iterdir()
    assert sets.all_rounds(folder) == [4]
    assert not list(folder.glob("heartbeat.*"))


def test_the_others_wait_for_a_slow_scontrol(tmp_path, monkeypatch):
    runs = []

    def slow():
        assert runs[0].transport.timeout_s > 2 * preempt.REQUEUE_S  # it is asked twice
        return "job 7 is requeued"

    monkeypatch.setattr(preempt, "requeue", slow)
    config = tiny(tmp_path, run__requeue=True, run__max_seconds=1e-9, transport__timeout_s=3.0)
    with pytest.raises(Preempted, match="; job 7 is requeued"):
        run_threads(config, after_round=lambda run, _: runs.append(run))


def test_a_stop_asked_in_the_last_round_lets_the_run_finish(tmp_path):
    assert asked_at(1, 8, tiny(tmp_path))["rounds"] == 8
    assert asked_at(1, 7, tiny(tmp_path))["rounds"] == 8


def test_a_limit_on_the_seconds_stops_and_the_run_ends_in_pieces(tmp_path):
    whole = run_threads(tiny(tmp_path / "whole"))
    config = tiny(tmp_path / "cut", run__max_seconds=1e-9)
    for done in range(1, 8):
        with pytest.raises(Preempted, match=rf"round {done} of 8 \(run.max_seconds = 1e-09 at"):
            run_threads(resumed(config))
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == list(range(1, 8))
    assert same_run(whole, summary)


def test_a_stop_that_cannot_be_written_is_an_error_and_no_preemption(tmp_path, monkeypatch):
    full_disk(monkeypatch, 1, (4,))
    with pytest.raises(ConfigError, match=r"rank 1: run folder .*No space left"):
        asked_at(2, 3, tiny(tmp_path, **EVERY))
    (folder,) = tmp_path.iterdir()
    assert sets.rounds_here(folder, 0) == [3, 2]


@pytest.mark.parametrize("forward", [True, False])
def test_a_clock_that_jumps_moves_no_checkpoint_no_stop_and_no_wait(tmp_path, monkeypatch, forward):
    """Of each wall clock that Python has, set by 11 days, to and fro, at every look at it."""
    looks = itertools.count()
    began = time.time()

    def jumping():
        return began + 1e6 * (next(looks) % 2 == forward)

    class Jumping(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromtimestamp(jumping(), tz)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * jumping()))
    for module in (folder_module, watch):
        monkeypatch.setattr(module, "datetime", Jumping)
    none = tiny(tmp_path / "none", run__checkpoint_s=3600, run__max_seconds=3600)
    summary = run_threads(none)
    assert summary["rounds"] == 8
    assert sets.all_rounds(Path(summary["folder"])) == []
    every = tiny(tmp_path / "every", run__checkpoint_s=1e-9, transport__timeout_s=60)
    folder = interrupted(every, 6)
    assert sets.all_rounds(folder) == [5, 4]
    assert next(looks) > 0


def test_the_asynchronous_driver_refuses_to_be_kept_or_resumed(tmp_path):
    over = {"algorithm__driver": "vafl", "labels__holder": "server"}
    for asks in ({"run__resume": "auto"}, EVERY, {"run__max_seconds": 9.0}, {"run__requeue": True}):
        with pytest.raises(ConfigError, match="'vafl' writes no checkpoints"):
            tiny(tmp_path, **over, **asks)
    run_threads(tiny(tmp_path, **over))
    assert not list(tmp_path.glob("*/checkpoints/round-*"))


def test_the_command_line_says_it_in_one_line_with_the_status_of_try_again(tmp_path, capsys):
    words = ["train", write_config(tmp_path)]
    assert main([*words, "--max-seconds", "1e-9"]) == 75
    said = [x for x in capsys.readouterr().err.splitlines() if x.startswith("hpcvfl: ")]
    assert len(said) == 1
    assert "stopped after round 1 of 8 (run.max_seconds = 1e-09 at all ranks)" in said[0]
    assert main([*words, "--resume", "auto"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["resumed_after_rounds"] == [1]
    assert "resume" not in (folder / "config.toml").read_text()
    assert main([*words, "--resume", "auto"]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1
    assert main([*words, "--resume", str(folder), "--seed", "4"]) == 2
    assert "seed is 4, the run has 0" in capsys.readouterr().err
