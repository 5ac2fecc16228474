"""Any process of a job names it, in every command that takes a pid: its launcher, and what it has started."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import anyio.lowlevel
import pytest

from hegmd.errors import NOT_FOUND, HegmError
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import Node, running
from tests.unit.workers.test_jobs import has_ended, mine, registered, until

Child = subprocess.Popen[bytes]
RUN = "a-run"


@pytest.fixture
def started() -> Iterator[dict[str, int]]:
    """Two processes without an agent: one of the job, as a launcher or a shell would be, and one of another job."""
    with ExitStack() as held:
        pids: dict[str, int] = {}
        for name, run in (("of the job", RUN), ("of another", "another-run")):
            child = held.enter_context(
                subprocess.Popen(["cat"], stdin=subprocess.PIPE, env={**os.environ, "HEGM_RUN": run})
            )
            held.callback(child.kill)
            pids[name] = child.pid
        yield pids


async def _moved(node: Node, pid: int, to: str) -> list[int]:
    answer = await node.operations.migrate([pid], to, node.context())
    assert answer.operation is not None
    assert (answer.operation.phase, answer.operation.failure) == ("done", None)
    return [process.pid for process in answer.operation.processes]


async def test_a_launcher_was_always_refused_as_still_starting(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """Issue 14, row 10: under torchrun the pid of the command is the launcher's, whose agent never sees a batch."""
    async with running(tmp_path) as node:
        await node.attend(process.pid, run=RUN)
        launcher = await _beginning(node, second_process.pid)
        assert await _moved(node, launcher, "gpu1") == [process.pid]


async def _beginning(node: Node, pid: int) -> int:
    """A process with an agent that reaches no batch and holds nothing."""
    agent = ModelAgent(node.workers, pid, b"", "b" * 32)
    agent.boundary = 0
    agent.about = {"run": RUN}
    await agent.attend(node.tasks)
    while node.workers.find(pid) is None:
        await anyio.lowlevel.checkpoint()
    return pid


@pytest.mark.thorough
async def test_a_process_of_a_job_without_an_agent_names_the_job(
    tmp_path: Path, process: Child, started: dict[str, int]
) -> None:
    """Issue 14, row 10: in every command that takes a pid."""
    pid = started["of the job"]
    async with running(tmp_path) as node:
        await node.attend(process.pid, run=RUN)
        assert await _moved(node, pid, "gpu1") == [process.pid]
        suspended = await node.operations.suspend([pid], node.context())
        assert suspended.operation is not None
        assert suspended.operation.phase == "suspended"
        resumed = await node.operations.resume(pid, "gpu0", node.context())
        assert resumed.operation is not None
        assert resumed.operation.phase == "done"
        held = await node.operations.quiesce([pid], 60.0, node.context())
        assert held.operation is not None
        assert held.operation.phase == "holding"
        await node.operations.resume(pid, None, node.context())
        assert await node.operations.named([pid, process.pid]) == (process.pid,)


async def test_a_process_of_another_job_names_none(tmp_path: Path, process: Child, started: dict[str, int]) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, run=RUN)
        for pid in (started["of another"], 1 << 22):
            with pytest.raises(HegmError) as refused:
                await node.operations.migrate([pid], "gpu1", node.context())
            assert refused.value.code is NOT_FOUND
        assert node.reservations(process.pid) == {"gpu0": 7}


async def test_an_operation_named_no_job_if_no_request_came_before_the_process_ended(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """`hegmctl checkpoint` of a job with --recover said `checkpoint of 4711`: its process was gone by then."""
    async with running(tmp_path) as node:
        job_id = await registered(node, process.pid, "run-1", name="bert")
        await node.attend(second_process.pid, run="run-1")
        moved = (await node.operations.migrate([second_process.pid], "gpu1", node.context())).operation
        assert moved is not None
        for child in (second_process, process):
            child.kill()
            child.wait()
        await until(node, lambda: has_ended(node, job_id))
        assert node.moving.job_requests.with_job(moved).job == job_id


def stop(child: Child) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)


async def test_a_job_whose_command_is_stopped_was_said_to_be_starting(tmp_path: Path, process: Child) -> None:
    """A stopped `hegmctl run --recover` starts nothing again, so to wait a few seconds was of no use."""
    async with running(tmp_path) as node:
        await registered(node, process.pid, "one")
        stop(process)
        with pytest.raises(HegmError, match="its command is stopped by a signal") as refused:
            await node.moving.job_requests.pids(["j1"], mine)
        assert refused.value.hint == f"run: kill -CONT {process.pid}"
