"""Two jobs change places on a stub node, by the places that the driver has them at."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.protocol.messages import Drained, Operations, OperationsReply, Swap
from hegmd.protocol.operations import Operation
from tests.e2e.driven import GIB, DrivenNode, Watched
from tests.looks import pause
from tests.wide import telling

pytestmark = [pytest.mark.e2e]


def test_jobs_that_a_new_daemon_has_moved_are_not_looked_for_where_an_older_one_left_them(tmp_path: Path) -> None:
    with DrivenNode(tmp_path) as node, node.agented(0) as one, node.agented(1) as other:
        first, second = Watched(one), Watched(other)
        with node.connect() as connection:
            connection.migrate(first.pid, "gpu1")
        node.daemon.stop()
        node.daemon.start()
        node.wait_for_agents(first.pid, second.pid)
        with node.connect() as connection:
            connection.migrate(first.pid, "gpu0")
            swapped = connection.call(Swap(first=first.pid, second=second.pid), Drained)
        assert [operation.phase for operation in swapped.operations] == ["done", "done"]
        assert (list(node.vram(first.pid)), list(node.vram(second.pid))) == (["gpu1"], ["gpu0"])
        first.is_whole()
        second.is_whole()


def test_two_jobs_that_fill_their_gpus_are_both_out_before_either_is_back(tmp_path: Path) -> None:
    with _full(tmp_path) as node, node.agented(0) as one, node.agented(1) as other:
        first, second = Watched(one), Watched(other)
        with node.connect() as connection:
            swapped = connection.swap(first.pid, second.pid)
        assert [(operation.phase, operation.failure) for operation in swapped.operations] == [("done", None)] * 2
        assert (list(node.vram(first.pid)), list(node.vram(second.pid))) == (["gpu1"], ["gpu0"])
        steps = [call.function for call in node.cuda.calls() if call.function in {CHECKPOINT, RESTORE}]
        assert steps == [CHECKPOINT, CHECKPOINT, RESTORE, RESTORE]
        first.is_whole()
        second.is_whole()


@pytest.mark.parametrize("stage", telling([("step:checkpoint",), ("step:restore",)], [("step:restore",)]))
def test_jobs_whose_daemon_was_killed_within_a_swap_run_again_with_the_next_one(tmp_path: Path, stage: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with _full(tmp_path) as node, node.agented(0) as one, node.agented(1) as other:
        jobs = Watched(one), Watched(other)
        node.cuda.order(f"hold {stage} {gate}")
        with node.connect() as connection:
            connection.swap(jobs[0].pid, jobs[1].pid, wait=False)
        with gate.open("w"):  # one of the two is in it
            node.daemon.stop(signal.SIGKILL)
            node.cuda.mend()
        node.daemon.start()
        node.wait_for_agents(*[job.pid for job in jobs])
        with node.connect() as connection:
            while not all(op.phase in ("done", "rolled-back") for op in _operations(connection)):
                pause()
            assert {op.processes[0].state for op in _operations(connection)} == {"running"}
        for job in jobs:
            job.is_whole()


def _operations(connection: Connection) -> tuple[Operation, ...]:
    return tuple(connection.call(Operations(), OperationsReply).operations)


CHECKPOINT, RESTORE = "cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore"


def _full(folder: Path) -> DrivenNode:
    """Without NVLink, and with room for one of the jobs and the helper's context on each GPU."""
    return DrivenNode(folder, gpu_bytes=3 * GIB // 2, linked=False)
