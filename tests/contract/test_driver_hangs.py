"""Driver calls that never return: distinguished from slow ones, left alone, and completed afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from hegmd.gpu_helper.link import Stuck
from hegmd.migration.methods.progress_probe import ProgressLimits
from tests.contract.driven import REST_BYTES, Parts, Rig, rigged, standing_in
from tests.patience import HANG_S

# A process that is seen stopped twice in a row counts as stopped. No caller waits for the other one, except for calls
# that a busy machine is slow to begin.
HASTY = ProgressLimits(look_s=0.02, stopped_s=0.02)
IMPATIENT = ProgressLimits(look_s=0.02, floor_s=1.0, times=0.0, quiet_s=1.0)
SOON_S = HANG_S


async def _is_left(rig: Rig, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Check that a call was given up for that reason."""
    with anyio.fail_after(SOON_S):
        while why not in caplog.text:
            await rig.state(rig.other)


@pytest.mark.thorough
async def test_a_process_that_was_stopped_in_a_call_held_it_for_five_minutes_and_took_the_helper_along(
    parts: Parts, gate: Path
) -> None:
    async with rigged(parts, HASTY) as rig:
        helper = (await rig.link.start())["pid"]
        observed: list[Stuck] = []

        async def checkpoint() -> None:
            with pytest.raises(Stuck, match=r"`lock` .* are stopped by a signal") as raised:
                await rig.method.checkpoint(rig.subject)
            observed.append(raised.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpoint)
            async with standing_in(rig, "cuCheckpointProcessLock", gate):
                rig.moved.pause()
        assert f"kill -CONT {rig.moved.pid}" in observed[0].hint
        assert await rig.state(rig.other) == "running"
        assert rig.link.pid == helper, "others have lost theirs with it"
        rig.moved.go_on()
        assert (await rig.method.inspect(rig.subject)).gpu == "gpu0"
        assert await rig.state(rig.moved) == "running"


@pytest.mark.thorough
async def test_a_checkpoint_given_up_without_progress_succeeds_if_it_ends_later(parts: Parts, gate: Path) -> None:
    async with rigged(parts, IMPATIENT) as rig:
        helper = (await rig.link.start())["pid"]
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)

        async def checkpoint() -> None:
            with pytest.raises(Stuck, match=r"at `checkpoint` of process .* made no progress"):
                await rig.method.checkpoint(rig.subject)
            given_up.set()

        given_up = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(checkpoint)
            async with standing_in(rig, "step:checkpoint", gate):
                await given_up.wait()
                with pytest.raises(Stuck, match="at `state`"):
                    await rig.method.inspect(rig.subject)
        assert (await rig.method.inspect(rig.subject)).gpu is None
        assert rig.link.pid == helper
        await rig.method.restore(replace(rig.subject, gpu=None, previous_gpu="gpu0"), "gpu1")
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_paused_processes_stay_paused_while_a_stopped_restore_continues(
    parts: Parts, gate: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stopped process was not queried, and the missing state was mistaken for a finished restore."""
    async with rigged(parts, HASTY) as rig:
        off = await rig.take_off()

        async def restore() -> None:
            with pytest.raises(Stuck, match="`restore`"):
                await rig.method.restore(off, "gpu1")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore)
            async with standing_in(rig, "step:restore", gate):
                rig.moved.pause()
                await _is_left(rig, caplog, "`restore` of process")
                await rig.stands(rig.other)
                rig.moved.go_on()
                await rig.stands(rig.other)
        assert await rig.state(rig.other) == "running"
        assert (await rig.method.inspect(off)).gpu == "gpu1"
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_reserved_memory_does_not_count_as_free(parts: Parts) -> None:
    """A second move was planned into room that the first had taken, by a picture of the node from before that."""
    async with rigged(parts) as rig:
        before = (await rig.inventory.fresh(SOON_S)).gpus[1].memory_free_bytes
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)
        after = (await rig.inventory.fresh(SOON_S)).gpus[1].memory_free_bytes
        assert before is not None
        assert after is not None
        assert after <= before - REST_BYTES
