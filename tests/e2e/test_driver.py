"""Processes without an agent, moved by the driver alone: a real daemon and a real helper over the stub driver.

The stub has the trap of the real one: a restore without memory loses the job permanently, and then the program below
never answers again. A test that ends with its answer and its digest has proved that the trap was not triggered.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.errors import HegmError
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import CancelOperation, Migrate, OperationReply, Operations, OperationsReply
from tests.e2e.driven import GIB, LOOKS, DrivenNode, Watched, at_rest, helper_of, helpers_of, only_its_own
from tests.looks import pause
from tests.wide import telling

pytestmark = [pytest.mark.e2e]

LOCK, CHECKPOINT = "cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"
RESTORE, UNLOCK = "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock"
STAGES = ("cuMemCreate", LOCK, "step:lock", CHECKPOINT, "step:checkpoint", RESTORE, "step:restore", UNLOCK)
# A killed daemon leaves the driver's calls to themselves, and a process whose reservation was released before its
# restore. A daemon that gets SIGTERM has to finish what is in progress.
KILLED_IN = ("cuMemCreate", "step:lock", "step:checkpoint", RESTORE, "step:restore", UNLOCK)
ENDS = (
    *((signal.SIGKILL, stage) for stage in KILLED_IN),
    *((signal.SIGTERM, stage) for stage in ("step:checkpoint", RESTORE)),
)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DrivenNode]:
    with DrivenNode(tmp_path) as made:
        yield made


def begin(connection: Connection, pid: int, to: str = "gpu1") -> protocol.Operation:
    reply = connection.call(Migrate(pids=(pid,), to=to, wait=False), OperationReply)
    assert reply.operation is not None
    return reply.operation


def test_a_process_without_an_agent_is_moved_suspended_and_resumed(node: DrivenNode) -> None:
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        moved = connection.migrate(watched.pid, "gpu1").operation
        assert moved is not None
        assert (moved.phase, moved.failure, moved.processes[0].gpu) == ("done", None, "gpu1")
        assert moved.downtime_s is not None
        watched.is_whole()
        assert list(node.vram(watched.pid)) == ["gpu1"]
        only_its_own(node, watched)
        suspended = connection.suspend(watched.pid).operation
        assert suspended is not None
        assert (suspended.phase, suspended.processes[0].state) == ("suspended", "off")
        assert node.used() == {"gpu0": 0, "gpu1": 0}
        resumed = connection.resume(watched.pid, "gpu0").operation
        assert resumed is not None
        assert (resumed.phase, resumed.failure) == ("done", None)
        watched.is_whole()
        only_its_own(node, watched)


def test_every_gpu_of_the_driver_is_in_the_map(tmp_path: Path) -> None:
    with DrivenNode(tmp_path, gpus=4) as node, node.program(2) as program, node.connect() as connection:
        watched = Watched(program)
        moved = connection.migrate(watched.pid, "gpu3").operation
        assert moved is not None
        assert (moved.phase, moved.failure) == ("done", None)
        watched.is_whole()
        assert list(node.vram(watched.pid)) == ["gpu3"]


@pytest.mark.parametrize(
    "stage",
    telling(((stage,) for stage in STAGES), [(stage,) for stage in ("cuMemCreate", "step:lock", RESTORE, UNLOCK)]),
)
def test_a_helper_killed_at_any_call_costs_no_job(node: DrivenNode, tmp_path: Path, stage: str) -> None:
    _interrupted(node, tmp_path, stage, lambda: helper_of(node).kill())


@pytest.mark.parametrize(("how", "stage"), telling(product((signal.SIGKILL, signal.SIGTERM), STAGES), ENDS))
def test_a_daemon_that_ends_anywhere_costs_no_job(
    node: DrivenNode, tmp_path: Path, how: signal.Signals, stage: str
) -> None:
    _interrupted(node, tmp_path, stage, lambda: node.daemon.process.send_signal(how), restart=True)


def _interrupted(
    node: DrivenNode, tmp_path: Path, stage: str, interrupt: Callable[[], None], *, restart: bool = False
) -> None:
    """A migration that is in that call when the victim is killed; then the call continues, if it still can."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.program(0) as program:
        watched = Watched(program)
        node.cuda.order(f"hold {stage} {gate}")
        with node.connect() as connection:
            begin(connection, watched.pid)
        with gate.open("w"):  # from here on a call is in progress
            interrupt()
            node.cuda.mend()
        if restart:
            node.daemon.stop()
            node.daemon.start()
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        watched.is_whole()
        only_its_own(node, watched)


