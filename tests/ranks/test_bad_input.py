"""Bad input: one clear line, a non-zero exit, before any work; in one process."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support.launch import environment
from support.runs import write_config

from hpcvfl.cli import main
from hpcvfl.engine import folder


def lines_of(capsys):
    out = [x for x in capsys.readouterr().err.splitlines() if not x.startswith("run folder")]
    return [x for x in out if x.strip()]


def write_shards(folder, change=lambda block, arrays: None):
    """One .npz a block for two parties, as a user would bring them; `change` spoils one."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 50)
    party = {}
    for block in range(3):
        arrays = {
            "train_y": labels[:40],
            "test_y": labels[40:],
            "train_ids": np.arange(40),
            "test_ids": np.arange(40, 50),
        }
        if block:
            arrays |= {"train_x": rng.normal(size=(40, 5)), "test_x": rng.normal(size=(10, 5))}
        change(block, arrays)
        np.savez(folder / f"{block}.npz", **arrays)
        party[str(block)] = {"data": {"root": str(folder / f"{block}.npz")}}
    return write_config(
        folder, num_parties=2, data__dataset="files", data__batch_size=20, party=party
    )


def spoil(block, name, value):
    def change(b, arrays):
        if b == block:
            arrays[name] = value(arrays[name])

    return change


def with_value(at, value):
    def put(array):
        array = array.astype(type(value) if isinstance(value, float) else array.dtype).copy()
        array[at] = value
        return array

    return put


def test_the_unspoiled_shards_train(tmp_path, capsys):
    assert main(["train", write_shards(tmp_path)]) == 0
    assert "test accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        (spoil(1, "train_x", lambda x: x[:-1]), ["rank 1", "39 rows", "40"], 3),
        (
            spoil(2, "train_x", with_value((3, 4), float("nan"))),
            ["rank 2", "row 3, column 4", "nan"],
            3,
        ),
        (spoil(1, "train_y", with_value(7, -1)), ["rank 1", "train_y row 7 is -1"], 3),
        (spoil(2, "train_x", lambda x: x[:0]), ["rank 2", "empty shard"], 3),
        (spoil(1, "train_ids", lambda x: x[::-1]), ["rank 1", "sample ids", "same order"], 3),
    ],
    ids=["odd rows", "nan", "label", "empty", "ids"],
)
def test_a_spoiled_shard_is_named_by_rank_and_place(tmp_path, capsys, change, words, code):
    assert main(["train", write_shards(tmp_path, change)]) == code
    lines = lines_of(capsys)
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert not (tmp_path / "runs").exists()


def test_fewer_rows_at_one_party_than_at_the_others(tmp_path, capsys):
    def change(block, arrays):
        if block == 2:
            for name in ("train_x", "train_y", "train_ids"):
                arrays[name] = arrays[name][:30]

    assert main(["train", write_shards(tmp_path, change)]) == 3
    (line,) = lines_of(capsys)
    assert "rank 2: number of training rows: 30, rank 0 has 40" in line


@pytest.mark.parametrize(
    ("over", "words", "code"),
    [
        ({"codec": "scalar:bits=0"}, "bits = '0'; possible: 1, 2", 2),
        ({"codec": "scalar:bits=9"}, "bits = '9'; possible: 1, 2", 2),
        ({"head_codec": "gzip"}, "unknown codec 'gzip'", 2),
        ({"data__batch_size": 5000}, "batch_size = 5000 is larger than the 104 training rows", 3),
        ({"data__dataset": "mnist"}, "choices: digits, fashion-mnist", 2),
        ({"model__tower": "vit"}, "model.tower = 'vit': unknown; choices: mlp", 2),
        ({"model__tower": "no.such:Tower"}, "cannot be imported", 2),
        ({"num_parties": 13}, "13", 2),
        ({"foo": 1}, "unknown field 'foo'", 2),
        ({"algorithm__local_steps": 0}, "algorithm.local_steps = 0", 2),
    ],
    ids=lambda v: str(v)[:30],
)
def test_a_bad_field_is_one_line(tmp_path, capsys, over, words, code):
    assert main(["train", write_config(tmp_path, **over)]) == code
    (line,) = lines_of(capsys)
    assert words in line


def test_an_unwritable_run_folder_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    path = write_config(tmp_path, run__folder=str(tmp_path / "file" / "runs"))
    assert main(["train", path]) == 2
    (line,) = lines_of(capsys)
    assert "run.folder" in line
    assert "cannot be written" in line


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["fly"], "verbs: train, evaluate, report, doctor, theory, bench"),
        (["train"], "train: which config?"),
        (["evaluate"], "evaluate: one run folder is due"),
        (["evaluate", "nowhere"], "nowhere/config.toml: cannot be read"),
        (["report"], "report: name at least one run folder"),
        (["report", "nowhere"], "nowhere: no summary.json"),
        (["report", "--out"], "--out needs a folder"),
        (["doctor", "please"], "config 'please': no such preset"),
        (["train", "digits", "--slow", "2,4"], "due is --slow party=K,factor=F"),
        (["train", "digits", "--slow", "party=2,factor=0.5"], "steps.slow_factor"),
        (["bench", "everything"], "kernels, codecs, exchange, round"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_wrong_call_of_a_verb_is_one_line(capsys, words, part):
    assert main(words) in (2, 3)
    (line,) = lines_of(capsys)
    assert part in line


@pytest.mark.parametrize(
    ("tower", "words"),
    [("ExplodingTower", "block 2, round"), ("CrashingTower", "a fault in the tower")],
)
def test_a_failure_inside_a_round_ends_the_run_in_one_process(tmp_path, tower, words):
    path = write_config(tmp_path, party={"2": {"model": {"tower": f"support.modules:{tower}"}}})
    command = [sys.executable, "-m", "hpcvfl", "train", path]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment(), check=False
    )
    assert done.returncode in (1, 7)
    assert words in done.stderr
    (left,) = tmp_path.glob("runs/*/error.rank*.txt")
    assert left.name == "error.rank2.txt"
    assert words in left.read_text()


