"""Processes that the driver has checkpointed and no journal mentions: found, reported, adopted, over the stub driver.

The stub's trap works as in test_driver.py: a process that is whole at the end was restored with memory reserved, or not
at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.errors import HegmError
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Adopt, Migrate, OperationReply, Orphans, OrphansReply, Suspend
from tests.e2e.driven import GIB, DrivenNode, Watched, only_its_own

pytestmark = [pytest.mark.e2e]

STATE, RESTORE = "cuCheckpointProcessGetState", "cuCheckpointProcessRestore"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DrivenNode]:
    with DrivenNode(tmp_path) as made:
        yield made


def call_driver(node: DrivenNode, *steps: str, pid: int) -> None:
    """Checkpoint a process with a separate program, which then exits."""
    for step in steps:
        words = [step, str(pid), *(["1000"] if step == "lock" else [])]
        subprocess.run(
            [sys.executable, "-m", "tests.stubs.cuda.rig", "--call", *words],
            env={**os.environ, **node.cuda.environment()},
            check=True,
        )


def orphans_of(connection: Connection) -> dict[str, protocol.Orphan]:
    return {orphan.name: orphan for orphan in connection.call(Orphans(), OrphansReply).orphans}


def adopt(connection: Connection, pid: int, to: str | None = None) -> protocol.Operation:
    reply = connection.call(Adopt(pid=pid, to=to), OperationReply)
    assert reply.operation is not None
    return reply.operation


def test_a_process_that_another_program_left_locked_is_reported(node: DrivenNode) -> None:
    with node.program(1) as program, node.connect() as connection:
        watched = Watched(program)
        call_driver(node, "lock", pid=watched.pid)
        orphan = orphans_of(connection)[str(watched.pid)]
        assert ("locked" in orphan.why, orphan.where, orphan.next) == (True, "on gpu1", f"hegmctl adopt {watched.pid}")
        with pytest.raises(HegmError, match="is on gpu1, and can only resume there"):
            adopt(connection, watched.pid, "gpu0")
        adopted = adopt(connection, watched.pid)
        assert (adopted.phase, adopted.failure, adopted.processes[0].gpu) == ("done", None, "gpu1")
        assert not node.cuda.calls(RESTORE), "it was only locked"
        watched.is_whole()
        assert str(watched.pid) not in orphans_of(connection)
        with pytest.raises(HegmError, match="is not parked"):
            adopt(connection, watched.pid)


def test_an_orphaned_checkpointed_process_is_restored_on_its_gpu_with_reserved_memory(node: DrivenNode) -> None:
    with node.program(0) as here, node.program(1) as there:
        neighbour, watched = Watched(here), Watched(there)
        call_driver(node, "lock", "checkpoint", pid=watched.pid)
        node.daemon.stop()
        node.daemon.start()
        with node.connect() as connection:
            events = connection.events(follow=True)  # of others on this machine too, who stand for reasons of their own
            assert next(event for event in events if event.kind == "pool.orphan" and event.pid == watched.pid)
        with node.connect() as connection:
            with pytest.raises(HegmError, match="is unknown, and the driver can only restore it there"):
                adopt(connection, watched.pid, "gpu0")
            adopted = adopt(connection, watched.pid)
            assert (adopted.phase, adopted.failure, adopted.processes[0].gpu) == ("done", None, "gpu1")
            neighbour.is_whole()
            watched.is_whole()
            assert str(watched.pid) not in orphans_of(connection)


def _come_back_without_a_journal(node: DrivenNode, watched: Watched) -> None:
    """Start a daemon without a journal, and read its report of that process."""
    (node.folder / "state" / "operations.journal").unlink()
    node.daemon.start()
    with node.connect() as connection:
        orphans = (event for event in connection.events(follow=True) if event.kind == "pool.orphan")
        next(event for event in orphans if event.facts["kind"] == "process" and event.pid == watched.pid)


def test_a_process_of_unknown_gpu_waits_for_memory_on_every_gpu(tmp_path: Path) -> None:
    with DrivenNode(tmp_path, gpu_bytes=4 * GIB) as node, node.program(0) as program, node.connect() as connection:
        watched = Watched(program)
        call_driver(node, "lock", "checkpoint", pid=watched.pid)
        with node.program(1, 16) as other:
            assert other.tell("grab").startswith("grabbed")
            with pytest.raises(HegmError, match=r"gpu1 has .* free, but .* are needed"):
                adopt(connection, watched.pid)
        assert not node.cuda.calls(RESTORE)
        assert adopt(connection, watched.pid).phase == "done"
        watched.is_whole()
        only_its_own(node, watched)


def test_stopped_processes_are_not_queried_and_a_silent_one_hides_no_other(node: DrivenNode) -> None:
    with node.program(0) as stopped, node.program(0) as hung, node.program(1) as found, node.connect() as connection:
        programs = [Watched(program) for program in (stopped, hung, found)]
        one, two, three = (program.pid for program in programs)
        for pid in (one, two, three):
            call_driver(node, "lock", pid=pid)
        os.kill(one, signal.SIGSTOP)
        node.cuda.order(f"hang step:state@{two}")
        before = len([call for call in node.cuda.calls(STATE) if call.subject == one])
        orphans = orphans_of(connection)
        assert orphans[str(one)].next.startswith(f"run: kill -CONT {one}")
        assert (str(two) in orphans, orphans[str(three)].next) == (False, f"hegmctl adopt {three}")
        with pytest.raises(HegmError, match=r"is stopped \(SIGSTOP\)"):
            adopt(connection, one)
        with pytest.raises(HegmError, match="did not report the state of process"):
            adopt(connection, two)
        assert len([call for call in node.cuda.calls(STATE) if call.subject == one]) == before
        os.kill(one, signal.SIGCONT)
        node.cuda.mend()
        assert [adopt(connection, pid).phase for pid in (one, two, three)] == ["done"] * 3
        for program in programs:
            program.is_whole()


def test_a_job_with_its_bytes_in_the_pool_stayed_parked_without_its_journal(node: DrivenNode) -> None:
    """How much room it needs was in the journal alone; now it is bounded, and its storages come on top."""
    with node.agented(1) as program:
        watched = Watched(program)
        with node.connect() as connection:
            connection.call(Suspend(pids=(watched.pid,), carrier="host"), OperationReply)
        node.daemon.stop()
        _come_back_without_a_journal(node, watched)
        with node.connect() as connection:
            assert {orphan.kind for orphan in orphans_of(connection).values() if orphan.pid == watched.pid} == {
                "bytes",
                "process",
            }
            adopted = adopt(connection, watched.pid)
            assert (adopted.phase, adopted.failure, adopted.processes[0].gpu) == ("done", None, "gpu1")
            watched.is_whole()
            assert watched.pid not in {orphan.pid for orphan in orphans_of(connection).values()}
        only_its_own(node, watched)


@pytest.mark.parametrize("step", ["checkpoint", "restore"])
def test_bytes_in_video_memory_of_a_job_without_a_journal_were_only_listed(
    node: DrivenNode, tmp_path: Path, step: str
) -> None:
    """They were on their way to another GPU, and their job stayed parked forever beside them."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with node.agented(0) as program:
        watched = Watched(program)
        node.cuda.order(f"hold step:{step} {gate} 1")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to="gpu1", carrier="peer", wait=False), OperationReply)
        with gate.open("w"):
            node.daemon.stop(signal.SIGKILL)
            node.cuda.mend()
        _come_back_without_a_journal(node, watched)
        with node.connect() as connection:
            (found,) = [orphan for orphan in orphans_of(connection).values() if orphan.kind == "bytes"]
            assert (found.pid, found.where) == (watched.pid, "video memory of gpu1")
            assert found.next == f"run: hegmctl adopt {watched.pid}; that process needs these bytes"
            adopted = adopt(connection, watched.pid)
            assert (adopted.phase, adopted.failure) == ("done", None)
            watched.is_whole()
            assert watched.pid not in {orphan.pid for orphan in orphans_of(connection).values()}
        only_its_own(node, watched)
