"""Thousands of hostile frames at the live socket: no crash, no leak, and another client is served all the while."""

from __future__ import annotations

import array
import os
import socket
import threading
from pathlib import Path

import pytest

from hegmctl.connection import connect
from tests.e2e.daemon import RunningDaemon
from tests.e2e.hostile import Hostile
from tests.patience import HANG_S
from tests.wide import telling

pytestmark = pytest.mark.e2e

ATTACKERS = 4
FRAMES_A_BATCH = 50
# Some here and all in `make test-wide`.
FRAMES, ALL_FRAMES = 20_000, 60_000
GROWTH_BYTES = 4 * 1024 * 1024


def attack(path: Path, seed: int, frames: int) -> None:
    """Send that many hostile frames, a batch to a connection, reading what comes back until the daemon is done."""
    hostile = Hostile(seed)
    with open(os.devnull, "rb") as null:
        for _ in range(frames // FRAMES_A_BATCH):
            data, fds = hostile.batch(FRAMES_A_BATCH)
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(HANG_S)
                peer.connect(str(path))
                _pour(peer, data, [null.fileno()] * fds)


def _pour(peer: socket.socket, data: bytes, fds: list[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sent = peer.sendmsg([data], rights)
        peer.sendall(data[sent:])
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65_536):
            pass
    except (BrokenPipeError, ConnectionResetError):
        pass  # the daemon closed in the middle, as it should


def attack_together(path: Path, first_seed: int, frames: int) -> None:
    failures: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            attack(path, seed, frames // ATTACKERS)
        except BaseException as error:  # noqa: BLE001 - shown by the thread that waits
            failures.append(error)

    threads = [threading.Thread(target=run, args=(first_seed + number,)) for number in range(ATTACKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("frames", telling([(FRAMES,), (ALL_FRAMES,)], [(FRAMES,)]))
def test_hostile_frames_do_not_affect_other_clients(socket_dir: Path, frames: int) -> None:
    # The interpreter keeps some memory of a burst (its arenas, the largest backlog), from the first part on.
    warm_up = frames // 2
    with RunningDaemon(socket_dir) as daemon:
        served = 0
        done = threading.Event()
        broken: list[BaseException] = []

        def be_served() -> None:
            nonlocal served
            try:
                with connect(str(daemon.socket_path), timeout_s=HANG_S) as client:
                    while not done.is_set():
                        assert [gpu.id for gpu in client.gpus().gpus] == ["gpu0", "gpu1"]
                        served += 1
            except BaseException as error:  # noqa: BLE001 - shown below
                broken.append(error)

        bystander = threading.Thread(target=be_served)
        bystander.start()
        try:
            attack_together(daemon.socket_path, 1000, warm_up)
            resident_bytes, fds = daemon.resident_bytes(), daemon.open_fds()
            served_before = served
            attack_together(daemon.socket_path, 2000, frames - warm_up)
        finally:
            done.set()
            bystander.join()
        assert not broken
        assert served > served_before > 0
        assert daemon.process.poll() is None, daemon.log_text()
        with connect(str(daemon.socket_path)) as client:
            client.ping()
            assert daemon.open_fds() <= fds
        assert daemon.resident_bytes() - resident_bytes < GROWTH_BYTES
        assert daemon.stop() == 0
        log = daemon.log_text()
        assert "Traceback" not in log, log[log.index("Traceback") :][:4000]
        assert len(log) < 100_000, "hostile peers can make the log grow"
