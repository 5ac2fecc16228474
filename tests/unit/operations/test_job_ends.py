"""Kill a job while a command waits for it: the command says at once that the job ended, and not that it refused."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hegmd.errors import NOT_FOUND, HegmError
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import CHECKPOINT, RESTART, ImageRequest
from hegmd.migration.machine.operation import Operation as MachineOperation
from hegmd.migration.run.runner import Runner
from hegmd.operations.job_requests import JobOperationsOf, _without_launcher
from hegmd.operations.request_context import OperationResult
from hegmd.protocol.operations import Operation
from hegmd.workers.job_file import JobRecord
from tests.patience import HANG_S
from tests.unit.migration.operations import operation, worker
from tests.unit.moving_node import Node, running
from tests.wide import quick_first

Child = subprocess.Popen[bytes]
Command = Callable[[Node, int], Awaitable[OperationResult]]

COMMANDS: dict[str, Command] = {
    "migrate": lambda node, pid: node.operations.migrate([pid], "gpu1", node.context()),
    "suspend": lambda node, pid: node.operations.suspend([pid], node.context()),
    "quiesce": lambda node, pid: node.operations.quiesce([pid], None, node.context()),
    "resume": lambda node, pid: node.operations.resume(pid, None, node.context()),
    "adopt": lambda node, pid: node.operations.adopt(pid, None, node.context()),
}
ORDERS = {"migrate": ("park", "offload", "reload"), "suspend": ("park", "offload"), "quiesce": ("park",)}
KILLED = [(command, order) for command, orders in ORDERS.items() for order in orders]


async def ended_at(node: Node, process: Child, order: str, command: str) -> Operation:
    """How the operation of that command ends when the process is killed while its agent carries out that order."""
    agent = await node.attend(process.pid)
    if command == "resume":
        await COMMANDS["suspend"](node, process.pid)
    agent.slow.add(order)
    results: list[OperationResult] = []

    async def run() -> None:
        results.append(await COMMANDS[command](node, process.pid))

    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await agent.waiting.wait()
            process.kill()
    (result,) = results
    assert result.operation is not None
    return result.operation


@pytest.mark.parametrize(("command", "order"), quick_first([*KILLED, ("resume", "reload")], 2))
async def test_a_job_killed_in_the_middle_is_not_reported_as_refused(
    tmp_path: Path, process: Child, command: str, order: str
) -> None:
    """Issue 14, row 11: `refused` means that nothing has changed, and its exit status is 6."""
    async with running(tmp_path) as node:
        operation = await ended_at(node, process, order, command)
        assert operation.failure is not None
        assert operation.failure.code == NOT_FOUND.name
        assert f"process {process.pid} exited" in operation.failure.message


@pytest.mark.parametrize("killed", ["first", "second"])
async def test_a_swap_waited_for_one_job_though_the_other_had_ended(
    tmp_path: Path, process: Child, second_process: Child, killed: str
) -> None:
    async with running(tmp_path) as node:
        agents = [
            await node.attend(child.pid, token=letter * 32) for child, letter in ((process, "a"), (second_process, "b"))
        ]
        for agent in agents:
            agent.slow.add("park")
        victim = process if killed == "first" else second_process
        async with anyio.create_task_group() as tasks:

            async def swap() -> None:
                outcome = await node.sequences.swap(process.pid, second_process.pid, node.context())
                assert [reason.code for reason in outcome.left] == [NOT_FOUND.name]
                assert f"process {victim.pid} has ended" in outcome.left[0].message

            tasks.start_soon(swap)
            await agents[0].waiting.wait()
            victim.kill()
            with anyio.fail_after(HANG_S):
                while "withdraw" not in agents[0].orders and killed == "second":
                    await anyio.wait_all_tasks_blocked()
                    await anyio.lowlevel.checkpoint()
            agents[0].go_on.set()


@pytest.mark.parametrize("command", [*COMMANDS])
async def test_an_ended_job_is_not_reported_as_on_no_gpu(tmp_path: Path, process: Child, command: str) -> None:
    async with running(tmp_path) as node:
        process.kill()
        process.wait()
        with pytest.raises(HegmError, match=f"process {process.pid} does not exist") as caught:
            await COMMANDS[command](node, process.pid)
        assert caught.value.code == NOT_FOUND
        assert "if it was a job, it has ended" in caught.value.hint


class ImageRunner(Runner):
    """Has one operation that writes an image."""

    def __init__(self, writes: MachineOperation) -> None:
        self.writes = writes

    def operations(self) -> tuple[MachineOperation, ...]:
        return (self.writes,)

    def under_way(self) -> tuple[MachineOperation, ...]:
        return () if self.writes.phase == "done" else (self.writes,)


def test_a_job_in_an_image_ended_by_a_signal_if_its_process_ended_before_the_operation() -> None:
    """The register of jobs ends a job that no operation holds, and asks then how it ended."""
    member = worker(has_exited=True)
    job = JobRecord(
        number=1,
        name="train",
        uid=0,
        runs=("run",),
        command="train.py",
        started_utc=0.0,
        boot="boot",
        pid=member.pid,
        start_ticks=member.start_ticks,
    )
    image = ImageRequest(path="/image", uid=0, gid=0)
    writing = operation(member, kind=CHECKPOINT, phase="releasing", image=image)
    operations = JobOperationsOf(ImageRunner(writing))
    assert operations.holds(job)
    assert operations.is_being_written(job)
    operations = JobOperationsOf(ImageRunner(writing.replace(phase="done")))
    assert not operations.holds(job)
    assert not operations.is_being_written(job)
    written = f"written into the image /image by operation {writing.id}"
    assert operations.end_of(job) == operations.end_of(job, member.start_ticks) == written
    # Another `hegmctl run` has continued it since, and was ended by something else.
    assert operations.end_of(job, member.start_ticks + 1) is None


def test_ranks_that_only_have_a_saved_state_seemed_to_wait_for_the_store_of_their_launcher() -> None:
    """`hegmctl jobs` said that a resume fails, and to end ranks that had ended: their restart had failed."""
    member = worker(rank=0, method=RESTART, state_saved=True, gpu=None)
    job = JobRecord(number=1, name="train", uid=0, runs=("run",), command="train.py", started_utc=0.0, boot="boot")
    waits = _without_launcher(job, operation(member, phase=SUSPENDED))
    assert waits == (
        "another command that continues from its saved state: hegmctl run --allow-restart --resume op1 -- COMMAND; "
        "hegmctl cancel op1 --drop deletes that state"
    )
