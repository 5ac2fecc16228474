"""Storages carried by the helper, around the driver's checkpoint: a real daemon and helper over the stub driver.

The agent is a model over real (stub) video memory; every byte of it goes from one process to another and back.
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
from hegmd.protocol.messages import Migrate, OperationReply, Operations, OperationsReply, Story, StoryReply
from tests.e2e.driven import GIB, LOOKS, DrivenNode, DrivenProgram, Watched, at_rest, helper_of, only_its_own
from tests.looks import pause
from tests.wide import telling

pytestmark = [pytest.mark.e2e]

OPEN = "cuIpcOpenMemHandle_v2"
CLOCKS_APART_S = 10.0
# Three pieces are opened on the way out, and three on the way in: where the helper is when it is interrupted.
STAGES = {
    "reserving": "cuDevicePrimaryCtxRetain",
    "copying out": f"{OPEN}",
    "checkpoint": "step:checkpoint",
    "restore": "step:restore",
    "copying in": f"{OPEN}",
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DrivenNode]:
    with DrivenNode(tmp_path) as made:
        yield made


def migrate(connection: Connection, pid: int, to: str, carrier: str | None = None) -> protocol.Operation:
    reply = connection.call(Migrate(pids=(pid,), to=to, carrier=carrier), OperationReply)
    assert reply.operation is not None
    return reply.operation


def copy_orders(program: DrivenProgram) -> list[str]:
    """The orders that moved something."""
    return [word for word in program.tell("seen").split() if word in {"export", "free", "make", "filled", "release"}]


@pytest.mark.parametrize("carrier", ["peer", "host", "driver"])
def test_a_job_is_moved_there_and_back_by_each_carrier(node: DrivenNode, carrier: str) -> None:
    with node.agented(0) as program, node.connect() as connection:
        watched = Watched(program)
        for to in ("gpu1", "gpu0"):
            moved = migrate(connection, watched.pid, to, carrier)
            assert (moved.phase, moved.failure, moved.processes[0].gpu) == ("done", None, to)
            watched.is_whole()
            only_its_own(node, watched)
        _has_timings(connection, moved.id, carrier)
        carried = ["export", "free", "make", "filled"] if carrier != "driver" else []
        assert copy_orders(program) == [*carried, "release"] * 2


def _has_timings(connection: Connection, op_id: str, carrier: str) -> None:
    """The story of the move has the steps of agent, helper, driver and copies, each within the operation."""
    story = connection.call(Story(id=op_id), StoryReply).story
    steps = [step for line in story for step in line.timings]
    assert {step.name for step in steps if step.lane == "driver"} >= {"checkpoint", "restore"}
    assert {step.name for step in steps if step.lane == "agent"} >= {"park", "survey"}
    copies = {step.name: step.size_bytes for step in steps if step.lane == "copies"}
    assert set(copies) == (set() if carrier == "driver" else {"out", "in"})
    assert all(size_bytes > 0 for size_bytes in copies.values())
    assert {step.name for step in steps if step.lane == "helper"} >= ({"copy"} if copies else {"checkpoint"})
    # The daemon reads two clocks for a step, one after the other, and others may have the processor in between.
    least_utc, last_utc = story[0].utc - CLOCKS_APART_S, story[-1].utc + CLOCKS_APART_S
    assert all(least_utc <= step.began_utc <= step.began_utc + step.took_s <= last_utc for step in steps)


def test_a_suspended_job_leaves_nothing_on_any_gpu_and_resumes_on_another(node: DrivenNode) -> None:
    with node.agented(0) as program, node.connect() as connection:
        watched = Watched(program)
        suspended = connection.suspend(watched.pid)
        assert suspended.plan is not None
        assert suspended.plan.workers[0].carrier == "host"
        assert node.used() == {"gpu0": 0, "gpu1": 0}
        resumed = connection.resume(watched.pid, "gpu1").operation
        assert resumed is not None
        assert (resumed.phase, resumed.failure) == ("done", None)
        watched.is_whole()
        only_its_own(node, watched)


def test_the_fastest_possible_carrier_is_chosen_and_the_plan_explains_why_no_faster_one(node: DrivenNode) -> None:
    with node.agented(0) as program, node.connect() as connection:
        assert _planned(connection, program.pid).workers[0].carrier == "peer"
        program.tell("facts expandable=yes")
        plan = _planned(connection, program.pid)
        assert plan.workers[0].carrier == "worker"
        assert "expandable segments" in " ".join(plan.hazards)
        program.tell("facts hazards=graphs,")
        assert _planned(connection, program.pid).workers[0].carrier == "driver"
        program.tell("facts hazards=nccl-p2p,")
        with pytest.raises(HegmError, match="peer-to-peer") as refused:
            _planned(connection, program.pid)
        assert "NCCL_P2P_DISABLE" in refused.value.hint
        assert "export" not in copy_orders(program)


def _planned(connection: Connection, pid: int) -> protocol.Plan:
    plan = connection.migrate(pid, "gpu1", dry_run=True).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("stage", "carrier"),
    telling(
        product(STAGES, ("peer", "host")),
        [
            *product(("copying out", "copying in"), ("peer", "host")),
            *(("reserving", "peer"), ("checkpoint", "host"), ("restore", "peer")),  # before the bytes move, and after
        ],
    ),
)
def test_a_helper_killed_during_a_copy_costs_no_byte(
    node: DrivenNode, tmp_path: Path, stage: str, carrier: str
) -> None:
    _interrupted(node, tmp_path, stage, carrier, lambda: helper_of(node).kill())


def _interrupted(node: DrivenNode, tmp_path: Path, stage: str, carrier: str, interrupt: Callable[[], None]) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program:
        watched = Watched(program)
        first = " 4" if stage == "copying in" else " 1"
        node.cuda.order(f"hold {STAGES[stage]} {gate}{first}")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier=carrier, wait=False), OperationReply)
        with gate.open("w"):
            interrupt()
            node.cuda.mend()
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        if "copying" in stage:
            assert (ended.phase, ended.failure) == ("done", None), "the copy was not made again by the next helper"
        watched.is_whole()
        only_its_own(node, watched)


@pytest.mark.parametrize(
    ("order", "carrier"),
    telling(
        product(("export", "free", "make", "filled"), ("peer", "host")),
        [("export", "peer"), ("free", "host"), ("make", "peer"), ("make", "host"), ("filled", "host")],
    ),
)
def test_a_job_whose_agent_fails_stays_or_is_rolled_back(node: DrivenNode, order: str, carrier: str) -> None:
    with node.agented(0) as program, node.connect() as connection:
        watched = Watched(program)
        program.tell(f"refuse {order}")
        moved = migrate(connection, watched.pid, "gpu1", carrier)
        assert moved.failure is not None
        assert "the test wants it so" in moved.failure.message
        if moved.phase == "suspended":  # neither way is open as long as it refuses
            program.tell(f"allow {order}")
            resumed = connection.resume(watched.pid).operation
            assert resumed is not None
            assert resumed.phase == "done"
        watched.is_whole()
        only_its_own(node, watched)


def test_storages_are_allocated_in_rounds_if_they_and_their_copies_do_not_fit(tmp_path: Path) -> None:
    with DrivenNode(tmp_path, gpu_bytes=7 * GIB // 2) as node, node.agented(0, 400, 400, 400) as program:
        watched = Watched(program)
        with node.connect() as connection:
            plan = _planned(connection, watched.pid)
            assert (plan.workers[0].carrier, plan.workers[0].overlap_bytes > 0) == ("peer", True)
            moved = migrate(connection, watched.pid, "gpu1")
            assert (moved.phase, moved.failure) == ("done", None)
        assert copy_orders(program) == ["export", "free", "make", "filled", "make", "filled", "release"]
        watched.is_whole()


def test_a_daemon_that_is_killed_while_a_job_is_suspended_leaves_it_to_the_next(node: DrivenNode) -> None:
    """The driver has all its bytes, so no other process has to keep any."""
    with node.agented(0) as program:
        watched = Watched(program)
        program.tell("facts hazards=graphs,")
        with node.connect() as connection:
            connection.suspend(watched.pid)
        node.daemon.stop(signal.SIGKILL)
        node.daemon.start()
        assert at_rest(node).phase == "suspended"
        with node.connect() as connection:
            resumed = connection.resume(watched.pid).operation
            assert resumed is not None
            assert (resumed.phase, resumed.failure) == ("done", None)
        watched.is_whole()
        only_its_own(node, watched)


@pytest.mark.parametrize("carrier", ["peer", "host"])
def test_a_program_that_keeps_taking_all_memory_does_not_get_the_storages_reservation(
    node: DrivenNode, tmp_path: Path, carrier: str
) -> None:
    """The reservation was released before the agent got the order to allocate, and another program was quicker.

    The allocator's cached memory had no reservation at all, and the job died at its next step, which needed it.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program, node.program(1, 16) as other:
        watched = Watched(program)
        assert program.tell("cache 700") == "cached 1"
        node.cuda.order(f"hold cuCheckpointProcessCheckpoint {gate}")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier=carrier, wait=False), OperationReply)
        with gate.open("w"):
            assert other.tell("grab").startswith("grabbed")
            assert other.tell("hoard") == "hoarding"
            node.cuda.mend()
        ended = at_rest(node)
        assert (ended.phase, ended.failure, ended.processes[0].gpu) == ("done", None, "gpu1")
        assert program.tell("cache") == "cached 1"
        watched.is_whole()


