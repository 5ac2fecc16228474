"""The snapshot for a plan: current sizes, whole jobs, and every rank of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from hegmd.errors import DENIED, HegmError
from hegmd.operations.request_context import Restarting
from hegmd.operations.survey import PlanSurvey
from hegmd.protocol.messages import Supervise, SuperviseReport, SupervisorOrder
from hegmd.workers.workers import Workers
from tests.patience import HANG_S
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import Node, running

Child = subprocess.Popen[bytes]


async def test_a_plan_was_made_with_the_bytes_of_the_last_count(tmp_path: Path, process: Child) -> None:
    """A job that had grown since then was planned for with room that was too small."""
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.data, agent.size_bytes = b"more weights", 12
        answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert answer.plan.size_bytes == 12


@pytest.mark.thorough
async def test_a_plan_does_not_wait_for_ever_for_a_memory_report(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid)
        agent.slow.add("survey")
        with anyio.fail_after(HANG_S):
            answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert answer.plan.size_bytes == 7
        agent.go_on.set()


async def test_two_runs_of_one_name_were_one_job(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, job="bert", run="1")
        await node.attend(second_process.pid, token="b" * 32, job="bert", run="2")
        answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert [worker.pid for worker in answer.plan.workers] == [process.pid]


async def test_the_processes_of_one_run_move_as_one(tmp_path: Path, process: Child, second_process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="1")
        await node.attend(second_process.pid, token="b" * 32, run="1")
        answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert {worker.pid for worker in answer.plan.workers} == {process.pid, second_process.pid}


@pytest.mark.thorough
async def test_a_rank_that_was_not_counted_yet_was_left_behind(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    async with running(tmp_path) as node:
        first = await node.attend(process.pid, run="1", rank=0, world_size=2)
        late = ModelAgent(node.workers, second_process.pid, token="b" * 32)
        late.about = {"run": "1", "rank": 1, "world_size": 2, "size_bytes": 0, "boundary": 0}
        late.slow.add("survey")
        await late.attend(node.tasks)
        with pytest.raises(
            HegmError, match=rf"rank 1 \(process {second_process.pid}\) has not reported its memory yet"
        ):
            await node.operations.suspend([process.pid], node.context())
        late.slow.clear()
        late.go_on.set()
        answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert {worker.pid for worker in answer.plan.workers} == {process.pid, second_process.pid}
        assert not first.parked


async def test_children_of_a_rank_are_not_waited_for(tmp_path: Path, process: Child, second_process: Child) -> None:
    """The workers of a loader inherit RANK from the process that started them, and reach no boundary."""
    async with running(tmp_path) as node:
        await node.attend(process.pid, run="1", rank=0, world_size=1)
        helper = ModelAgent(node.workers, second_process.pid, token="b" * 32)
        helper.about = {"run": "1", "rank": 0, "world_size": 1, "size_bytes": 0, "boundary": 0}
        helper.slow.add("survey")
        await helper.attend(node.tasks)
        answer = await node.operations.suspend([process.pid], node.context(dry_run=True))
        assert answer.plan is not None
        assert [worker.pid for worker in answer.plan.workers] == [process.pid]
        helper.go_on.set()


@pytest.mark.thorough
async def test_a_second_suspension_is_refused_for_the_first_alone(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
        with pytest.raises(HegmError) as refused:
            await node.operations.suspend([process.pid], node.context())
        assert refused.value.message == f"operation 1 (suspend, suspended) already includes process {process.pid}"
        assert refused.value.hint == f"run: hegmctl resume {process.pid}"


async def test_a_process_that_holds_no_storages_is_refused_for_that(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        agent = await node.attend(process.pid, b"")
        with pytest.raises(HegmError, match="holds no GPU memory that could be moved"):
            await node.operations.migrate([process.pid], "gpu1", node.context())
        assert "park" not in agent.orders


@pytest.mark.thorough
async def test_a_job_before_its_first_batch_was_refused_for_being_on_no_gpu(tmp_path: Path, process: Child) -> None:
    """The plan called for another start of the job.

    Its supervisor connects a moment later, and may be named instead.
    """
    async with running(tmp_path) as node:
        agent = ModelAgent(node.workers, process.pid, b"")
        agent.about = {"boundary": 0, "run": "1"}
        agent.slow.add("survey")
        await agent.attend(node.tasks)
        offer = Supervise(run="1", python=True, pid=process.pid)
        node.tasks.start_soon(node.moving.supervisors.attend, agent, os.getpid(), os.getuid(), offer, _never)
        await anyio.wait_all_tasks_blocked()
        for pid in (process.pid, os.getpid()):
            with pytest.raises(HegmError) as refused:
                await node.operations.migrate([pid], "gpu1", node.context())
            assert refused.value.message == f"process {pid} is starting up and is not on a GPU before its first batch"
            assert "then retry" in refused.value.hint
        agent.go_on.set()
        node.moving.supervisors.close()


async def test_a_plan_makes_the_supervisor_probe_the_other_python(tmp_path: Path, process: Child) -> None:
    """The supervisor runs the reported Python, as the job's user; hegmd must not run it with its own rights."""
    line = object()
    async with running(tmp_path) as node:
        supervisors = node.moving.supervisors

        async def answer(order: SupervisorOrder, _fds: Sequence[int]) -> None:
            says = SuperviseReport(order=order.order, result="failed", message=f"{order.do} {order.python} {order.set}")
            supervisors.report(line, says)

        await node.attend(process.pid, run="1")
        offer = Supervise(run="1", python=True, pid=process.pid, asks=True)
        node.tasks.start_soon(supervisors.attend, line, os.getpid(), os.getuid(), offer, answer)
        await anyio.wait_all_tasks_blocked()
        wanted = Restarting(via="restart", python="/bin/true", set={"A": "1"})
        with pytest.raises(HegmError) as refused:
            await node.operations.migrate([process.pid], "gpu1", node.context(), wanted)
        assert "/bin/true is no Python: ask /bin/true {'A': '1'}" in str(refused.value.facts["reasons"])
        supervisors.close()


