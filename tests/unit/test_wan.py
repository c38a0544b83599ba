"""What the emulated network does to packets, with a clock that the test moves."""

import os
import struct
import subprocess
import sys

import pytest

from hpcvfl.errors import ConfigError

from wan.packets import Traffic, address, parse
from wan.router import hurrying
from wan.run import Wan, main
from wan.run import parse as parse_words
from wan.shaping import Hub, Line
from wan.spaces import make_spaces, missing


def arrivals(hub, until_s):
    """[(time, dest, packet)] of everything that arrives, at the moments the hub names."""
    out = []
    while (now_s := hub.next_s()) is not None and now_s <= until_s:
        out += [(now_s, dest, packet) for dest, packet in hub.due(now_s)]
    return out


def ip_packet(dest, payload, options=b"", protocol=6, tcp_options=b""):
    """An IPv4 packet to a rank with that many payload bytes behind its TCP (or UDP) header."""
    to = bytes(int(part) for part in address(dest).split("."))
    if protocol == 6:
        words = (20 + len(tcp_options)) // 4
        inner = struct.pack(">HHIIBBHHH", 1, 2, 3, 4, words << 4, 0, 0, 0, 0) + tcp_options
    else:
        inner = bytes(8)
    inner += bytes(payload)
    total = 20 + len(options) + len(inner)
    head = struct.pack(
        ">BBHHHBBH", 0x40 | (20 + len(options)) // 4, 0, total, 0, 0, 64, protocol, 0
    )
    return head + bytes(4) + to + options + inner


def test_a_packet_arrives_after_the_delay_and_not_before():
    hub = Hub(2, delay_s=0.01)
    hub.accept(5.0, 0, 1, b"abc")
    assert hub.next_s() == pytest.approx(5.01)
    assert list(hub.due(5.0099)) == []
    assert list(hub.due(5.0101)) == [(1, b"abc")]
    assert hub.next_s() is None


def test_a_line_sends_one_packet_after_another_at_its_rate():
    line = Line(bytes_per_s=1000)
    assert line.leaves_s(0.0, 100) == pytest.approx(0.1)
    assert line.leaves_s(0.0, 100) == pytest.approx(0.2)
    assert line.leaves_s(0.15, 50) == pytest.approx(0.25)
    assert line.leaves_s(9.0, 100) == pytest.approx(9.1)  # idle time is not saved up


def test_a_line_without_a_rate_neither_waits_nor_drops():
    line = Line(None, queue_bytes=0)
    assert [line.leaves_s(1.0, 10**9) for _ in range(3)] == [1.0] * 3


def test_a_full_line_drops_until_there_is_room():
    line = Line(bytes_per_s=1000, queue_bytes=250)
    assert [line.leaves_s(0.0, 100) for _ in range(3)] == [
        pytest.approx(0.1),
        pytest.approx(0.2),
        None,
    ]
    assert line.leaves_s(0.0, 50) == pytest.approx(0.25)  # a smaller one still fits
    assert line.leaves_s(0.1, 100) == pytest.approx(0.35)


def test_both_lines_limit_and_the_receivers_is_shared():
    """Two ranks send 1000 bytes each to a third at 10 kB/s: 0.1 s up, side by side, 0.1 s down, one
    after the other.
    """
    hub = Hub(3, delay_s=1.0, bytes_per_s=10_000)
    hub.accept(0.0, 0, 2, b"a" * 1000)
    hub.accept(0.0, 1, 2, b"b" * 1000)
    came = [(round(when_s, 6), dest, packet[:1]) for when_s, dest, packet in arrivals(hub, 9)]
    assert came == [(1.2, 2, b"a"), (1.3, 2, b"b")]


def test_the_hub_counts_what_it_drops_at_either_line():
    hub = Hub(3, delay_s=0.0, bytes_per_s=1000, queue_bytes=100)
    hub.accept(0.0, 0, 2, bytes(100))
    hub.accept(0.0, 0, 2, bytes(100))  # no room on the way up
    hub.accept(0.0, 1, 2, bytes(100))  # arrives with the first: no room on the way down
    assert len(arrivals(hub, 9)) == 1
    assert hub.dropped == 2


def test_packets_between_two_ranks_keep_their_order():
    hub = Hub(2, delay_s=0.25, bytes_per_s=1e6)
    packets = [bytes([k]) * (1 + 37 * k % 200) for k in range(100)]
    for packet in packets:
        hub.accept(0.0, 0, 1, packet)
    assert [packet for _, _, packet in arrivals(hub, 9)] == packets