def test_a_job_without_memory_for_its_storages_reports_it_and_resumes_once_there_is_enough(
    node: DrivenNode, tmp_path: Path
) -> None:
    """On two H200 the job stayed suspended with its bytes until an operator resumed it.

    The other program cannot be paused here; a checkpoint that fails with 999, as it did there, prevents the rollback.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0, 400, 1, 16) as program, node.connect() as connection:
        watched = Watched(program)
        with node.program(1, 16) as other:
            # So little is free that its storages have to be allocated in their reservation, not next to it.
            assert other.tell("alloc 3840") == "allocated"
            node.cuda.order(
                f"error cuCheckpointProcessLock@{other.pid} 600", f"hold cuMemAlloc_v2@{watched.pid} {gate}"
            )
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier="host", wait=False), OperationReply)
            with gate.open("w"):  # the agent is about to make the first of them
                node.cuda.mend()
                node.cuda.order("error cuCheckpointProcessCheckpoint 999")
                assert other.tell("grab").startswith("grabbed")
            waits = _waiting(connection)
            assert "no room" in waits.why
            assert watched.program.tell("seen").split().count("release") == 0
        node.cuda.mend()
        ended = at_rest(node)
        assert (ended.phase, ended.processes[0].gpu, ended.processes[0].state) == ("rolled-back", "gpu1", "running")
        watched.is_whole()
        only_its_own(node, watched)


def test_a_greedy_neighbour_gets_no_reserved_memory_while_storages_are_allocated(
    node: DrivenNode, tmp_path: Path
) -> None:
    """The other program cannot be paused and is quicker than the agent. The next attempt has the reservation, and does
    not wait for more.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program, node.connect() as connection, node.program(1, 16) as other:
        watched = Watched(program)
        node.cuda.order(f"error cuCheckpointProcessLock@{other.pid} 600", f"hold cuMemAlloc_v2@{watched.pid} {gate}")
        connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier="host", wait=False), OperationReply)
        with gate.open("w"):
            node.cuda.mend()
            node.cuda.order("error cuCheckpointProcessCheckpoint 999")  # so that the way home is closed
            assert other.tell("grab").startswith("grabbed")
        ended = at_rest(node)
        assert (ended.processes[0].gpu, ended.processes[0].state) == ("gpu1", "running")
        watched.is_whole()


