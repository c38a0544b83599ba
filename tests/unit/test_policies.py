"""How many local steps: rules, traces, logs, the wall clock, and what each refuses."""

import itertools
import json

import numpy as np
import pytest

from hpcvfl.config import build
from hpcvfl.engine import traces
from hpcvfl.engine.policies import WallClockSteps, plan_of, policy_of, read_steps
from hpcvfl.engine.rates import adaptive_rate
from hpcvfl.engine.weights import weights_of
from hpcvfl.errors import ConfigError, DataError
from hpcvfl.sections import OptimizerConfig

GOOGLE = [
    0.30291598,
    0.3638092, 0.17014983, 0.14333789, 0.33265191, 0.17415424, 0.06804619,
    0.14446286, 0.29251583, 0.2207424, 0.12800219, 0.27062089, 0.13972783,
]  # fmt: skip
"""The server's utilisation and those of 12 parties in the published code of Flex-VFL."""


def plan(num_parties=2, **steps):
    table = {"num_parties": num_parties, "steps": {"policy": "virtual", **steps}}
    return plan_of(build(table))


def test_t1_steps_of_the_published_utilisations():
    due = [12, 16, 17, 13, 16, 18, 17, 14, 15, 17, 14, 17]
    assert traces.steps_of(np.array(GOOGLE), "floor20").tolist() == [13, *due]


@pytest.mark.parametrize(
    ("rule", "most", "units"), [("floor20", 20, 20), ("int10", 11, 11), ("int19", 20, 20)]
)
def test_t1_ranges_of_the_rules(rule, most, units):
    u = np.linspace(0, 1, 1001)
    taus = traces.steps_of(u, rule)
    assert set(taus.tolist()) == set(range(1, most + 1))
    assert (np.diff(taus) <= 0).all()
    assert traces.most_steps(rule) == units


def test_t4_units_of_a_round_by_the_papers_rules():
    # Set "2" of the published experiments: 20 units, the slowest of 13 blocks takes 12 steps.
    taus = [13, 12, 16, 17, 13, 16, 18, 17, 14, 15, 17, 14, 17]
    due = {"none": 20, "min": 20, "max": 20 * 20 / 12, "one": 20 / 12}
    for sync, units in due.items():
        assert plan(12, speeds=taus, timeout_units=20, sync=sync).units(5) == pytest.approx(units)
    # Mean epochs 7.6 of 154 rounds, in thousands of units, at three costs of communication.
    flex = plan(12, speeds=taus, timeout_units=20)
    times = [7.6 * 154 * (cost + flex.units(0)) / 1000 for cost in (1, 10, 50)]
    assert [round(t, 2) for t in times] == [24.58, 35.11, 81.93]


def test_a_step_that_is_longer_than_the_timeout_is_waited_for_whatever_the_rule():
    units = {
        sync: plan(speeds=[10, 0.2, 5], sync=sync, timeout_units=10).units(0)
        for sync in ("none", "min", "one")
    }
    assert units == {"none": 50, "min": 50, "one": 50}  # one step at 0.2 steps in 10 units


def test_the_rules_of_the_baselines():
    own = {"speeds": [10, 2, 6], "timeout_units": 10}
    assert plan(**own).steps(3) == (10, 2, 6)
    assert plan(**own, sync="min").steps(3) == (2, 2, 2)
    assert plan(**own, sync="max").steps(3) == (10, 10, 10)
    assert plan(**own, sync="one").steps(3) == (1, 1, 1)
    assert plan(speeds=[0.3, 4.9, 2]).steps(0) == (1, 4, 2)
    assert plan(speeds=[0.3, 4.9, 2], sync="one").units(0) == pytest.approx(4.9 / 0.3)


