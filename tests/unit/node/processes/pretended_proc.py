"""A /proc made of files, and processes behind its pids, for the tests of the process table."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from hegmd.node.processes.table import ProcessFacts, ProcessTable

Start = Callable[..., "subprocess.Popen[bytes]"]


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


class PretendedProc:
    """A /proc of files. Its pids belong to the processes whose pidfds the test holds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[int, int] = {}
        self.opened = 0
        (root / "self").symlink_to(str(os.getpid()))

    def put(
        self,
        pid: int,
        *,
        name: bytes = b"train",
        start_ticks: int = 5000,
        uids: tuple[int, int, int] = (1000, 1000, 1000),
        cgroup: str = "0::/system.slice/train.service\n",
        state: str = "S",
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        rest = " ".join([state, *["0"] * 18, str(start_ticks), *["0"] * 30])
        (folder / "stat").write_bytes(b"%d (%s) %s\n" % (pid, name, rest.encode()))
        (folder / "status").write_text(
            f"Name:\tx\nUid:\t{uids[0]}\t{uids[1]}\t{uids[2]}\t{uids[1]}\nGid:\t0\t0\t0\t0\n"
        )
        (folder / "cgroup").write_text(cgroup)

    def remove(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()

    def open_pidfd(self, pid: int) -> int:
        self.opened += 1
        if pid not in self.held:
            raise OSError(errno.ESRCH, "No such process")
        return os.pidfd_open(self.held[pid])

    def table(self, pidfd_limit: int | None = None) -> ProcessTable:
        return ProcessTable(str(self.root), open_pidfd=self.open_pidfd, pidfd_limit=pidfd_limit)


def one(table: ProcessTable, pid: int, unproven: frozenset[int] = frozenset()) -> ProcessFacts:
    return table.refresh([pid], unproven)[pid]
