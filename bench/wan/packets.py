"""Read IPv4 and TCP headers, and count what moved from rank to rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from ipaddress import IPv4Address
from typing import NamedTuple

FIRST_ADDRESS = int(IPv4Address("10.77.0.1"))
"""Of rank 0; rank k has the k-th after it. One network, 10.77.0.0/24."""
MAX_RANKS = 250
TCP = 6


class Packet(NamedTuple):
    """What the router wants to know of a packet; bytes as in the IP header.

    dest      : rank
    payload   : bytes behind the TCP header (UDP and others: behind the IP header)
    """

    dest: int
    payload: int


def address(rank: int) -> str:
    """The IPv4 address of a rank."""
    return str(IPv4Address(FIRST_ADDRESS + rank))


def parse(packet: bytes, num_ranks: int) -> Packet | None:
    """Destination and payload of an IPv4 packet between ranks; None for any other packet."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    dest = int.from_bytes(packet[16:20], "big") - FIRST_ADDRESS
    ip_header = (packet[0] & 15) * 4
    total = int.from_bytes(packet[2:4], "big")
    if not 0 <= dest < num_ranks or not 20 <= ip_header <= total <= len(packet):
        return None
    if packet[9] != TCP or total < ip_header + 20:
        return Packet(dest, total - ip_header)
    return Packet(dest, max(0, total - ip_header - (packet[ip_header + 12] >> 4) * 4))


@dataclass
class Count:
    """What went from one rank to another.

    packets, ip_bytes : all of them, with their IP headers
    payload_bytes     : what TCP carried
    bare              : packets without payload: acknowledgements, and the ends of connections
    """

    packets: int = 0
    ip_bytes: int = 0
    payload_bytes: int = 0
    bare: int = 0

    def add(self, nbytes: int, payload: int) -> None:
        """Count one packet."""
        self.packets += 1
        self.ip_bytes += nbytes
        self.payload_bytes += payload
        self.bare += payload == 0


class Traffic:
    """Counts of every pair of ranks, of packets that the router took in."""

    def __init__(self, num_ranks: int) -> None:
        self.between = [[Count() for _ in range(num_ranks)] for _ in range(num_ranks)]
        self.ignored = 0  # neither IPv4 nor between ranks

    def rows(self) -> list[dict[str, int]]:
        """{"source", "dest", ..counts} of every pair that spoke."""
        return [
            {"source": s, "dest": d, **asdict(count)}
            for s, line in enumerate(self.between)
            for d, count in enumerate(line)
            if count.packets
        ]

    def lines(self) -> list[dict[str, int]]:
        """{"rank", "up_..", "down_.."}: packets and IP bytes of every rank's line, both ways."""
        ranks = range(len(self.between))
        return [
            {
                "rank": k,
                "up_packets": sum(self.between[k][p].packets for p in ranks),
                "up_ip_bytes": sum(self.between[k][p].ip_bytes for p in ranks),
                "down_packets": sum(self.between[p][k].packets for p in ranks),
                "down_ip_bytes": sum(self.between[p][k].ip_bytes for p in ranks),
            }
            for k in ranks
        ]
