"""A helper that is kept ready, over the stub libcuda: it holds what was requested, and no more, and is restarted."""

from __future__ import annotations

import errno
import os

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.gpu_helper.ready_helper import CONTEXTS, OFF, STARTED, ReadyHelper
from tests.contract.helped import SIZE_BYTES, linked
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode


def contexts(node: CudaNode) -> int:
    """How many contexts there are now, by what the stub was asked."""
    retained, released = (len(node.calls(f"cuDevicePrimaryCtx{what}")) for what in ("Retain", "Release_v2"))
    return retained - released


@pytest.mark.thorough
async def test_a_started_helper_makes_no_context_and_is_started_again(node: CudaNode) -> None:
    async with linked(node) as link:
        ready = ReadyHelper(link, STARTED, lambda: pytest.fail("nobody asked for contexts"))
        await ready.check()
        first = link.pid
        assert first is not None
        assert contexts(node) == 0
        await ready.check()
        assert link.pid == first
        link.kill("the test says so")
        await ready.check()
        assert link.pid not in (None, first)


async def test_contexts_and_the_ring_exist_before_the_first_copy(node: CudaNode) -> None:
    gpus = [node.uuids[0]]
    async with linked(node) as link:
        ready = ReadyHelper(link, CONTEXTS, lambda: gpus)
        await ready.check()
        assert contexts(node) == 1
        count = len(node.calls("cuDevicePrimaryCtxRetain"))
        fd = os.memfd_create("pool")
        os.ftruncate(fd, SIZE_BYTES)
        route = await CopyClient.open(link, "7.1", gpus, fd, SIZE_BYTES)
        os.close(fd)
        assert len(node.calls("cuDevicePrimaryCtxRetain")) == count, "a suspend made a context"
        await route.close()
        assert contexts(node) == 1, "they are kept for the next"
        gpus.append(node.uuids[1])
        await ready.check()
        assert contexts(node) == 2
        gpus.clear()
        await ready.check()
        assert contexts(node) == 0, "no job is left that would need one"


@pytest.mark.thorough
async def test_a_broken_driver_is_not_a_failure_of_the_daemon(node: CudaNode) -> None:
    async with linked(node) as link:
        ready = ReadyHelper(link, CONTEXTS, lambda: ["GPU-that-is-not-there"])
        with pytest.raises(HegmError, match="shows no GPU GPU-that-is-not-there"):
            await ready.check()
        with anyio.fail_after(HANG_S):
            await ReadyHelper(link, OFF, list).run()


async def test_a_lack_of_descriptors_is_not_a_failure_of_the_daemon(node: CudaNode) -> None:
    requested = anyio.Event()

    def scarce() -> list[str]:
        requested.set()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with linked(node) as link, anyio.create_task_group() as tasks:
        tasks.start_soon(ReadyHelper(link, CONTEXTS, scarce).run)
        with anyio.fail_after(HANG_S):
            await requested.wait()
            await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
