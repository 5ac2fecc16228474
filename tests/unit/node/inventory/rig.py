"""An inventory for tests, and short functions that find values in its snapshots and events."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from hegmd.node.devices.base import DeviceProvider
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes.table import ProcessTable
from hegmd.protocol.snapshots import AgentInfo, Event, GpuProcess, Vendor
from hegmd.telemetry.events import EventLog
from tests.patience import HANG_S
from tests.unit.doubles import Clock, Provider

ME = os.getpid()
# Long enough never to pass in a test that is not about it.
LONG_S = HANG_S
SHORT_S = 0.02


class Node:
    def __init__(
        self, *providers: DeviceProvider, table: ProcessTable | None = None, deadline_s: float = LONG_S
    ) -> None:
        self.events = EventLog()
        self.clock = Clock()
        self.agents: dict[int, AgentInfo] = {}
        self.held: dict[int, int] = {}
        self.vendors = [VendorWatch(provider, monotonic=self.clock) for provider in providers]
        self.inventory = Inventory(
            self.vendors,
            query_deadline_s=deadline_s,
            events=self.events,
            table=table or ProcessTable(),
            agents=lambda: self.agents,
            held=lambda: self.held,
            monotonic=self.clock,
        )

    def happened(self, *families: str) -> list[Event]:
        """The events of these kinds that were not asked for yet."""
        found = [event for event in self.events.remembered(kinds=families) if event.seq >= self._next.get(families, 0)]
        self._next[families] = self.events.next_seq
        return found

    def kinds(self, *families: str) -> list[str]:
        return [event.kind for event in self.happened(*families)]

    @property
    def _next(self) -> dict[tuple[str, ...], int]:
        return self.__dict__.setdefault("next", {})


@asynccontextmanager
async def node_of(
    *providers: Provider, table: ProcessTable | None = None, deadline_s: float = LONG_S
) -> AsyncIterator[Node]:
    node = Node(*providers, table=table, deadline_s=deadline_s)
    try:
        async with node.inventory:
            yield node
            for provider in providers:
                provider.unblock()
            node.inventory.set_query_deadline(LONG_S)
    finally:
        for provider in providers:
            provider.unblock()


def shown(found: NodeSnapshot) -> list[tuple[str, str, str]]:
    return [(gpu.id, gpu.uuid, gpu.state) for gpu in found.gpus]


def vendor_of(found: NodeSnapshot, name: str = "nvidia") -> Vendor:
    return next(vendor for vendor in found.vendors if vendor.vendor == name)


def process_of(found: NodeSnapshot, pid: int = ME) -> GpuProcess:
    return next(process for process in found.processes if process.pid == pid)


async def entered(provider: Provider) -> None:
    await anyio.to_thread.run_sync(provider.entered.wait, 10)


def joined(name: str) -> None:
    """Wait for the threads of that name to end."""
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(HANG_S)
