"""Two blocks in one process: the server beside the party that holds the labels.

The holder's embedding and its gradient do not travel and are not compressed; all else is as with a
server of its own. Both blocks take the steps of block 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from hpcvfl.codecs.base import Array
from hpcvfl.config import Config
from hpcvfl.data import Shard
from hpcvfl.engine.blocks import Block, PrivateParty, Server
from hpcvfl.errors import DataError, NonFiniteError


class Holder(Server):
    """Block 0 with `own`, the block of the party that holds the labels."""

    def __init__(self, config: Config, shard: Shard, module: nn.Module, own: Block) -> None:
        """`config` and `shard` are the server's."""
        assert isinstance(own, PrivateParty)
        if own.shard.ids_digest != shard.ids_digest:
            raise DataError(
                f"start-up: digest of the sample ids: party {own.block} {own.shard.ids_digest}, the"
                f" server beside it {shard.ids_digest}; both must hold the same samples"
            )
        super().__init__(0, config, shard, module)
        self.own = own
        self.own_w_bar = 0.0  # of the round before, for the log
        self._steps = 0
        self._own_generator = torch.default_generator.get_state()

    @property
    def blocks(self) -> Sequence[Block]:
        """See Block."""
        return (self, self.own)

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        """The party draws from a generator of its own, as in a process of its own."""
        servers = torch.default_generator.get_state()
        torch.default_generator.set_state(self._own_generator)
        try:
            yield
        finally:
            self._own_generator = torch.default_generator.get_state()
            torch.default_generator.set_state(servers)

    def begin_round(self, round_index: int, rows_N: Array, *rates: float) -> None:
        """Of both blocks; rates: the server's, the party's."""
        if self._steps:
            self.own_w_bar = self.own.optimizer.weights(self._steps).w_bar
        self._steps, self._round = 0, round_index
        with self._own_random():
            self.own.begin_round(round_index, rows_N, rates[1])
        super().begin_round(round_index, rows_N, rates[0])

    def state(self) -> tuple[float, int]:
        """What the next `begin_round` goes by, of the round before."""
        return self.own_w_bar, self._steps

    def restore(self, own_w_bar: float, steps: int) -> None:
        """Go on from what `state` gave."""
        self.own_w_bar, self._steps = own_w_bar, steps

    def message(self) -> list[Array]:
        """Puts the own embedding in its place among those that arrive; nothing is sent."""
        with self._own_random():
            (embedding_NP,) = self.own.message()
        # Codecs look at what travels; this does not.
        if not np.isfinite(embedding_NP).all():
            raise NonFiniteError(
                f"block {self.own.block}, round {self._round}: NaN or Inf in its embedding; a"
                " smaller optimizer.lr may help"
            )
        self._embeddings(len(self._rows))[self.own.block - 1].copy_(torch.from_numpy(embedding_NP))
        return super().message()

    def _make_targets(self, batch_size: int) -> list[list[Array] | None]:
        targets = super()._make_targets(batch_size)
        del targets[self.own.block]
        return targets

    def embedding_gradients(self) -> list[Array]:
        """See Server; the own one stays here."""
        gradients = super().embedding_gradients()
        self.own.gradient(len(self._rows))[...] = gradients[self.own.block - 1]
        return gradients

    def step(self, round_index: int, step: int) -> float:
        """A local step of both; the loss is the server's."""
        value = super().step(round_index, step)
        with self._own_random():
            self.own.step(round_index, step)
        self._steps = step + 1
        return value

    def trial_step_s(self, rows_N: Array) -> float:
        """Seconds of a step of both."""
        return super().trial_step_s(rows_N) + self.own.trial_step_s(rows_N)
