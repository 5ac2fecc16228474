"""A daemon is halted at the state that a test of kills asks for, also where the operation skips that state."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import pytest

from hegmd.migration.journal import records
from tests.chaos.halts import MOMENTS, UNRECORDED, Halts, Trap
from tests.patience import HANG_S
from tests.unit.migration.machine.test_communicators import ranks
from tests.unit.migration.operations import DrivenOperation, ending

_HEAD = struct.Struct("=cI")


def _written(ranks_first: str) -> list[bytes]:
    """Return the records of a move of two ranks, in which one of "reload" and "reconnect" ends before the other."""
    drive = DrivenOperation(ranks()).until("reloading")
    for effect in sorted(drive.wanted, key=lambda one: one.tag != ranks_first):
        drive.wanted.remove(effect)
        drive.feed(ending(effect))
    drive.until("done")
    steps = [
        records.step(before, event, after, effects, now=0.0, utc=0.0)[0]
        for before, event, after, effects in drive.taken
    ]
    return [records.opening(ranks(), 0.0).removeprefix(records.MAGIC), *steps]


def _halted_at(folder: Path, moment: str, written: list[bytes]) -> int:
    """Write these records as a daemon does; return before or after how many it is halted."""
    answered: list[bytes] = []

    def write(daemon: socket.socket) -> None:
        for record in written:
            for frame in (_HEAD.pack(b"W", len(record)) + record, _HEAD.pack(b"S", 0)):
                daemon.sendall(frame)
                answered.append(daemon.recv(1))

    with Halts(folder / "halt.sock") as halts, socket.socket(socket.AF_UNIX) as daemon:
        halts.set(Trap(ranks().workers[0].pid, "reconnecting", moment))
        daemon.connect(str(halts.path))
        writing = threading.Thread(target=write, args=(daemon,))
        writing.start()
        try:
            halts.wait(HANG_S)
            at = len(answered) // 2
            halts.go()
        finally:
            writing.join()
    return at


@pytest.mark.parametrize("moment", MOMENTS)
def test_ranks_that_had_connected_before_their_bytes_were_back_were_never_halted_at_reconnecting(
    socket_dir: Path, moment: str
) -> None:
    """The kill waited for two minutes for a state that the operation had skipped, on a busy machine."""
    phases = []
    for first in ("reload", "reconnect"):
        written = _written(first)
        at = _halted_at(socket_dir, moment, written)
        entries = [entry for record in written[: at + 1] for entry in records.entries(records.MAGIC + record)]
        phases.append([entry.values["phase"] for entry in entries if "phase" in entry.values][-1])
    assert phases == ["releasing" if moment == UNRECORDED else "reconnecting", "releasing"]
