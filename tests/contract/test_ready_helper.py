"""A helper that is kept ready, over the stub libcuda: it holds what was requested, and no more, and is restarted.

Longer than 400 lines because contexts and pinned memory are of the same helper.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.gpu_helper.link import HelperLost, Link
from hegmd.gpu_helper.ready_helper import CONTEXTS, LOOK_S, OFF, PINNED, RETRY_S, STARTED, ReadyHelper
from tests.contract.helped import SIZE_BYTES, Owner, linked, places
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode

PLACES = [(handle, offset, size_bytes, at) for handle, offset, size_bytes, at in places()]


def contexts(node: CudaNode) -> int:
    """How many contexts there are now, by what the stub was asked."""
    retained, released = (len(node.calls(f"cuDevicePrimaryCtx{what}")) for what in ("Retain", "Release_v2"))
    return retained - released


def pinned(node: CudaNode) -> int:
    """How many ranges of host memory are pinned now."""
    return len(node.calls("cuMemHostRegister_v2")) - len(node.calls("cuMemHostUnregister"))


class Segments:
    """Files in memory, as the pool hands them out."""

    def __init__(self) -> None:
        self.fds: dict[int, int] = {}

    async def handed(self, use: Callable[[Sequence[tuple[int, int]]], Awaitable[bool]]) -> bool:
        return await use(list(self.fds.items()))

    def add(self, size_bytes: int) -> int:
        fd = os.memfd_create("pool")
        os.ftruncate(fd, size_bytes)
        self.fds[fd] = size_bytes
        return fd


@contextmanager
def segments() -> Iterator[Segments]:
    made = Segments()
    yield made
    for fd in made.fds:
        os.close(fd)


@asynccontextmanager
async def one_pinned(node: CudaNode) -> AsyncIterator[tuple[Link, ReadyHelper, Segments, int]]:
    """A helper that has pinned a segment for the first GPU, with the segment's descriptor."""
    with segments() as memory:
        fd = memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: node.uuids[:1], memory.handed)
            await ready.check()
            yield link, ready, memory, fd
        if fd not in memory.fds:
            os.close(fd)


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


async def test_ready_memory_that_is_pinned_is_copied_without_a_ring(node: CudaNode, owner: Owner) -> None:
    here = node.uuids[0]
    with segments() as memory:
        fd = memory.add(2 * SIZE_BYTES)
        async with linked(node) as link:
            await ReadyHelper(link, PINNED, lambda: [here], memory.handed).check()
            count = len(node.calls("cuMemHostRegister_v2"))
            os.ftruncate(fd, SIZE_BYTES)  # a piece is made of it
            route = await CopyClient.open(link, "7", [here], fd, SIZE_BYTES)
            await route.copy(here, "out", owner.handles(), PLACES)
            owner.come_back()
            await route.copy(here, "in", owner.handles(), PLACES)
            await route.close()
            assert owner.ask("digest") == owner.digest
            assert len(node.calls("cuMemHostRegister_v2")) == count, "the copy pinned memory"


async def test_memory_is_unpinned_before_it_is_cut_and_once_it_is_not_wanted(node: CudaNode) -> None:
    gpus = [node.uuids[0]]
    with segments() as memory:
        one, other = memory.add(SIZE_BYTES), memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: gpus, memory.handed)
            await ready.check()
            gpus.clear()
            await ready.check()
            assert (pinned(node), contexts(node), ready.pinned_bytes) == (3, 1, 2 * SIZE_BYTES), (
                "and a page, without a job"
            )
            await ready.unpin(one)
            assert (pinned(node), ready.pinned_bytes) == (2, SIZE_BYTES)
            os.ftruncate(one, SIZE_BYTES // 2)
            memory.fds[one] = SIZE_BYTES // 2
            await ready.check()
            assert pinned(node) == 3
            del memory.fds[other]
            ready.unpin_later(other)
            assert pinned(node) == 3
            await ready.unpin()
            assert pinned(node) == 2
            memory.fds.clear()
            await ready.check()
            assert pinned(node) == 0, "nothing is left to pin"
            await ready.check()
            assert contexts(node) == 0
        os.close(one)
        os.close(other)


async def test_a_resume_after_all_jobs_left_their_gpus_makes_no_context(node: CudaNode) -> None:
    """Each context that is made has all pinned memory mapped first: 1.6 s for 68 GiB."""
    gpus = list(node.uuids)
    with segments() as memory:
        memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: gpus, memory.handed)
            await ready.check()
            made = len(node.calls("cuDevicePrimaryCtxRetain"))
            gpus.pop()
            await ready.check()
            gpus.clear()
            await ready.check()
            route = await CopyClient.open(link, "7", node.uuids)
            await route.close()
            assert len(node.calls("cuDevicePrimaryCtxRetain")) == made


