"""Images at intervals: when, of which job, with which name, and what follows a failure or a missed one."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import anyio
import pytest

from hegmd.errors import REFUSED, HegmError
from hegmd.operations.request_context import OperationResult, RequestContext
from hegmd.operations.scheduled_images import ScheduledImages, series_of
from hegmd.protocol.operations import PeriodicImages
from hegmd.system.programs import Rights
from hegmd.workers.workers import AgentConnection
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import Node, running

Child = subprocess.Popen[bytes]
DAY_S = 86_400.0
WISH = PeriodicImages(every_s=600.0, keep=2, path="/images")


class Clock:
    """Time that passes as soon as all tasks wait for it, and stops at its end."""

    def __init__(self, end_s: float) -> None:
        self.utc_s = 1_700_000_000.0
        self.end_s = self.utc_s + end_s
        self.over = anyio.Event()

    def utc(self) -> float:
        return self.utc_s

    async def sleep(self, wait_s: float) -> None:
        if self.utc_s + wait_s > self.end_s:
            self.over.set()
            await anyio.sleep_forever()
        self.utc_s += wait_s
        await anyio.lowlevel.checkpoint()


class ImageCatalogue:
    """Takes images, each in so many seconds; the numbers in `fails` do not come off."""

    def __init__(self, node: Node, clock: Clock, *, takes_s: float = 0.0, fails: Sequence[int] = ()) -> None:
        self.node, self.clock, self.takes_s, self.fails = node, clock, takes_s, fails
        self.taken: list[tuple[float, str]] = []
        self.trimmed: list[tuple[str, str, int]] = []
        self.notes: list[str] = []
        self.missed: list[int] = []
        self.count: Callable[[], int] = lambda: 0

    async def take(self, pid: int, path: str, rights: Rights, request: RequestContext) -> OperationResult:
        self.taken.append((self.clock.utc_s, path))
        self.missed.append(self.count())
        self.clock.utc_s += self.takes_s
        if len(self.taken) in self.fails:
            raise HegmError(REFUSED, "the disk is full", "free some")
        return await self.node.operations.migrate([pid], self._other(pid), self.node.context())

    def _other(self, pid: int) -> str:
        worker = self.node.workers.find(pid)
        return "gpu1" if worker is not None and worker.gpu == "gpu0" else "gpu0"

    async def note(self, worker: AgentConnection, message: str, hint: str) -> None:
        """The supervisor of the job gets the message."""
        self.notes.append(f"{message}; {hint}")

    async def trim(self, path: str, series: str, keep: int, rights: Rights) -> Sequence[str]:
        self.trimmed.append((path, series, keep))
        return ()


class SettingClockBack(ImageCatalogue):
    """An administrator sets the clock back by a day while the first image is written."""

    async def take(self, pid: int, path: str, rights: Rights, request: RequestContext) -> OperationResult:
        taken = await super().take(pid, path, rights, request)
        if len(self.taken) == 1:
            self.clock.utc_s -= DAY_S
            self.clock.end_s -= DAY_S
        return taken


@asynccontextmanager
async def attended(node: Node, clock: Clock, shelf: ImageCatalogue) -> AsyncIterator[None]:
    periodic = ScheduledImages(
        node.workers,
        node.operations.runner,
        node.events,
        take=shelf.take,
        trim=shelf.trim,
        note=shelf.note,
        utc=clock.utc,
        sleep=clock.sleep,
    )
    shelf.count = lambda: periodic.missed
    node.workers.listen(periodic.on_event)
    async with anyio.create_task_group() as tasks:
        await tasks.start(periodic.run)
        yield
        with anyio.fail_after(HANG_S):
            await clock.over.wait()
        tasks.cancel_scope.cancel()


@pytest.mark.thorough
async def test_images_are_taken_at_intervals_and_old_ones_are_removed(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        clock = Clock(2000.0)
        shelf = ImageCatalogue(node, clock)
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=WISH, run="ab12", job="train")
        begun = clock.end_s - 2000.0
        assert [utc_s - begun for utc_s, _ in shelf.taken] == [600.0, 1200.0, 1800.0]
        assert shelf.taken[0][1] == "/images/train-ab12.20231114T222320Z"
        assert shelf.trimmed == [("/images", "train-ab12", 2)] * 3


async def test_another_users_process_that_claims_the_same_run_does_not_prevent_images(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The process has passed more boundaries, but has no image: it belongs to another user than its agent."""
    async with running(tmp_path) as node:
        its_own = ModelAgent(node.workers, process.pid)
        its_own.about = {"images": WISH, "run": "ab12", "job": "train"}
        clock = Clock(6300.0)
        shelf = ImageCatalogue(node, clock)
        async with attended(node, clock, shelf):
            stranger = ModelAgent(node.workers, second_process.pid, token="b" * 32)
            stranger.uid, stranger.boundary = stranger.uid + 1, 9
            stranger.about = {"images": WISH, "run": "ab12", "job": "strange"}
            node.tasks.start_soon(stranger.attend, node.tasks)
            node.tasks.start_soon(its_own.attend, node.tasks)
        assert {path.partition(".")[0] for _, path in shelf.taken} == {"/images/train-ab12"}


