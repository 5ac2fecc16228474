"""The helper over the stub libcuda: the node, checkpoints, held video memory, contexts, and bytes out and back."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost
from hegmd.gpu_helper.staging import PACE
from hegmd.memory.video_memory import VideoMemory
from hegmd.system.descriptors import Descriptors
from tests.contract.helped import GIB, MIB, SIZE_BYTES, SOON_S, Owner, ask, carry, hold, linked, move, places
from tests.stubs.cuda.node import CudaNode

pytestmark = pytest.mark.thorough

# -- the node ------------------------------------------------------------------------------------------------------


async def test_the_gpus_are_those_of_the_driver_whatever_is_visible_to_the_daemon(node: CudaNode) -> None:
    async with linked(node) as link:
        hello = await link.start()
        assert (hello["cuda_version"], hello["gpus"]) == (13000, 2)
        reply = await ask(link, "devices")
        assert [gpu["uuid"] for gpu in reply["devices"]] == node.uuids
        assert [gpu["total_bytes"] for gpu in reply["devices"]] == [node.gpu_bytes] * 2


async def test_a_helper_without_a_driver_reports_it(tmp_path: Path) -> None:
    node = CudaNode.make(tmp_path)
    node.order("error cuInit 100")
    async with linked(node) as link:
        with pytest.raises(DriverFailed, match="cuInit failed with 100"):
            await link.start()
        node.mend()
        assert (await link.start())["gpus"] == 2, "the next attempt starts anew"


async def test_a_process_goes_through_all_states_and_returns(node: CudaNode, owner: Owner) -> None:
    swap = [node.uuids, node.uuids[::-1]]
    async with linked(node) as link:

        async def state() -> object:
            return (await ask(link, "state", pid=owner.pid))["state"]

        states = [await state()]
        await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
        states.append(await state())
        await ask(link, "checkpoint", pid=owner.pid)
        states.append(await state())
        await ask(link, "restore", pid=owner.pid, pairs=[list(pair) for pair in zip(*swap, strict=True)])
        states.append(await state())
        await ask(link, "unlock", pid=owner.pid)
        assert [*states, await state()] == ["running", "locked", "checkpointed", "locked", "running"]
        assert owner.ask("digest") == owner.digest
        with pytest.raises(DriverFailed, match="401") as refused:
            await ask(link, "unlock", pid=owner.pid)
        assert refused.value.number == 401
        with pytest.raises(DriverFailed) as gone:
            await ask(link, "lock", pid=2**22 + 1, timeout_s=1.0)
        assert gone.value.number == 304


async def test_a_helper_killed_in_the_middle_of_a_checkpoint_leaves_the_process_to_finish_it(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    """The next helper gets the true state: a state query waits for the call in progress."""
    fifo = tmp_path / "step"
    os.mkfifo(fifo)
    node.order(f"hold step:checkpoint {fifo}")
    async with linked(node) as link:
        await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
        async with anyio.create_task_group() as tasks:

            async def checkpoint() -> None:
                with pytest.raises(HelperLost, match="in flight: checkpoint"):
                    await ask(link, "checkpoint", pid=owner.pid)

            tasks.start_soon(checkpoint)
            step = await anyio.to_thread.run_sync(os.open, fifo, os.O_WRONLY)  # returns when the step has begun
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
        node.mend()
        os.close(step)
        assert (await ask(link, "state", pid=owner.pid))["state"] == "checkpointed"
        await ask(link, "restore", pid=owner.pid, pairs=[])
        await ask(link, "unlock", pid=owner.pid)
        assert owner.ask("digest") == owner.digest


# -- video memory by descriptor ------------------------------------------------------------------------------------


async def test_held_memory_is_allocated_immediately_outlives_the_helper_and_ends_with_its_descriptors(
    node: CudaNode, watcher: Owner
) -> None:
    before_bytes = watcher.free_bytes()
    async with linked(node) as link:
        held, sizes = await hold(link, node.uuids[1], [GIB, GIB, 3 * MIB])
        assert sizes == [GIB, GIB, 4 * MIB], "in whole units of the driver's"
        with held:
            assert watcher.free_bytes() == before_bytes - sum(sizes)
            link.kill("the test says so")
            await link.start()
            assert watcher.free_bytes() == before_bytes - sum(sizes)
        assert watcher.free_bytes() == before_bytes


async def test_memory_is_held_whole_or_not_at_all(node: CudaNode, watcher: Owner) -> None:
    before_bytes = watcher.free_bytes()
    async with linked(node) as link:
        with pytest.raises(Refused, match=r"has only 7168 MiB free of the 8192 MiB") as refused:
            await hold(link, node.uuids[1], [GIB] * 8)
        assert refused.value.facts["asked_bytes"] == 8 * GIB
        assert refused.value.facts["got_bytes"] == before_bytes // GIB * GIB
        assert watcher.free_bytes() == before_bytes


async def test_a_reservation_larger_than_the_gpu_is_out_of_memory_and_no_failure(node: CudaNode) -> None:
    """Driver 580.159.04 answers cuMemCreate with 1, an invalid value, and not with 2 there."""
    node.order("error cuMemCreate 1")
    async with linked(node) as link:
        with pytest.raises(Refused, match="of the 9216 MiB"):
            await hold(link, node.uuids[1], [9 * GIB])


async def test_an_unknown_gpu_is_refused(node: CudaNode) -> None:
    async with linked(node) as link:
        requests: dict[str, dict[str, object]] = {
            "hold": {"gpu": "GPU-no", "sizes": [1]},
            "open": {"lane": "7", "gpus": ["GPU-no"]},
        }
        for op, args in requests.items():
            with pytest.raises(Refused, match="shows no GPU GPU-no"):
                await link.call(op, args, deadline_s=SOON_S)


# -- out and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", [1, 0], ids=["peer", "same-gpu"])
async def test_bytes_in_held_video_memory_survive_a_kill_of_the_helper(
    node: CudaNode, owner: Owner, other: int
) -> None:
    here, there = node.uuids[0], node.uuids[other]
    async with linked(node) as link:
        held, sizes = await hold(link, there, [4 * MIB, 2 * MIB, 2 * MIB])
        with held:
            assert (await ask(link, "open", lane="7", gpus=[here, there]))["peer"] is True
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            done = await carry(link, here, "out", owner, places())
            assert done["copied_bytes"] == SIZE_BYTES
            assert link.pid is not None
            os.kill(link.pid, signal.SIGKILL)
            owner.come_back()
            with pytest.raises(HegmError):  # the one that was killed, or the next, which knows no session
                await carry(link, here, "in", owner, places())
            await ask(link, "open", lane="7", gpus=[there, here])
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            await carry(link, here, "in", owner, places())
            assert owner.ask("digest") == owner.digest


@pytest.mark.parametrize("way", ["memfd", "hugetlb-sized"])
async def test_bytes_go_to_host_memory_and_return(node: CudaNode, owner: Owner, way: str) -> None:
    gpu = node.uuids[0]
    size_bytes = SIZE_BYTES + (2 * MIB if way == "hugetlb-sized" else 0)
    with Descriptors([os.memfd_create("pool")]) as pool:
        os.ftruncate(pool.view()[0], size_bytes)
        async with linked(node) as link:
            await ask(link, "open", lane="7", gpus=[gpu], host_bytes=size_bytes, fds=pool.view())
            await carry(link, gpu, "out", owner, places())
            owner.come_back()
            await ask(link, "close", lane="7")
            await ask(link, "open", lane="8", gpus=[gpu], host_bytes=size_bytes, fds=pool.view())
            handles = owner.handles()
            await ask(link, "copy", lane="8", gpu=gpu, direction="in", handles=handles, places=places())
            assert owner.ask("digest") == owner.digest


async def test_more_bytes_than_ring_slots_go_to_host_memory_and_return(node: CudaNode) -> None:
    """And small places beside large ones: they share a slot, and a slot is used again as soon as it is empty."""
    gpu, sizes_mib = node.uuids[0], (1, *[3] * 5, PACE.strands * 32 + 3, 1)
    size_bytes = sum(sizes_mib) * MIB
    owner = Owner(node, 0, *sizes_mib)
    try:
        with Descriptors([os.memfd_create("pool")]) as pool:
            os.ftruncate(pool.view()[0], size_bytes)
            async with linked(node) as link:
                await ask(link, "open", lane="7", gpus=[gpu], host_bytes=size_bytes, fds=pool.view())
                assert (await carry(link, gpu, "out", owner, places(sizes_mib)))["copied_bytes"] == size_bytes
                owner.come_back()
                await carry(link, gpu, "in", owner, places(sizes_mib))
                assert owner.ask("digest") == owner.digest
    finally:
        owner.close()


async def test_the_pool_is_not_pinned_only_the_ring_is(node: CudaNode, owner: Owner) -> None:
    """Pinning 32 GiB took a second, and made the driver's own restore beside it twice as long."""
    with Descriptors([os.memfd_create("pool")]) as pool:
        os.ftruncate(pool.view()[0], GIB)
        async with linked(node) as link:
            await ask(link, "open", lane="7", gpus=[node.uuids[0]], host_bytes=GIB, fds=pool.view())
            await ask(link, "close", lane="7")
    assert [len(node.calls(f"cuMemHost{what}")) for what in ("Register_v2", "Unregister")] == [1, 1]


