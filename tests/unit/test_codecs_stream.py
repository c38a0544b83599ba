"""Streams: both ends remember the same, in any batches; errors are those that were measured."""

import numpy as np
import pytest

from hpcvfl.codecs import table
from hpcvfl.codecs.feedback import memory_nbytes, zeros
from hpcvfl.codecs.stream import Stream
from hpcvfl.errors import ConfigError, NonFiniteError, WireError
from hpcvfl.seeds import subkey

NUM_ROWS, WIDTH = 50, 6
COARSE = "scalar:bits=1,range=gauss"
WRAPPED = (
    f"ef({COARSE})",
    "ef(none)",
    "ef16(scalar:bits=2)",
    "ef(topk:k=2,per=row)",
    "ef(auto:error=0.1,codec=(scalar:range=gauss,scope=column))",
)


def stream(spec, dtype=np.float32, folder=None):
    return Stream(table.parse(spec), [(WIDTH,)], np.dtype(dtype), NUM_ROWS, folder)


def targets(seed=0, dtype=np.float32):
    """What every sample's embedding is, for a sender that does not change."""
    return np.random.default_rng(seed).normal(1.0, 2.0, (NUM_ROWS, WIDTH)).astype(dtype)


def batches(count, size=20, seed=1):
    generator = np.random.default_rng(seed)
    return [generator.permutation(NUM_ROWS)[:size].astype(np.int64) for _ in range(count)]


def send(sender, receiver, x, rows, round_index=0):
    """One message; (what the receiver now has, squared error, energy)."""
    payload_B = np.zeros(sender.message(len(rows)).nbytes, np.uint8)
    error, energy = sender.encode([x[rows]], 77 + round_index, payload_B, rows)
    out = np.full((len(rows), WIDTH), np.nan, x.dtype)
    receiver.decode(payload_B, 77 + round_index, [out], rows)
    level = sender.next_level(round_index, error, energy)
    sender.level = receiver.level = level
    return out, error, energy


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spec", WRAPPED)
def test_sender_and_receiver_remember_the_same_bits(spec, dtype):
    sender, receiver, x = stream(spec, dtype), stream(spec, dtype), targets(dtype=dtype)
    for r, rows in enumerate(batches(30)):
        out, _, _ = send(sender, receiver, x, rows, r)
        assert out.tobytes() == sender.memories[0].state_SP[rows].astype(dtype).tobytes()
    assert sender.memories[0].state_SP.tobytes() == receiver.memories[0].state_SP.tobytes()


@pytest.mark.parametrize("spec", [*WRAPPED, COARSE, "scalar:bits=3", "none", "auto:error=0.05"])
def test_the_error_reported_is_that_of_what_the_receiver_has(spec):
    sender, receiver, x = stream(spec), stream(spec), targets()
    for r, rows in enumerate(batches(5)):
        out, error, energy = send(sender, receiver, x, rows, r)
        exact = x[rows].astype(np.float64)
        due = ((out - exact) ** 2).sum()
        assert error == pytest.approx(due, rel=1e-6, abs=1e-12)
        assert spec == "none" or energy == pytest.approx((exact**2).sum(), rel=1e-6)


def test_feedback_equals_its_definition_written_out():
    spec = "scalar:bits=2,range=gauss"
    codec, sender, receiver = table.parse(spec), stream(f"ef({spec})"), stream(f"ef({spec})")
    x = targets()
    known = np.zeros((NUM_ROWS, WIDTH), np.float32)
    for r, rows in enumerate(batches(12)):
        change = x[rows] - known[rows]
        payload_B = np.zeros(codec.nbytes(change.shape, 4), np.uint8)
        codec.encode(change, subkey(77 + r, 0), payload_B)
        decoded = np.zeros_like(change)
        codec.decode(payload_B, subkey(77 + r, 0), decoded)
        known[rows] += decoded
        out, _, _ = send(sender, receiver, x, rows, r)
        assert out.tobytes() == known[rows].tobytes()


@pytest.mark.parametrize("spec", [f"ef({COARSE})", "ef(topk:k=2,per=row)", "ef16(scalar:bits=2)"])
def test_what_stands_still_is_known_better_with_every_message(spec):
    sender, receiver, x = stream(spec), stream(spec), targets()
    everyone = np.arange(NUM_ROWS)
    errors = [send(sender, receiver, x, everyone, r)[1] for r in range(25)]
    assert errors[-1] < 1e-3 * errors[0]


def test_rows_outside_the_batch_are_left_alone():
    sender, receiver, x = stream(f"ef({COARSE})"), stream(f"ef({COARSE})"), targets()
    rows = np.array([3, 41, 7])
    send(sender, receiver, x, rows)
    others = np.setdiff1d(np.arange(NUM_ROWS), rows)
    assert not sender.memories[0].state_SP[others].any()
    assert sender.memories[0].state_SP[rows].any()


