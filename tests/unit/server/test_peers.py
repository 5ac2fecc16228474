"""The kernel's word on a peer: credentials at the time of connecting, supplementary groups included."""

import os
import socket
import subprocess
import sys

import pytest

from hegmd.server.listener import _many_groups_of, peer_of
from tests.patience import HANG_S


def test_our_own_socket_pair_is_us() -> None:
    here, there = socket.socketpair()
    with here, there:
        peer = peer_of(here)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert peer.groups == frozenset(os.getgroups())


@pytest.mark.thorough
@pytest.mark.skipif(os.getuid() != 0, reason="only root can take on groups")
@pytest.mark.parametrize("how_many", [1, 255, 300, 3000])
def test_every_supplementary_group_is_read(how_many: int) -> None:
    """More than 256 do not fit into what Python's getsockopt takes."""
    script = f"""
import os, socket
from hegmd.server.listener import peer_of
os.setgroups(list(range(5000, 5000 + {how_many})))
here, there = socket.socketpair()
assert peer_of(there).groups == frozenset(range(5000, 5000 + {how_many}))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=HANG_S)


def test_groups_that_the_kernel_does_not_report_are_an_error() -> None:
    with socket.socket() as closed:
        pass
    with pytest.raises(OSError, match="Bad file descriptor"):
        _many_groups_of(closed)
