"""`auto`: the mean error follows the schedule, with no more bits than that takes."""

import math

import pytest

from hpcvfl.codecs import table
from hpcvfl.codecs.auto import RateControl


def play(codec, rounds, error_of):
    """Levels and errors of a run whose message at `bits` in round r has error_of(bits, r)."""
    control, level, told = RateControl(codec), codec.first_level, []
    for r in range(rounds):
        error = error_of(codec.bits[level], r)
        told.append((codec.bits[level], error))
        level = control.next_level(r, level, error)
    return told


def gaussian(bits, r):
    """Errors of the best uniform quantiser of a normal (Max 1960), 6 dB a bit beyond 4."""
    return {1: 0.3634, 2: 0.1188, 3: 0.03744, 4: 0.01154}.get(bits, 0.01154 * 4.0 ** (4 - bits))


@pytest.mark.parametrize("error", [0.5, 0.2, 0.05, 0.01])
@pytest.mark.parametrize("horizon", [50, 500])
def test_the_mean_error_keeps_to_the_schedule(error, horizon):
    codec = table.parse(f"auto:error={error},horizon={horizon}")
    told = play(codec, 3000, gaussian)
    due = sum(codec.due(r) for r in range(3000))
    measured = sum(e for _, e in told)
    assert measured <= 1.01 * due
    assert measured >= 0.5 * due or max(b for b, _ in told) == 1  # nor finer than it need be


def test_bits_grow_as_the_schedule_tightens():
    codec = table.parse("auto:error=0.3,horizon=20")
    told = play(codec, 20_000, gaussian)
    means = [sum(b for b, _ in told[i : i + 500]) / 500 for i in (0, 2000, 19_500)]
    assert means[0] < means[1] < means[2]


def test_messages_that_got_easier_need_fewer_bits():
    codec = table.parse("auto:error=0.05,horizon=100000")
    told = play(codec, 600, lambda bits, r: gaussian(bits, r) * (1 if r < 300 else 0.01))
    assert told[290][0] >= 2
    assert told[-1][0] == 1


def test_an_error_out_of_reach_takes_all_the_bits_there_are():
    codec = table.parse("auto:error=0.001")
    assert play(codec, 100, lambda bits, r: 0.5)[-1][0] == 8


def test_the_schedule_is_of_order_one_over_the_square_root_of_t():
    codec = table.parse("auto:error=0.1,horizon=100")
    means = [sum(codec.due(r) for r in range(t)) / t * math.sqrt(t) for t in (10**4, 10**5)]
    assert means[1] == pytest.approx(means[0], rel=0.1)
    assert codec.due(0) == 0.1


@pytest.mark.parametrize(("error", "bits"), [(0.9, 1), (0.25, 1), (0.06, 3), (1e-3, 5), (1e-9, 8)])
def test_the_first_level_is_six_decibels_a_bit(error, bits):
    codec = table.parse(f"auto:error={error}")
    assert codec.bits[codec.first_level] == bits


def test_the_canonical_spec_leaves_defaults_out():
    default = table.parse("auto:error=0.1").rates[0].spec.replace("bits=1,", "")
    assert table.parse(f"auto:horizon=100,codec=({default})").spec == "auto:error=0.1"


def test_a_codec_need_not_have_every_number_of_bits():
    codec = table.parse("auto:error=0.2,codec=qsgd")
    assert codec.bits == tuple(range(2, 9))
    assert codec.rates[0].spec == "qsgd:bits=2"
    assert table.parse("auto:codec=lattice-paper").bits == (2, 3, 4)


def test_the_error_is_spelled_out_to_the_last_digit():
    assert table.parse("auto:error=0.123456789").spec == "auto:error=0.123456789"
