"""The restart method: which process it accepts as the successor, and when it stops waiting for one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from hegmd.errors import Refused
from hegmd.memory.pool import MemoryKeeping, Pool
from hegmd.migration.contracts import MigratedProcess, Rank, ReplacedBy, TrainingFinished, start_key
from hegmd.migration.methods.rank_startup import RankPosition, StartingRank, position_of, ranks_below
from hegmd.migration.methods.restart import RestartMethod
from hegmd.migration.methods.restore_lock import has_finished, has_passed, lock_path
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.node.processes.procfs import ProcessKey, start_ticks_of
from hegmd.protocol.agents import AgentAttend, Order
from hegmd.protocol.snapshots import AgentInfo, Gpu
from hegmd.protocol.supervision import BACK, OVER, Supervise, SuperviseReport, SupervisorOrder
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import AgentConnection, Identity, Workers
from tests.patience import HANG_S

UID, TICKS = 1000, 7
BEFORE, NEXT = 4711, 4712


class EndedSupervisors(Supervisors):
    """The supervisor of every run has ended."""

    def has_ended(self, uid: int | None, run: str | None) -> bool:
        return True


class AttendingWorkers(Workers):
    """Workers that attend, whatever their processes do."""

    def __init__(self, *pids: int) -> None:
        super().__init__(lambda _pid: TICKS)
        self._attending = [_went_on(pid) for pid in pids]

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(tuple(self._attending))

    def come(self, pid: int) -> AgentConnection:
        """Rank 0 of the run attends, which has not put anything back."""
        about = AgentAttend(token=f"token-{pid}", python_version="3.11", boundary=0, run="run-1", rank=0, world_size=1)
        worker = AgentConnection(Identity(pid, TICKS, UID), AgentInfo(name="agent", version="1"), about)
        worker.connect(_send, about)
        self._attending.append(worker)
        self.changed.notify_all()
        return worker

    def go_on(self, pid: int, gpu: str | None) -> None:
        """Let that process attend with the restored state of operation 4."""
        self._attending.append(_went_on(pid, gpu))

    def leave(self, worker: AgentConnection) -> None:
        """Its process has ended."""
        worker.ended = True
        self._attending.remove(worker)
        self.changed.notify_all()


def _went_on(pid: int, gpu: str | None = "gpu1") -> AgentConnection:
    """Return a process that reports the restored state of operation 4."""
    about = AgentAttend(token=f"token-{pid}", python_version="3.11", boundary=5, restarted="4", gpu=gpu, run="run-1")
    worker = AgentConnection(Identity(pid, TICKS, UID), AgentInfo(name="agent", version="1"), about)
    worker.connect(_send, about)
    return worker


async def _send(_order: Order, _fds: Sequence[int]) -> None:
    raise AssertionError("nothing is asked of it")


async def _send_to_supervisor(_order: SupervisorOrder, _fds: Sequence[int]) -> None:
    raise AssertionError("nothing is asked of it")


def method(
    folder: Path,
    *pids: int,
    workers: Workers | None = None,
    supervisors: Supervisors | None = None,
    position_of: Callable[[int, int], RankPosition | None] = position_of,
    ranks_below: Callable[[int], tuple[ProcessKey | None, Mapping[int, ProcessKey]]] = ranks_below,
    vendor: str = "simulated",
    pool: Pool | None = None,
) -> RestartMethod:
    gpus = [Gpu(id=name, index=index, uuid=name.upper(), vendor=vendor) for index, name in enumerate(("gpu0", "gpu1"))]
    by = SimulatedMethod(SimulatedMemory(None))
    pool = pool or Pool(1 << 20, keep=MemoryKeeping())
    parts = workers or AttendingWorkers(*pids), supervisors or EndedSupervisors(lambda _: TICKS), pool
    return RestartMethod(
        *parts, by=by, gpus=lambda: gpus, folder=folder, position_of=position_of, ranks_below=ranks_below
    )


def subject(pid: int = BEFORE) -> MigratedProcess:
    return MigratedProcess("4", "a", pid, TICKS, gpu=None, target_gpu="gpu1", previous_gpu="gpu0", uid=UID, run="run-1")


def noted(folder: Path, notes: bytes) -> None:
    lock_path(folder, "4").write_bytes(notes)


@pytest.mark.parametrize("place", ["gpu0,gpu1", "gpu1,gpu0"])
async def test_a_process_on_several_gpus_is_started_with_all_of_them_in_the_order_of_its_devices(
    tmp_path: Path, place: str
) -> None:
    parts = method(tmp_path, NEXT, vendor="nvidia")
    surroundings = parts.surroundings_of(subject(), place)
    assert surroundings["set"] == {"CUDA_VISIBLE_DEVICES": place.upper()}
    assert {"HEGM_GPU", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"} == set(surroundings["unset"])
    recovered = parts.variables_for(tuple(place.split(",")))
    assert recovered["set"] == {"CUDA_VISIBLE_DEVICES": place.upper()}, "a recovery starts it in that order as well"


async def test_a_process_that_continues_on_several_gpus_is_on_all_of_them(tmp_path: Path) -> None:
    workers = AttendingWorkers()
    workers.go_on(NEXT, gpu=None)
    reborn = await method(tmp_path, workers=workers).restore(subject(), "gpu1,gpu0")
    assert isinstance(reborn, ReplacedBy)
    assert (reborn.pid, reborn.gpu) == (NEXT, "gpu1,gpu0")
    assert [worker.gpu for worker in workers] == ["gpu1,gpu0"]


async def test_the_process_that_reports_the_restored_state_is_the_successor(tmp_path: Path) -> None:
    reborn = await method(tmp_path, NEXT).restore(subject(), "gpu1")
    assert isinstance(reborn, ReplacedBy)
    assert (reborn.pid, reborn.gpu, reborn.boundary) == (NEXT, "gpu1", 5)


async def test_a_process_restarted_by_an_earlier_order_is_known_on_that_orders_target(tmp_path: Path) -> None:
    """A process on a real GPU does not report its GPU: the daemon assumed that it was on the target."""
    supervisors, workers = Supervisors(start_ticks_of), AttendingWorkers()
    forth, back = (start_key("migrate", heading, [gpu]) for heading, gpu in (("forward", "gpu1"), ("back", "gpu0")))
    offer = Supervise(run="run-1", python=True, pid=NEXT, started=True, operation="4", key=forth)
    workers.go_on(NEXT, gpu=None)
    parts = method(tmp_path, workers=workers, supervisors=supervisors)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisors.attend, "it", os.getpid(), UID, offer, _send_to_supervisor)
        await supervisors.changed.wait()
        again = await parts.restore(replace(subject(), target_gpu="gpu0", start=back), "gpu0")
        first = await parts.restore(replace(subject(), start=forth), "gpu1")
        tasks.cancel_scope.cancel()
    supervisors.close()
    assert isinstance(again, ReplacedBy)
    assert isinstance(first, ReplacedBy)
    assert [(one.gpu, one.is_earlier) for one in (again, first)] == [("gpu1", True), ("gpu1", False)]


@pytest.mark.thorough
async def test_a_killed_process_is_not_confused_with_the_next_one_of_its_pid(tmp_path: Path) -> None:
    """Killed before its boundary, its connection was there for a moment still: it continued a second time, and the
    operation was suspended while its supervisor had started another."""
    with pytest.raises(Refused, match="has exited, and no other process can restart the job"):
        await method(tmp_path, NEXT).restore(subject(NEXT), "gpu0")


@pytest.mark.parametrize("attends", [(), (NEXT,)])
async def test_no_process_is_started_from_the_state_of_a_finished_training(
    tmp_path: Path, attends: tuple[int, ...]
) -> None:
    noted(tmp_path, BACK + OVER)
    assert await method(tmp_path, *attends).restore(subject(NEXT), "gpu1") == TrainingFinished()


@pytest.mark.parametrize("notes", [b"", BACK, bytes(len(BACK)) + OVER])
def test_both_words_are_the_end_of_a_training_and_neither_alone_is(tmp_path: Path, notes: bytes) -> None:
    assert not has_finished(tmp_path, "4")
    noted(tmp_path, notes)
    assert not has_finished(tmp_path, "4")
    with lock_path(tmp_path, "4").open("r+b") as lock:
        os.pwrite(lock.fileno(), BACK, 0)
        os.pwrite(lock.fileno(), OVER, len(BACK))
    assert has_finished(tmp_path, "4")


async def test_a_resumed_process_is_recorded_for_its_supervisor_and_an_exited_one_is_not(tmp_path: Path) -> None:
    """A process that was killed at that moment may already have a successor."""
    noted(tmp_path, BACK)
    ticks = start_ticks_of(os.getpid())
    assert ticks is not None
    here = replace(subject(os.getpid()), start_ticks=ticks)
    await method(tmp_path).note_resumed(replace(here, rank=1))
    assert has_passed(tmp_path, "4", 1)
    assert not has_passed(tmp_path, "4", 0)
    with pytest.raises(AgentAway, match="has ended"):
        await method(tmp_path).note_resumed(replace(here, start_ticks=ticks - 1))
    assert not has_passed(tmp_path, "4", 0)
    lock_path(tmp_path, "4").unlink()
    await method(tmp_path).note_resumed(replace(here, rank=1))  # it trains on, whether that can be noted or not


async def test_a_start_is_forgotten_with_its_last_process(tmp_path: Path) -> None:
    restart = method(tmp_path)
    with restart._start_of(subject(1)), restart._start_of(subject(2)):
        assert list(restart._starts) == ["4"]
    assert restart._starts == {}


# -- ranks -------------------------------------------------------------------------------------------------------------

# A launcher that starts its one rank again by itself, below a supervisor that stays.
LAUNCHER = "echo $$; for _ in 1 2; do RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 sh -c 'echo $$; read _'; done"
SUPERVISOR = 'sh -c "$LAUNCHER"; echo ended; read _'


class Launched:
    """The processes of a start, and their reports to the daemon."""

    def __init__(self, workers: AttendingWorkers, supervisors: Supervisors) -> None:
        self._workers = workers
        self._supervisors = supervisors
        environ, pipe = {**os.environ, "LAUNCHER": LAUNCHER}, subprocess.PIPE
        self._process = subprocess.Popen(["sh", "-c", SUPERVISOR], env=environ, stdin=pipe, stdout=pipe, text=True)
        #: Set once the state of a rank was read.
        self.checked = anyio.Event()

    def position_of(self, pid: int, supervisor: int) -> RankPosition | None:
        found = position_of(pid, supervisor)
        anyio.from_thread.run_sync(self.checked.set)
        return found

    async def attend(self) -> None:
        """The supervisor says that it has started its command; until this is cancelled."""
        command = int(await self.next_line())
        offer = Supervise(run="run-1", python=False, pid=command, started=True, operation="4")
        try:
            await self._supervisors.attend(self, self._process.pid, UID, offer, _send_to_supervisor)
        finally:
            self._process.communicate()
            self._supervisors.close()

    def ranks_below(self, command: int) -> tuple[ProcessKey | None, Mapping[int, ProcessKey]]:
        found = ranks_below(command)
        if found[1]:
            anyio.from_thread.run_sync(self.checked.set)
        return found

    async def next_line(self) -> str:
        """The next word of them: the pid of a rank, or that the launcher has ended."""
        assert self._process.stdout is not None
        return (await anyio.to_thread.run_sync(self._process.stdout.readline)).strip()

    def fall(self, rank: AgentConnection | None = None) -> None:
        """The rank ends, and so does its agent's connection, if it has come so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if rank is not None:
            self._workers.leave(rank)

    def fail(self, message: str) -> None:
        """The supervisor has given the start up."""
        self._supervisors.report(self, SuperviseReport(result="failed", message=message))