async def test_memory_of_a_moved_process_is_opened_where_it_counts_as_being(node: CudaNode, owner: Owner) -> None:
    """Opened on the GPU that it is on, it was read from the other at 90 GB/s of the link's 394."""
    here, there = node.uuids
    async with linked(node) as link:
        await move(link, owner, here, there)
        held, sizes = await hold(link, here, [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=[there, here])
            await ask(link, "attach-video", lane="7", gpu=here, sizes=sizes, fds=held.view())
            await carry(link, there, "out", owner, places())
            opened = len(node.calls("cuIpcOpenMemHandle_v2"))
            owner.come_back()
            await carry(link, there, "in", owner, places())
            assert owner.ask("digest") == owner.digest
    assert opened == len(places()) + 1, "the first one twice: it tells where all count as being"
    assert len(node.calls("cuIpcCloseMemHandle")) == len(node.calls("cuIpcOpenMemHandle_v2"))


async def test_a_move_in_rounds_gives_the_memory_back_as_it_goes(node: CudaNode, owner: Owner) -> None:
    here, there = node.uuids
    watcher = Owner(node, 1, 1)
    try:
        async with linked(node) as link:
            held, sizes = await hold(link, there, [4 * MIB, 4 * MIB])
            fds = held.take()
            await ask(link, "open", lane="7", gpus=[here, there])
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=fds)
            await carry(link, here, "out", owner, places())
            owner.come_back()
            first, second = places()[:1], places()[1:]
            await carry(link, here, "in", owner, first)
            before_bytes = watcher.free_bytes()
            assert (await ask(link, "detach-video", lane="7", pieces=0))["detached_bytes"] == 0
            # The second storage starts within the first segment, so all of it has to be copied before that segment is
            # freed.
            await carry(link, here, "in", owner, second[:1])
            assert (await ask(link, "detach-video", lane="7", pieces=1))["detached_bytes"] == 4 * MIB
            os.close(fds[0])
            assert watcher.free_bytes() == before_bytes + 4 * MIB
            await carry(link, here, "in", owner, second[1:])
            assert owner.ask("digest") == owner.digest
            with pytest.raises(HegmError, match="is outside the mapped range 4194304 to 8388608"):
                await carry(link, here, "in", owner, first)
            with pytest.raises(Refused, match=r"2 allocations .* 1 are left"):
                await ask(link, "detach-video", lane="7", pieces=2)
            os.close(fds[1])
    finally:
        watcher.close()


