"""Copies within one GPU by its processors, over the stub: of what counts as another's, and of nothing else."""

from __future__ import annotations

import pytest

from tests.contract.helped import SIZE_BYTES, Owner, ask, carry, hold, linked, move, places
from tests.stubs.cuda.node import CudaNode


@pytest.mark.thorough
@pytest.mark.parametrize(
    "order",
    [
        "",
        "error cuModuleLoadData 2",
        "error cuModuleGetFunction 500",
        "error cuDeviceGetAttribute 1",
        "error cuPointerGetAttribute 1",
        "error cuLaunchKernel 701",
    ],
)
async def test_the_kernel_copies_within_one_gpu_that_counts_as_two(node: CudaNode, owner: Owner, order: str) -> None:
    """The copy engines had it at a quarter of the speed; and still have it where the driver takes or runs none."""
    here, there = node.uuids
    async with linked(node) as link:
        await move(link, owner, here, there)
        held, sizes = await hold(link, there, [SIZE_BYTES])
        if order:
            node.order(order)
        with held:
            await ask(link, "open", lane="7", gpus=[there, here])
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            tried = len(node.calls("cuMemcpyDtoDAsync_v2"))
            await carry(link, there, "out", owner, places())
            owner.come_back()
            await carry(link, there, "in", owner, places())
            assert owner.ask("digest") == owner.digest
            await ask(link, "close", lane="7")
    assert bool(node.calls("cuLaunchKernel")) is (not order or "Launch" in order)
    assert (len(node.calls("cuMemcpyDtoDAsync_v2")) > tried) is bool(order)
    loaded = len(node.calls("cuModuleLoadData"))
    assert len(node.calls("cuModuleUnload")) == (0 if "Load" in order else loaded)


@pytest.mark.thorough
async def test_memory_that_was_never_moved_is_left_to_the_driver(node: CudaNode, owner: Owner) -> None:
    async with linked(node) as link:
        held, sizes = await hold(link, node.uuids[0], [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=node.uuids)
            await ask(link, "attach-video", lane="7", gpu=node.uuids[0], sizes=sizes, fds=held.view())
            await carry(link, node.uuids[0], "out", owner, places())
    assert not node.calls("cuModuleLoadData")
