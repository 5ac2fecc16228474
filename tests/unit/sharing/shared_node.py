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
# Until it is looked again where nothing tells of a change.
LOOK_S = 0.005
ADMIN = Caller(os.getpid(), UID, is_admin=True, may=lambda _uid: True)


def user(uid: int) -> Caller:
    """A caller who may act on what is theirs."""
    return Caller(os.getpid(), uid, is_admin=False, may=lambda owner: owner == uid)


def rules(**changes: Any) -> SharingRules:
    """The settings as they are if nothing is said, but for these."""
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
    """The node, what shares its GPUs, and what it is asked."""

    def __init__(self, node: Node, own: SharingRules, clock: Callable[[], float], utc: Callable[[], float]) -> None:
        self.node = node
        self.sharing = Sharing(node.moving, node.events, own, start_ticks, clock=clock, utc=utc)
        self.requests = SharingRequests(
            *(self.sharing, node.moving.jobs, node.moving.job_requests, node.inventory),
            start_ticks=start_ticks,
            owner_of=lambda _pid: UID,
        )
        self.heard: list[Any] = []

    async def emit(self, progress: object) -> None:
        self.heard.append(progress)

    async def make_room(self, size_bytes: int, caller: Caller = ADMIN, **asked: Any) -> protocol.RoomReply:
        return await self.requests.make_room(protocol.MakeRoom(size_bytes=size_bytes, **asked), caller, self.emit)

    async def states(self) -> dict[str, str]:
        """What each job does, by its id."""
        return {job.job: job.state for job in (await self.requests.queue(ADMIN)).jobs}

    async def until(self, holds: Callable[[], bool]) -> None:
        with anyio.fail_after(HANG_S):
            while not holds():
                await self._something()

    async def until_states(self, **states: str) -> None:
        with anyio.fail_after(HANG_S):
            while await self.states() != states:
                await self._something()

    async def _something(self) -> None:
        """Until something was decided or written, or nobody has anything to do."""
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(LOOK_S):
            await self.sharing.memory.changed.wait()

    @property
    def events(self) -> list[str]:
        """The kinds of what was told of sharing."""
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