async def test_memory_that_a_session_uses_is_unpinned_after_it(node: CudaNode, owner: Owner) -> None:
    here = node.uuids[0]
    async with one_pinned(node) as (link, ready, memory, fd):
        route = await CopyClient.open(link, "7", [here], fd, SIZE_BYTES)
        await ready.unpin(fd)
        assert pinned(node) == 2
        await route.copy(here, "out", owner.handles(), PLACES)
        await route.close()
        memory.fds.clear()
        await ready.check()
        assert pinned(node) == 0


async def test_memory_that_the_driver_did_not_unpin_counted_as_free(node: CudaNode) -> None:
    """Its pages stayed until the helper ended, which nothing made it do."""
    async with one_pinned(node) as (link, ready, memory, fd):
        node.order("error cuMemHostUnregister 1")
        await ready.unpin(fd)
        assert link.pid is None, "the helper that has it lives"
        node.mend()
        await ready.check()
        memory.fds.clear()
        node.order("error cuMemHostUnregister 1")
        with pytest.raises(HegmError, match="cuMemHostUnregister failed with 1"):
            await ready.check()
        assert link.pid is None
        node.mend()
        await ready.check()
        assert ready.pinned_bytes == 0


async def test_a_session_ends_although_the_driver_does_not_unpin_its_memory(node: CudaNode) -> None:
    async with one_pinned(node) as (link, ready, memory, fd):
        route = await CopyClient.open(link, "7", node.uuids[:1], fd, SIZE_BYTES)
        await ready.unpin(fd)
        node.order("error cuMemHostUnregister 1")
        await route.close()
        memory.fds.clear()
        memory.add(SIZE_BYTES)
        with pytest.raises(HegmError, match="cuMemHostUnregister failed with 1"):
            await ready.check()


async def test_the_next_helper_pins_memory_again(node: CudaNode) -> None:
    async with one_pinned(node) as (link, ready, _memory, fd):
        before = len(node.calls("cuMemHostRegister_v2"))
        link.kill("the test says so")
        await ready.unpin(fd)
        assert link.pid is None, "an unpin started a helper"
        await ready.check()
        assert len(node.calls("cuMemHostRegister_v2")) > before


async def test_nothing_is_pinned_while_an_operation_runs(node: CudaNode) -> None:
    with segments() as memory:
        memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: node.uuids[:1], memory.handed, lambda: True)
            await ready.check()
            assert (pinned(node), contexts(node)) == (0, 1)


async def test_an_operation_waited_20_s_for_a_piece_that_was_not_pinned(node: CudaNode) -> None:
    """The pool's lock is held for a piece, and so is the helper's, which a session needs."""
    operations = iter([False, False])  # one begins after the look before the piece
    with segments() as memory:
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: node.uuids[:1], memory.handed, lambda: next(operations, True))
            await ready.check()
            memory.add(SIZE_BYTES)
            node.order("hang cuMemHostRegister_v2")
            with pytest.raises(HelperLost, match="it is still pinning memory, and an operation may wait"):
                await ready.check()


async def test_contexts_are_released_although_another_gpu_could_not_get_one(node: CudaNode) -> None:
    """The session that had them was forgotten, and its contexts stayed until the helper ended."""
    gpus = node.uuids[:1]
    async with linked(node) as link:
        ready = ReadyHelper(link, CONTEXTS, lambda: gpus)
        await ready.check()
        gpus.append(node.uuids[1])
        await ready.check()
        gpus.append("GPU-that-is-not-there")
        with pytest.raises(HegmError, match="shows no GPU"):
            await ready.check()
        gpus.clear()
        await ready.check()
        assert contexts(node) == 0


