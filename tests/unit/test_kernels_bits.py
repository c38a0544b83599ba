"""Packing: compiled and plain Python against the twin that works on one big integer."""

import numpy as np
import pytest
from support import naive

from hpcvfl.kernels import bits as kernels

SIZES = (0, 1, 7, 8, 9, 4097)


@pytest.fixture(params=["compiled", "python"])
def mode(request, monkeypatch):
    """Run the public functions on compiled kernels, then on the Python they were written in."""
    if request.param == "python":
        packer, unpacker = kernels.packer, kernels.unpacker
        monkeypatch.setattr(kernels, "packer", lambda b: naive.plain(packer(b)))
        monkeypatch.setattr(kernels, "unpacker", lambda b: naive.plain(unpacker(b)))
    with np.errstate(over="ignore"):
        yield request.param


def some_codes(n, bits):
    return np.random.default_rng(n * 31 + bits).integers(0, 2**bits, n).astype(np.uint16)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bits", kernels.BITS)
def test_pack_and_unpack_agree_with_the_twin(mode, bits, n):
    codes_N = some_codes(n, bits)
    out_B = np.full(kernels.packed_nbytes(n, bits), 0xAA, np.uint8)
    kernels.pack_bits(codes_N, bits, out_B)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))
    back_N = np.full(n, 0xAAAA, np.uint16)
    kernels.unpack_bits(out_B, bits, back_N)
    np.testing.assert_array_equal(back_N, naive.unpack(out_B, bits, n))
    np.testing.assert_array_equal(back_N, codes_N)


@pytest.mark.parametrize("bits", kernels.BITS)
def test_strided_and_read_only_arrays_are_packed_alike(mode, bits):
    n = 4097
    codes_N = some_codes(n, bits)
    spaced = np.zeros(2 * n, np.uint16)[::2]
    spaced[:] = codes_N
    spaced.flags.writeable = False
    out_B = np.empty(kernels.packed_nbytes(n, bits), np.uint8)
    kernels.pack_bits(spaced, bits, out_B)
    np.testing.assert_array_equal(out_B, naive.pack(codes_N, bits))
    apart = np.zeros(3 * len(out_B), np.uint8)[::3]
    apart[:] = out_B
    apart.flags.writeable = False
    back_N = np.zeros(2 * n, np.uint16)[::2]
    kernels.unpack_bits(apart, bits, back_N)
    np.testing.assert_array_equal(back_N, codes_N)


@pytest.mark.parametrize("bits", kernels.BITS)
def test_pack_writes_its_own_bytes_only(mode, bits):
    n = 2049
    length = kernels.packed_nbytes(n, bits)
    room_B = np.full(length + 16, 0x5A, np.uint8)
    kernels.pack_bits(some_codes(n, bits), bits, room_B[8 : 8 + length])
    assert set(room_B[:8]) == set(room_B[8 + length :]) == {0x5A}


def test_unpack_reads_no_byte_past_the_payload(mode):
    """A payload in the middle of a buffer decodes the same whatever follows it."""
    for bits in kernels.BITS:
        n = 4091
        length = kernels.packed_nbytes(n, bits)
        got = []
        for filler in (0, 255):
            room_B = np.full(length + 16, filler, np.uint8)
            room_B[:length] = naive.pack(some_codes(n, bits), bits)
            out_N = np.empty(n, np.uint16)
            kernels.unpack_bits(room_B[:length], bits, out_N)
            got.append(out_N)
        np.testing.assert_array_equal(got[0], got[1])


def test_first_code_lies_in_the_lowest_bits():
    out_B = np.empty(2, np.uint8)
    kernels.pack_bits(np.array([0b101, 0b001, 0b110, 0b011], np.uint16), 3, out_B)
    assert out_B.tolist() == [0b10001101, 0b00000111]


@pytest.mark.parametrize(
    ("n", "bits", "nbytes"), [(0, 3, 0), (1, 1, 1), (8, 1, 1), (9, 1, 2), (5, 16, 10), (3, 5, 2)]
)
def test_packed_size_is_padded_to_a_byte_once(n, bits, nbytes):
    assert kernels.packed_nbytes(n, bits) == nbytes
