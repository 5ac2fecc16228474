"""Two ranks on a stub node, which the driver loses if it checkpoints one while its communicators are connected.

The helper or the daemon is killed within each step that the driver makes for one of them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hegmd.errors import HegmError
from hegmd.protocol.operations import Operation
from tests.e2e.driven import DrivenNode, DrivenProgram, Watched, at_rest, helper_of
from tests.looks import pause
from tests.wide import telling

pytestmark = [pytest.mark.e2e]

DAEMON, HELPER = "daemon", "helper"
STEPS = ("step:lock", "step:checkpoint", "step:restore", "step:unlock")
KILLS = [(step, victim) for step in STEPS for victim in (DAEMON, HELPER)]


def rank(node: DrivenNode, number: int) -> DrivenProgram:
    return node.agented(number, RANK=str(number), WORLD_SIZE="2", HEGM_RUN="run-of-ranks")


@contextmanager
def two_ranks(folder: Path) -> Iterator[tuple[DrivenNode, list[Watched]]]:
    """Each on a GPU of its own; what they have is whole when the block begins."""
    with DrivenNode(folder) as node, rank(node, 0) as first, rank(node, 1) as second:
        yield node, [Watched(first), Watched(second)]


def brought_back(node: DrivenNode, ranks: list[Watched]) -> Operation:
    """Return the ended operation; resume the job first if it is suspended, as its operator would."""
    op = at_rest(node)
    if op.phase == "suspended":
        node.wait_for_agents(*[one.pid for one in ranks])
        with node.connect() as connection:
            resumed = connection.resume(ranks[0].pid).operation
        assert resumed is not None
        op = resumed
    return op


def test_ranks_exchange_their_gpus_are_suspended_and_return(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (node, ranks):
        with node.connect() as connection:
            plan = connection.migrate(ranks[0].pid, "gpu1,gpu0", dry_run=True).plan
            assert plan is not None
            message = (
                "2 ranks disconnect 1 group each (nccl, NCCL 2.26.2): each backend is aborted and replaced by a new"
            )
            assert message in "\n".join(plan.hazards)
            exchanged = connection.migrate(ranks[0].pid, "gpu1,gpu0").operation
            assert exchanged is not None
            assert (exchanged.phase, exchanged.failure) == ("done", None)
            assert [list(node.vram(one.pid)) for one in ranks] == [["gpu1"], ["gpu0"]]
            suspended = connection.suspend(ranks[1].pid).operation
            assert suspended is not None
            assert suspended.phase == "suspended"
            resumed = connection.resume(ranks[0].pid, "gpu0,gpu1").operation
            assert resumed is not None
            assert (resumed.phase, resumed.failure) == ("done", None)
        calls = [call.function for call in node.cuda.calls() if call.function.startswith("cuCheckpointProcess")]
        steps = [call.removeprefix("cuCheckpointProcess") for call in calls if not call.endswith("State")]
        assert steps[:4] == ["Lock", "Lock", "Checkpoint", "Checkpoint"], steps
        assert [list(node.vram(one.pid)) for one in ranks] == [["gpu0"], ["gpu1"]]
        for one in ranks:
            one.is_whole()


def test_no_job_comes_to_the_gpus_of_ranks_that_the_driver_has_restored(tmp_path: Path) -> None:
    """It would end them: the GPU interrupts none of their kernels. The next daemon learns it from their agents."""
    with DrivenNode(tmp_path, gpus=3) as node, rank(node, 0) as first, rank(node, 1) as second:
        ranks = [Watched(first), Watched(second)]
        with node.agented(2) as other:
            with node.connect() as connection:
                assert connection.migrate(other.pid, "gpu0", dry_run=True).plan is not None
                assert connection.migrate(ranks[0].pid, "gpu1,gpu0").operation is not None
            node.daemon.stop(signal.SIGKILL)
            node.daemon.start()
            node.wait_for_agents(*[one.pid for one in ranks], other.pid)
            for job, to in ((other.pid, "gpu0"), (ranks[0].pid, "gpu2,gpu1")):
                with (
                    node.connect() as connection,
                    pytest.raises(HegmError, match="for itself after a restore") as refused,
                ):
                    connection.migrate(job, to)
                assert "end, suspend or move process" in refused.value.hint
        for one in ranks:
            one.is_whole()


@contextmanager
def held_in(step: str, node: DrivenNode, ranks: list[Watched], folder: Path) -> Iterator[None]:
    """Exchange the ranks' GPUs. The driver holds rank 1 in that step during the block."""
    gate = folder / "gate"
    os.mkfifo(gate)
    node.cuda.order(f"hold {step}@{ranks[1].pid} {gate}")
    with node.connect() as connection:
        connection.migrate(ranks[0].pid, "gpu1,gpu0", wait=False)
    with gate.open("w"):
        yield


@pytest.mark.parametrize(("step", "victim"), telling(KILLS, [("step:checkpoint", HELPER), ("step:restore", DAEMON)]))
def test_a_kill_within_a_step_of_the_driver_loses_no_rank(tmp_path: Path, step: str, victim: str) -> None:
    """Issue 16, outcome 3."""
    with two_ranks(tmp_path) as (node, ranks):
        with held_in(step, node, ranks, tmp_path):
            if victim == DAEMON:
                node.daemon.stop(signal.SIGKILL)
            else:
                helper = helper_of(node)
                helper.kill()
                psutil.wait_procs([helper])
            node.cuda.mend()
        if victim == DAEMON:
            node.daemon.start()
            node.wait_for_agents(*[one.pid for one in ranks])
        op = brought_back(node, ranks)
        assert op.phase in ("done", "rolled-back"), op
        for one in ranks:
            one.is_whole()
        places = [list(node.vram(one.pid)) for one in ranks]
        assert places == ([["gpu1"], ["gpu0"]] if op.phase == "done" else [["gpu0"], ["gpu1"]])


def test_a_rank_killed_in_its_checkpoint_leaves_nothing_reserved(tmp_path: Path) -> None:
    with two_ranks(tmp_path) as (node, ranks):
        with held_in("step:checkpoint", node, ranks, tmp_path):
            ranks[1].program.process.kill()
            node.cuda.mend()
        assert at_rest(node).phase in ("lost", "rolled-back")
        ranks[0].program.process.kill()
        while any(node.used().values()):
            pause()
