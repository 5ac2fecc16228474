"""The memory of 1,000 connected clients, and that requests and connections leave none behind.

Growth is the slope over the rounds that follow a warm-up, of the memory that is the daemon's alone. Its budget is what
a leak cannot hide under: 16 bytes for each of 1,000 connections or requests is less than the smallest Python object.
"""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hegmctl.connection import Connection, connect
from tests.bench.gauges import MIB, Memory, let_run, slope
from tests.bench.report import Row
from tests.e2e.daemon import RunningDaemon

CLIENTS = 1000
ROUNDS = 30
WARM_UP_ROUNDS = 30  # until the allocator has found its shape
BYTES_EACH = 16
GROWTH_KIB = BYTES_EACH * CLIENTS / 1024
DESCRIPTORS = CLIENTS + 100
# The daemon returns memory when it looks at the node, every ten seconds. Python's arenas keep a part of it while they
# contain an old object. No later burst adds to that.
CALM_S = 25.0


def run() -> list[Row]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, DESCRIPTORS), hard))
    with contextlib.ExitStack() as held:
        folder = held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-"))
        return _measure(held.enter_context(RunningDaemon(Path(folder), "--simulate", "8x141GiB")))


def _measure(daemon: RunningDaemon) -> list[Row]:
    pid = daemon.process.pid
    with connect(str(daemon.socket_path)) as watcher:
        watcher.gpus()
        before = Memory.of(pid)
        with _connected(daemon, watcher) as clients:
            held = Memory.of(pid)
            while_held = [_ask(pid, clients) for _ in range(WARM_UP_ROUNDS + ROUNDS)][WARM_UP_ROUNDS:]
        after_each = [_come_and_go(daemon, watcher) for _ in range(WARM_UP_ROUNDS + ROUNDS)][WARM_UP_ROUNDS:]
        let_run(daemon, CALM_S)
        after = Memory.of(pid)
    each_kib = (held.anonymous_bytes - before.anonymous_bytes) / CLIENTS / 1024
    asking = f"growth with {CLIENTS:,} requests on them"
    coming = f"growth with {CLIENTS:,} connections made and ended"
    return [
        Row(f"{CLIENTS:,} connected clients: RSS", held.resident_bytes / MIB, "MiB"),
        Row(f"{CLIENTS:,} connected clients: each", each_kib, "KiB"),
        Row(f"{CLIENTS:,} connected clients: {asking}, slope of {ROUNDS}", slope(while_held), "KiB", GROWTH_KIB),
        Row(f"{coming}, slope of {ROUNDS}", slope(after_each), "KiB", GROWTH_KIB),
        Row("RSS before all of them", before.resident_bytes / MIB, "MiB"),
        Row("RSS after all of them", after.resident_bytes / MIB, "MiB", held.resident_bytes / MIB),
    ]


def _ask(pid: int, clients: list[Connection]) -> float:
    """Let every client ask once; the daemon's own memory after it, in KiB."""
    for client in clients:
        client.ping()
    return Memory.of(pid).anonymous_bytes / 1024


def _come_and_go(daemon: RunningDaemon, watcher: Connection) -> float:
    """Let all connect, ask and leave; the daemon's own memory once the last has gone, in KiB."""
    with _connected(daemon, watcher) as clients:
        for client in clients:
            client.ping()
    return Memory.of(daemon.process.pid).anonymous_bytes / 1024


@contextlib.contextmanager
def _connected(daemon: RunningDaemon, watcher: Connection) -> Iterator[list[Connection]]:
    """All clients, greeted; at the end the daemon has noticed that they have left."""
    with contextlib.ExitStack() as held:
        yield [held.enter_context(connect(str(daemon.socket_path))) for _ in range(CLIENTS)]
    while "hegmd_connections 1\n" not in watcher.metrics().text:
        pass
