"""The formula of the trade-off, and the choice of what is measured."""

import json

import pytest

from hpcvfl.benchmarks.common import Report

import tradeoff_q
from wan import cells as emulated


def test_the_published_table_follows_from_its_own_round_counts():
    report = Report("tradeoff-q", ["--smoke"])
    tradeoff_q.check_paper(report)
    (target,) = report.targets
    assert target["passed"]
    assert "worst of 12" in target["name"]
    assert target["value"] < 0.01


@pytest.mark.parametrize(
    ("rounds", "latency_ms", "q", "seconds"), [(100, 0, 10, 10), (100, 200, 1, 21), (0, 50, 5, 0)]
)
def test_virtual_time_is_a_round_trip_and_q_steps_a_round(rounds, latency_ms, q, seconds):
    assert tradeoff_q.virtual_seconds(rounds, latency_ms, q) == pytest.approx(seconds)


def test_the_model_of_the_wall_is_round_trips_and_measured_compute():
    result = {"rounds": 40, "cell": {"latency_ms": 50}, "compute_s": 1.5}
    assert emulated.model_s(result) == pytest.approx(3.5)


def test_words_of_the_command_line_spell_the_changes_of_a_cell():
    cell = tradeoff_q.Cell("2bit", 5, 0.1, 0)
    words = emulated.options({"algorithm.local_steps": 5, "head_codec": "none"})
    assert words == ["--algorithm.local-steps", "5", "--head-codec", "none"]
    assert tradeoff_q.configure(cell.changes).algorithm.local_steps == 5


def test_a_result_that_is_there_is_not_made_again(tmp_path):
    store = tradeoff_q.Store(tmp_path, only="")
    assert store.get("a", lambda: {"n": 1}) == {"n": 1}
    assert store.get("a", lambda: {"n": 2}) == {"n": 1}
    assert json.loads((tmp_path / "a.json").read_text()) == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_table_and_a_pattern_run_nothing_else(tmp_path):
    assert tradeoff_q.Store(tmp_path, only=None).get("a", lambda: {}) is None
    assert tradeoff_q.Store(tmp_path, only="^b").get("a", lambda: {}) is None
    assert list(tmp_path.iterdir()) == []


def test_cells_of_the_emulated_network_are_of_the_grid():
    assert len(set(emulated.CELLS)) == len(emulated.CELLS) >= 10
    for cell in emulated.CELLS:
        assert cell.codec in tradeoff_q.CODECS
        assert cell.q in tradeoff_q.QS
        assert cell.latency_ms in tradeoff_q.LATENCIES_MS
