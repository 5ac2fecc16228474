"""Messages about files when a restore fails, and about its progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from hegmd.errors import DISCONNECTED, REFUSED, HegmError
from hegmd.images.criu.needs import Needs
from hegmd.images.manifests import is_unrevived
from hegmd.images.restore_checks import GrownFile
from hegmd.migration.machine.describe import description
from hegmd.migration.machine.operation import Failure, Operation
from hegmd.migration.plan.throughput import Throughputs
from hegmd.operations.image_requests import Checkpoints, reading, to_cut_back
from hegmd.operations.request_context import RequestContext
from hegmd.protocol.images import ImageWorker, Manifest
from hegmd.protocol.operations import OperationProgress, Reason
from hegmd.system.programs import Rights
from tests.patience import HANG_S

LONGER = GrownFile("/log", 3, Reason(code="refused", message="/log has 5 bytes and had 3", hint="cut it back"))
TAKEN = Reason(code="refused", message="the job had the number 7, which process 7 has", hint="end that one")


def test_files_were_cut_back_for_a_restore_that_was_refused_all_the_same() -> None:
    """The job still ran: it lost its log, and nothing was restored."""
    assert to_cut_back([LONGER.reason, TAKEN], [LONGER]) == ()
    assert to_cut_back([TAKEN], [LONGER]) == ()


def test_files_are_named_if_truncating_them_is_enough() -> None:
    assert to_cut_back([LONGER.reason], [LONGER]) == [LONGER]


async def test_the_progress_of_reading_was_not_reported() -> None:
    """A restore of 32 GiB reported nothing for a minute."""
    events: list[OperationProgress] = []
    taken = anyio.Event()

    async def emit(progress: OperationProgress) -> None:
        events.append(progress)
        taken.set()

    async with reading("7", 100, emit) as tell:
        await anyio.wait_all_tasks_blocked()
        taken = anyio.Event()
        tell(50)
        tell(60)
        with anyio.fail_after(HANG_S):
            await taken.wait()
    first = OperationProgress(id="7", phase="reading", size_bytes=100)
    assert events[:2] == [first, first.replace(moved_bytes=50)]


async def test_a_client_that_stops_listening_ends_no_restore() -> None:
    async def emit(_: OperationProgress) -> None:
        raise HegmError(DISCONNECTED, "gone", "connect again")

    async with reading("7", 100, emit) as tell:
        await anyio.wait_all_tasks_blocked()
        tell(50)
        await anyio.wait_all_tasks_blocked()


async def test_a_failed_read_is_reported_unchanged() -> None:
    async def emit(_: OperationProgress) -> None:
        """Discard the progress: no client watches."""

    with pytest.raises(HegmError, match="it is damaged"):
        async with reading("7", 100, emit):
            raise HegmError(REFUSED, "it is damaged", "use another")


class RestoresAnyImage:
    """Restores any image; it has a runner and operations."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.runner = SimpleNamespace(reserve_id=lambda: "7", begin=self.begin)

    async def restore(self, *_: object) -> object:
        self.done.append("back")
        return None

    async def begin(self, _: object) -> None:
        self.done.append("begun")

    async def settled(self, *_: object) -> None:
        self.done.append("settled")


@pytest.mark.parametrize("is_gone", [False, True])
async def test_the_return_of_a_job_is_reported_before_a_later_step_can_fail(*, is_gone: bool) -> None:
    """The caller put files back that the restored job has open: the last progress was that of reading."""
    double: Any = RestoresAnyImage()

    async def emit(progress: OperationProgress) -> None:
        double.done.append(progress.phase)
        if is_gone:
            raise HegmError(DISCONNECTED, "gone", "connect again")

    request = RequestContext(by="the test", may=lambda _: True, emit=emit)
    image: Any = SimpleNamespace(manifest=Manifest(more={"needs": Needs(pids=(7,)).plain()}))
    checkpoints = Checkpoints(double, double, double, double, Throughputs())
    await checkpoints._bring_back(image, Rights(0, 0, ()), request, {})
    assert [step for step in double.done if step != "reading"] == ["back", "begun", "suspended", "settled"]