def test_a_head_has_one_memory_a_tensor():
    shapes = [(3, 4), (3,)]
    codec = table.parse("ef(scalar:bits=1)")
    sender, receiver = (Stream(codec, shapes, np.dtype(np.float32)) for _ in range(2))
    rng = np.random.default_rng(5)
    head = [rng.normal(size=s).astype(np.float32) for s in shapes]
    payload_B = np.zeros(sender.message(9).nbytes, np.uint8)
    out = [np.zeros(s, np.float32) for s in shapes]
    errors = []
    for r in range(60):
        rows = np.arange(r % 3 + 1)  # the size of the batch is nothing to the head
        errors.append(sender.encode(head, r, payload_B, rows)[0])
        receiver.decode(payload_B, r, out, rows)
    assert errors[-1] < 0.05 * errors[0]
    for got, memory in zip(out, sender.memories, strict=True):
        assert got.reshape(-1).tobytes() == memory.state_SP.tobytes()


@pytest.mark.parametrize("spec", ["ef(none)", "ef(bfloat16)", "ef(scalar:bits=8)"])
def test_payloads_that_add_up_beyond_float32_are_refused(spec):
    receiver, rows = stream(spec), np.array([0])
    inner = table.parse(spec).inner
    payload_B = np.zeros(receiver.message(1).nbytes, np.uint8)
    inner.encode(np.full((1, WIDTH), 2e38, np.float32), subkey(1, 0), payload_B)
    out = np.zeros((1, WIDTH), np.float32)
    receiver.decode(payload_B, 1, [out], rows)
    with pytest.raises(WireError, match="diverge"), np.errstate(over="ignore"):
        receiver.decode(payload_B, 1, [out], rows)


def test_a_refused_message_changes_no_memory():
    sender, x = stream("ef(scalar:bits=2)"), targets()
    x[4, 2] = np.nan
    payload_B = np.zeros(sender.message(NUM_ROWS).nbytes, np.uint8)
    with pytest.raises(NonFiniteError):
        sender.encode([x], 1, payload_B, np.arange(NUM_ROWS))
    assert not sender.memories[0].state_SP.any()


def test_compiling_remembers_nothing():
    for spec in WRAPPED:
        for sender in (True, False):
            s = stream(spec)
            s.warm_up(8, sender)
            assert not s.memories[0].state_SP.any()


@pytest.mark.parametrize(
    "spec",
    [
        *(c.examples[-1] for c in table.CODECS.values()),
        "topk:ratio=0.1,per=tensor",  # index sets of every kind
        "topk:k=13",
        "ef(topk:k=40,per=row)",
        "topk:ratio=0.5",
        "randomk:ratio=0.5,values=best:bits=1",
    ],
)
@pytest.mark.parametrize("shapes", [[(128,)], [(10, 64), (10,)]], ids=["embedding", "head"])
@pytest.mark.parametrize("sender", [True, False])
def test_every_codec_can_be_warmed_up(spec, shapes, sender):
    num_rows = 2000 if len(shapes) == 1 else None
    Stream(table.parse(spec), shapes, np.dtype(np.float32), num_rows).warm_up(1000, sender)


def test_memories_may_lie_in_files_that_leave_nothing_behind(tmp_path):
    folder = tmp_path / "memories"
    sender, receiver = stream("ef(scalar:bits=2)", folder=str(folder)), stream("ef(scalar:bits=2)")
    assert isinstance(sender.memories[0].state_SP, np.memmap)
    assert list(folder.iterdir()) == []
    x = targets()
    for r, rows in enumerate(batches(5)):
        send(sender, receiver, x, rows, r)
    assert sender.memories[0].state_SP.tobytes() == receiver.memories[0].state_SP.tobytes()


def test_a_folder_that_cannot_hold_them_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.memory_folder = .*file.*400 bytes"):
        zeros((10, 10), np.dtype(np.float32), str(tmp_path / "file"))


def test_memory_is_rows_times_width_times_the_state():
    sizes = [memory_nbytes(table.parse(s), 60_000, 16) for s in ("ef(none)", "ef16(none)", "none")]
    assert sizes == [3_840_000, 1_920_000, 0]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("ef", "which one"),
        ("ef(scalar)", "bits is missing"),
        ("ef(ef(none))", "given twice"),
        ("ef(" * 200 + "none" + ")" * 200, "804 characters, at most 300"),
        ("topk:k=" + "9" * 6000, "6007 characters"),
        ("ef16(ef(none))", "given twice"),
        ("auto:codec=ef", "has no bits to choose.*unknown option 'bits'"),
        ("auto:codec=none", "has no bits to choose.*it takes none"),
        ("auto:codec=scalar:bits=2", "which auto is to choose"),
        ("auto:error=0", "between 0 and 1"),
        ("auto:error=x", "is no number"),
        ("auto:error=nan", "between 0 and 1"),
        ("auto:horizon=0", "number of rounds"),
        ("auto:horizon=inf", "number of rounds"),
        ("topk:k=2,values=(ef(none))", "has a memory"),
    ],
)
def test_a_bad_wrapper_is_refused(spec, words):
    with pytest.raises(ConfigError, match=words):
        table.parse(spec)
