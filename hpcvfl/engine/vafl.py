"""The asynchronous driver: the server serves one party at a time, and nobody waits for the others.

    start     every party sends the embeddings of all training samples, batch by batch, through its
              codec; they fill the server's table (vafl_exchange.py) and count as training bytes
    party k   1  rows = batches.rows(c), c its own count, which goes on after the upload's
              2  sends h_k = tower(x[rows]); waits for the answer
              3  one step down J^T C, C the gradient that came
    server    1  takes the message of the party whose turn it is into the table
              2  loss of these rows from the table's entries of all parties, the others' as old as
                 they are
              3  answers with the gradient at h_k; one step of the head

VAFL (Chen, Jin, Sun & Yin, arXiv 2007.06081), the asynchronous baseline of Flex-VFL's experiments.
Unlike their published code, the table is keyed by sample, so that it holds when batches are drawn
anew; filling it is not free; each party's own optimizer steps its own tower.

Whose turn it is: in virtual time party k acts at multiples of

    period_k = timeout / speed_k + algorithm.comm_units        (steps.policy = virtual)

in units of a step of a block of full speed, the lower number first where several act at once; with
steps.policy = fixed all have speed = timeout. The clock is that of the last update; the upload and
evaluations cost no virtual time. With steps.policy = wall-clock it is whoever came first.

A "round" of the books is an update of the server; an epoch is as many as it takes all parties
together to see each sample once each. Rates follow the same count, at a party as far as the last
answer told it: a schedule ends with the run, however often a party was served.

An evaluation needs everybody: the server holds the others' messages back unserved and calls their
senders by a header alone. They are served afterwards; those held at the end of the run never are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from fractions import Fraction

from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.config import Config
from hpcvfl.data import Batches
from hpcvfl.engine.blocks import PrivateParty, Server
from hpcvfl.engine.evaluations import evaluate_and_tell, evaluation_is_due
from hpcvfl.engine.exchange import RAW_ITEMSIZE
from hpcvfl.engine.observer import Observer
from hpcvfl.engine.prepare import Run
from hpcvfl.engine.rates import learning_rate
from hpcvfl.engine.round import RoundResult
from hpcvfl.engine.vafl_exchange import VaflExchange
from hpcvfl.errors import WireError
from hpcvfl.transport.metered import Metered

AfterRound = Callable[[Run, RoundResult], None]

UPLOAD = -1
"""Number of the upload in the ledgers: before update, or message, 0."""


def drive(run: Run, shown: Observer, after_round: AfterRound | None) -> None:
    """Fill the table, then update until the last update or the target; called by every rank."""
    run.meter.phase = "train"
    fill_table(run)
    run.transport.timeout_s = run.config.transport.timeout_s
    if isinstance(run.block, Server):
        serve(run, run.block, shown, after_round)
    else:
        assert isinstance(run.block, PrivateParty)
        attend(run, run.block, shown, after_round)
    run.steps.close()  # every update is written, the last one too


class Schedule:
    """Whose turn it is in virtual time, exactly: times are fractions, so that ties are ties.

    periods_M : of each party, in units
    """

    def __init__(self, config: Config) -> None:
        """Of a config with steps.policy fixed or virtual."""
        steps = config.steps
        costs_M = [Fraction(1)] * config.num_parties
        if steps.policy == "virtual":
            timeout = exact(steps.timeout_units or max(steps.speeds))
            costs_M = [timeout / exact(speed) for speed in steps.speeds[1:]]
        comm = exact(config.algorithm.comm_units)
        self.periods_M = [cost + comm for cost in costs_M]
        self._events = [(period, k) for k, period in enumerate(self.periods_M, 1)]
        heapq.heapify(self._events)

    def next(self) -> tuple[int, float]:
        """(party, time in units) of the next event."""
        at, party = self._events[0]
        heapq.heapreplace(self._events, (at + self.periods_M[party - 1], party))
        return party, float(at)


def exact(value: float) -> Fraction:
    """The number that was written, not the float nearest to it: 0.1 is one tenth."""
    return Fraction(repr(float(value)))


class Walk:
    """Where a party is in its batches: `number` and `rows_N` of its present message."""

    def __init__(self, run: Run) -> None:
        """At the first message after the upload, which was an epoch's."""
        data = run.config.data
        rows = run.batches.num_rows
        self._batches = Batches(rows, data.batch_size, run.config.seed, data.shuffle)
        self.number = self._batches.rounds_per_epoch
        self.rows_N = self._batches.rows(self.number)

    def go_on(self) -> None:
        """To the next message."""
        self.number += 1
        self.rows_N = self._batches.rows(self.number)


