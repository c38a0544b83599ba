"""Books, clocks and keys."""

import json
import time

import numpy as np
import pytest

from hpcvfl import seeds
from hpcvfl.clock import PhaseClock
from hpcvfl.ledger import Meter, paper_bytes

KEY = 0x14FEE0F56FF564A2


def test_meter_adds_up_by_phase_kind_direction_and_peer(tmp_path):
    meter = Meter()
    meter.open(tmp_path / "ledger")
    meter.phase = "train"
    meter.record(1, "embed", "in", 10, 40)
    meter.record(1, "embed", "in", 5, 20)
    meter.record(2, "head", "out", 7, 28)
    meter.end_round(0)
    meter.phase = "eval"
    meter.record(1, "eval", "in", 100, 100)
    meter.end_round(1)
    meter.close()
    assert meter.received() == (15, 60)
    assert meter.received("eval") == (100, 100)
    assert meter.table()[1] == {
        "phase": "train", "kind": "embed", "direction": "in", "peer": 1,
        "wire_bytes": 15, "raw_bytes": 60, "messages": 2,
    }  # fmt: skip
    lines = [json.loads(x) for x in (tmp_path / "ledger").read_text().splitlines()]
    assert lines == [{"round": 0, "in.embed": 15, "out.head": 7}, {"round": 1}]


@pytest.mark.parametrize(
    ("bits", "batch", "dim", "head", "due"),
    [
        (32, 1000, 16, 128, 2_050_048),
        (2, 1000, 16, 128, 128_128),
        (4, 100, 16, 640, 26_880),
        (3, 64, 4096, 163_840, 3_391_488),
    ],
)
def test_paper_formula_gives_the_tables_of_the_paper(bits, batch, dim, head, due):
    assert paper_bytes(bits, batch, dim, 4, head) == due


def test_clock_books_every_second_once():
    clock = PhaseClock()
    for phase in ("load", "forward", "wire", "decode", "other"):
        clock.to(phase)
        time.sleep(0.002)
    clock.to("other", waited_s=1e9)
    assert sum(clock.seconds.values()) == pytest.approx(clock.elapsed(), abs=0.01)
    assert clock.seconds["wait"] > 0
    assert clock.training_s() >= clock.computing_s() > 0


def test_trace_is_a_chrome_trace(tmp_path):
    clock = PhaseClock()
    clock.to("load")
    clock.to("forward")
    clock.write_trace(tmp_path / "trace", 3)
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    assert [e["name"] for e in events] == ["start", "load"]
    assert all(e["pid"] == 3 and e["ph"] == "X" for e in events)


def test_keys_are_fixed_numbers_and_tell_purposes_apart():
    # Fixed for ever: another value would change every published run.
    assert seeds.key64(0, "dither", 1, 2) == KEY
    keys = {
        seeds.key64(s, name, r, k)
        for s in (0, 1) for name in ("a", "b") for r in range(10) for k in range(10)
    }  # fmt: skip
    assert len(keys) == 400
    assert seeds.key64(0, "a", 1) != seeds.key64(0, "a1")
    assert seeds.key64(0, 1, 2) != seeds.key64(0, 12)
    with pytest.raises(ValueError, match="comma"):
        seeds.key64(0, "a,i1")
    assert all(0 <= k < 2**64 for k in keys)


def test_subkeys_are_the_splitmix64_sequence():
    # First outputs for seed 1234567, from the reference implementation by Vigna.
    due = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [seeds.subkey(1234567, i) for i in range(3)] == due


def test_generators_repeat():
    a, b = (seeds.generator(1, "x", 2).random(5) for _ in range(2))
    assert (a == b).all()
    assert not np.array_equal(a, seeds.generator(1, "x", 3).random(5))
