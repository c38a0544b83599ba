"""One round ahead: the next round's frames travel while this round's local steps run.

    before round 0   the exchange of round 0, as ever
    in round r       1 encode the message of round r + 1, made of the parameters as they are
                     2 move the frames, in a thread of its own, while the local steps of round r run
                     3 after the steps, while frames may still be on their way, make the message of
                       round r + 2: the parameters stay what they are until 1 in round r + 1
                     4 when the frames are here, decode: the snapshot of round r + 1

So the snapshot of a round is one round staler than without, and local step 0 needs a forward of its
own: the parameters have moved since its embedding was sent. Only encoding and decoding stand
between one exchange and the next. A rank computes while it waits, and makes no MPI call of its own
meanwhile. On the threads transport, where ranks take turns, frames
move before the steps: the bits are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from hpcvfl.clock import PhaseClock
from hpcvfl.codecs.base import Array
from hpcvfl.data import Batches
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.exchange import Exchange
from hpcvfl.errors import ConfigError, DataError


class Ahead:
    """The exchange of the next round on one rank."""

    def __init__(
        self,
        block: Block,
        exchange: Exchange,
        batches: Batches,
        total_rounds: int,
        clock: PhaseClock,
    ) -> None:
        """Nothing moves before `begin`. Raises ConfigError if no thread may move frames here."""
        if not exchange.transport.threaded:
            raise ConfigError(
                "algorithm.pipeline = 1: this MPI lets one thread alone call it; use an MPI that"
                " gives MPI_THREAD_SERIALIZED or more (MPI_Init_thread), or leave pipeline at 0"
            )
        self._block, self._exchange, self._batches = block, exchange, batches
        self._total_rounds, self._clock = total_rounds, clock
        self._made: tuple[int, list[Array]] | None = None  # a round and its message
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def begin(self, round_index: int, tau: int, w_bar: float, seconds: float) -> None:
        """Encode the message of round `round_index` and let the frames go; nothing after the last.

        tau, w_bar, seconds : of the last round that is over, told to the others
        """
        if round_index >= self._total_rounds:
            return
        exchange = self._exchange
        exchange.transport.round_index = round_index
        message = self.make(round_index)
        self._clock.to("encode")
        rows_N = self._batches.rows(round_index)
        exchange.encode(round_index, rows_N, message, self._block.score(), tau, w_bar, seconds)
        if exchange.transport.name == "threads":
            self._clock.to("wire")
            exchange.swap(len(rows_N))
            return
        # A daemon: after an error in the local steps it must not keep the rank from ending.
        self._thread = threading.Thread(target=self._move, args=(len(rows_N),), daemon=True)
        self._thread.start()

    def make(self, round_index: int) -> list[Array]:
        """The message of round `round_index`, of the parameters as they are; once for a round, so
        call it only when they have their values of its `begin`. Empty after the last round.
        """
        if round_index >= self._total_rounds:
            return []
        if self._made is None or self._made[0] != round_index:
            self._clock.to("forward")
            rows_N = self._batches.rows(round_index)
            self._made = round_index, self._block.message_ahead(round_index, rows_N)
        return self._made[1]

    def end(self, round_index: int) -> bool:
        """Wait for the frames of `begin` and decode them; whether there were any.

        Raises what moving them raised.
        """
        if round_index >= self._total_rounds:
            return False
        transport, waited_s = self._exchange.transport, 0.0
        if self._thread:
            waited_s = transport.waited_s
            self._clock.to("wire")
            self._thread.join()
            self._thread = None
            # A wait is told of when it ends: one that began beside the steps counts in whole, but
            # for no more than the clock has seen of it.
            waited_s = transport.waited_s - waited_s
        if self._failure:
            raise self._failure
        self._clock.to("decode", waited_s)
        rows_N = self._batches.rows(round_index)
        self._exchange.decode(round_index, rows_N, self._block.targets(len(rows_N)))
        return True

    def state(self, round_index: int) -> dict[str, Array]:
        """Copies of the snapshot of round `round_index`, which is here, "RANK.TENSOR" -> what was
        decoded of that tensor of that rank's message; and "made.TENSOR" of the message of the round
        after it, which is made: another forward might move buffers of a tower once more.
        """
        out = {name: array.copy() for name, array in self._snapshot(round_index).items()}
        if self._made and self._made[0] == round_index + 1:
            out |= {f"made.{i}": array.copy() for i, array in enumerate(self._made[1])}
        return out

    def _snapshot(self, round_index: int) -> dict[str, Array]:
        targets = self._block.targets(len(self._batches.rows(round_index)))
        return {
            f"{rank}.{i}": array
            for rank, arrays in enumerate(targets)
            for i, array in enumerate(arrays or ())
        }

    def restore(self, round_index: int, state: Mapping[str, Array]) -> None:
        """Have what `state` gave. Raises DataError if it does not fit."""
        made = {n: a for n, a in state.items() if n.startswith("made.")}
        if made:
            self._made = round_index + 1, [made[f"made.{i}"] for i in range(len(made))]
        state = {n: a for n, a in state.items() if n not in made}
        here = self._snapshot(round_index)
        shapes = ({n: a.shape for n, a in arrays.items()} for arrays in (here, state))
        if next(shapes) != next(shapes):
            raise DataError(f"the snapshot of round {round_index} does not fit this run")
        for name, array in here.items():
            array[...] = state[name]

    def _move(self, batch_size: int) -> None:
        try:
            self._exchange.swap(batch_size)
        except BaseException as error:  # raised again where the frames are waited for
            self._failure = error