async def test_a_dry_run_reports_that_its_job_is_stopped(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        process.send_signal(signal.SIGSTOP)
        await anyio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED)
        answer = await node.operations.migrate([process.pid], "gpu1", node.context(dry_run=True))
        assert answer.plan is not None
        assert f"kill -CONT {process.pid}" in answer.plan.hazards[0]
        process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def supervised(tmp_path: Path, pid: int, *, kept: bool = False) -> AsyncIterator[tuple[Node, ModelAgent]]:
    """A node, and the agent of a process that can be started again."""
    async with running(tmp_path) as node:
        supervisors = node.moving.supervisors

        async def hear(_order: SupervisorOrder, _fds: Sequence[int]) -> None: ...

        agent = await node.attend(pid, run="1")
        offer = Supervise(run="1", python=True, pid=pid, kept=kept, ready="always" if kept else None)
        node.tasks.start_soon(supervisors.attend, object(), os.getpid(), os.getuid(), offer, hear)
        await anyio.wait_all_tasks_blocked()
        try:
            yield node, agent
        finally:
            supervisors.close()


@pytest.mark.parametrize("kept", [False, True])
async def test_a_report_of_an_agent_includes_its_prestarted_process(tmp_path: Path, process: Child, kept: bool) -> None:
    async with supervised(tmp_path, process.pid, kept=kept) as (node, _agent):
        agent = node.moving.agents()[process.pid]
        assert (agent.supervised, agent.kept) == (True, kept)


async def refusal_of_restart(node: Node, pid: int, limit_s: float | None = None) -> HegmError:
    with pytest.raises(HegmError) as refused:
        await node.operations.migrate([pid], "gpu1", node.context(limit_s=limit_s), Restarting(via="restart"))
    return refused.value


