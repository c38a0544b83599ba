"""A run that is cut off and goes on is the run without the cut, bit for bit."""

import json
from pathlib import Path

import pytest
from support.resuming import interrupted, resumed, same_run
from support.runs import run_threads, tiny

from hpcvfl.engine.run import train
from hpcvfl.transport.threads import ThreadsWorld

# Four rounds an epoch: cuts fall inside an epoch and at its end.
EVERY = {"run__checkpoint_rounds": 1}
GAUSS = "scalar:bits=1,range=gauss,scope=column"
AUTO = "auto:error=0.02,horizon=3,codec=scalar"
PRIVATE = {"labels__holder": "server"}
FED = {"codec": f"ef({GAUSS})", "labels__gradient_codec": "ef16(scalar:bits=2)"}
SPEEDS = {"steps__policy": "virtual", "steps__speeds": (4, 1, 2, 3)}
MOMENTUM = {"optimizer__momentum": 0.9, "optimizer__keep_state": True}

RUNS = {
    "ef of both, one in float16": {"codec": f"ef({GAUSS})", "head_codec": "ef16(scalar:bits=2)"},
    "memories in files": {"codec": f"ef({GAUSS})", "run__memory_folder": "memories"},
    "auto": {"codec": AUTO},
    "ef of auto": {"codec": f"ef({AUTO})", "head_codec": f"ef({AUTO})"},
    "top-k by score": {"codec": "topk:k=2"},
    "best": {"codec": "best:bits=2"},
    "momentum kept": MOMENTUM,
    "Adam kept": {"optimizer__name": "Adam", "optimizer__keep_state": True},
    "rules that are not kept": {"optimizer__proximal": 0.1, "optimizer__momentum": 0.5},
    "adaptive rates, speeds": {**SPEEDS, "optimizer__schedule": "adaptive"},
    "adaptive sum, a trace": {
        "steps__policy": "virtual",
        "steps__trace": "ar1",
        "optimizer__schedule": "adaptive-sum",
        "optimizer__lr": 0.5,
        "optimizer__momentum": 0.9,
        "optimizer__proximal": 0.3,  # beside momentum, makes the next rate depend on the last one
    },
    "cosine": {"optimizer__schedule": "cosine"},
    "batch norm": {"model__tower": "support.modules:BatchNormTower"},
    "dropout": {"model__tower": "support.modules:DropoutTower"},
    "one round ahead": {"algorithm__pipeline": 1, "codec": "topk:k=2", **SPEEDS},
    "one round ahead, buffers that every forward moves": {
        "algorithm__pipeline": 1,
        "model__tower": "support.modules:SpectralTower",
    },
    "one round ahead, ef": {
        "algorithm__pipeline": 1,
        "codec": f"ef({GAUSS})",
        "head_codec": "ef16(scalar:bits=2)",
        "model__tower": "support.modules:DropoutTower",
        "optimizer__schedule": "adaptive",
    },
    "buffers of odd kinds": {"model__tower": "support.modules:OddStateTower"},
    "tied weights": {"model__tower": "support.modules:TiedTower"},
    "private labels, ef both ways": {**PRIVATE, **FED, **MOMENTUM},
    "private labels, top-k": {**PRIVATE, "codec": "topk:k=2"},
    "labels at a party": {
        "labels__holder": "party:2",
        **FED,
        **SPEEDS,
        "optimizer__schedule": "adaptive",
        "optimizer__momentum": 0.5,
        "model__tower": "support.modules:DropoutTower",
    },
}


@pytest.mark.parametrize("cut", [1, 3, 4, 5, 7])
def test_a_resumed_run_is_the_run_without_the_cut(tmp_path, cut):
    whole = run_threads(tiny(tmp_path / "whole", algorithm__local_steps=3))
    config = tiny(tmp_path / "cut", algorithm__local_steps=3, **EVERY)
    folder = interrupted(config, cut + 1)
    summary = run_threads(resumed(config))
    assert summary["folder"] == str(folder)
    assert summary["resumed_after_rounds"] == [cut]
    assert same_run(whole, summary)


@pytest.mark.parametrize("name", RUNS)
def test_whatever_lasts_from_round_to_round_is_in_a_checkpoint(tmp_path, name):
    over = {"algorithm__local_steps": 2} | RUNS[name]
    if "run__memory_folder" in over:
        over["run__memory_folder"] = str(tmp_path / "memories")
    whole = run_threads(tiny(tmp_path / "whole", **over))
    config = tiny(tmp_path / "cut", run__checkpoint_rounds=5, **over)
    interrupted(config, 6, rank=1)
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [5]
    assert same_run(whole, summary)


@pytest.mark.parametrize("cut", [3, 4, 7])
def test_frames_that_came_a_round_ahead_are_not_lost(tmp_path, cut):
    over = {"algorithm__pipeline": 1, "codec": "none", "head_codec": "none"}
    whole = run_threads(tiny(tmp_path / "whole", **over))
    config = tiny(tmp_path / "cut", **over, **EVERY)
    interrupted(config, cut + 1)
    assert same_run(whole, run_threads(resumed(config)))