def test_nothing_is_lost_or_made_between_accept_and_due():
    hub = Hub(4, delay_s=0.003, bytes_per_s=5e5)
    sent = []
    for k in range(400):
        source, dest, packet = k % 4, (k * 7 + 1) % 4, struct.pack(">I", k) * (1 + k % 50)
        hub.accept(k * 1e-4, source, dest, packet)
        sent.append((dest, packet))
    assert sorted((dest, packet) for _, dest, packet in arrivals(hub, 99)) == sorted(sent)
    assert hub.dropped == 0


@pytest.mark.parametrize("options", [b"", bytes(12)])
@pytest.mark.parametrize("tcp_options", [b"", bytes(12)])
def test_the_payload_of_a_packet_is_what_tcp_carries(options, tcp_options):
    packet = ip_packet(3, 100, options, tcp_options=tcp_options)
    assert parse(packet, 5) == (3, 100)


def test_a_packet_of_another_protocol_counts_without_its_ip_header():
    assert parse(ip_packet(1, 30, protocol=17), 5) == (1, 38)


@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"", id="empty"),
        pytest.param(ip_packet(1, 10)[:19], id="cut header"),
        pytest.param(ip_packet(1, 10)[:-1], id="shorter than it says"),
        pytest.param(b"\x60" + bytes(39), id="IPv6"),
        pytest.param(ip_packet(5, 10), id="to no rank"),
        pytest.param(b"\x4f" + ip_packet(1, 0)[1:], id="header longer than the packet"),
        pytest.param(b"\x41" + ip_packet(1, 0)[1:], id="header of four bytes"),
    ],
)
def test_what_is_no_packet_between_ranks_is_refused(packet):
    assert parse(packet, 5) is None


def test_a_tcp_header_longer_than_its_packet_has_no_payload():
    packet = bytearray(ip_packet(1, 4))
    packet[32] = 0xF0  # says 60 bytes
    assert parse(bytes(packet), 5) == (1, 0)


def test_ip_bytes_are_counted_by_pair_and_by_line():
    traffic = Traffic(3)
    for source, dest, payload in ((0, 1, 100), (0, 1, 0), (2, 1, 5), (1, 0, 7)):
        packet = ip_packet(dest, payload)
        traffic.between[source][dest].add(len(packet), parse(packet, 3).payload)
    assert traffic.rows()[0] == {
        "source": 0,
        "dest": 1,
        "packets": 2,
        "ip_bytes": 180,
        "payload_bytes": 100,
        "bare": 1,
    }
    lines = traffic.lines()
    assert [line["up_ip_bytes"] for line in lines] == [180, 47, 45]
    assert [line["down_ip_bytes"] for line in lines] == [47, 225, 0]
    assert [line["down_packets"] for line in lines] == [1, 3, 0]
    assert sum(row["ip_bytes"] for row in traffic.rows()) == 272


def test_the_number_of_ranks_is_checked_before_anything_is_made():
    if missing():
        with pytest.raises(ConfigError, match=r"^wan: .*as root$"):
            make_spaces(3)
    else:
        with pytest.raises(ConfigError, match="wan: 1 ranks; 2 to 250"):
            make_spaces(1)


def test_without_root_the_network_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match=r"^wan: needs root, to make network namespaces; [^\n]*$"):
        make_spaces(2)


def test_the_router_gives_the_realtime_class_back_and_children_never_have_it():
    before = os.sched_getscheduler(0)
    ask = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
    with hurrying() as allowed:
        inside = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        child = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert inside == (os.SCHED_RR if allowed else before)
    assert int(child.stdout) == before == os.sched_getscheduler(0)


def test_the_command_line_says_in_one_line_what_is_missing_and_starts_nothing(monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["-n", "2", "--", "train", "digits"]) == ConfigError.exit_code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("hpcvfl: wan: needs root")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["--latency-ms", "-1"], ["--mbit-s", "0"], ["--mtu", "100"]])
def test_a_network_that_cannot_be_is_refused_before_it_is_made(words, capsys):
    with pytest.raises(SystemExit) as refused:
        parse_words(["-n", "2", *words, "--", "doctor"])
    assert refused.value.code == 2
    assert "--latency-ms >= 0" in capsys.readouterr().err


def test_the_hub_of_a_network_has_half_the_round_trip_each_way_and_bytes_for_bits():
    hub = Wan(latency_ms=20, mbit_s=8).hub(2)
    hub.accept(0.0, 0, 1, bytes(1000))
    assert arrivals(hub, 1) == [(pytest.approx(0.001 + 0.01 + 0.001), 1, bytes(1000))]