async def test_a_restart_of_a_stopped_job_was_refused_with_advice_about_its_script(
    tmp_path: Path, process: Child
) -> None:
    """ "The agent has not answered a weigh within 6.8 s; say how with hegm.keep": all that it took was `kill -CONT`."""
    async with supervised(tmp_path, process.pid) as (node, agent):
        agent.refuses["weigh"] = "another order is under way"
        for number, why, hint in (
            (signal.SIGSTOP, f"process {process.pid} is stopped by a signal", f"kill -CONT {process.pid}"),
            (signal.SIGCONT, "another order is under way", "ask the test"),
        ):
            process.send_signal(number)
            await anyio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED | os.WCONTINUED)
            refused = await refusal_of_restart(node, process.pid)
            assert why in refused.message, refused
            assert hint in refused.hint, refused


@pytest.mark.thorough
async def test_a_stopped_job_is_not_waited_for_as_long_as_its_batch_may_take(tmp_path: Path, process: Child) -> None:
    async with supervised(tmp_path, process.pid) as (node, agent):
        agent.slow.add("weigh")
        process.send_signal(signal.SIGSTOP)
        await anyio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED)
        with anyio.fail_after(HANG_S):
            refused = await refusal_of_restart(node, process.pid, limit_s=3600.0)
        assert f"process {process.pid} is stopped by a signal" in refused.message
        process.send_signal(signal.SIGCONT)
        agent.go_on.set()


async def test_a_job_stopped_after_its_answer_does_not_count_as_unable(tmp_path: Path, process: Child) -> None:
    """The watch that ended with the answer counted as one during which the job was stopped."""
    async with supervised(tmp_path, process.pid) as (node, _):
        process.send_signal(signal.SIGSTOP)
        await anyio.to_thread.run_sync(os.waitpid, process.pid, os.WUNTRACED)
        refused = await refusal_of_restart(node, process.pid)
        assert f"the size of the state of process {process.pid} is unknown" in refused.message
        process.send_signal(signal.SIGCONT)


async def test_a_job_whose_batches_take_long_could_not_be_restarted(tmp_path: Path, process: Child) -> None:
    """The job had five seconds to reach a boundary, no option extended that, and each repetition reset it."""
    refusals: list[HegmError] = []
    async with supervised(tmp_path, process.pid) as (node, agent):
        agent.slow.add("weigh")
        agent.refuses["weigh"] = "it was weighed"

        async def ask() -> None:
            refusals.append(await refusal_of_restart(node, process.pid, limit_s=300.0))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await agent.waiting.wait()
            assert agent.limits_s["weigh"] == 300.0
            tasks.start_soon(ask)
            worker = node.workers.find(process.pid)
            assert worker is not None
            surveys = agent.orders.count("survey")
            await node.moving.attendance.count(worker)
            assert agent.orders.count("survey") == surveys
            assert agent.orders.count("weigh") == 1
            impatient = await refusal_of_restart(node, process.pid, limit_s=0.05)
            assert "is unknown" in impatient.message, "it waited for as long as somebody else would"
            agent.go_on.set()
        assert ["it was weighed" in refused.message for refused in refusals] == [True, True]
        assert agent.orders.count("weigh") == 2


async def test_a_second_plan_does_not_change_the_data_of_the_first(tmp_path: Path, process: Child) -> None:
    """The daemon refused five of six concurrent `migrate --via restart --dry-run`:

    the size of the state "is not known".
    """
    async with supervised(tmp_path, process.pid) as (node, agent):
        worker = node.workers.find(process.pid)
        assert worker is not None
        await refusal_of_restart(node, process.pid)  # the model has no state to tell of
        worker.state_bytes = 7
        agent.slow.add("weigh")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(refusal_of_restart, node, process.pid)
            await agent.waiting.wait()
            assert worker.state_bytes == 7
            agent.go_on.set()
        assert worker.state_bytes is None