def fill_table(run: Run) -> None:
    """Send all training embeddings, in train mode, as messages 0 to the end of epoch 0."""
    swap, clock = exchange_of(run), run.clock
    for number in range(run.batches.rounds_per_epoch):
        clock.to("forward")
        rows_N = run.batches.rows(number)
        run.block.begin_round(number, rows_N, run.block.config.optimizer.lr)
        message = run.block.message()
        clock.to("encode")
        swap.encode(number, rows_N, message, run.block.score())
        clock.to("wire")
        waited_s = run.transport.waited_s
        swap.fill(number, rows_N, run.block)
        clock.to("other", waited_s=run.transport.waited_s - waited_s)
    run.meter.end_round(UPLOAD)


def serve(run: Run, server: Server, shown: Observer, after_round: AfterRound | None) -> None:
    """The server's side of all updates."""
    swap = exchange_of(run)
    walks_M = [Walk(run) for _ in range(run.config.num_parties)]
    book_raw_bytes(run, lambda peer: walks_M[peer - 1])
    schedule = None if run.config.steps.policy == "wall-clock" else Schedule(run.config)
    while True:
        run.transport.round_index = run.rounds
        party = next_party(run, swap, schedule)
        result = one_update(run, server, party, walks_M[party - 1])
        walks_M[party - 1].go_on()
        due = evaluation_is_due(run)
        if due:
            call_the_others(run, swap, walks_M)
        run.meter.end_round(run.rounds - 1)
        shown.round(result.loss)
        if after_round:
            after_round(run, result)
        if due and evaluation_ends(run, shown):
            return


def next_party(run: Run, swap: VaflExchange, schedule: Schedule | None) -> int:
    """The party whose turn it is, its message held; moves the virtual clock."""
    clock, transport = run.clock, run.transport
    clock.to("wire")
    waited_s = transport.waited_s
    if schedule:
        party, run.units = schedule.next()
        if party not in swap.held:
            swap.receive_embedding(party)
    else:
        if not swap.held:
            swap.receive_embedding(None)
        party = next(iter(swap.held))
    clock.to("other", waited_s=transport.waited_s - waited_s)
    return party


def one_update(run: Run, server: Server, party: int, walk: Walk) -> RoundResult:
    """Serve the message held of `party`: table, answer, one step of the head, books."""
    swap, clock, transport, update = exchange_of(run), run.clock, run.transport, run.rounds
    number, rows_N = walk.number, walk.rows_N
    worked_s = clock.computing_s()
    clock.to("decode")
    server.begin_round(update, rows_N, rate_of(run))
    swap.take(party, number, rows_N, server)
    clock.to("local steps")
    gradient_NP = server.embedding_gradients()[party - 1]
    clock.to("encode")
    frame_B = swap.encode_gradient(party, number, rows_N, gradient_NP, update + 1)
    clock.to("wire")
    waited_s = transport.waited_s
    transport.send(frame_B, party, "grad")
    clock.to("local steps", waited_s=transport.waited_s - waited_s)
    run.policy.begin_round(update)
    loss = server.step(update, 0)
    run.policy.end_step()
    clock.to("other")
    run.messages.note(update, swap.headers_R)
    units = run.units if run.plan else None
    run.steps.served(update, party, number, clock.training_s(), units)
    run.rounds = update + 1
    return book_step(run, loss, worked_s)


def call_the_others(run: Run, swap: VaflExchange, walks_M: list[Walk]) -> None:
    """Wait for a message of everybody but the party served last, which knows, and tell their
    senders that an evaluation comes first.
    """
    # Each must have been received: a party may not get out of its send before.
    clock, transport = run.clock, run.transport
    clock.to("eval")  # who is waited for here is waited for because of the evaluation
    while len(swap.held) < len(walks_M) - 1:
        swap.receive_embedding(None)
    for party in swap.held:
        walk = walks_M[party - 1]
        frame_B = swap.encode_note(party, walk.number, walk.rows_N, run.rounds)
        transport.send(frame_B, party, "grad")
    clock.to("other")


