"""A frame that is damaged or missing ends the run with an error that names it; nothing hangs."""

import pytest
from support.faulty import Fault, Faulty
from support.runs import tiny

from hpcvfl.codecs.frame import HEADER_NBYTES
from hpcvfl.engine.run import train
from hpcvfl.errors import TransportError, WireError
from hpcvfl.transport.threads import ThreadsWorld

SET_UP_ALLGATHERS = 20
"""Eight exchanges of text before the first round (what to resume, blocks, plan, its digest, folder,
books, buffers, what the theory does not cover), each with its lengths.
"""


def run_with(config, rank, fault):
    """Train with one misbehaving rank."""

    def work(transport):
        return train(config, Faulty(transport, fault) if transport.rank == rank else transport)

    return ThreadsWorld(config.num_parties + 1).run(work)


@pytest.mark.parametrize("at", range(0, HEADER_NBYTES * 8, 37))
def test_a_flipped_header_bit_of_a_party_is_found_by_who_receives_it(tmp_path, at):
    config = tiny(tmp_path, algorithm__epochs=1)
    with pytest.raises(WireError, match=r"rank [013], round 1: embed from rank 2"):
        run_with(config, 2, Fault("flip", "gather", call=1, at=at))


def test_a_flipped_header_bit_of_the_server_is_found_by_the_parties(tmp_path):
    with pytest.raises(WireError, match=r"rank [123], round 0: head from rank 0"):
        run_with(tiny(tmp_path), 0, Fault("flip", "broadcast", at=99))


@pytest.mark.parametrize("at", [0, 1, 63, HEADER_NBYTES - 4])
@pytest.mark.parametrize("pattern", ["hub", "allgather"])
def test_a_frame_cut_inside_its_header_is_found(tmp_path, at, pattern):
    verb, call = ("gather", 2) if pattern == "hub" else ("allgather", SET_UP_ALLGATHERS + 2)
    config = tiny(tmp_path, transport__pattern=pattern)
    with pytest.raises(WireError, match="round 2: embed from rank 1"):
        run_with(config, 1, Fault("cut", verb, call=call, at=at))


def test_a_cut_payload_is_found_with_payload_checksums(tmp_path):
    config = tiny(tmp_path, wire__checksum="payload")
    with pytest.raises(WireError, match="payload checksum does not match"):
        run_with(config, 3, Fault("cut", "gather", call=1, at=HEADER_NBYTES + 9))


def test_a_dropped_frame_ends_the_run_and_is_named(tmp_path):
    with pytest.raises(TransportError, match=r"round 1: .*gather"):
        run_with(tiny(tmp_path), 1, Fault("drop", "gather", call=1))


def test_a_run_without_a_fault_is_not_disturbed_by_the_wrapper(tmp_path):
    summaries = run_with(tiny(tmp_path), 1, Fault("flip", "scatter"))
    assert summaries[0]["rounds"] == 8
