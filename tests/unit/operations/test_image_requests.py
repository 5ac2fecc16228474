"""What is said of files when a job is not brought back, and of how far it is when it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from hegmd.errors import DISCONNECTED, REFUSED, HegmError
from hegmd.images.criu.needs import Needs
from hegmd.images.restore_checks import Grown
from hegmd.migration.plan.throughput import Paces
from hegmd.operations.image_requests import Checkpoints, reading, to_cut_back
from hegmd.operations.request_context import Asked
from hegmd.protocol.images import Manifest
from hegmd.protocol.operations import OperationProgress, Reason
from hegmd.system.programs import Rights
from tests.patience import HANG_S

LONGER = Grown("/log", 3, Reason(code="refused", message="/log has 5 bytes and had 3", hint="cut it back"))
TAKEN = Reason(code="refused", message="the job had the number 7, which process 7 has", hint="end that one")


def test_files_were_cut_back_for_a_restore_that_was_refused_all_the_same() -> None:
    """The job still ran: it lost its log, and nothing was restored."""
    assert to_cut_back([LONGER.reason, TAKEN], [LONGER]) == ()
    assert to_cut_back([TAKEN], [LONGER]) == ()


def test_files_are_named_where_cutting_them_back_is_all_that_is_needed() -> None:
    assert to_cut_back([LONGER.reason], [LONGER]) == [LONGER]


async def test_how_far_the_reading_is_was_told_to_nobody() -> None:
    """A restore of 32 GiB said nothing for a minute."""
    told: list[OperationProgress] = []
    taken = anyio.Event()

    async def emit(progress: OperationProgress) -> None:
        told.append(progress)
        taken.set()

    async with reading("7", 100, emit) as tell:
        await anyio.wait_all_tasks_blocked()
        taken = anyio.Event()
        tell(50)
        tell(60)
        with anyio.fail_after(HANG_S):
            await taken.wait()
    first = OperationProgress(id="7", phase="reading", size_bytes=100)
    assert told[:2] == [first, first.replace(moved_bytes=50)]


async def test_who_does_not_listen_any_more_ends_no_restore() -> None:
    async def emit(_: OperationProgress) -> None:
        raise HegmError(DISCONNECTED, "gone", "connect again")

    async with reading("7", 100, emit) as tell:
        await anyio.wait_all_tasks_blocked()
        tell(50)
        await anyio.wait_all_tasks_blocked()


async def test_what_fails_while_it_is_read_is_told_as_it_is() -> None:
    async def emit(_: OperationProgress) -> None:
        """Nobody watches."""

    with pytest.raises(HegmError, match="it is damaged"):
        async with reading("7", 100, emit):
            raise HegmError(REFUSED, "it is damaged", "use another")


class Revived:
    """Brings back whatever is asked for, and has runner and operations to go with it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.runner = SimpleNamespace(reserve_id=lambda: "7", begin=self.begin)

    async def bring_back(self, *_: object) -> None:
        self.done.append("back")

    async def begin(self, _: object) -> None:
        self.done.append("begun")

    async def settled(self, *_: object) -> None:
        self.done.append("settled")


@pytest.mark.parametrize("is_gone", [False, True])
async def test_that_a_job_is_back_is_told_before_what_comes_then_can_fail(*, is_gone: bool) -> None:
    """Who asked put files back under it that it has open: the last that was heard was how much had been read."""
    double: Any = Revived()

    async def emit(progress: OperationProgress) -> None:
        double.done.append(progress.phase)
        if is_gone:
            raise HegmError(DISCONNECTED, "gone", "connect again")

    asked = Asked(by="the test", may=lambda _: True, emit=emit)
    image: Any = SimpleNamespace(manifest=Manifest(more={"needs": Needs(pids=(7,)).plain()}))
    checkpoints = Checkpoints(double, double, double, double, Paces())
    await checkpoints._bring_back(image, Rights(0, 0, ()), asked, {})
    assert [step for step in double.done if step != "reading"] == ["back", "begun", "suspended", "settled"]