async def refusal_of_a_rank(parts: RestartMethod) -> Refused:
    """Why the only rank of a job does not come back."""
    with pytest.raises(Refused) as failed:
        await parts.restore(replace(subject(), rank=0, ranks=(Rank("a", 0, "gpu1"),)), "gpu1")
    return failed.value


async def test_a_rank_that_failed_before_its_agent_connected_left_the_operation_waiting(tmp_path: Path) -> None:
    """The launcher had restarted the ranks itself.

    They waited for ranks that had exited, and the daemon did not end them.
    """
    workers, supervisors = AttendingWorkers(), Supervisors(start_ticks_of)
    launched = Launched(workers, supervisors)
    parts = method(tmp_path, workers=workers, supervisors=supervisors, position_of=launched.position_of)
    failures: list[Refused] = []

    async def restore() -> None:
        failures.append(await refusal_of_a_rank(parts))
        tasks.cancel_scope.cancel()

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launched.attend)
            await supervisors.changed.wait()
            tasks.start_soon(restore)
            fallen = int(await launched.next_line())
            rank = workers.come(fallen)
            await launched.checked.wait()
            launched.fall(rank)
            workers.come(int(await launched.next_line()))
            assert await launched.next_line() == "ended"
            launched.fail("it ended with -9, started 2 times")
    assert f"rank 0 (process {fallen}) ended before its first boundary; it ended with -9" in failures[0].message
    assert failures[0].hint == "read what it printed", "whether its state is held is seen later"