def test_a_trace_gives_a_sample_a_round_over_and_over(tmp_path):
    trace = np.array([[0.0, 0.5], [0.875, 0.1], [0.25, 0.25]])
    np.save(tmp_path / "u.npy", trace)
    np.savetxt(tmp_path / "u.csv", trace, delimiter=",")
    for name in ("u.npy", "u.csv"):
        came = plan(trace=str(tmp_path / name), trace_rule="int10")
        assert [came.steps(r) for r in range(3)] == [(11, 2, 8), (6, 10, 8), (11, 2, 8)]
        assert came.units(0) == 11
    assert plan(trace=str(tmp_path / "u.npy")).digest == plan(trace=str(tmp_path / "u.csv")).digest
    slow = plan(trace=str(tmp_path / "u.npy"), trace_rule="int10", sync="one")
    assert slow.units(0) == pytest.approx(11 / 2)
    assert slow.units(1) == pytest.approx(11 / 6)


def test_the_synthetic_trace_is_one_of_utilisations_that_remember():
    u = traces.ar1(5)
    assert u.shape == (5, 8351)
    assert u.min() >= 0
    assert u.max() <= 1
    assert u.mean() == pytest.approx(traces.AR1_MEAN, abs=0.02)
    for row in u:
        lag = np.corrcoef(row[:-1], row[1:])[0, 1]
        assert lag == pytest.approx(traces.AR1_MEMORY, abs=0.03)
    assert (traces.ar1(5) == u).all()
    assert plan(4, trace="ar1").steps(17) == tuple(traces.steps_of(u[:, 17], "floor20").tolist())


@pytest.mark.parametrize(
    ("trace", "words"),
    [
        (np.array([[0.1], [np.nan], [0.2]]), "block 1, sample 0 is nan, due is a utilisation"),
        (np.array([[0.1], [0.2], [1.5]]), "block 2, sample 0 is 1.5"),
        (np.zeros((2, 5)), r"has shape \(2, 5\), due \(3, samples\)"),
        (np.zeros((3, 0)), r"has shape \(3, 0\)"),
        (np.array(["a", "b", "c"]), "holds no numbers"),
        (np.array([[None], [1], [2]]), "cannot be read"),
    ],
    ids=["nan", "beyond", "rows", "empty", "text", "objects"],
)
def test_a_bad_trace_is_named_by_place(tmp_path, trace, words):
    np.save(tmp_path / "u.npy", trace)
    with pytest.raises(DataError, match=words):
        plan(trace=str(tmp_path / "u.npy"))


