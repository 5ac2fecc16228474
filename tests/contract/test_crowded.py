"""Driver calls that lack memory for themselves, on GPUs that another program has filled meanwhile.

On two H200, a program took all free memory while a job was suspended. The driver could not create a stream to copy the
job's bytes back, so the job stayed suspended until its operator resumed it, and could not leave that GPU again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from hegmd.errors import Refused
from hegmd.gpu_helper.link import DriverFailed
from hegmd.gpu_helper.preallocation import PIECE_BYTES, PIECES
from tests.contract.driven import QUESTIONS, REST_BYTES, Parts, rigged
from tests.contract.helped import MIB, SIZE_BYTES, Owner, ask, carry, hold, linked, places
from tests.stubs.cuda.node import CudaNode


def fill(owner: Owner) -> None:
    """Have it take all that is free on its GPU."""
    assert owner.ask("grab").startswith("grabbed")


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["video", "host"])
async def test_on_a_gpu_filled_after_arming_copies_still_have_streams_and_open_memory(
    node: CudaNode, owner: Owner, watcher: Owner, tmp_path: Path, way: str
) -> None:
    """Streams were made for each copy, and nothing was there for the page tables of what is opened."""
    here, there = node.uuids
    fillers = watcher, Owner(node, 0, 1)
    async with linked(node) as link:
        held, sizes = await hold(link, there, [SIZE_BYTES])
        with held, (tmp_path / "pool").open("w+b") as pool:
            pool.truncate(SIZE_BYTES)
            if way == "video":
                await ask(link, "open", lane="7", gpus=[here, there])
                await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            else:
                await ask(link, "open", lane="7", gpus=[here, there], host_bytes=SIZE_BYTES, fds=[pool.fileno()])
            node.stream_bytes, node.open_bytes = MIB, PIECE_BYTES // 2
            node.write()
            for filler in fillers:
                fill(filler)
            await carry(link, here, "out", owner, places())
            owner.come_back()
            await carry(link, here, "in", owner, places())
            assert owner.ask("digest") == owner.digest
            await ask(link, "close", lane="7")
    fillers[1].close()


@pytest.mark.thorough
async def test_a_lane_gives_its_reserve_bit_by_bit_and_has_it_again(
    node: CudaNode, owner: Owner, watcher: Owner
) -> None:
    here, there = node.uuids
    async with linked(node) as link:
        held, sizes = await hold(link, there, [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=[here, there])
            before_bytes = watcher.free_bytes()
            await ask(link, "attach-video", lane="7", gpu=there, sizes=sizes, fds=held.view())
            assert watcher.free_bytes() == before_bytes - PIECES * PIECE_BYTES
            opened = len(node.calls("cuIpcOpenMemHandle_v2"))
            node.order("error cuIpcOpenMemHandle_v2 2")
            with pytest.raises(DriverFailed, match="cuIpcOpenMemHandle failed with 2"):
                await carry(link, here, "out", owner, places())
            assert len(node.calls("cuIpcOpenMemHandle_v2")) == opened + PIECES + 1
            assert watcher.free_bytes() == before_bytes - PIECES * PIECE_BYTES, "it is there for the next one"
            node.mend()
            await ask(link, "close", lane="7")
            assert watcher.free_bytes() > before_bytes


@pytest.mark.thorough
async def test_memory_was_released_while_a_trial_copy_still_wrote_to_it(
    node: CudaNode, owner: Owner, gate: Path
) -> None:
    """Streams are tried on the reserve, which a checkpoint on a full GPU may spend at that moment from its thread."""
    async with linked(node) as link:
        held, sizes = await hold(link, node.uuids[0], [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=node.uuids[:1])
            await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
            node.order(f"hold cuStreamSynchronize {gate}")
            async with anyio.create_task_group() as tasks:

                async def attach() -> None:
                    await ask(link, "attach-video", lane="7", gpu=node.uuids[0], sizes=sizes, fds=held.view())

                async def checkpoint() -> None:
                    await ask(link, "checkpoint", pid=owner.pid)

                tasks.start_soon(attach)
                gated = await anyio.to_thread.run_sync(gate.open, "w")  # returns when it waits for its copies
                node.mend()
                node.order("error step:checkpoint 999 1 1")
                tasks.start_soon(checkpoint)
                while not node.calls("step:checkpoint"):
                    await ask(link, "state", pid=owner.pid)
                for _ in range(QUESTIONS):
                    await ask(link, "state", pid=owner.pid)
                given_back = len(node.calls("cuMemFree_v2"))
                gated.close()
            assert not given_back, "as long as something was under way"
            assert node.calls("cuMemFree_v2"), "once that is over"
            await ask(link, "restore", pid=owner.pid, pairs=[])
            await ask(link, "unlock", pid=owner.pid)
            await ask(link, "close", lane="7")


@pytest.mark.thorough
@pytest.mark.parametrize("code", [2, 999])
async def test_a_checkpoint_on_a_full_gpu_is_retried_with_the_copy_reserve(
    node: CudaNode, owner: Owner, code: int
) -> None:
    filler = Owner(node, 0, 1)
    async with linked(node) as link:
        held, sizes = await hold(link, node.uuids[0], [SIZE_BYTES])
        with held:
            await ask(link, "open", lane="7", gpus=node.uuids[:1])
            await ask(link, "attach-video", lane="7", gpu=node.uuids[0], sizes=sizes, fds=held.view())
            node.checkpoint_bytes = 2 * PIECE_BYTES
            node.write()
            if code == 2:
                node.order("error step:checkpoint 2 1 2")
            fill(filler)
            await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
            await ask(link, "checkpoint", pid=owner.pid)
            assert (await ask(link, "state", pid=owner.pid))["state"] == "checkpointed"
            filler.close()
            await ask(link, "restore", pid=owner.pid, pairs=[])
            await ask(link, "unlock", pid=owner.pid)
            assert owner.ask("digest") == owner.digest
            await ask(link, "close", lane="7")


@pytest.mark.thorough
async def test_a_checkpoint_that_fails_for_another_reason_is_not_retried(node: CudaNode, owner: Owner) -> None:
    async with linked(node) as link:
        with pytest.raises(DriverFailed, match="401"):
            await ask(link, "checkpoint", pid=owner.pid)
        node.order("error step:checkpoint 999")
        await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
        with pytest.raises(DriverFailed, match="999"):
            await ask(link, "checkpoint", pid=owner.pid)
        assert len(node.calls("step:checkpoint")) == 2, "there is no reserve without a lane"
        await ask(link, "unlock", pid=owner.pid)


@pytest.mark.thorough
async def test_a_process_that_cannot_be_checkpointed_on_a_full_gpu_keeps_running_and_the_reason_is_shown(
    parts: Parts,
) -> None:
    parts.node.checkpoint_bytes = 8 * MIB
    parts.node.write()
    filler = Owner(parts.node, 0, 1)
    async with rigged(parts) as rig:
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)
        fill(filler)
        with pytest.raises(Refused, match=r"gpu0 has no free memory: .* failed with 999"):
            await rig.method.checkpoint(rig.subject)
        assert await rig.state(rig.moved) == "running"
        filler.close()
        await rig.method.checkpoint(rig.subject)
        off = replace(rig.subject, gpu=None, previous_gpu="gpu0")
        await rig.method.restore(off, "gpu1")
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_an_unknown_error_on_a_gpu_with_memory_left_is_not_called_crowded(parts: Parts) -> None:
    async with rigged(parts) as rig:
        rig.node.order("error step:checkpoint 999")
        with pytest.raises(DriverFailed, match="999"):
            await rig.method.checkpoint(rig.subject)
        assert await rig.state(rig.moved) == "running"
        rig.node.mend()
