"""The register of supervisors: one for each run, over many connections, known by its process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.memory.pool import Pool
from hegmd.migration.carriers.prestart import PrestartService
from hegmd.migration.carriers.state import StateCarrier
from hegmd.migration.contracts import MigratedProcess
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.workers.supervisors import OrderFailed, Supervisor, SupervisorAway, Supervisors

OFFER = Supervise(run="run", python=True, pid=1)


class Line:
    """One connection of a supervisor, and the orders that it received."""

    def __init__(self) -> None:
        self.orders: list[SupervisorOrder] = []
        self.news = anyio.Event()

    async def send(self, order: SupervisorOrder, _fds: Sequence[int]) -> None:
        self.orders.append(order)
        self.news.set()

    async def next(self) -> SupervisorOrder:
        await self.news.wait()
        self.news = anyio.Event()
        return self.orders[-1]


@pytest.fixture
def supervisors() -> Iterator[Supervisors]:
    known = Supervisors(lambda pid: pid)
    yield known
    known.close()


@asynccontextmanager
async def attending(
    known: Supervisors, line: Line, offer: Supervise = OFFER, pid: int = 0
) -> AsyncIterator[Supervisor]:
    async with anyio.create_task_group() as tasks:
        changed = known.changed.next
        tasks.start_soon(known.attend, line, pid or os.getpid(), 0, offer, line.send)
        await changed.wait()
        found = known.find(0, offer.run)
        assert found is not None
        yield found
        tasks.cancel_scope.cancel()


async def test_an_order_ends_with_its_report(supervisors: Supervisors) -> None:
    line = Line()
    async with attending(supervisors, line) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.order, "start", "4")
        order = await line.next()
        supervisors.report(line, SuperviseReport(order=order.order, result="done", pid=77, starts=1))
    assert (supervisor.offer.pid, supervisor.offer.started, supervisor.serves("4")) == (77, True, True)


async def test_a_job_that_was_continued_and_has_ended_is_not_continued_again(supervisors: Supervisors) -> None:
    """Until its supervisor had exited too, the daemon counted the job as one that waits for its start."""
    line = Line()
    async with (
        attending(supervisors, line, OFFER.replace(pid=None, resumes="j4")) as supervisor,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(supervisor.order, "start", "j4")
        order = await line.next()
        supervisors.report(line, SuperviseReport(order=order.order, result="done", pid=77, starts=1))
        supervisors.report(line, SuperviseReport(result="ended", status=0))
    assert (supervisor.offer.pid, supervisor.offer.started, supervisor.offer.resumes) == (None, False, None)


async def test_a_start_that_failed_after_it_was_done_is_known_of(supervisors: Supervisors) -> None:
    """The process started, which ended the order, and then exited: no task waited for it."""
    line = Line()
    async with attending(supervisors, line) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.order, "start", "4")
        order = await line.next()
        supervisors.report(line, SuperviseReport(order=order.order, result="done", pid=77, starts=1))
        supervisors.report(line, SuperviseReport(order=order.order, result="failed", message="it ended with 5"))
    assert (supervisor.offer.started, supervisor.failure) == (False, "it ended with 5")


@pytest.mark.parametrize(("result", "is_one"), [("done", True), ("failed", False)])
async def test_the_kind_of_program_does_not_change_the_command(
    supervisors: Supervisors, result: str, is_one: bool
) -> None:
    line, answers = Line(), list[object]()

    async def ask(supervisor: Supervisor) -> None:
        answers.append(await supervisor.ask_python("/bin/true", {"A": "1"}, ("B",)))

    async with attending(supervisors, line) as supervisor, anyio.create_task_group() as tasks:
        before = supervisor.offer
        tasks.start_soon(ask, supervisor)
        order = await line.next()
        assert (order.do, order.python, order.set, order.unset) == ("ask", "/bin/true", {"A": "1"}, ("B",))
        supervisors.report(line, SuperviseReport(order=order.order, result=result, message="what it says"))
    assert answers == [("what it says", is_one)]
    assert (supervisor.offer, supervisor.failure) == (before, "")


@pytest.mark.parametrize(("status", "is_well"), [(0, True), (1, False), (-9, False)])
async def test_the_exit_of_a_command_is_known_once_its_supervisor_reports_it(
    supervisors: Supervisors, status: int, is_well: bool
) -> None:
    """The kernel reports an exit to the daemon and to the parent at the same time: either may come first."""
    line, found = Line(), list[bool]()

    async def ask() -> None:
        found.append(await supervisors.exited_cleanly(0, "run", 1))

    async with attending(supervisors, line), anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert found == []
        supervisors.report(line, SuperviseReport(result="ended", status=status))
    assert found == [is_well]


async def test_a_command_that_continues_as_another_process_has_not_ended(supervisors: Supervisors) -> None:
    async with attending(supervisors, Line()):
        assert not await supervisors.exited_cleanly(0, "run", 2)
    assert not await supervisors.exited_cleanly(0, "nobody's", 2)


async def test_prestarted_processes_of_an_operation_are_known_until_it_is_forgotten(supervisors: Supervisors) -> None:
    line = Line()
    offer = OFFER.replace(kept=True, readies="4", operation="5", started=True)
    async with attending(supervisors, line, offer) as supervisor:
        await supervisor.tell("forget", "4")
        assert supervisor.offer == offer.replace(readies=None)
        await supervisor.tell("unready", "")
        assert supervisor.offer == offer.replace(readies=None, kept=False)


async def test_a_repeated_start_does_not_count_as_the_prestarted_one(supervisors: Supervisors) -> None:
    """The supervisor reports `done` again for another process after the order's end; the daemon ignored it."""
    line = Line()
    async with attending(supervisors, line) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(supervisor.order, "start", "4")
        order = await line.next()
        supervisors.report(line, SuperviseReport(order=order.order, result="done", pid=77, was_ready=True))
        await anyio.wait_all_tasks_blocked()
        assert supervisor.was_ready
        supervisors.report(line, SuperviseReport(order=order.order, result="done", pid=78))
    assert (supervisor.was_ready, supervisor.offer.pid, supervisor.offer.started) == (False, 78, True)


