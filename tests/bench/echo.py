"""The shortest possible round trip on this machine: bytes to another process that returns them.

The difference to the daemon's round trip is the daemon's own share.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Sequence

FRAME = bytes(64)


def echoes_ms(count: int) -> Sequence[float]:
    """How long so many round trips took, each."""
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen([sys.executable, "-m", __name__], stdin=theirs.fileno()):
        theirs.close()
        took_ms = [_echo_ms(ours) for _ in range(count)]
        ours.shutdown(socket.SHUT_WR)
    return took_ms


def _echo_ms(peer: socket.socket) -> float:
    began = time.perf_counter()
    peer.send(FRAME)
    if peer.recv(len(FRAME)) != FRAME:
        raise RuntimeError("the echo fell silent")
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    with socket.socket(fileno=sys.stdin.fileno()) as peer:
        while data := peer.recv(len(FRAME)):
            peer.send(data)


if __name__ == "__main__":
    main()
