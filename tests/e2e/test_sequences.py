"""Two trainings change places and leave a GPU, by command and through both library faces, and no loss is different."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hegmctl.async_connection import connect_async
from hegmctl.connection import Connection
from hegmd.errors import REFUSED, HegmError
from hegmd.protocol.operations import OperationProgress
from tests.e2e.daemon import RunningDaemon
from tests.e2e.test_moving import LONG, Job, is_as_undisturbed
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


def _places(hegmd: Connection, *jobs: Job) -> list[str]:
    """The GPU of each."""
    found = {process.pid: process for process in hegmd.processes().processes}
    return [use.gpu for job in jobs for use in found[job.process.pid].gpus]


def test_jobs_change_places_and_leave_a_gpu_and_change_no_loss(daemon: RunningDaemon) -> None:
    argv = [LONG, "0"]
    with Job(daemon, argv, "--gpu", "gpu0") as one, Job(daemon, argv, "--gpu", "gpu1", "--name", "two") as two:
        one.await_gpu()
        two.await_gpu()
        with one.connect() as hegmd:
            planned = one.command("swap", str(one.process.pid), str(two.process.pid), "--dry-run")[-1]
            assert [plan["kind"] for plan in planned["plans"]] == ["migrate", "migrate"]
            assert _places(hegmd, one, two) == ["gpu0", "gpu1"]
            swapped = one.command("swap", str(one.process.pid), str(two.process.pid))
            assert [operation["phase"] for operation in swapped[-1]["operations"]] == ["done", "done"]
            assert {"offloading", "reloading"} <= {line["phase"] for line in swapped[:-1]}
            assert _places(hegmd, one, two) == ["gpu1", "gpu0"]

            reports: list[OperationProgress] = []
            drained = hegmd.drain("gpu0", ["gpu1"], on_progress=reports.append)
            assert [(operation.phase, operation.failure) for operation in drained.operations] == [("done", None)]
            assert {progress.id for progress in reports} == {drained.operations[0].id}
            assert _places(hegmd, one, two) == ["gpu1", "gpu1"]

            both = one.command("drain", "gpu1", "--no-wait")[-1]["operations"]
            assert len(both) == 2
            for operation in both:
                assert [progress.phase for progress in hegmd.follow(operation["id"])][-1] == "done"
            assert _places(hegmd, one, two) == ["gpu0", "gpu0"]
        anyio.run(_suspend_and_resume, str(daemon.socket_path), one.process.pid)
        printed = [one.output(), two.output()]
    for each in printed:
        is_as_undisturbed(argv, each)


async def _suspend_and_resume(socket_path: str, pid: int) -> None:
    """The asynchronous face, in a program of its own event loop."""
    async with connect_async(socket_path) as hegmd:
        begun = (await hegmd.suspend(pid, wait=False)).operation
        assert begun is not None
        assert [progress.phase async for progress in hegmd.follow(begun.id)][-1] == "suspended"
        with pytest.raises(HegmError, match="there is nothing to cancel") as refused:
            await hegmd.cancel(begun.id)
        assert refused.value.code is REFUSED
        resumed = (await hegmd.resume(pid)).operation
        assert resumed is not None
        assert (resumed.phase, resumed.failure) == ("done", None)
        story = await hegmd.story(begun.id)
        assert {"offloaded", "reloaded", "verified"} <= {line.event for line in story.story}
        assert begun.id in [operation.id for operation in (await hegmd.operations()).operations]