async def test_a_plan_ran_the_callers_program_as_the_user_of_a_newly_connected_job(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The daemon waited for a pid that was unknown when it was named: its supervisor had LD_PRELOAD set."""
    stranger_uid = os.getuid() + 1
    asked_of_it: list[SupervisorOrder] = []

    async def take(order: SupervisorOrder, _fds: Sequence[int]) -> None:
        asked_of_it.append(order)

    async with running(tmp_path) as node:
        own = await node.attend(process.pid)
        own.slow.add("survey")
        stranger = ModelAgent(node.workers, second_process.pid, token="b" * 32)
        stranger.uid, stranger.about = stranger_uid, {"run": "2", "rank": 0}
        supervisors = node.moving.supervisors

        async def come() -> None:
            await own.waiting.wait()
            offer = Supervise(run="2", python=True, pid=second_process.pid, asks=True)
            node.tasks.start_soon(supervisors.attend, stranger, os.getpid(), stranger_uid, offer, take)
            await stranger.attend(node.tasks)
            stranger.orders.clear()  # the survey at its connection, not for a request
            own.go_on.set()

        node.tasks.start_soon(come)
        request = replace(node.context(dry_run=True), may=lambda uid: uid == os.getuid())
        wanted = Restarting(via="restart", python="/tmp/it", set={"LD_PRELOAD": "/tmp/it.so"})
        with pytest.raises(HegmError) as refused:
            await node.operations.migrate([process.pid, second_process.pid], "gpu1", request, wanted)
        assert refused.value.code is DENIED
        assert (asked_of_it, stranger.orders) == ([], [])
        supervisors.close()


async def test_a_drain_does_not_survey_jobs_of_other_users(tmp_path: Path, process: Child) -> None:
    async with running(tmp_path) as node:
        stranger = ModelAgent(node.workers, process.pid)
        stranger.uid = os.getuid() + 1
        await stranger.attend(node.tasks)
        await node.until_placed(process.pid)
        stranger.orders.clear()
        request = replace(node.context(dry_run=True), may=lambda uid: uid == os.getuid())
        outcome = await node.sequences.drain("gpu0", (), request)
        assert [reason.code for reason in outcome.left] == ["denied"]
        assert stranger.orders == []


@pytest.mark.thorough
async def test_a_suspended_job_keeps_its_owner_while_its_agent_is_disconnected(tmp_path: Path, process: Child) -> None:
    """It is on no GPU, and so in no list of processes: a daemon that was just started knows it as its operation's."""
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        await node.operations.suspend([process.pid], node.context())
    async with running(tmp_path) as node:
        request = replace(node.context(), may=lambda uid: uid == os.getuid() + 1)
        with pytest.raises(HegmError) as refused:
            node.operations.check(request, [process.pid])
        assert (refused.value.code, refused.value.message) == (DENIED, f"operation 1 belongs to uid {os.getuid()}")


async def _never(_order: SupervisorOrder, _fds: Sequence[int]) -> None:
    raise AssertionError("nothing is asked of it")


async def test_hegmds_own_helper_was_a_job_that_a_drain_would_move(tmp_path: Path, process: Child) -> None:
    """With pool.ready_helper = "contexts" it is on the GPUs all the time."""
    async with running(tmp_path) as node:
        await node.attend(process.pid)
        for own_pids, found in (((), [process.pid]), ((None, process.pid), [])):
            survey = PlanSurvey(
                node.inventory,
                Workers(),
                node.moving.suspended_operations.pool_memory,
                count=_uncounted,
                running=tuple,
                supervisors=node.moving.supervisors,
                own_pids=partial(tuple, own_pids),
            )
            snapshot = await survey.snapshot_for("gpu0", may=lambda _: True)
            assert [candidate.pid for candidate in snapshot.candidates if "gpu0" in candidate.gpus] == found


async def _uncounted(_worker: object, _limit_s: float) -> None:
    pytest.fail("no agent is asked")
