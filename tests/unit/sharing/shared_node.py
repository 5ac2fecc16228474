"""A node that shares its GPUs, without its socket: all real but the agents and the GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from hegmd.protocol import sharing as protocol
from hegmd.sharing import model
from hegmd.sharing.requests import Caller, SharingRequests
from hegmd.sharing.rules import SharingRules
from hegmd.sharing.service import Sharing
from tests.patience import HANG_S
from tests.unit.moving_node import MIB, Node, running, start_ticks

UID = os.geteuid()
# Seconds between two checks of a condition that no event announces.
LOOK_S = 0.005
ADMIN = Caller(os.getpid(), UID, is_admin=True, may=lambda _uid: True)


def user(uid: int) -> Caller:
    """Return a caller who may change only what `uid` owns."""
    return Caller(os.getpid(), uid, is_admin=False, may=lambda owner: owner == uid)


def rules(**changes: Any) -> SharingRules:
    """Return the default settings with these changes."""
    values: dict[str, Any] = {
        "priorities": {"production": 80, "normal": 50, "best-effort": 20},
        "max_user_priority": 50,
        "max_lease_s": 100.0,
        "suspends_others": True,
        "method": "auto",
        "policy": model.Rules(slices=False, settle_s=0.0),
    }
    return SharingRules(**{**values, **changes})


class SharedNode:
    """A node, the service that shares its GPUs, and its request handlers."""

    def __init__(
        self, node: Node, sharing_rules: SharingRules, clock: Callable[[], float], utc: Callable[[], float]
    ) -> None:
        self.node = node
        self.sharing = Sharing(node.moving, node.events, sharing_rules, start_ticks, clock=clock, utc=utc)
        self.requests = SharingRequests(
            *(self.sharing, node.moving.jobs, node.moving.job_requests, node.inventory),
            start_ticks=start_ticks,
            owner_of=lambda _pid: UID,
            utc=utc,
        )
        self.progress: list[Any] = []

    async def emit(self, progress: object) -> None:
        self.progress.append(progress)

    async def make_room(self, size_bytes: int, caller: Caller = ADMIN, **fields: Any) -> protocol.RoomReply:
        return await self.requests.make_room(protocol.MakeRoom(size_bytes=size_bytes, **fields), caller, self.emit)

    async def states(self) -> dict[str, str]:
        """Return the state of each job by its id."""
        return {job.job: job.state for job in (await self.requests.queue(ADMIN)).jobs}

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(HANG_S):
            while not condition():
                await self._something()

    async def until_states(self, **states: str) -> None:
        with anyio.fail_after(HANG_S):
            while await self.states() != states:
                await self._something()

    async def _something(self) -> None:
        """Wait until a decision was made or written, or until all tasks are blocked."""
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(LOOK_S):
            await self.sharing.memory.changed.wait()

    @property
    def events(self) -> list[str]:
        return [event.kind.removeprefix("sharing.") for event in self.node.events.remembered(kinds=["sharing"])]


@asynccontextmanager
async def sharing_on(
    state_dir: Path,
    spec: str = "1x8MiB",
    *,
    clock: Callable[[], float] = time.monotonic,
    utc: Callable[[], float] = time.time,
    **changes: Any,
) -> AsyncIterator[SharedNode]:
    """A node that shares its GPUs; leaving it is the daemon's end."""
    async with running(state_dir, spec) as node:
        shared = SharedNode(node, rules(**changes), clock, utc)
        shared.sharing.open(state_dir)
        await node.tasks.start(shared.sharing.run)
        yield shared


__all__ = ["ADMIN", "MIB", "UID", "SharedNode", "rules", "sharing_on", "user"]
