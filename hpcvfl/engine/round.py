"""One round, the same on every rank. Read this file first.

    1 ids        rows = batches.rows(r)              the same on every rank, no message
    2 message    party: h_k = tower(x[rows])         graph kept: it is the forward of local step 0
                 server: theta_0
    3 frame      codec.encode(message) + header
    4 exchange   hub: gather to the server, broadcast of all frames; or one allgather
    5 others     decode every other frame            the own block stays exact
                 private labels: gather, then scatter of the gradient at each h_k (private.py)
    6 steps      while policy.may_start(t): one step of the own block, everything else frozen
    7            nothing is sent; tau and w_bar ride on the next header, and so does what keeper.py
                 asks: to stop, to write a checkpoint

C-VFL, Algorithm 1 (arXiv 2206.08330); with other step policies Flex-VFL, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcvfl.clock import PhaseClock
from hpcvfl.data import Batches
from hpcvfl.engine.ahead import Ahead
from hpcvfl.engine.blocks import Block
from hpcvfl.engine.exchange import Exchange
from hpcvfl.engine.policies import StepPolicy


@dataclass(frozen=True, slots=True)
class RoundResult:
    """tau: local steps taken; w_bar: the largest of their weights (weights.py); loss: of the batch
    at local step 0; seconds: own work in this round.
    """

    tau: int
    loss: float
    seconds: float
    w_bar: float = 0.0


def run_round(
    round_index: int,
    block: Block,
    exchange: Exchange,
    batches: Batches,
    policy: StepPolicy,
    rates: Sequence[float],
    last: RoundResult,
    clock: PhaseClock,
    ahead: Ahead | None = None,
) -> RoundResult:
    """Run one round of `block` at the rates of `block.blocks`; `last` is the result of the previous
    round, told to the others.

    ahead : where frames travel a round ahead (ahead.py); those of this round are then here
    """
    worked_s = clock.computing_s()
    exchange.transport.round_index = round_index

    told = (last.tau, last.w_bar, last.seconds)
    if ahead:
        ahead.begin(round_index + 1, *told)

    clock.to("forward")
    rows_N = batches.rows(round_index)
    block.begin_round(round_index, rows_N, *rates)
    if not ahead:
        message = block.message()

        clock.to("encode")
        exchange.encode(round_index, rows_N, message, block.score(), *told)

        clock.to("wire")
        exchange.deliver(round_index, rows_N, block, clock)

    clock.to("local steps")
    policy.begin_round(round_index)
    tau, loss = 0, 0.0
    while policy.may_start(tau):
        value = block.step(round_index, tau)
        loss = value if tau == 0 else loss
        policy.end_step()
        tau += 1
    if ahead:
        ahead.make(round_index + 2)
        ahead.end(round_index + 1)
    clock.to("other")
    seconds = clock.computing_s() - worked_s
    return RoundResult(tau, loss, seconds, block.optimizer.weights(tau).w_bar)
