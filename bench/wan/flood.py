"""Two ranks, of which rank 0 sends by TCP as fast as it can: the limits of a line or of the router.

python -m wan.flood OUT SECONDS   rank 1 writes {"mbit_s"}, what arrived, to OUT

Ranks are told by PMI_RANK; there is no MPI in it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

from wan.packets import address

PORT, CHUNK_NBYTES, CONNECT_S = 5001, 1 << 18, 20.0


def send(seconds: float) -> None:
    """Send for so long."""
    end_s = time.monotonic() + CONNECT_S
    while True:
        try:
            sock = socket.create_connection((address(1), PORT), CONNECT_S)
            break
        except OSError:  # rank 1 is not there yet
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)
    data, end_s = bytes(CHUNK_NBYTES), time.monotonic() + seconds
    with sock:
        while time.monotonic() < end_s:
            sock.sendall(data)


def receive() -> float:
    """Mbit/s of what comes after the first second, which is TCP's start, until it ends."""
    with socket.create_server((address(1), PORT)) as server:
        server.settimeout(CONNECT_S)
        sock, _ = server.accept()
    begun_s, nbytes, now_s = time.monotonic() + 1.0, 0, 0.0
    with sock:
        while data := sock.recv(CHUNK_NBYTES):
            now_s = time.monotonic()
            nbytes += len(data) if now_s > begun_s else 0
    return 8e-6 * nbytes / max(now_s - begun_s, 1e-9)


def main(out: Path, seconds: float) -> None:
    """Play the rank that this process is."""
    if os.environ["PMI_RANK"] == "0":
        send(seconds)
    else:
        out.write_text(json.dumps({"mbit_s": receive()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