async def test_a_failed_order_reports_the_reason(supervisors: Supervisors) -> None:
    line = Line()
    failures: list[HegmError] = []

    async def ask(supervisor: Supervisor) -> None:
        try:
            await supervisor.order("expect", "4")
        except OrderFailed as error:
            failures.append(error)

    async with attending(supervisors, line) as supervisor, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, supervisor)
        order = await line.next()
        supervisors.report(
            line, SuperviseReport(order=order.order, result="failed", message="no Python", hint="use one")
        )
    assert "no Python" in failures[0].message


async def test_a_reconnection_replaces_the_earlier_connection(supervisors: Supervisors) -> None:
    first, second = Line(), Line()
    async with attending(supervisors, first) as before:
        async with attending(supervisors, second, OFFER.replace(operation="4", left=True)) as now:
            assert now is before
            assert supervisors.of_operation(0, "4") is now
            with pytest.raises(Refused):
                supervisors.report(first, SuperviseReport(result="ended", status=0))
        with pytest.raises(SupervisorAway) as away:
            await now.order("start", "4")
        # A supervisor killed during a start left a hint with ID although the number was known, and without an option.
        assert "hegmctl run --allow-restart --resume 4 -- COMMAND" in away.value.hint


@pytest.fixture
def second_process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that exits when its input closes. The test reaps it at its end."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process


async def test_a_run_with_a_supervisor_accepts_no_second_one(
    supervisors: Supervisors, second_process: subprocess.Popen[bytes]
) -> None:
    async with attending(supervisors, Line()):
        with pytest.raises(Refused, match="already supervises run run"):
            await supervisors.attend("other", second_process.pid, 0, OFFER, Line().send)


async def test_a_supervisor_that_reconnects_after_its_agent_does_not_count_as_gone(supervisors: Supervisors) -> None:
    """hegmd was killed before a job was stopped; the next one stopped it, and undid the restart at once."""
    line, pool = Line(), Pool(1 << 20)
    carrier = StateCarrier(pool, supervisors, PrestartService(supervisors, lambda _subject, _gpu: {}))
    subject = MigratedProcess("4", "a", 1, 1, gpu="gpu0", target_gpu="gpu1", previous_gpu="gpu0", uid=0, run="run")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carrier.offload, subject, lambda _done: None)
        await anyio.wait_all_tasks_blocked()
        async with attending(supervisors, line):
            expected = await line.next()
            assert (expected.do, expected.operation) == ("expect", "4")
            tasks.cancel_scope.cancel()
    pool.close()


async def test_an_unreaped_supervisor_counts_as_exited(
    supervisors: Supervisors, second_process: subprocess.Popen[bytes]
) -> None:
    """Its start time said that the process still existed, and waiters waited for ever."""
    assert second_process.stdin is not None
    async with attending(supervisors, Line(), pid=second_process.pid) as supervisor:
        assert supervisor.is_alive
        second_process.stdin.close()
        await anyio.to_thread.run_sync(os.waitid, os.P_PID, second_process.pid, os.WEXITED | os.WNOWAIT)
        assert supervisors.find(0, "run") is None
        assert supervisors.has_ended(0, "run")


async def test_a_supervisor_that_ended_after_its_connection_kept_a_descriptor_for_ever(
    supervisors: Supervisors, second_process: subprocess.Popen[bytes]
) -> None:
    """The kernel closes a process's connections before it ends: the daemon kept one of each job under a supervisor."""
    assert second_process.stdin is not None
    async with attending(supervisors, Line(), pid=second_process.pid):
        own = len(os.listdir("/proc/self/fd"))
    second_process.stdin.close()
    await anyio.to_thread.run_sync(second_process.wait)
    async with attending(supervisors, Line(), OFFER.replace(run="another")):
        assert supervisors.has_ended(0, "run")
        assert len(os.listdir("/proc/self/fd")) == own - 1, "that of one supervisor, and not the input of the process"