async def test_a_copy_in_rounds_continues_in_another_helper_with_the_remaining_bytes(
    node: CudaNode, owner: Owner
) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        memory = VideoMemory(link)
        await memory.reserve("7.1-1.storages", there, 4 * MIB)
        await memory.reserve("7.1-1.storages", there, SIZE_BYTES)

        async def attach() -> None:
            pieces = memory.pieces("7.1-1.storages", there)
            args = {"lane": "7", "gpu": there, "sizes": [piece.size_bytes for piece in pieces], "start": pieces[0].at}
            await link.call("open", {"lane": "7", "gpus": [here, there]}, deadline_s=SOON_S)
            await link.call("attach-video", args, deadline_s=SOON_S, fds=[piece.fd for piece in pieces])

        await attach()
        await carry(link, here, "out", owner, places())
        owner.come_back()
        await carry(link, here, "in", owner, places()[:2])
        await ask(link, "detach-video", lane="7", pieces=1)
        await memory.give_first("7.1-1.storages", there, 1)
        link.kill("the test says so")
        await attach()
        await carry(link, here, "in", owner, places()[2:])
        assert owner.ask("digest") == owner.digest
        with pytest.raises(HegmError, match="is outside the mapped range 4194304 to 8388608"):
            await carry(link, here, "in", owner, places()[:1])
        memory.close()


async def test_bytes_of_a_gpu_without_peer_access_are_carried_too(node: CudaNode, owner: Owner) -> None:
    node.order("error cuCtxEnablePeerAccess 217")
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, there, [SIZE_BYTES])
        with held:
            assert (await ask(link, "open", lane="7", gpus=[here, there]))["peer"] is False
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            await carry(link, here, "out", owner, places())
            owner.come_back()
            await carry(link, here, "in", owner, places())
            assert owner.ask("digest") == owner.digest