def attend(run: Run, party: PrivateParty, shown: Observer, after_round: AfterRound | None) -> None:
    """A party's side of all updates."""
    swap, clock, walk = exchange_of(run), run.clock, Walk(run)
    book_raw_bytes(run, lambda peer: walk)
    while True:
        run.transport.round_index = walk.number
        worked_s = clock.computing_s()
        send_batch(run, swap, party, walk)
        answered = wait_for_gradient(run, swap, party, walk, shown)
        if not answered:
            run.meter.end_round(walk.number)
            return
        clock.to("local steps")
        run.policy.begin_round(walk.number)
        loss = party.step(walk.number, 0)
        run.policy.end_step()
        clock.to("other")
        result = book_step(run, loss, worked_s)
        run.meter.end_round(walk.number)
        if after_round:
            after_round(run, result)
        if evaluation_is_due(run) and evaluation_ends(run, shown):
            return
        walk.go_on()


def send_batch(run: Run, swap: VaflExchange, party: PrivateParty, walk: Walk) -> None:
    """Forward and message of one batch; a slowed party is slow in both halves of its step."""
    clock, transport, last = run.clock, run.transport, run.last
    clock.to("forward")
    run.policy.begin_round(walk.number)
    party.begin_round(walk.number, walk.rows_N, rate_of(run))
    message = party.message()
    run.policy.end_step()
    clock.to("encode")
    swap.encode(
        walk.number, walk.rows_N, message, party.score(), last.tau, last.w_bar, last.seconds
    )
    clock.to("wire")
    waited_s = transport.waited_s
    swap.send_embedding(len(walk.rows_N))
    clock.to("other", waited_s=transport.waited_s - waited_s)


def wait_for_gradient(
    run: Run, swap: VaflExchange, party: PrivateParty, walk: Walk, shown: Observer
) -> bool:
    """Wait for the answer, taking part in evaluations meanwhile; False if the run ends first."""
    clock, transport = run.clock, run.transport
    while True:
        clock.to("wire")
        waited_s = transport.waited_s
        frame_B = swap.receive_answer()
        clock.to("decode", waited_s=transport.waited_s - waited_s)
        updates, answered = swap.read_answer(frame_B, walk.number, walk.rows_N, party)
        if not run.rounds < updates <= run.total_rounds:
            raise WireError(
                f"rank {transport.rank}, round {walk.number}: grad from rank 0 tells of {updates}"
                f" updates, due are {run.rounds + 1} to {run.total_rounds}; do all ranks run the"
                " same version?"
            )
        run.rounds = updates
        if answered:
            return True
        clock.to("other")
        if evaluation_ends(run, shown):
            return False


def evaluation_ends(run: Run, shown: Observer) -> bool:
    """Evaluate; whether the run is over, the same answer on every rank."""
    over = evaluate_and_tell(run, shown) or run.rounds == run.total_rounds
    if not over:
        run.meter.phase = "train"
    return over


def rate_of(run: Run) -> float:
    """The own block's rate after so many updates of the server as it knows of."""
    parties, optimizer = run.config.num_parties, run.block.config.optimizer
    per_epoch, total = run.batches.rounds_per_epoch, run.total_rounds // parties
    return learning_rate(optimizer, run.rounds // parties, per_epoch, total)


def book_step(run: Run, loss: float, worked_s: float) -> RoundResult:
    """The result of a step, kept for the next message; `worked_s` is of before it."""
    weights = run.block.optimizer.weights(1)
    seconds = run.clock.computing_s() - worked_s
    run.last = RoundResult(1, loss, seconds, weights.w_bar)
    return run.last


def book_raw_bytes(run: Run, walk_with: Callable[[int], Walk]) -> None:
    """Tell the ledger what the frames to and from a peer were before encoding."""
    values = run.config.model.embedding_dim

    def raw_nbytes(peer: int, kind: str, nbytes: int) -> int:
        rows = 0 if nbytes == HEADER_NBYTES else len(walk_with(peer).rows_N)
        return RAW_ITEMSIZE * rows * values

    assert isinstance(run.transport, Metered)
    run.transport.raw_nbytes = raw_nbytes


def exchange_of(run: Run) -> VaflExchange:
    """The exchange, of the class that this driver made it."""
    assert isinstance(run.exchange, VaflExchange)
    return run.exchange
