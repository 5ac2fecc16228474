"""The state after a driver failure under the helper: nothing open, nothing mapped, the bytes unchanged."""

from __future__ import annotations

import os

import pytest

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost
from hegmd.system.descriptors import Descriptors
from tests.contract.helped import MIB, SIZE_BYTES, SOON_S, Owner, ask, carry, hold, linked, places
from tests.stubs.cuda.node import CudaNode

# -- what fails ----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("number", [1, 719], ids=["one-copy", "the-context"])
async def test_a_copy_that_fails_leaves_nothing_open_and_the_bytes_where_they_were(
    node: CudaNode, owner: Owner, number: int
) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, there, [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=[here, there])
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            second = len(node.calls("cuMemcpyPeerAsync")) + 2  # beyond those that the streams were tried with
            node.order(f"error cuMemcpyPeerAsync {number} {second} {second}")
            with pytest.raises(DriverFailed, match=f"cuMemcpyPeerAsync failed with {number}"):
                await carry(link, here, "out", owner, places())
            opened = len(node.calls("cuIpcOpenMemHandle_v2"))
            assert opened == len(node.calls("cuIpcCloseMemHandle")) == 2
            assert owner.ask("digest") == owner.digest
            node.mend()
            if number == 719:
                with pytest.raises(Refused, match="there is no copy session 7"):
                    await carry(link, here, "out", owner, places())
            else:
                await carry(link, here, "out", owner, places())


@pytest.mark.thorough
async def test_a_copy_that_hangs_is_ended_and_done_again(node: CudaNode, owner: Owner) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, there, [SIZE_BYTES])
        with held:
            args = {"lane": "7", "gpu": here, "direction": "out", "handles": owner.handles(), "places": places()}
            for deadline_s in (0.5, SOON_S):
                await ask(link, "open", lane="7", gpus=[here, there])
                await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
                if deadline_s != SOON_S:
                    node.order("hang cuStreamSynchronize")
                    with pytest.raises(HelperLost, match=r"`copy` was not done after 0\.5 s"):
                        await link.call("copy", args, deadline_s=deadline_s)
                    node.mend()
            await link.call("copy", args, deadline_s=SOON_S)
            owner.come_back()
            await carry(link, here, "in", owner, places())
            assert owner.ask("digest") == owner.digest


@pytest.mark.thorough
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemSetAccess", "cuMemImportFromShareableHandle"])
async def test_memory_that_cannot_be_mapped_leaves_the_lane_as_it_was(node: CudaNode, owner: Owner, call: str) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, there, [4 * MIB, 4 * MIB])
        with held:
            await ask(link, "open", lane="7", gpus=[here, there])
            node.order(f"error {call} 1")
            with pytest.raises(DriverFailed, match=f"{call} failed with 1"):
                await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            with pytest.raises(Refused, match="exactly one address space"):
                await carry(link, here, "out", owner, places())
            node.mend()
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            with pytest.raises(Refused, match="the copy session has GPU memory already"):
                await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            await carry(link, here, "out", owner, places())


@pytest.mark.thorough
async def test_memory_that_cannot_be_pinned_leaves_no_lane(node: CudaNode) -> None:
    with Descriptors([os.memfd_create("pool")]) as pool:
        os.ftruncate(pool.view()[0], 2 * MIB)
        async with linked(node) as link:

            async def open_lane() -> None:
                await ask(link, "open", lane="7", gpus=node.uuids, host_bytes=2 * MIB, fds=pool.view())

            node.order("error cuMemHostRegister_v2 2")
            with pytest.raises(DriverFailed, match="cuMemHostRegister"):
                await open_lane()
            node.mend()
            await open_lane()


@pytest.mark.thorough
async def test_host_memory_that_cannot_be_mapped_is_a_refusal_and_no_fault_of_ours(node: CudaNode) -> None:
    """It was seen where huge pages were promised twice."""
    with Descriptors(list(os.pipe())) as pipe:
        async with linked(node) as link:
            with pytest.raises(Refused, match="2 MiB of the host pool cannot be mapped"):
                await ask(link, "open", lane="7", gpus=node.uuids, host_bytes=2 * MIB, fds=pipe.view()[:1])


@pytest.mark.thorough
async def test_invalid_requests_are_refused_before_a_driver_call(node: CudaNode, owner: Owner) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, here, [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=[here])
            with pytest.raises(Refused, match="does not belong to this copy session"):
                await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            with pytest.raises(Refused, match="2 sizes came with 1 descriptors"):
                await ask(link, "attach-video", lane="7", gpu=here, sizes=[1, 2], fds=held.view())
            await ask(link, "attach-video", lane="7", gpu=here, sizes=sizes, fds=held.view())
            for wrong in ([[3, 0, 1, 0]], [[0, 0, 1]], [[0, 0, -1, 0]]):
                with pytest.raises(HegmError, match="is outside of 3 allocations"):
                    await carry(link, here, "out", owner, wrong)
            with pytest.raises(HegmError, match="is outside the mapped range"):
                await carry(link, here, "out", owner, [[0, 0, 1, SIZE_BYTES]])
            with pytest.raises(HegmError, match="is not a direction of a copy"):
                await carry(link, here, "sideways", owner, places())
            assert (await carry(link, here, "out", owner, []))["copied_bytes"] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("place", [[0, 3 * MIB, 512, 0], [0, 3 * MIB - 256, 512, 0], [2, 1 << 40, 512, 0]])
@pytest.mark.parametrize("direction", ["out", "in"])
async def test_an_agents_place_beyond_its_own_allocation_is_neither_read_nor_written(
    node: CudaNode, owner: Owner, direction: str, place: list[int]
) -> None:
    """The helper is root's, and other processes' memory is mapped beside it: once any offset was taken."""
    here = node.uuids[0]
    async with linked(node) as link:
        held, sizes = await hold(link, here, [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=[here])
            await ask(link, "attach-video", lane="7", gpu=here, sizes=sizes, fds=held.view())
            with pytest.raises(HegmError, match="are beyond the"):
                await carry(link, here, direction, owner, [place])
            assert not node.calls("cuMemcpyDtoDAsync")
            assert len(node.calls("cuIpcOpenMemHandle_v2")) == len(node.calls("cuIpcCloseMemHandle")) == 1
            end = [[0, 3 * MIB - 512, 512, 0]]
            assert (await carry(link, here, direction, owner, end))["copied_bytes"] == 512