@pytest.mark.thorough
async def test_a_daemon_started_later_missed_a_rank_that_failed_before_its_agent_connected(tmp_path: Path) -> None:
    """An earlier daemon requested the start; the daemon that waits now finds the rank below the launcher itself."""
    workers, supervisors = AttendingWorkers(), Supervisors(start_ticks_of)
    launched = Launched(workers, supervisors)
    parts = method(tmp_path, workers=workers, supervisors=supervisors, ranks_below=launched.ranks_below)
    failures: list[Refused] = []

    async def restore() -> None:
        failures.append(await refusal_of_a_rank(parts))
        tasks.cancel_scope.cancel()

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(launched.attend)
            await supervisors.changed.wait()
            fallen = int(await launched.next_line())
            tasks.start_soon(restore)
            await launched.checked.wait()
            launched.fall()
            assert int(await launched.next_line()) != fallen
            assert await launched.next_line() == "ended"
            launched.fail("it ended with -9, started 2 times")
    assert f"rank 0 (process {fallen}) ended before its first boundary; it ended with -9" in failures[0].message
    assert failures[0].hint == "read what it printed", "whether its state is held is seen later"


async def test_the_launcher_that_this_daemon_started_is_not_searched_for_ranks(tmp_path: Path) -> None:
    """It may have started only some of its ranks yet, and the others would be mistaken for ranks that have ended."""
    searched: list[int] = []

    def ranks_below(command: int) -> tuple[ProcessKey, Mapping[int, ProcessKey]]:
        searched.append(command)
        return (command, TICKS), {1: (command, TICKS)}

    supervisors = Supervisors(lambda _: TICKS)
    restart = method(tmp_path, supervisors=supervisors, ranks_below=ranks_below)
    rank = StartingRank(lambda _: True)
    offer = Supervise(run="run-1", python=False, pid=BEFORE, started=True, operation="4")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(supervisors.attend, object(), os.getpid(), UID, offer, _send_to_supervisor)
        await supervisors.changed.wait()
        (supervisor,) = supervisors
        with restart._start_of(subject()) as start:
            for start.is_ours, commands in (True, []), (False, [BEFORE]):
                await restart._look_after(rank, start, supervisor, replace(subject(), rank=0))
                assert searched == commands
        tasks.cancel_scope.cancel()
    supervisors.close()