async def test_storages_that_share_an_allocation_open_it_once(node: CudaNode, owner: Owner) -> None:
    gpu = node.uuids[0]
    (first, *_) = owner.handles()
    small = [[index, index * 1024, 1000, index * 1024] for index in range(1000)]
    with Descriptors([os.memfd_create("pool")]) as pool:
        os.ftruncate(pool.view()[0], 2 * MIB)
        async with linked(node) as link:
            await ask(link, "open", lane="7", gpus=[gpu], host_bytes=2 * MIB, fds=pool.view())
            args = {"lane": "7", "gpu": gpu, "direction": "out", "handles": [first] * 1000, "places": small}
            done = (await link.call("copy", args, deadline_s=SOON_S)).values
        assert done["copied_bytes"] == 1000 * 1000
    assert len(node.calls("cuIpcOpenMemHandle_v2")) == len(node.calls("cuIpcCloseMemHandle")) == 1


async def test_contexts_exist_only_while_a_copy_session_uses_them(node: CudaNode, watcher: Owner) -> None:
    here, there = node.uuids
    before_bytes = watcher.free_bytes()
    async with linked(node) as link:
        await ask(link, "open", lane="7", gpus=[here, there])
        await ask(link, "open", lane="8", gpus=[there])
        assert watcher.free_bytes() == before_bytes - node.context_bytes
        await ask(link, "close", lane="7")
        assert watcher.free_bytes() == before_bytes - node.context_bytes
        await ask(link, "close", lane="8")
        assert watcher.free_bytes() == before_bytes
        await ask(link, "close", lane="8")
        with pytest.raises(Refused, match="there is no copy session 8"):
            await ask(link, "detach-video", lane="8", pieces=1)


async def test_a_closed_lane_keeps_no_memory_from_being_freed(node: CudaNode, watcher: Owner) -> None:
    before_bytes = watcher.free_bytes()
    async with linked(node) as link:
        held, sizes = await hold(link, node.uuids[1], [GIB, GIB])
        with held:
            await ask(link, "open", lane="7", gpus=node.uuids)
            await ask(link, "attach-video", lane="7", gpu=node.uuids[1], sizes=sizes, fds=held.view())
            await ask(link, "detach-video", lane="7", pieces=1)
            await ask(link, "close", lane="7")
        assert watcher.free_bytes() == before_bytes


async def test_a_lane_that_cannot_be_opened_leaves_no_context(node: CudaNode, watcher: Owner) -> None:
    node.order("error cuDevicePrimaryCtxRetain@0 2")
    before_bytes = watcher.free_bytes()
    async with linked(node) as link:
        with pytest.raises(DriverFailed, match="cuDevicePrimaryCtxRetain failed with 2"):
            await ask(link, "open", lane="7", gpus=node.uuids)
        assert watcher.free_bytes() == before_bytes
        node.mend()
        await ask(link, "open", lane="7", gpus=node.uuids)


async def test_two_copy_sessions_copy_at_once_and_close_after_their_copy(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    fifo = tmp_path / "copying"
    os.mkfifo(fifo)
    gpu = node.uuids[0]
    handles = owner.handles()
    async with linked(node) as link:
        held, sizes = await hold(link, gpu, [SIZE_BYTES])
        with held:
            for lane in ("7", "8"):
                await ask(link, "open", lane=lane, gpus=[gpu])
                await ask(link, "attach-video", lane=lane, gpu=gpu, sizes=sizes, fds=held.view())
            first = len(node.calls("cuMemcpyDtoDAsync_v2")) + 1  # beyond those that the streams were tried with
            node.order(f"hold cuMemcpyDtoDAsync_v2 {fifo} {first} {first}")
            copied = {"gpu": gpu, "direction": "out", "handles": handles, "places": places()}
            ended: list[str] = []

            async def end(op: str, args: Mapping[str, object]) -> None:
                await link.call(op, args, deadline_s=SOON_S)
                ended.append(op)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(end, "copy", {"lane": "7", **copied})
                step = await anyio.to_thread.run_sync(os.open, fifo, os.O_WRONLY)
                tasks.start_soon(end, "close", {"lane": "7"})
                await link.call("copy", {"lane": "8", **copied}, deadline_s=SOON_S)
                assert not ended
                os.close(step)
            assert ended == ["copy", "close"]
            await ask(link, "close", lane="8")
