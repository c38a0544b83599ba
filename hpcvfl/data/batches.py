"""Which rows make a round: the same answer on every rank, without a message."""

from __future__ import annotations

import numpy as np

from hpcvfl import seeds


class Batches:
    """Cuts an order of all rows into rounds, a new order each epoch.

    num_rows   : int >= 1   training rows
    batch_size : int >= 1   rows per round; the last round of an epoch takes what is left
    seed       : int        the run's seed; the order of an epoch is keyed by (seed, epoch)
    shuffle    : bool       False: the order of the file, each epoch anew

    Any round may be asked for in any order, so a resumed run sees what the uninterrupted one saw.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int, shuffle: bool = True) -> None:
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._epoch = -1  # the epoch whose order _order_N holds
        self._order_N = np.arange(num_rows, dtype=np.int64)

    @property
    def rounds_per_epoch(self) -> int:
        """Rounds until every row was seen once."""
        return -(-self.num_rows // self.batch_size)

    def epoch_of(self, round_index: int) -> int:
        """Epoch (from 0) that a round (from 0) belongs to."""
        return round_index // self.rounds_per_epoch

    def rows(self, round_index: int) -> np.ndarray:
        """Row numbers of a round: int64, shape (B,), the caller's own copy; B <= batch_size."""
        order_N = self._order(self.epoch_of(round_index))
        start = (round_index % self.rounds_per_epoch) * self.batch_size
        return order_N[start : start + self.batch_size].copy()

    def _order(self, epoch: int) -> np.ndarray:
        if self.shuffle and epoch != self._epoch:
            draw = seeds.generator(self.seed, "batches", epoch)
            self._order_N = draw.permutation(self.num_rows).astype(np.int64, copy=False)
            self._epoch = epoch
        return self._order_N
