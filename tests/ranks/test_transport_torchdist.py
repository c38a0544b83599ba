"""The torchdist transport: the contract, and what gloo is relied on for.

Ranks are threads here, each with a gloo group and connections of its own: the same code and the
same bytes on sockets as between processes, without starting any.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from support.transport_contract import WRAPPERS, TransportContract, content, slots_of
from torch.distributed import PrefixStore, TCPStore

from hpcvfl.errors import ConfigError, TransportError, TransportTimeout
from hpcvfl.transport import Transport, torchdist
from hpcvfl.transport.torchdist import COPIED_NBYTES, UNDER_WAY, TorchTransport

pytestmark = pytest.mark.timeout(120)
NUMBERS = count()


@pytest.fixture(scope="module")
def stores() -> list[TCPStore]:
    """A connection to one server for each rank; kept, as making them anew stalls now and then."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in "1234")]


class TorchGroup:
    """The contract's `world` over gloo."""

    def __init__(
        self,
        stores: list[TCPStore],
        size: int,
        wrap: Callable[[Transport], Transport] = lambda t: t,
    ) -> None:
        self.stores, self.size, self.wrap = stores, size, wrap

    def run(self, fn: Callable[[Transport], Any], timeout_s: float = 20.0) -> list[Any]:
        results: list[Any] = [None] * self.size
        failed: list[str] = []
        done = threading.Barrier(self.size)
        name = f"group{next(NUMBERS)}"

        def rank(k: int) -> None:
            try:
                store = PrefixStore(name, self.stores[k])
                t = TorchTransport(timeout_s, (store, k, self.size))
                results[k] = fn(self.wrap(t))
                done.wait(60)
                t.close()
            except BaseException:
                failed.append(f"on rank {k}:\n{traceback.format_exc()}")
                done.abort()

        threads = [threading.Thread(target=rank, args=(k,), daemon=True) for k in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert not failed, "\n".join(failed)
        return results


class TestTorchdist(TransportContract):
    @pytest.fixture(params=[(2, "plain"), (3, "metered"), (5, "plain")])
    def world(self, request: pytest.FixtureRequest, stores: list[TCPStore]) -> TorchGroup:
        size, wrapper = request.param
        return TorchGroup(stores, size, WRAPPERS[wrapper])


def test_gloo_cannot_be_asked_whether_a_receive_is_over(stores: list[TCPStore]) -> None:
    """Why a thread waits. Should this fail one day, a rank can test as it does over MPI."""

    def fn(t: Any) -> None:
        one = [torch.zeros(8, dtype=torch.uint8)]
        if t.rank == 0:
            work = t._group.recv(one, 1, 5)
            t.barrier()  # the bytes of rank 1 have come before its token
            assert not work.is_completed()
            work.wait()
            assert work.is_completed()
        else:
            work = t._group.send(one, 0, 5)
            work.wait()
            t.barrier()

    TorchGroup(stores, 2).run(fn)


@pytest.mark.parametrize("nbytes", [0, 1, COPIED_NBYTES, COPIED_NBYTES + 1, 3_000_001])
@pytest.mark.parametrize("source", ["named", "any"])
def test_messages_of_any_length_arrive_whole_and_in_order(
    stores: list[TCPStore], nbytes: int, source: str
) -> None:
    def fn(t: Transport) -> None:
        if t.rank == 1:
            sent_B = content(1, nbytes)
            sent_B.flags.writeable = False
            t.send(sent_B, 0, "LONG")
            t.send(content(1, 3, 5), 0, "LONG")
        elif t.rank == 0:
            out_B, peer = np.full(nbytes + 3, 255, np.uint8), 1 if source == "named" else None
            assert t.receive(out_B, peer, "LONG") == (1, nbytes)
            np.testing.assert_array_equal(out_B[:nbytes], content(1, nbytes))
            assert (out_B[nbytes:] == 255).all()
            assert t.receive(out_B, peer, "LONG") == (1, 3)
            np.testing.assert_array_equal(out_B[:3], content(1, 3, 5))

    TorchGroup(stores, 2).run(fn)


def test_a_sent_buffer_may_be_reused_at_once(stores: list[TCPStore]) -> None:
    def fn(t: Transport) -> None:
        if t.rank == 1:
            data_B = content(1, 500)
            t.send(data_B, 0, "SHORT")
            data_B[:] = 254
            t.barrier()
        else:
            t.barrier()
            out_B = np.empty(500, np.uint8)
            t.receive(out_B, 1, "SHORT")
            np.testing.assert_array_equal(out_B, content(1, 500))

    TorchGroup(stores, 2).run(fn)


def test_more_unreceived_messages_than_may_be_under_way_are_waited_for(
    stores: list[TCPStore],
) -> None:
    many = UNDER_WAY + 20

    def fn(t: Transport) -> None:
        out_B = np.empty(4, np.uint8)
        for i in range(many):
            if t.rank == 1:
                t.send(content(1, 4, i), 0, "SHORT")
            else:
                assert t.receive(out_B, 1, "SHORT") == (1, 4)
                np.testing.assert_array_equal(out_B, content(1, 4, i))

    TorchGroup(stores, 2).run(fn)


def test_a_long_message_that_does_not_fit_is_refused_before_a_byte_is_taken(
    stores: list[TCPStore],
) -> None:
    def fn(t: Transport) -> None:
        if t.rank == 1:
            t.timeout_s = 0.5
            with pytest.raises(TransportTimeout, match="send of LONG to rank 0: rank 0 did not"):
                t.send(np.zeros(COPIED_NBYTES + 1, np.uint8), 0, "LONG")
        else:
            out_B = np.full(100, 255, np.uint8)
            with pytest.raises(TransportError, match=r"LONG from rank 1 has 65537 bytes.*er 100"):
                t.receive(out_B, 1, "LONG")
            assert (out_B == 255).all()

    TorchGroup(stores, 2).run(fn)


def test_verbs_that_differ_are_a_timeout_that_says_so(stores: list[TCPStore]) -> None:
    def fn(t: Transport) -> str:
        t.timeout_s, slots = 0.5, slots_of([4, 4 + t.rank])  # sizes that the other has not
        with pytest.raises(TransportTimeout) as caught:
            t.broadcast(slots, 0)
        return str(caught.value)

    for text in TorchGroup(stores, 2).run(fn):
        assert "all have posted: bytes were lost, or the verbs differ" in text


def test_a_message_to_oneself_is_refused(stores: list[TCPStore]) -> None:
    def fn(t: Transport) -> None:
        with pytest.raises(TransportError, match=f"dest {t.rank} is this rank itself"):
            t.send(np.zeros(1, np.uint8), t.rank, "X")
        with pytest.raises(TransportError, match=f"source {t.rank} is this rank itself"):
            t.receive(np.zeros(1, np.uint8), t.rank, "X")

    TorchGroup(stores, 2).run(fn)


def test_a_connection_that_is_lost_is_an_error_that_names_the_rank(stores: list[TCPStore]) -> None:
    def fn(t: Any) -> None:
        if t.rank == 1:
            t.barrier()
            t.close()  # and with it its connections, as the end of its process would
        else:
            t.round_index = 3
            t.barrier()
            with pytest.raises(TransportError, match=r"round 3: gather.*to rank 1 is lost"):
                t.gather(slots_of([4, 4]))

    TorchGroup(stores, 2).run(fn)


def test_a_rank_that_does_not_come_is_named(stores: list[TCPStore]) -> None:
    store = PrefixStore(f"group{next(NUMBERS)}", stores[0])
    due = "rank 0, start-up of 3 ranks: rank 1 did not post .it has not come.; rank 2 did not"
    with pytest.raises(TransportTimeout, match=due) as caught:
        TorchTransport(0.3, (store, 0, 3))
    assert caught.value.missing == (1, 2)


def test_without_torchrun_it_is_refused_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torchdist.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    due = r"WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start with torchrun \(launch/torchrun.sh"
    with pytest.raises(ConfigError, match=due):
        TorchTransport(1.0)


def test_a_store_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with pytest.raises(TransportError, match="no store of torchrun can be reached"):
        TorchTransport(1.0)
