"""The daemon's side of a copy session, over the stub libcuda: it ends with its helper, and the memory it was given does
not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

import anyio
import pytest

from hegmd.errors import Refused
from hegmd.gpu_helper.copy_client import CopyClient, Place
from hegmd.gpu_helper.link import HelperLost, HelperReply
from hegmd.memory.video_memory import VideoMemory
from hegmd.system.descriptors import Descriptors
from tests.contract.helped import MIB, SIZE_BYTES, Owner, linked, places
from tests.stubs.cuda.node import CudaNode

WHO = "7.1-1.storages"


def all_places() -> list[Place]:
    return [(handle, offset, size_bytes, at) for handle, offset, size_bytes, at in places()]


@pytest.mark.thorough
async def test_out_and_back_and_nothing_left(node: CudaNode, owner: Owner) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        memory = VideoMemory(link)
        await memory.reserve(WHO, there, SIZE_BYTES)
        route = await CopyClient.open(link, "7", [here, there])
        assert route.peer
        await route.attach_video(there, memory.pieces(WHO, there))
        counts: list[int] = []
        done = await route.copy(here, "out", owner.handles(), all_places(), counts.append)
        assert done.copied_bytes == counts[-1] == SIZE_BYTES
        owner.come_back()
        await route.copy(here, "in", owner.handles(), all_places())
        assert await route.detach_first(1) == SIZE_BYTES
        await route.close()
        memory.close()
        assert owner.ask("digest") == owner.digest
    contexts = [len(node.calls(f"cuDevicePrimaryCtx{what}")) for what in ("Retain", "Release_v2")]
    assert contexts[0] - 1 == contexts[1], "but for the owner's own"


@pytest.mark.thorough
async def test_a_copy_session_whose_helper_was_replaced_is_lost_and_not_unknown(node: CudaNode, owner: Owner) -> None:
    """The next helper knows no session of that name. A refusal would look like a mistake of ours."""
    here = node.uuids[0]
    with Descriptors([os.memfd_create("pool")]) as pool:
        os.ftruncate(pool.view()[0], SIZE_BYTES)
        async with linked(node) as link:
            route = await CopyClient.open(link, "7", [here], pool.view()[0], SIZE_BYTES)
            await route.copy(here, "out", owner.handles(), all_places())
            link.kill("the test says so")
            with pytest.raises(HelperLost, match="was replaced after this was started"):
                await route.copy(here, "in", owner.handles(), all_places())
            await link.start()
            with pytest.raises(HelperLost, match="in flight: copy"):
                await route.copy(here, "in", owner.handles(), all_places())
            await route.close()
            owner.come_back()
            again = await CopyClient.open(link, "7", [here], pool.view()[0], SIZE_BYTES)
            await again.copy(here, "in", owner.handles(), all_places())
            assert owner.ask("digest") == owner.digest


@pytest.mark.thorough
async def test_a_copy_session_left_by_an_earlier_caller_is_closed_first(node: CudaNode, owner: Owner) -> None:
    """An operation that was cancelled while its copy continued starts over under the same name."""
    here = node.uuids[0]
    async with linked(node) as link:
        memory = VideoMemory(link)
        await memory.reserve(WHO, here, SIZE_BYTES)
        for _ in range(2):
            route = await CopyClient.open(link, "7", [here])
            await route.attach_video(here, memory.pieces(WHO, here))
            with anyio.CancelScope() as scope:
                scope.cancel()
                await route.copy(here, "out", owner.handles(), all_places())
        route = await CopyClient.open(link, "7", [here])
        await route.attach_video(here, memory.pieces(WHO, here))
        await route.close()
        memory.close()


class SlowHelper:
    """A link to a helper that opens a session slowly."""

    def __init__(self) -> None:
        self.asked, self.go = anyio.Event(), anyio.Event()

    async def call(self, op: str, _args: Mapping[str, object], **_: object) -> HelperReply:
        if op == "open":
            self.asked.set()
            await self.go.wait()
        return HelperReply({"peer": True}, helper=1)


async def test_a_copy_session_opened_for_a_cancelled_caller_stayed_open() -> None:
    """As for one of several GPUs when another has no memory: half a gigabyte stayed in use there."""
    helper = SlowHelper()
    opened: list[CopyClient] = []

    async def open_session() -> None:
        opened.append(await CopyClient.open(cast(Any, helper), "7/1", ["GPU-1"]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(open_session)
        await helper.asked.wait()
        tasks.cancel_scope.cancel()
        helper.go.set()
    assert len(opened) == 1, "the caller does not get the session, and cannot close it"


@pytest.mark.thorough
async def test_a_copy_session_without_memory_reports_the_missing_bytes(node: CudaNode) -> None:
    async with linked(node) as link:
        route = await CopyClient.open(link, "7", node.uuids)
        with pytest.raises(Refused, match="no GPU memory is reserved for the bytes"):
            await route.attach_video(node.uuids[0], [])
        with pytest.raises(
            Refused, match="the copy session needs exactly one address space to copy to or from, and has"
        ):
            await route.copy(node.uuids[0], "out", [b"x" * 64], [(0, 0, MIB, 0)])
