"""Stores in which descriptors outlive the daemon: one interface for systemd's descriptor store and the keeper.

The keeper is a process of ours (keeper/), for nodes without systemd. The pool and others use `Store` and do not know
which it is. A descriptor may be of any kind: memory, exported GPU memory, a socket.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.to_thread

from hegmd.system.systemd import PassedDescriptors, ServiceManager

logger = logging.getLogger(__name__)

# Prefix of our names among the descriptors passed at the start.
PREFIX = "hegm-"
BARRIER_S = 5.0


class Store(Protocol):
    """Holds descriptors by name. A call that cannot do so raises HegmError."""

    async def put(self, name: str, fd: int) -> None:
        """Store a copy of that descriptor under that name, beyond the end of this process."""
        ...

    async def drop(self, *names: str) -> None:
        """Remove everything under these names before this returns. Does nothing for unknown names."""
        ...

    async def found(self) -> Sequence[tuple[str, int]]:
        """Return what an earlier daemon left: names and descriptors, which the caller owns. Call it once."""
        ...

    async def run(self) -> None:
        """Maintain the store, until cancelled."""
        ...


class ManagerStore:
    """The service manager's store. Its contents come with the start of the daemon."""

    def __init__(self, manager: ServiceManager, passed: PassedDescriptors) -> None:
        self._manager = manager
        self._passed = passed

    async def put(self, name: str, fd: int) -> None:
        await anyio.to_thread.run_sync(self._put, name, fd)

    def _put(self, name: str, fd: int) -> None:
        self._manager.store(name, [fd])
        self._settle("taken", name)

    async def drop(self, *names: str) -> None:
        await anyio.to_thread.run_sync(self._drop, names)

    def _drop(self, names: Sequence[str]) -> None:
        for name in names:
            self._manager.unstore(name)
        self._settle("let go of", ", ".join(names))

    def _settle(self, what: str, names: str) -> None:
        # The manager handles the datagrams in order, when it has time. A descriptor that is not dropped may keep GPU
        # memory occupied.
        if not self._manager.barrier(BARRIER_S):
            logger.warning("the service manager has not %s %s within %g s", what, names, BARRIER_S)

    async def found(self) -> Sequence[tuple[str, int]]:
        names = [name for name in self._passed.names if name.startswith(PREFIX)]
        found: list[tuple[str, int]] = []
        for name in names:
            first, *others = self._passed.take(name)
            for double in others:  # put twice, by a daemon that was killed in between
                os.close(double)
            found.append((name, first))
        return found

    async def run(self) -> None:
        await anyio.sleep_forever()  # it looks after itself