def test_the_helper_started_no_sooner_than_the_agent_connected_after_a_crash(node: DrivenNode, tmp_path: Path) -> None:
    """The paused job waited for the helper to start. The agent is stopped here, so that it cannot connect first."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program:
        node.cuda.order(f"hold {LOCK} {gate}")
        with node.connect() as connection:
            begin(connection, program.pid)
        with gate.open("w"):
            node.daemon.process.kill()
            node.cuda.mend()
        node.daemon.stop()
        os.kill(program.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, program.pid, os.WSTOPPED | os.WNOWAIT)
        node.daemon.start()
        for _ in range(LOOKS):
            if helpers_of(node):
                break
            pause()
        early = bool(helpers_of(node))
        os.kill(program.pid, signal.SIGCONT)
        ended = at_rest(node)
        assert (early, ended.phase in {"done", "rolled-back"}) == (True, True)


@pytest.mark.parametrize(
    "stage", telling(zip(STAGES[:5], strict=False), [("cuMemCreate",), ("step:lock",), ("step:checkpoint",)])
)
def test_a_move_cancelled_before_the_checkpoint_changes_nothing(node: DrivenNode, tmp_path: Path, stage: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        node.cuda.order(f"hold {stage} {gate}")
        op = begin(connection, watched.pid)
        with gate.open("w"):
            connection.call(CancelOperation(id=op.id), OperationReply)
            node.cuda.mend()
        ended = at_rest(node)
        assert (ended.phase, ended.processes[0].gpu) == ("rolled-back", "gpu0")
        watched.is_whole()
        only_its_own(node, watched)


def test_kernels_that_do_not_end_are_waited_for_and_then_left_alone(node: DrivenNode) -> None:
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        node.cuda.order(f"error {LOCK} 600")
        moved = connection.migrate(watched.pid, "gpu1").operation
        assert moved is not None
        assert moved.phase == "rolled-back"
        assert moved.failure is not None
        assert "did not finish" in moved.failure.message
        watched.is_whole()
        only_its_own(node, watched)


def test_a_process_that_grew_after_the_plan_gets_more_memory_or_stays(tmp_path: Path) -> None:
    with DrivenNode(tmp_path, gpu_bytes=2 * GIB) as node, node.program(0) as program, node.program(1, 700) as other:
        watched, neighbour = Watched(program), Watched(other)
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        node.cuda.order(f"hold {LOCK}@{watched.pid} {gate}")
        with node.connect() as connection:
            begin(connection, watched.pid)
        with gate.open("w"):
            assert program.tell("alloc 600") == "allocated"
            node.cuda.mend()
        ended = at_rest(node)
        assert ended.phase == "rolled-back"
        assert ended.failure is not None
        assert "MiB free of the" in ended.failure.message
        watched.steps += 1
        assert program.tell("step") == f"step {watched.steps}"
        neighbour.is_whole()


def test_a_process_that_takes_all_free_memory_does_not_lose_the_job(tmp_path: Path) -> None:
    """The neighbour grabs in a loop while the job is moved there, and gets all but what is held."""
    with DrivenNode(tmp_path, gpu_bytes=4 * GIB) as node, node.program(0) as program, node.program(1, 16) as other:
        watched = Watched(program)
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        node.cuda.order(f"hold {CHECKPOINT} {gate}")
        with node.connect() as connection:
            begin(connection, watched.pid)
        with gate.open("w"):
            assert other.tell("grab").startswith("grabbed")
            assert other.tell("hoard") == "hoarding"
            node.cuda.mend()
        ended = at_rest(node)
        assert (ended.phase, ended.failure) == ("done", None)
        watched.is_whole()


def test_a_job_without_gpu_memory_stays_off_its_gpu_until_memory_is_free(tmp_path: Path) -> None:
    """Both ways are closed for a while; nothing is called that could lose it, and it comes back by itself."""
    with DrivenNode(tmp_path, gpu_bytes=4 * GIB) as node, node.program(0) as program:
        watched = Watched(program)
        with node.connect() as connection:
            connection.suspend(watched.pid)
        with node.program(0, 16) as here, node.program(1, 16) as there:
            assert here.tell("grab").startswith("grabbed")
            assert there.tell("grab").startswith("grabbed")
            with node.connect() as connection, pytest.raises(HegmError, match="free, but"):
                connection.resume(watched.pid)
        with node.connect() as connection:
            resumed = connection.resume(watched.pid).operation
            assert resumed is not None
            assert resumed.phase == "done"
        watched.is_whole()
        only_its_own(node, watched)


def test_a_process_stopped_by_a_signal_is_refused_before_the_driver_waits_for_it(node: DrivenNode) -> None:
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        os.kill(watched.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, watched.pid, os.WSTOPPED | os.WNOWAIT)  # on a busy machine that takes a moment
        with pytest.raises(HegmError, match=r"is stopped \(SIGSTOP\)"):
            connection.migrate(watched.pid, "gpu1")
        os.kill(watched.pid, signal.SIGCONT)
        watched.is_whole()


def test_a_process_stopped_in_its_checkpoint_is_reported_within_seconds_and_finishes_once_continued(
    node: DrivenNode, tmp_path: Path
) -> None:
    """Five minutes passed before the daemon reported it, and then it ended the helper of all jobs."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        node.cuda.order(f"hold step:checkpoint@{watched.pid} {gate}")
        begin(connection, watched.pid)
        with gate.open("w"):
            helper = helper_of(node).pid
            node.cuda.mend()
            os.kill(watched.pid, signal.SIGSTOP)
        assert f"kill -CONT {watched.pid}" in _next_step(connection)
        os.kill(watched.pid, signal.SIGCONT)
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        assert helper_of(node).pid == helper
        watched.is_whole()
        only_its_own(node, watched)