async def test_a_failed_image_is_reported_and_no_old_one_is_removed_for_it(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        clock = Clock(1300.0)
        shelf = ImageCatalogue(node, clock, fails=[1])
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=WISH, run="ab12")
        assert len(shelf.taken) == 2
        assert len(shelf.trimmed) == 1
        (missed,) = node.events.remembered(kinds=("operation.image-missed",))
        assert "the disk is full" in missed.message
        assert missed.pid == process.pid


@pytest.mark.thorough
async def test_the_first_missed_image_in_a_row_is_an_event(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        clock = Clock(3700.0)
        shelf = ImageCatalogue(node, clock, fails=[1, 2, 3, 5])
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=WISH, run="ab12")
        lost, found, lost_again, found_again = shelf.notes
        assert "hegmd wrote no image of this job: the disk is full; run hegmctl ps for the latest attempt" in lost
        assert found.startswith("hegmd writes images of this job again")
        assert (lost_again, found_again) == (lost, found)
        assert shelf.missed == [0, 1, 1, 1, 0, 1], "jobs without, whenever the next is taken"


async def test_a_missed_image_is_shown_with_the_job_until_the_next_image(tmp_path: Path, process: Child) -> None:
    """It was in the daemon's events and log alone, and the job's owner believed that there were images."""
    async with running(tmp_path) as node:
        for end_s, missed in ((700.0, True), (1300.0, False)):
            clock = Clock(end_s)
            async with attended(node, clock, ImageCatalogue(node, clock, fails=[1])):
                await node.attend(process.pid, images=WISH, run=f"ab{end_s:.0f}")
            worker = node.workers.find(process.pid)
            assert worker is not None
            reason = worker.info().image_missed
            assert (reason is not None and "the disk is full" in reason) == missed


@pytest.mark.thorough
async def test_images_that_take_longer_than_the_time_between_them_leave_the_job_time_to_train(
    tmp_path: Path, process: Child
) -> None:
    async with running(tmp_path) as node:
        clock = Clock(4000.0)
        shelf = ImageCatalogue(node, clock, takes_s=1000.0)
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=WISH, run="ab12")
        begun = [utc_s for utc_s, _ in shelf.taken]
        assert [later - earlier for earlier, later in pairwise(begun)] == [1300.0, 1300.0]


@pytest.mark.thorough
async def test_a_clock_that_is_set_back_by_a_day_does_not_stop_the_images_for_a_day(
    tmp_path: Path, process: Child
) -> None:
    """The next image was due at the time of the last one and the interval, by a clock that may change."""
    async with running(tmp_path) as node:
        clock = Clock(2000.0)
        shelf = SettingClockBack(node, clock)
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=WISH, run="ab12")
        begun = clock.end_s - 2000.0
        assert [round(utc_s - begun) for utc_s, _ in shelf.taken] == [DAY_S + 600, 1200, 1800]


async def test_none_is_taken_while_another_operation_has_the_job(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        clock = Clock(1000.0)
        shelf = ImageCatalogue(node, clock)
        agent = await node.attend(process.pid, images=WISH, run="ab12")
        await node.operations.quiesce([process.pid], 900.0, node.context())
        async with attended(node, clock, shelf):
            await agent.leave()
            await agent.attend(node.tasks)
        assert shelf.taken == []
        assert node.events.remembered(kinds=("operation.image-missed",)) == ()


@pytest.mark.parametrize(
    "wish",
    [
        WISH.replace(every_s=0.0),
        WISH.replace(every_s=float("nan")),
        WISH.replace(keep=0),
        WISH.replace(path="images"),
        WISH.replace(path="/images\0"),
    ],
)
async def test_a_wish_that_makes_no_sense_is_not_granted(tmp_path: Path, process: Child, wish: PeriodicImages) -> None:
    async with running(tmp_path) as node:
        clock = Clock(5000.0)
        shelf = ImageCatalogue(node, clock)
        async with attended(node, clock, shelf):
            await node.attend(process.pid, images=wish, run="ab12")
            clock.over.set()
        assert shelf.taken == []


class HangingDisk(ImageCatalogue):
    """Takes images that are never whole."""

    async def take(self, pid: int, path: str, rights: Rights, request: RequestContext) -> OperationResult:
        self.taken.append((self.clock.utc_s, path))
        await anyio.sleep_forever()
        raise AssertionError


async def test_two_images_of_one_user_that_hang_keep_no_other_user_from_theirs(
    tmp_path: Path, process: Child, second_process: Child, third_process: Child
) -> None:
    """A process of the user writes them, so that user could stop the images of the whole node."""
    async with running(tmp_path) as node:
        clock = Clock(2000.0)
        shelf = HangingDisk(node, clock)
        agents = [
            ModelAgent(node.workers, child.pid, token=f"{child.pid:032x}")
            for child in (process, second_process, third_process)
        ]
        agents[2].uid += 1
        async with attended(node, clock, shelf):
            for number, agent in enumerate(agents):
                agent.about = {"images": WISH, "run": f"run{number}"}
                await agent.attend(node.tasks)
        assert len(shelf.taken) == 2
        assert [f"process {third_process.pid} acts as uid" in note for note in shelf.notes] == [True], (
            "its turn has come"
        )


async def test_the_name_of_a_series_leads_nowhere(tmp_path: Path, process: Child) -> None:
    """A job can choose any name; a daemon of root may create the path."""
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="../../etc", job="../a b/\n")
        worker = node.workers.find(process.pid)
        assert worker is not None
        assert series_of(worker) == "_a_b__-.._.._etc"