class FailingWhereTold(RestoresAnyImage):
    """Fails at the step that the test names, and records what is stored of it."""

    def __init__(self, error: HegmError, *, at_begin: bool) -> None:
        super().__init__()
        self.error, self.at_begin = error, at_begin
        self.runner.remember = self.remember
        self.remembered: list[Operation] = []

    async def restore(self, *_: object) -> object:
        if not self.at_begin:
            raise self.error
        return SimpleNamespace()

    async def begin(self, _: object) -> None:
        raise self.error

    async def undo(self, *_: object) -> None:
        self.done.append("undone")

    async def remember(self, op: Operation) -> None:
        self.remembered.append(op)


_IMAGE: Any = SimpleNamespace(
    path="/images/one",
    manifest=Manifest(
        workers=(ImageWorker(pid=7, gpus=(), carrier="worker", size_bytes=5, rest_bytes=0, token="t", bytes=("7",)),),
        more={"needs": Needs(pids=(7,)).plain()},
    ),
)


async def _heard(_: OperationProgress) -> None:
    """Discard the events."""


@pytest.mark.parametrize("at_begin", [False, True])
async def test_a_restore_that_failed_left_no_row_in_ops(*, at_begin: bool) -> None:
    """Issue 14, row 12."""
    error = HegmError(REFUSED, "criu cannot restore process 7", "see its log")
    double: Any = FailingWhereTold(error, at_begin=at_begin)
    checkpoints = Checkpoints(double, double, double, double, Throughputs())
    request = RequestContext(by="the test", may=lambda _: True, emit=_heard)
    with pytest.raises(HegmError, match="criu cannot restore"):
        await checkpoints._bring_back(_IMAGE, Rights(0, 0, ()), request, {})
    (op,) = double.remembered
    assert (op.id, op.kind, op.phase, op.failure) == (
        "7",
        "restore",
        "rolled-back",
        Failure(code="refused", message="criu cannot restore process 7", hint="see its log"),
    )
    assert double.done == (["undone"] if at_begin else [])
    record = description(op, last_utc=op.created_utc + 3)
    assert [(process.pid, process.state) for process in record.processes] == [(7, "gone")]
    assert record.failure is not None
    assert record.took_s == 3
    assert is_unrevived(op)
    assert not is_unrevived(op.replace(seq=1)), "an operation that began has its job, or had it"


async def test_a_stopped_restore_is_shown_in_ops() -> None:
    double: Any = FailingWhereTold(HegmError(REFUSED, "never raised", "never shown"), at_begin=False)
    started = anyio.Event()

    async def bring_back(*_: object) -> None:
        started.set()
        await anyio.sleep_forever()

    double.restore = bring_back
    checkpoints = Checkpoints(double, double, double, double, Throughputs())
    request = RequestContext(by="the test", may=lambda _: True, emit=_heard)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(checkpoints._bring_back, _IMAGE, Rights(0, 0, ()), request, {})
        await started.wait()
        tasks.cancel_scope.cancel()
    (op,) = double.remembered
    assert op.failure is not None
    assert (op.failure.code, op.failure.message) == ("cancelled", "the restore from /images/one was interrupted")


async def test_a_job_that_was_back_was_ended_because_its_restore_was_cancelled_then() -> None:
    """Its operation had begun: to undo it took the processes from under that."""
    double: Any = FailingWhereTold(HegmError(REFUSED, "never raised", "never shown"), at_begin=False)
    telling = anyio.Event()

    async def back(*_: object) -> object:
        return SimpleNamespace()

    async def begin(_: object) -> None:
        double.done.append("begun")

    async def emit(progress: OperationProgress) -> None:
        if progress.phase == "suspended":
            telling.set()
            await anyio.sleep_forever()

    double.restore, double.runner.begin = back, begin
    checkpoints = Checkpoints(double, double, double, double, Throughputs())
    async with anyio.create_task_group() as tasks:
        request = RequestContext(by="the test", may=lambda _: True, emit=emit)
        tasks.start_soon(checkpoints._bring_back, _IMAGE, Rights(0, 0, ()), request, {})
        await telling.wait()
        tasks.cancel_scope.cancel()
    assert double.done == ["begun", "settled"]
    assert double.remembered == []