async def test_memory_was_not_pinned_because_one_gpu_had_no_memory_for_a_context(node: CudaNode) -> None:
    here, full = node.uuids
    with segments() as memory:
        memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: [full, here], memory.handed)
            node.order("error cuDevicePrimaryCtxRetain@1 2")
            for _ in range(2):
                with pytest.raises(HegmError, match=f"{full}: cuDevicePrimaryCtxRetain failed with 2"):
                    await ready.check()
                refused = sum(call.subject == 1 for call in node.calls("cuDevicePrimaryCtxRetain"))
                assert (ready.pinned_bytes, contexts(node) - refused) == (SIZE_BYTES, 1)
            node.mend()
            await ready.check()
            assert contexts(node) - refused == 2


async def test_memory_stays_known_as_pinned_although_no_more_can_be_pinned(node: CudaNode) -> None:
    gpus = node.uuids[:1]
    with segments() as memory:
        memory.add(SIZE_BYTES)
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: gpus, memory.handed)
            await ready.check()
            memory.add(SIZE_BYTES)
            node.order("error cuMemHostRegister_v2 2")
            gpus.clear()
            with pytest.raises(HegmError):
                await ready.check()
            assert (ready.pinned_bytes, contexts(node)) == (SIZE_BYTES, 1)


async def test_a_lack_of_descriptors_while_memory_is_pinned_leaks_none(node: CudaNode) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def listed() -> list[int]:
        return sorted(map(int, os.listdir("/proc/self/fd")))

    with segments() as memory:
        for _ in range(3):
            memory.add(SIZE_BYTES)

        async def scarce(use: Callable[[Sequence[tuple[int, int]]], Awaitable[bool]]) -> bool:
            spare = os.dup(0)  # the lowest that is free
            os.close(spare)
            before = listed()
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, limits[1]))
                with pytest.raises(OSError, match="Too many open files"):
                    await memory.handed(use)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert listed() == before
            return False

        async with linked(node) as link:
            await ReadyHelper(link, PINNED, lambda: node.uuids[:1], scarce).check()


async def test_a_reason_that_stays_the_same_is_logged_once(node: CudaNode, caplog: pytest.LogCaptureFixture) -> None:
    """It was logged each 30 s, as long as a GPU had no memory for a context."""
    gpus = ["GPU-that-is-not-there"]
    async with linked(node) as link:
        ready = ReadyHelper(link, CONTEXTS, lambda: gpus)
        for _ in range(2):
            assert await ready.look() == RETRY_S
        assert caplog.text.count("GPU-that-is-not-there") == 1
        gpus.clear()
        assert await ready.look() == LOOK_S
        gpus.append("GPU-that-is-not-there")
        await ready.look()
        assert caplog.text.count("GPU-that-is-not-there") == 2


@pytest.mark.parametrize("first_pieces", [1, 4])
def test_memory_that_was_cut_while_it_was_pinned_is_pinned_to_its_new_end(node: CudaNode, first_pieces: int) -> None:
    """A job needs less than the ready memory has. The helper went on to pin beyond the end of the file, which failed
    each time, and what was pinned there was not free before the job continued.
    """
    script = f"""
import os
from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.copy_session import Contexts
from hegmd.gpu_helper.host_memory import PinnedSegments
piece_bytes = 1 << 20
cuda.start()
pinned = PinnedSegments(Contexts(), piece_bytes)
fd = os.memfd_create("pool")
os.ftruncate(fd, 4 * piece_bytes)
for _ in range({first_pieces}):
    pinned.adjust(0, [(fd, 4 * piece_bytes)])
cut_bytes = 2 * piece_bytes + 8192
os.ftruncate(fd, cut_bytes)
while pinned.adjust(0, [(fd, cut_bytes)]):
    pass
assert pinned.borrow(fd, cut_bytes) is not None
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=root, env={**os.environ, **node.environment()})
    assert pinned(node) == 4, "three pieces, and a page"


async def test_a_segment_that_cannot_be_mapped_leaves_no_context(node: CudaNode) -> None:
    """Its GPU had half a gigabyte less, until another segment was pinned and unpinned."""
    gpus = node.uuids[:1]
    with segments() as memory:
        async with linked(node) as link:
            ready = ReadyHelper(link, PINNED, lambda: gpus, memory.handed)
            await ready.check()
            gpus.clear()
            memory.fds[memory.add(SIZE_BYTES)] = 2 * SIZE_BYTES
            with pytest.raises(HegmError, match="cannot be mapped"):
                await ready.check()
            assert contexts(node) == 0
