"""Keeps a daemon's descriptors and passes them to the next daemon: a stub of systemd, or hegmd's own keeper.

`Keeper` speaks as much of sd_notify(3) and sd_listen_fds(3) as hegmd does: readiness, descriptor store, barriers.
`HegmdKeeper` says nothing to the daemon, which then starts `hegmd.memory.keeper` by itself, and only looks at what that
holds. As a program it runs for a moment between the stub and the daemon:

    keeper.py NAME=FD... -- COMMAND...    becomes the command, with these descriptors passed as systemd passes them
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hegmd.memory.keeper import wire
from tests.patience import HANG_S

FIRST_PASSED = 3
MAX_DESCRIPTORS = 253
READY_WITHIN_S = 30.0
# FileDescriptorStoreMax= of hegmd.service, which systemd tells the daemon.
MAX_STORED = 4096


class KeeperRun(Protocol):
    """Starts daemons, and reports what is held for them while none runs."""

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: int) -> subprocess.Popen[bytes]: ...

    def stored(self) -> list[str]: ...

    def close(self) -> None: ...


class Keeper:
    """One service: its notifications and its store. A context manager; the daemon is the caller's to end."""

    def __init__(self, folder: Path) -> None:
        self.address = folder / "notify.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.bind(str(self.address))
        self._stored: dict[str, list[int]] = {}
        self._guard = threading.Lock()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._read, name="keeper", daemon=True)
        self._thread.start()

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the service with what is stored, and wait until it serves. Raises RuntimeError when it does not."""
        self._ready.clear()
        with self._guard:
            passed = {name: list(descriptors) for name, descriptors in self._stored.items()}
        pairs = [(name, descriptor) for name, several in passed.items() for descriptor in several]
        words = [f"{name}={descriptor}" for name, descriptor in pairs]
        # A Python puts them where they belong. The time of a start has none in it if nothing is stored.
        placed = [sys.executable, "-S", __file__, *words, "--"] if pairs else []
        process = subprocess.Popen(
            [*placed, *command],
            env={**environ, "NOTIFY_SOCKET": str(self.address), "FDSTORE": str(MAX_STORED)},
            pass_fds=[descriptor for _, descriptor in pairs],
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._ready.wait(0.1):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the daemon did not get ready; it ended with {process.wait()}")
        return process

    def stored(self) -> list[str]:
        """The names of what is kept now."""
        with self._guard:
            return [name for name, descriptors in self._stored.items() for _ in descriptors]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(HANG_S)
        self._socket.close()
        for descriptors in self._stored.values():
            for descriptor in descriptors:
                os.close(descriptor)
        self._stored.clear()

    def _read(self) -> None:
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(4096, room, socket.MSG_CMSG_CLOEXEC)
            except OSError:
                return
            descriptors = array.array("i")
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
            if not data and not descriptors:
                return
            self._take(data.decode(), list(descriptors))

    def _take(self, text: str, descriptors: list[int]) -> None:
        values = dict(line.partition("=")[::2] for line in text.splitlines())
        with self._guard:
            if "FDSTORE" in values:
                self._stored.setdefault(values["FDNAME"], []).extend(descriptors)
                return
            if "FDSTOREREMOVE" in values:
                descriptors += self._stored.pop(values["FDNAME"], [])
        for descriptor in descriptors:  # those of a barrier too, which is how it is answered
            os.close(descriptor)
        if "READY" in values:
            self._ready.set()


class HegmdKeeper:
    """hegmd's own, which it starts where no service manager keeps anything; here it is only looked at."""

    def __init__(self, socket_path: Path, state_dir: Path) -> None:
        self._serving, self._at = socket_path, state_dir / wire.SOCKET_NAME

    def start(self, command: Sequence[str], environ: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
        """Start the daemon, and wait until it is listening. Raises RuntimeError when it does not come to that."""
        silent = {name: value for name, value in environ.items() if name != "NOTIFY_SOCKET"}
        process = subprocess.Popen(list(command), env=silent, stdin=subprocess.DEVNULL, stderr=log)
        deadline, pause = time.monotonic() + READY_WITHIN_S, threading.Event()
        while not self._listens():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the daemon did not get ready; it ended with {process.wait()}")
            pause.wait(0.02)  # a daemon that is started by hand has no service manager
        return process

    def _listens(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            return probe.connect_ex(str(self._serving)) == 0

    def stored(self) -> list[str]:
        """The names of what it holds now; it ends when that is nothing."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.settimeout(READY_WITHIN_S)
            try:
                asking.connect(str(self._at))
                wire.send(asking, [wire.LIST])
                output, _ = wire.receive(asking)
            except (FileNotFoundError, ConnectionError):
                return []
        return output[1:]

    def close(self) -> None:
        """End it. It is not a child of any process here, and exits by itself."""


def main(argv: Sequence[str]) -> None:
    """Put the descriptors where systemd puts them, and become the command."""
    border = argv.index("--")
    pairs = [word.rpartition("=")[::2] for word in argv[:border]]
    beyond = FIRST_PASSED + len(pairs)
    copies = [fcntl.fcntl(int(text), fcntl.F_DUPFD_CLOEXEC, max(beyond, 64)) for _, text in pairs]
    for _, text in pairs:
        os.close(int(text))
    for number, copy in enumerate(copies, FIRST_PASSED):
        os.dup2(copy, number, inheritable=True)
    if pairs:
        names = ":".join(name for name, _ in pairs)
        os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(pairs)), LISTEN_FDNAMES=names)
    command = list(argv[border + 1 :])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