def test_a_job_whose_former_memory_was_taken_waits_with_all_its_bytes(node: DrivenNode, tmp_path: Path) -> None:
    """Between the moment in which they are freed and that in which room is kept, others take all there is; the way on
    is closed as well."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program, node.connect() as connection:
        watched = Watched(program)
        with node.program(0, 16) as other:
            node.cuda.order(f"hold cuCheckpointProcessCheckpoint {gate}")
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier="peer", wait=False), OperationReply)
            with gate.open("w"):
                node.cuda.mend()
                node.cuda.order("error cuCheckpointProcessRestore 1 1 1")
                assert other.tell("grab").startswith("grabbed")
                assert other.tell("hoard") == "hoarding"
            waiting = (one for one in connection.follow("1") if one.waits is not None)
            assert any("free of the" in one.waits.why for one in waiting if one.waits is not None)
            assert watched.program.tell("seen").split().count("release") == 0
        ended = at_rest(node)
        assert (ended.phase, ended.processes[0].gpu, ended.processes[0].state) == ("rolled-back", "gpu0", "running")
        watched.is_whole()
        only_its_own(node, watched)


def _waiting(connection: Connection) -> protocol.Wait:
    """Return what the newest operation waits for, once it waits for memory."""
    for _ in range(LOOKS):
        newest = connection.call(Operations(), OperationsReply).operations[-1]
        assert newest.phase not in {"done", "rolled-back", "suspended"}
        if newest.waits is not None and "room" in newest.waits.why:
            return newest.waits
        pause()
    raise AssertionError("it does not wait for room")