def test_a_process_stopped_in_its_restore_is_shown_by_ops(node: DrivenNode, tmp_path: Path) -> None:
    """No call on it makes progress, and `ops` showed an operation that merely takes long."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        node.cuda.order(f"hold step:restore@{watched.pid} {gate}")
        moving = begin(connection, watched.pid)
        with gate.open("w"):
            node.cuda.mend()
            os.kill(watched.pid, signal.SIGSTOP)
        with node.connect() as following:
            waits = next(one.waits for one in following.follow(moving.id) if one.waits is not None)
        assert waits.next == f"kill -CONT {watched.pid}"
        assert f"kill -CONT {watched.pid}" in _next_step(connection)
        os.kill(watched.pid, signal.SIGCONT)
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        watched.is_whole()


def _next_step(connection: Connection) -> str:
    """Return the next step that the newest operation proposes, once it cannot proceed by itself."""
    for _ in range(30 * LOOKS):
        newest = connection.call(Operations(), OperationsReply).operations[-1]
        hints = [one for one in (newest.waits and newest.waits.next, newest.failure and newest.failure.hint) if one]
        if hints:
            return "; ".join(hints)
    raise AssertionError("it waits for nothing")


def test_a_killed_suspended_process_leaves_nothing_behind(node: DrivenNode) -> None:
    with node.program(0) as program, node.connect() as connection:
        connection.suspend(program.pid)
        program.process.kill()
        next(event for event in connection.events(follow=True) if event.kind == "operation.lost")
    with node.connect() as connection:
        (suspended,) = connection.call(Operations(), OperationsReply).operations
        assert (suspended.phase, suspended.processes[0].state) == ("lost", "lost")
        assert node.used() == {"gpu0": 0, "gpu1": 0}
