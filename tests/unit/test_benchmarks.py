"""What the benchmarks work out themselves, without ranks: byte formulas and verdicts."""

import json
import sys
from pathlib import Path

import pytest

from hpcvfl import cli
from hpcvfl.benchmarks import common
from hpcvfl.benchmarks import exchange as bench_exchange
from hpcvfl.benchmarks import kernels as bench_kernels
from hpcvfl.benchmarks import round as bench_round
from hpcvfl.clock import PHASES
from hpcvfl.errors import ConfigError

BENCHES = {"round": bench_round, "exchange": bench_exchange, "kernels": bench_kernels}

HEAD = 64 + 4 * (10 * 16 + 10)  # frame of a float32 head of 16 x 10 weights and 10 offsets
EMBED = 64 + 8 + 64 * 8 // 2  # header, range, 4 bits a value
DUE = {"hub": 2 * EMBED + 2 * (HEAD + 2 * EMBED), "allgather": 2 * (HEAD + 2 * EMBED)}


def result_of(pattern: str, more_received: int = 0, more_sent: int = 0) -> dict:
    phases = dict.fromkeys(PHASES, 1.0)
    return {
        "round_ms": 1.0,
        "server": phases,
        "party": phases,
        "booked": [7 * DUE[pattern] + more_received, 7 * DUE[pattern] + more_sent],
        "booked_rounds": 7,
        "head_codec": "none",
        "head_shapes": [[10, 16], [10]],
    }


@pytest.mark.parametrize("pattern", DUE)
def test_the_formula_is_the_sum_of_the_frames_that_travel(pattern: str) -> None:
    due = bench_round.due_nbytes(2, 64, 8, pattern, "none", [[10, 16], [10]])
    assert due == DUE[pattern]


@pytest.mark.parametrize(("more", "status"), [((0, 0), 0), ((1, 0), 1), ((0, -1), 1), ((1, -1), 1)])
def test_the_smoke_run_fails_on_a_single_byte(
    more: tuple[int, int], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def worker(m, b, p, pattern, rounds, compare):
        assert (m, b, p) == (2, 64, 8)
        return result_of(pattern, *more)

    monkeypatch.setattr(bench_round, "worker", worker)
    assert bench_round.main(["--smoke"]) == status


def unwritable(folder: Path) -> list[str]:
    """Paths of a file in no folder, of a folder, and of a file below a file."""
    (folder / "file").write_text("kept")
    return [str(folder / "none" / "out.json"), str(folder), str(folder / "file" / "out.json")]


@pytest.mark.parametrize("name", BENCHES)
def test_json_that_cannot_be_written_is_refused_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_round, "worker", lambda *_, **__: pytest.fail("it ran"))
    monkeypatch.setattr(bench_exchange, "measured_by_ranks", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(bench_kernels, "median_seconds", lambda *_, **__: pytest.fail("it ran"))
    for path in unwritable(tmp_path):
        words = ["--smoke", "--json", path]
        assert cli.main(["bench", name, *words]) == ConfigError.exit_code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"hpcvfl: bench {name}: --json {path}: cannot be written (")
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        with pytest.raises(SystemExit) as caught:
            common.run_script(BENCHES[name].main)
        assert caught.value.code == ConfigError.exit_code
        assert capsys.readouterr().err.splitlines() == [line]


def test_json_is_written_at_the_end_and_touched_no_earlier(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("before")
    reports = [common.Report("kernels", ["--smoke", "--json", str(path)]) for path in (new, old)]
    assert not new.exists()
    assert old.read_text() == "before"
    for report, path in zip(reports, (new, old), strict=True):
        report.target("sizes exact", 0, 0, any_size=True)
        assert report.finish() == 0
        assert json.loads(path.read_text())["targets"][0]["passed"]


def test_json_that_became_unwritable_meanwhile_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    report = common.Report("kernels", ["--json", str(folder / "out.json")])
    folder.rmdir()
    with pytest.raises(ConfigError, match=r"bench kernels: --json .*: cannot be written"):
        report.finish()