def test_a_reader_that_leaves_early_is_no_error():
    sizes = ["--batch-size", "9", "--embedding-dim", "4", "--range", "2", "--steps", "99"]
    command = [sys.executable, "-m", "hpcvfl", "theory", *sizes]
    writer = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    writer.stdout.close()
    assert writer.wait(timeout=100) == 141
    assert writer.stderr.read() == ""


def test_one_row_left_over_is_refused_where_batches_are_normalised(tmp_path, capsys):
    over = {"model__tower": "support.modules:BatchNormTower", "data__batch_size": 103}
    assert main(["train", write_config(tmp_path, **over)]) == 2
    (line,) = lines_of(capsys)
    assert "the last batch of 104 rows has 1 row" in line
    assert "choose 104" in line


def test_labels_that_differ_between_parties_are_refused(tmp_path, capsys):
    assert main(["train", write_shards(tmp_path, spoil(2, "train_y", lambda y: y[::-1]))]) == 3
    (line,) = lines_of(capsys)
    assert "rank 2: digest of the labels" in line


def test_a_value_beyond_float32_is_named_by_place(tmp_path, capsys):
    change = spoil(1, "train_x", with_value((3, 4), 1e39))
    assert main(["train", write_shards(tmp_path, change)]) == 3
    (line,) = lines_of(capsys)
    assert "row 3, column 4 is inf" in line


def test_evaluate_refuses_a_folder_whose_config_was_changed(tmp_path, capsys):
    path = write_config(tmp_path)
    assert main(["train", path]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    closing = json.loads((run / "summary.json").read_text())["metrics"]["accuracy"]
    capsys.readouterr()
    assert main(["evaluate", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == closing
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("seed = 0", "seed = 1"))
    assert main(["evaluate", str(run)]) == 3
    (line,) = lines_of(capsys)
    assert "changed after the run" in line


@pytest.mark.parametrize("made", [b"", b"no safetensors at all", None])
def test_evaluate_refuses_broken_weights(tmp_path, capsys, made):
    assert main(["train", write_config(tmp_path)]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    weights = run / "checkpoints" / "final" / "rank2.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2] if made is None else made)
    assert main(["evaluate", str(run)]) == 3
    assert "rank2.safetensors: cannot be read" in lines_of(capsys)[-1]


@pytest.mark.parametrize(
    ("tower", "words"),
    [
        (
            "WideInTraining",
            "block 2, model.tower = 'support.modules:WideInTraining': gives ((30, 256)",
        ),
        (
            "DoubleTower",
            "gives ((30, 4), torch.float64) for 30 rows, must give ((30, 4), torch.float32)",
        ),
        ("DetachedTower", "block 2, round 0: the loss does not depend on the block's parameters"),
        ("QuittingTower", "a module of the model ended the program"),
    ],
)
def test_a_tower_that_gives_what_it_should_not_is_one_line(tmp_path, capsys, tower, words):
    path = write_config(tmp_path, party={"2": {"model": {"tower": f"support.modules:{tower}"}}})
    assert main(["train", path]) in (1, 2)
    (line,) = lines_of(capsys)
    assert words in line


@pytest.mark.parametrize("tower", ["FrozenTower", "TiedTower"])
def test_an_unusual_but_right_tower_trains_and_is_saved(tmp_path, capsys, tower):
    path = write_config(tmp_path, party={"2": {"model": {"tower": f"support.modules:{tower}"}}})
    assert main(["train", path]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert main(["evaluate", str(run)]) == 0


@pytest.mark.parametrize("name", ["checkpoints", "trace.rank0.json", "summary.json"])
def test_a_name_that_is_taken_in_the_run_folder_is_one_line(tmp_path, capsys, monkeypatch, name):
    made = folder.create

    def create(config):
        path = made(config)
        (path / name).write_text("") if name == "checkpoints" else (path / name).mkdir()
        return path

    monkeypatch.setattr(folder, "create", create)
    assert main(["train", write_config(tmp_path)]) == 2
    (line,) = lines_of(capsys)
    assert "cannot be written" in line


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"wire_bytes": 0}', "[" * 100_000])
def test_report_on_a_foreign_summary_is_one_line(tmp_path, capsys, text):
    (tmp_path / "summary.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert main(["report", str(tmp_path)]) == 3
    assert "summary.json" in lines_of(capsys)[0]


def test_deep_toml_is_one_line(tmp_path, capsys):
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000)
    assert main(["train", str(tmp_path / "deep.toml")]) == 2
    (line,) = lines_of(capsys)
    assert "not valid TOML" in line


def test_report_of_several_runs_leaves_out_the_unfinished(tmp_path, capsys):
    assert main(["train", write_config(tmp_path)]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    (tmp_path / "runs" / "dead").mkdir()
    words = [str(tmp_path / "runs" / "dead"), str(run), "--out", str(tmp_path / "out")]
    assert main(["report", *words]) == 0
    said = capsys.readouterr()
    assert "test accuracy" in said.out
    assert "dead: no summary.json" in said.err
    assert len(list((tmp_path / "out").glob("*.png"))) == 4
    assert main(["report", words[0], words[0]]) == 3
