"""Other clients: a process that holds connections to the daemon and, on demand, sends requests on them now and then.

    python -m tests.bench.crowd SOCKET CLIENTS REQUESTS_PER_S

Each is greeted before `ready` is printed. With a rate, `gpus` is asked on one of them after another at random moments
that are so far apart on average, as people and exporters that know nothing of each other would. It ends when its input
does, and then prints how often it asked. A process of its own, so that the one that measures has no work but that.
"""

from __future__ import annotations

import contextlib
import random
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hegmctl.connection import Connection, connect


@contextlib.contextmanager
def crowd(socket_path: Path, clients: int, requests_per_s: float) -> Iterator[None]:
    """Run so many other clients while the context lasts. Raises RuntimeError if they sent fewer requests than they
    should.
    """
    argv = [sys.executable, "-m", __name__, str(socket_path), str(clients), str(requests_per_s)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as others:
        assert others.stdin is not None
        assert others.stdout is not None
        if others.stdout.readline() != "ready\n":
            raise RuntimeError(f"{clients} clients could not connect")
        began = time.monotonic()
        yield
        due = requests_per_s * (time.monotonic() - began)
        others.stdin.close()
        request_count = int(others.stdout.readline())
        if request_count < 0.8 * due:
            raise RuntimeError(
                f"the others asked {request_count} times where {due:.0f} were due: the machine is too busy"
            )


def _ask_now_and_then(connections: list[Connection], requests_per_s: float) -> int:
    chance = random.Random(1)  # the same moments in every run
    request_count = 0
    due = time.monotonic()
    while True:
        due += chance.expovariate(requests_per_s) if requests_per_s else 3600
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))
        if readable:
            return request_count
        connections[request_count % len(connections)].gpus()
        request_count += 1


def main() -> None:
    socket_path, clients, requests_per_s = sys.argv[1:]
    with contextlib.ExitStack() as held:
        connections = [held.enter_context(connect(socket_path)) for _ in range(int(clients))]
        print("ready", flush=True)
        print(_ask_now_and_then(connections, float(requests_per_s)), flush=True)


if __name__ == "__main__":
    main()
