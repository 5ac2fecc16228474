"""Jobs that request several GPUs, or GPUs for themselves, with model agents."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.protocol import sharing as protocol
from hegmd.protocol.messages import Communicators, RegisterJob
from hegmd.sharing.memory_use import needs_whole_gpus
from tests.patience import HANG_S
from tests.unit.migration.operations import operation
from tests.unit.migration.operations import worker as a_worker
from tests.unit.sharing.shared_node import ADMIN, MIB, UID, sharing_on

Child = subprocess.Popen[bytes]


@pytest.mark.thorough
async def test_a_job_gets_all_its_gpus_at_once_or_none(tmp_path: Path, process: Child, second_process: Child) -> None:
    """All ranks of `run --ranks 2 --gpu auto` got the same GPU."""
    async with sharing_on(tmp_path, "2x8MiB") as shared:
        lease = (await shared.make_room(7 * MIB, gpu="gpu1", until_free=True)).lease
        assert lease is not None
        placed: list[str] = []

        async def wait(run: str, **fields: Any) -> None:
            reply = await shared.requests.place(protocol.PlaceJob(run=run, **fields), ADMIN, shared.emit)
            placed.append(f"{run} on {reply.gpu}")

        for child, run in ((process, "pair"), (second_process, "one")):
            await shared.node.moving.job_requests.register(child.pid, UID, RegisterJob(run=run, command=("train",)))
        for count, gpu in ((3, "auto"), (2, "gpu0"), (0, "auto")):
            with pytest.raises(HegmError) as refused:
                await wait("pair", gpu_count=count, gpu=gpu)
            assert refused.value.facts["final"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(wait, "pair", gpu_count=2, size_bytes=5 * MIB))
            await shared.until(lambda: len(shared.sharing.memory.queue) == 1)
            await shared.until(
                lambda: any("5 MiB each on gpu0, gpu1" in progress.waits for progress in shared.progress)
            )
            tasks.start_soon(partial(wait, "one", size_bytes=5 * MIB))
            await shared.until(lambda: len(shared.sharing.memory.queue) == 2)
            assert await shared.states() == {"j1": "waiting", "j2": "waiting"}, "gpu0 is held for the pair"
            await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
            await shared.until(lambda: placed == ["pair on gpu0,gpu1"])
            assert await shared.states() == {"j1": "starting", "j2": "waiting"}
            assert shared.sharing.leased_bytes((), ()) == {"gpu0": 5 * MIB, "gpu1": 5 * MIB}
            process.kill()
            process.wait()
            await shared.until(lambda: len(placed) == 2)
        assert placed[-1] == "one on gpu0"


MIXED = """\
[[gpu]]
count = 3
memory = "4MiB"
chip = "small"
[[gpu]]
count = 2
memory = "8MiB"
chip = "large"
"""


async def test_a_job_gets_the_larger_gpus_of_a_node_that_has_more_small_ones(tmp_path: Path, process: Child) -> None:
    """The daemon considered only the most common chip: it admitted the job, which waited for ever."""
    description = tmp_path / "node.toml"
    description.write_text(MIXED)
    async with sharing_on(tmp_path, str(description)) as shared:
        await shared.node.moving.job_requests.register(process.pid, UID, RegisterJob(run="pair", command=("train",)))
        request = protocol.PlaceJob(run="pair", gpu_count=2, size_bytes=5 * MIB)
        with anyio.fail_after(HANG_S):
            assert (await shared.requests.place(request, ADMIN, shared.emit)).gpu == "gpu3,gpu4"


@pytest.mark.parametrize(("is_restored", "leaves"), [(True, ["j1"]), (False, [])])
async def test_no_memory_was_free_beside_ranks_that_the_driver_has_restored(
    is_restored: bool, leaves: list[str], tmp_path: Path, process: Child
) -> None:
    """The GPU interrupts no kernel of theirs: a process beside them would end them."""
    groups = Communicators(mechanism="suspend", groups=1, backends=("nccl",), library="2.29.7")
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, b"1" * MIB, rank=0, world_size=1, driver_restored=is_restored)
        worker = shared.node.workers.find(process.pid)
        assert worker is not None
        worker.communicators = groups
        planned = await shared.make_room(2 * MIB, dry_run=True)
        assert [step.job for step in planned.steps] == leaves


@pytest.mark.parametrize(
    ("kind", "method", "is_alone"),
    [
        ("resume", "driver", True),
        ("suspend", "driver", True),
        ("resume", "keep-context", False),
        ("migrate", "restart", False),
        ("quiesce", "driver", False),
    ],
)
async def test_a_job_was_started_beside_ranks_that_the_driver_was_restoring(
    kind: str, method: str, is_alone: bool, tmp_path: Path, process: Child
) -> None:
    """They counted as a job that can share its GPU from the request to resume until they trained again."""
    groups = Communicators(mechanism="suspend", groups=1, backends=("nccl",), library="2.29.7")
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, b"1" * MIB, rank=0, world_size=1)
        worker = shared.node.workers.find(process.pid)
        assert worker is not None
        worker.communicators = groups
        op = operation(a_worker(pid=process.pid, method=method), kind=kind, phase="arming")
        assert needs_whole_gpus([worker], op) == is_alone
        assert not needs_whole_gpus([worker], None)
