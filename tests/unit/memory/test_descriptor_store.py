"""The service manager's descriptor store as a `Store`: against a real datagram socket that plays the manager."""

from __future__ import annotations

import array
import os
import socket
import threading
from pathlib import Path

import pytest

from hegmd.memory.descriptor_store import ManagerStore
from hegmd.system.systemd import PassedDescriptors, ServiceManager
from tests.patience import HANG_S


def take_report(manager: socket.socket) -> tuple[list[str], list[int]]:
    data, ancillary, _, _ = manager.recvmsg(65536, socket.CMSG_SPACE(64))
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload)
    return data.decode().split("\n"), list(fds)


async def test_stored_and_dropped_descriptors_reach_the_manager_by_name(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(HANG_S)
        reports = ServiceManager(str(tmp_path / "notify"))
        store = ManagerStore(reports, PassedDescriptors([]))
        fd = os.memfd_create("bytes")
        os.pwrite(fd, b"weights", 0)

        observed: list[tuple[list[str], bytes]] = []

        def manage() -> None:
            for _ in range(4):
                lines, fds = take_report(manager)
                observed.append((lines, b"".join(os.pread(one, 7, 0) for one in fds if lines[0] == "FDSTORE=1")))
                for one in fds:
                    os.close(one)  # the descriptor of a barrier, whose closing ends it

        thread = threading.Thread(target=manage)
        thread.start()
        await store.put("hegm-pool-7-4711-7.ab", fd)
        await store.drop("hegm-pool-7-4711-7.ab")
        thread.join()
        os.close(fd)
        reports.close()
    assert observed[0] == (["FDSTORE=1", "FDNAME=hegm-pool-7-4711-7.ab", "FDPOLL=0"], b"weights")
    assert observed[1][0] == ["BARRIER=1"], "it was not waited for until the manager had it"
    assert observed[2][0] == ["FDSTOREREMOVE=1", "FDNAME=hegm-pool-7-4711-7.ab"]
    assert observed[3][0] == ["BARRIER=1"], "what is dropped may be video memory, which others wait for"


async def test_descriptors_of_the_start_are_found_once_and_foreign_ones_left_alone() -> None:
    first = 500
    for number, name in enumerate(("a", "b", "listening")):
        fd = os.memfd_create(name)
        os.dup2(fd, first + number)
        os.close(fd)
    fds = list(range(first, first + 3))
    with PassedDescriptors(["hegm-pool-7-4711-7.ab", "hegm-pool-7-4711-7.ab", "hegmd"], first) as passed:
        store = ManagerStore(ServiceManager(None), passed)
        ((name, fd),) = await store.found()
        assert (name, fd) == ("hegm-pool-7-4711-7.ab", first)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds[1])
        assert passed.names == ("hegmd",)
        assert list(await store.found()) == []
        os.close(fd)
