"""Batches: laws for any size, checked on drawn sizes (the same draws on every rank)."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcvfl.data import Batches

sizes = st.tuples(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2**63 - 1))
laws = settings(derandomize=True, deadline=None, max_examples=60)


def epoch_rows(batches, epoch):
    """The rows of each round of an epoch."""
    first = epoch * batches.rounds_per_epoch
    return [batches.rows(first + i) for i in range(batches.rounds_per_epoch)]


@laws
@given(sizes, st.integers(0, 1000), st.booleans())
def test_an_epoch_holds_every_row_exactly_once(size, epoch, shuffle):
    num_rows, batch_size, seed = size
    batches = Batches(num_rows, batch_size, seed, shuffle)
    rows = np.concatenate(epoch_rows(batches, epoch))
    assert rows.dtype == np.int64
    assert np.array_equal(np.sort(rows), np.arange(num_rows))


@laws
@given(sizes)
def test_every_round_is_full_but_the_last_which_takes_what_is_left(size):
    num_rows, batch_size, seed = size
    lengths = [len(rows) for rows in epoch_rows(Batches(num_rows, batch_size, seed), 0)]
    assert lengths[:-1] == [batch_size] * (len(lengths) - 1)
    assert 1 <= lengths[-1] <= batch_size
    assert sum(lengths) == num_rows


@laws
@given(sizes, st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_round_does_not_depend_on_what_was_asked_before_nor_on_the_rank(size, rounds):
    batches = Batches(*size)
    asked_in_turn = [batches.rows(r) for r in rounds]
    for r, rows in zip(rounds, asked_in_turn, strict=True):
        assert np.array_equal(rows, Batches(*size).rows(r))


@laws
@given(sizes, st.integers(0, 500))
def test_the_epoch_of_a_round_counts_whole_passes(size, round_index):
    batches = Batches(*size)
    before = sum(len(batches.rows(r)) for r in range(round_index % batches.rounds_per_epoch))
    assert before < batches.num_rows
    assert batches.epoch_of(round_index) == round_index // batches.rounds_per_epoch
    assert batches.epoch_of(0) == 0


@laws
@given(st.integers(0, 2**63 - 2), st.integers(0, 100))
def test_orders_of_two_epochs_and_of_two_seeds_differ(seed, epoch):
    def order(seed, epoch):
        return np.concatenate(epoch_rows(Batches(200, 64, seed), epoch)).tolist()

    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


@laws
@given(sizes)
def test_without_shuffling_every_epoch_is_the_order_of_the_file(size):
    num_rows, batch_size, seed = size
    batches = Batches(num_rows, batch_size, seed, shuffle=False)
    for epoch in (0, 3):
        assert np.array_equal(np.concatenate(epoch_rows(batches, epoch)), np.arange(num_rows))


def test_a_caller_that_changes_its_rows_does_not_change_the_next_answer():
    batches = Batches(10, 10, 0)
    rows = batches.rows(0)
    due = rows.copy()
    rows[:] = 0
    assert np.array_equal(batches.rows(0), due)


def test_a_row_is_equally_likely_at_every_place():
    """Chi-square of row 0's place over 2,000 epochs; 99.9 % point of 9 degrees: 27.9."""
    batches = Batches(10, 10, 7)
    places = [int(np.flatnonzero(batches.rows(epoch) == 0)[0]) for epoch in range(2000)]
    counts = np.bincount(places, minlength=10)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9
