"""The connection of a rank to its launcher: what comes with a message."""

from __future__ import annotations

import os
import socket

from hegmd.agent.ranks.line import LauncherConnection


def test_a_slot_is_the_descriptor_that_came_with_it_and_replaces_the_former() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = LauncherConnection(ours, 0, 1, lambda: None)
        former, newer = (os.memfd_create(name) for name in ("former", "newer"))
        try:
            for fd in (former, newer):
                line._take({"do": "slot", "slot": 3, "generation": 1}, [fd])
                assert line._slots == {3: fd}
            assert not os.path.exists(f"/proc/self/fd/{former}")
        finally:
            os.close(newer)