def test_blocks_with_optimizers_and_codecs_of_their_own_go_on(tmp_path):
    party = {
        1: {"codec": f"ef({GAUSS})", "optimizer": {"name": "Adagrad", "keep_state": True}},
        2: {"codec": "topk:k=1", "model": {"tower": "support.modules:BatchNormTower"}},
        3: {"codec": "none", "optimizer": {"momentum": 0.9, "keep_state": True, "lr": 0.3}},
    }
    whole = run_threads(tiny(tmp_path / "whole", party=party))
    config = tiny(tmp_path / "cut", party=party, **EVERY)
    interrupted(config, 6)
    assert same_run(whole, run_threads(resumed(config)))


def test_a_replayed_run_goes_on(tmp_path):
    model = run_threads(tiny(tmp_path / "model", **SPEEDS))
    script = {"steps__policy": "script", "steps__replay": model["folder"]}
    whole = run_threads(tiny(tmp_path / "whole", **script))
    config = tiny(tmp_path / "cut", **script, **EVERY)
    interrupted(config, 6)
    assert same_run(whole, run_threads(resumed(config)))


def test_a_run_may_be_cut_twice_also_before_its_next_checkpoint(tmp_path):
    over = {"codec": f"ef({GAUSS})", **MOMENTUM, "algorithm__epochs": 3}
    whole = run_threads(tiny(tmp_path / "whole", **over))
    config = tiny(tmp_path / "cut", **over, run__checkpoint_rounds=3)
    folder = interrupted(config, 5)
    assert interrupted(resumed(config), 5, rank=2) == folder  # no checkpoint in between
    assert interrupted(resumed(config), 11, rank=1) == folder
    summary = run_threads(resumed(config))
    assert summary["resumed_after_rounds"] == [3, 9]
    assert same_run(whole, summary)


@pytest.mark.parametrize("codec", [f"ef({GAUSS})", AUTO])
def test_a_run_goes_on_in_another_pattern_and_another_order(tmp_path, codec):
    hub = tiny(tmp_path / "cut", codec=codec, **EVERY)
    spread = tiny(tmp_path / "cut", codec=codec, transport__pattern="allgather", **EVERY)
    whole = run_threads(tiny(tmp_path / "whole", codec=codec, transport__pattern="allgather"))
    interrupted(hub, 3)
    interrupted(resumed(spread), 6, order=[3, 1, 0, 2])
    hub_again = run_threads(resumed(hub))
    assert hub_again["metrics"] == whole["metrics"]
    spread_again = tiny(tmp_path / "other", codec=codec, transport__pattern="allgather", **EVERY)
    interrupted(spread_again, 6, order=[3, 1, 0, 2])
    assert same_run(whole, run_threads(resumed(spread_again)))


def test_a_target_that_is_reached_after_the_cut_ends_the_run_as_without_it(tmp_path):
    over = {"algorithm__epochs": 6, "algorithm__target_accuracy": 0.5}
    whole = run_threads(tiny(tmp_path / "whole", **over))
    config = tiny(tmp_path / "cut", **over, **EVERY)
    interrupted(config, 3)
    assert same_run(whole, run_threads(resumed(config)))


def test_checkpoints_cost_no_training_byte_and_are_booked_apart(tmp_path):
    plain = run_threads(tiny(tmp_path / "plain"))
    kept = run_threads(tiny(tmp_path / "kept", **EVERY))
    assert same_run(plain, kept)
    assert "checkpoint" not in plain["wire_bytes_by"]
    assert kept["wire_bytes_by"]["checkpoint"]["uplink control"] > 0
    assert kept["seconds"]["server"]["checkpoint"] > 0


def test_so_many_sets_are_kept_and_each_has_a_file_a_rank(tmp_path):
    config = tiny(tmp_path, run__checkpoint_rounds=2, run__keep_checkpoints=2)
    folder = Path(run_threads(config)["folder"])
    places = sorted((folder / "checkpoints").glob("round-*"))
    assert [p.name for p in places] == ["round-00000004", "round-00000006"]
    due = {"complete.json", *(f"rank{k}.safetensors" for k in range(4))}
    assert all({p.name for p in place.iterdir()} == due for place in places)
    said = json.loads((places[1] / "complete.json").read_text())
    assert (said["round"], said["of"], said["ranks"]) == (6, 8, 4)


def test_no_checkpoint_is_written_where_none_is_asked_for(tmp_path):
    folder = Path(run_threads(tiny(tmp_path, run__checkpoint_s=0))["folder"])
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["final"]


@pytest.mark.parametrize(
    ("server_s", "party_s", "due"),
    [(1e-9, 0, ["round-00000006", "round-00000007"]), (0, 1e-9, [])],
)
def test_the_clock_of_the_server_alone_decides_when(tmp_path, server_s, party_s, due):
    configs = [tiny(tmp_path, run__checkpoint_s=s) for s in (server_s, party_s)]
    summary = ThreadsWorld(4).run(lambda t: train(configs[t.rank > 0], t))[0]
    places = Path(summary["folder"], "checkpoints").glob("round-*")
    assert sorted(p.name for p in places) == due
