"""The wire: what is not exactly the frame that was due is a WireError that says so."""

import numpy as np
import pytest

from hpcvfl.codecs.frame import HEADER_NBYTES, Header, read_header, rows_hash, write_header
from hpcvfl.errors import WireError

DUE = Header("embed", 1, 3, 17, 100, 25, batch_hash=99)


def frame(checksum=False, header=DUE):
    frame_B = np.zeros(HEADER_NBYTES + 25, np.uint8)
    frame_B[HEADER_NBYTES:] = np.arange(25)
    write_header(frame_B, header, checksum)
    return frame_B


def test_header_comes_back_as_written():
    sent = Header(
        "head", 2, 0, 2**32 - 1, 2**32 - 1, 25, tau=7, w_bar=1.5, seconds=0.25, batch_hash=2**32 - 1
    )
    sent = sent._replace(level=3, next_level=255, squared_error=0.125, energy=3.5)
    assert read_header(frame(header=sent), sent) == sent


@pytest.mark.parametrize("name", ["w_bar", "seconds"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_piggybacked_number_that_is_none_is_refused(name, value):
    sent = DUE._replace(**{name: value})
    with pytest.raises(WireError, match=f"{name} is .*, due a number that is not negative"):
        read_header(frame(header=sent), DUE)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(("stop", "save"), [(False, True), (True, False), (True, True)])
def test_what_the_sender_asks_for_comes_with_the_header(stop, save, checksum):
    frame_B = frame(checksum, DUE._replace(stop=stop, save=save))
    assert frame_B[7] == checksum + 2 * stop + 4 * save
    came = read_header(frame_B, DUE, checksum)
    assert (came.stop, came.save) == (stop, save)


def test_header_is_64_bytes_little_endian():
    assert HEADER_NBYTES == 64
    assert frame()[:16].tobytes() == b"HVFL" + bytes([4, 1, 1, 0]) + bytes([3, 0, 0, 0]) + bytes(4)
    assert frame()[16:24].tobytes() == (17).to_bytes(8, "little")  # no error measured


@pytest.mark.parametrize("checksum", [False, True])
def test_every_cut_length_is_refused(checksum):
    whole_B = frame(checksum)
    for length in range(whole_B.size):
        with pytest.raises(WireError, match="round 17: embed from rank 3"):
            read_header(whole_B[:length], DUE, checksum)


def test_every_flipped_bit_of_the_header_is_refused():
    for at in range(HEADER_NBYTES):
        for bit in range(8):
            hostile_B = frame()
            hostile_B[at] ^= 1 << bit
            with pytest.raises(WireError, match="round 17: embed from rank 3"):
                read_header(hostile_B, DUE)


def test_payload_checksum_finds_every_flipped_payload_byte():
    for at in range(HEADER_NBYTES, HEADER_NBYTES + 25):
        hostile_B = frame(checksum=True)
        hostile_B[at] ^= 0x40
        with pytest.raises(WireError, match="payload checksum"):
            read_header(hostile_B, DUE, checksum_payload=True)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("kind", "head", "kind is head, due embed"),
        ("codec", 2, "codec is 2, due 1; codecs differ"),
        ("sender", 4, "sender is 4, due 3"),
        ("round_index", 16, "round is 16, due 17"),
        ("num_values", 101, "count is 101, due 100"),
        ("payload_nbytes", 24, "payload_nbytes is 24, due 25"),
        ("level", 1, "level is 1, due 0; the ranks disagree about the rate"),
        ("batch_hash", 98, "batch_hash is 98, due 99; the ranks drew different rows"),
    ],
)
def test_another_message_than_due_is_named_by_field(field, value, words):
    with pytest.raises(WireError, match=words):
        read_header(frame(header=DUE._replace(**{field: value})), DUE)


def test_checksum_setting_must_be_the_same_on_both_sides():
    with pytest.raises(WireError, match=r"payload checksum unexpected; wire\.checksum differs"):
        read_header(frame(checksum=True), DUE, checksum_payload=False)
    with pytest.raises(WireError, match=r"payload checksum expected; wire\.checksum differs"):
        read_header(frame(checksum=False), DUE, checksum_payload=True)


def test_a_buffer_that_was_never_filled_is_no_frame():
    with pytest.raises(WireError, match="none arrived"):
        read_header(np.zeros(89, np.uint8), DUE)


def test_rows_hash_depends_on_order_not_on_layout():
    rows_B = np.arange(10)
    assert rows_hash(rows_B) == rows_hash(np.arange(20)[::2] // 2)
    assert rows_hash(rows_B) != rows_hash(rows_B[::-1])