def test_a_trace_that_is_no_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.csv.*cannot be read"):
        plan(trace=str(tmp_path / "nowhere.csv"))
    for name, data in (("zip.npy", b"PK\x03\x04"), ("cut.npy", b"\x93NUMPY\x01\x00v\x00{'descr'")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(DataError, match="cannot be read") as caught:
            plan(trace=str(tmp_path / name))
        assert "\n" not in str(caught.value)
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match="cannot be read"):
        plan(trace=str(tmp_path / "empty.csv"))
    (tmp_path / "text.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"text.csv.*cannot be read"):
        plan(trace=str(tmp_path / "text.csv"))


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({"policy": "wall-clock"}, "steps.policy = 'wall-clock' needs steps.timeout_s"),
        ({"policy": "wall-clock", "timeout_s": 0}, "steps.timeout_s = 0: .*greater than 0"),
        ({"policy": "virtual"}, "needs one of: speeds, trace"),
        (
            {"policy": "virtual", "speeds": [1, -1, 2]},
            "steps.speeds.1 = -1: .*greater than",
        ),
        ({"policy": "virtual", "speeds": [1, 2], "trace": "ar1"}, "speeds, trace, not both"),
        ({"policy": "script"}, "needs one of: replay"),
        ({"timeout_s": 1.0}, "timeout_s is not for policy 'fixed'"),
        ({"sync": "max"}, "sync and timeout_units are for policy 'virtual'"),
        ({"policy": "sometimes"}, "'fixed', 'wall-clock', 'virtual' or 'script'"),
        ({"slow_factor": 0.5}, "steps.slow_factor = 0.5: .*greater than or equal to 1"),
    ],
)
def test_bad_fields_are_one_line(steps, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build({"num_parties": 2, "steps": steps})
    assert "\n" not in str(caught.value)


def test_a_party_beside_the_server_has_the_servers_speed():
    beside = {"num_parties": 2, "labels": {"holder": "party:2"}}
    for steps, due in (
        ({"speeds": [4, 2, 9]}, (4, 2, 4)),
        ({"speeds": [4, 2, 1], "sync": "min"}, (2, 2, 2)),
        ({"trace": "ar1", "trace_rule": "int10"}, None),
    ):
        found = plan_of(build({**beside, "steps": {"policy": "virtual", **steps}}))
        assert found.steps(0)[2] == found.steps(0)[0]
        assert due is None or found.steps(0) == due
    units = plan_of(build({**beside, "steps": {"policy": "virtual", "speeds": [4, 2, 1]}})).units
    assert units(0) == 4


def test_speeds_are_one_a_block():
    with pytest.raises(
        ConfigError, match=r"steps.speeds: 2 numbers, due are 3: the server's and 2"
    ):
        plan(speeds=[1, 2])


def write_log(path, rows):
    path.write_text("".join(json.dumps({"round": r, "tau": t}) + "\n" for r, t in rows))


def test_a_script_takes_the_steps_on_record_and_no_others(tmp_path):
    write_log(tmp_path / "steps.jsonl", [(0, [3, 1, 2]), (1, [1, 5, 1])])
    for path in (tmp_path, tmp_path / "steps.jsonl"):
        config = build({"num_parties": 2, "steps": {"policy": "script", "replay": str(path)}})
        came = plan_of(config)
        assert [came.steps(0), came.steps(1)] == [(3, 1, 2), (1, 5, 1)]
        assert came.units is None  # the log does not say what its rounds cost
        assert came.length == 2
        assert came.expected == (3, 1, 2)
        policy = policy_of(config, 2, came)
        policy.begin_round(0)
        assert [policy.may_start(t) for t in range(3)] == [True, True, False]
        with pytest.raises(ConfigError, match="2 rounds are on record, round 2 is not"):
            policy.begin_round(2)


def test_what_was_expected_of_round_0_is_on_record(tmp_path):
    line = {"round": 0, "tau": [3, 1, 2], "expected": [7, 8, 9]}
    (tmp_path / "steps.jsonl").write_text(json.dumps(line) + "\n")
    taken, expected = read_steps(tmp_path, 3)
    assert taken.tolist() == [[3, 1, 2]]
    assert expected == (7, 8, 9)


@pytest.mark.parametrize(
    "text",
    ['{"round": 0, "tau": [0, 1, 1]}', '{"round": 0, "tau": [1, 1]}',
     '{"round": 1, "tau": [1, 1, 1]}', '{"round": 0, "tau": [1, 1.5, 1]}',
     '{"round": 0, "tau": [1, 1, 10000000000]}', '{"round": 0, "tau": [1, true, 1]}',
     "[]", "nonsense"],
)  # fmt: skip
def test_a_bad_log_is_named_by_line(tmp_path, text):
    (tmp_path / "steps.jsonl").write_text(text + "\n")
    with pytest.raises(DataError, match=r"steps.jsonl, line 1: .*due: round 0 and tau"):
        read_steps(tmp_path, 3)
    (tmp_path / "steps.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no rounds"):
        read_steps(tmp_path, 3)
    (tmp_path / "steps.jsonl").write_text('{"update": 0, "party": 1, "message": 0}\n')
    with pytest.raises(DataError, match="of an asynchronous run, which cannot be replayed"):
        read_steps(tmp_path, 3)


class Clock:
    """Stands in for the monotonic clock: time passes only in `sleep` and in steps."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("hpcvfl.engine.policies.time", self)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def take_round(policy, clock, step_s):
    policy.begin_round(0)
    begun, count = clock.now, 0
    while policy.may_start(count):
        clock.now += step_s
        policy.end_step()
        count += 1
    return count, clock.now - begun


@pytest.mark.parametrize(("step_s", "due"), [(1.0, 10), (2.5, 4), (9.5, 1), (0.25, 40)])
def test_t2_as_many_steps_as_end_within_the_timeout(monkeypatch, step_s, due):
    clock = Clock(monkeypatch)
    policy = WallClockSteps(10.0)
    for _ in range(4):
        count, spent = take_round(policy, clock, step_s)
        assert count == due  # these numbers and their means are exact
        assert spent == due * step_s <= 10.0
    assert not policy.too_short


def test_t2_one_step_is_taken_however_short_the_timeout(monkeypatch):
    clock = Clock(monkeypatch)
    policy = WallClockSteps(0.5)
    assert take_round(policy, clock, 2.0) == (1, 2.0)
    assert policy.too_short


def test_t2_a_single_slow_step_is_no_timeout_too_short(monkeypatch):
    clock = Clock(monkeypatch)
    policy = WallClockSteps(10.0)
    said = []
    for step_s in (2.0, 2.0, 30.0, 2.0, 30.0, 30.0, 30.0):
        take_round(policy, clock, step_s)
        said.append(policy.too_short)
    assert said == [False, False, False, False, False, False, True]  # 4 of 7 rounds


def test_t2_a_step_that_gets_slower_overruns_by_less_than_itself(monkeypatch):
    clock = Clock(monkeypatch)
    policy = WallClockSteps(10.0)
    rng = np.random.default_rng(0)
    for _ in range(50):
        policy.begin_round(0)
        begun, count, longest = clock.now, 0, 0.0
        while policy.may_start(count):
            step_s = float(rng.uniform(0.1, 3))
            clock.now += step_s
            policy.end_step()
            count, longest = count + 1, max(longest, step_s)
        assert count >= 1
        assert clock.now - begun < 10.0 + longest


def test_t2_a_slow_party_takes_its_share_of_the_steps(monkeypatch):
    clock = Clock(monkeypatch)
    fast, slow = WallClockSteps(12.0), WallClockSteps(12.0, slow_factor=4.0)
    for _ in range(3):
        counts = [take_round(policy, clock, 1.0)[0] for policy in (fast, slow)]
        assert counts == [12, 3]


def test_a1_the_adaptive_rate_is_a_over_tau_and_the_largest_weight():
    a, momentum = 0.7, OptimizerConfig(momentum=0.9)
    for tau in (1, 3, 11):
        w = weights_of(momentum, 0.1, tau)
        rate = adaptive_rate("adaptive", a, tau, w.w_bar, w.total)
        assert rate == pytest.approx(a / (tau * w.w_bar), rel=1e-15)
        assert w.w_bar == pytest.approx((1 - 0.9**tau) / 0.1, rel=1e-12)
        larger = adaptive_rate("adaptive-sum", a, tau, w.w_bar, w.total)
        assert larger * sum(w.w) == pytest.approx(a, rel=1e-12)
        assert larger >= rate


def test_a1_the_published_recursion_telescopes_to_the_same_rate():
    rng = np.random.default_rng(3)
    taus = rng.integers(1, 12, 200).tolist()
    rate = 0.01 / taus[0]
    for before, tau in itertools.pairwise(taus):
        assert adaptive_rate("adaptive", 0.01, before, 1.0, before) == pytest.approx(
            rate,
            rel=1e-13,  # the recursion rounds 400 times
        )
        rate *= before / tau


def test_a2_the_limit_is_never_violated_where_a_is_small_enough():
    # (14): eta tau w_bar <= 1 / (16 L), with A <= 1 / (16 alpha L) and alpha the largest growth.
    rng, smooth = np.random.default_rng(5), 3.0
    config = OptimizerConfig(momentum=0.5)
    taus = rng.integers(1, 9, 300).tolist()
    costs = [t * weights_of(config, 0.1, t).w_bar for t in taus]
    alpha = max(b / a for a, b in itertools.pairwise(costs))
    a = 1 / (16 * alpha * smooth)
    for before, tau, cost in zip(taus, taus[1:], costs[1:], strict=False):
        w = weights_of(config, 0.1, before)
        rate = adaptive_rate("adaptive", a, before, w.w_bar, w.total)
        assert rate * cost <= 1 / (16 * smooth) * (1 + 1e-12), (before, tau)
