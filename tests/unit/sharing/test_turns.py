"""Turns of jobs with equal priority: preparations before a turn, and jobs that keep their contexts."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hegmd.memory.sizes import CONTEXT_BYTES
from hegmd.migration.machine.operation import Operation
from hegmd.operations.job_requests import JobOperationsOf
from hegmd.protocol import sharing as protocol
from hegmd.protocol.operations import HOST
from hegmd.sharing import model
from hegmd.sharing.actions import PREPARE_AHEAD_S, is_enough
from hegmd.sharing.history import History
from hegmd.sharing.memory_use import kept_by_gpu
from hegmd.sharing.policy import decide
from hegmd.sharing.records import QueuedRecord
from hegmd.sharing.view import SharingView, SuspendOptions
from hegmd.workers.job_file import JobRecord
from tests.unit.migration.operations import worker
from tests.unit.sharing.shared_node import ADMIN, MIB, rules, sharing_on

Child = subprocess.Popen[bytes]
BYTES = b"1" * (6 * MIB)


@pytest.mark.thorough
async def test_checksums_are_compared_before_the_turn_begins(
    tmp_path: Path, process: Child, second_process: Child
) -> None:
    """The comparison delayed a job of 32 GiB by two seconds while no job trained."""
    policy = model.Rules(slices=True, min_quantum_s=PREPARE_AHEAD_S - 1, quantum_per_switch=0.0, settle_s=0.0)
    async with sharing_on(tmp_path, policy=policy) as shared:
        await shared.node.attend(process.pid, BYTES)
        lease = (await shared.make_room(7 * MIB, until_free=True)).lease
        assert lease is not None
        await shared.until_states(j1="suspended")
        (segment,) = shared.node.moving.pool.by_owner().values()
        await shared.until(lambda: segment.sums is not None)
        assert segment.compared_at == -math.inf
        await shared.node.attend(second_process.pid, b"2" * len(BYTES), token="b" * 32)
        await shared.requests.release(protocol.Release(lease=lease.id), ADMIN)
        await shared.until_states(j1="suspended", j2="running")
        await shared.until(lambda: segment.compared_at > 0)


def crowded(*jobs: model.Job) -> model.Snapshot:
    """Return a GPU of 100 bytes: a lease holds 60, contexts of suspended jobs use 25, and 75 are free."""
    lease = model.Lease("l1", "l1", model.HELD, 100, 0, 0.0, 60, "gpu0")
    return model.Snapshot((model.Gpu("gpu0", 100, 75),), jobs, (lease,))


def suspended(name: str, since_s: float) -> model.Job:
    return model.Job(
        *(name, name, model.SUSPENDED, 50, 0, since_s, ("gpu0",)),
        needs_bytes=(20,),
        least_bytes=(10,),
        allowed_gpus=("gpu0",),
    )


def test_jobs_that_requested_more_than_contexts_leave_free_resume() -> None:
    """On an H200 two jobs of 1 GiB kept their contexts. Each waited for ever for memory that no job could free."""
    decision = decide(crowded(suspended("j1", 0.0), suspended("j2", 1.0)), 100.0)
    assert [(action.kind, action.subject, action.size_bytes) for action in decision.actions] == [
        (model.RESUME, "j1", (10,))
    ]


@pytest.mark.parametrize("gpu", [model.Gpu("gpu0", 100, 75, is_healthy=False), model.Gpu("gpu0", 100, None)])
def test_nothing_was_decided_for_a_suspended_job_while_no_gpu_could_be_used(gpu: model.Gpu) -> None:
    """The decision failed each second, and `hegmctl queue` did not say what the job waits for."""
    node = model.Snapshot((gpu,), (suspended("j1", 0.0),))
    assert [waiting.waits for waiting in decide(node, 100.0).waiting] == ["a healthy GPU: gpu0 has none"]


def test_a_job_gets_all_its_requested_memory_while_others_can_be_suspended() -> None:
    running = model.Job("j2", "j2", model.RUNNING, 50, 0, 90.0, ("gpu0",), (15,), None, {"gpu0": 15})
    node = crowded(suspended("j1", 0.0), running)
    (waits,) = decide(node, 100.0).waiting
    assert waits.at_s == 90.0 + node.rules.min_quantum_s


@pytest.mark.parametrize(
    ("state", "retry_at_s"), [(model.ARRIVING, None), (model.LEAVING, None), (model.BUSY, None), (model.RUNNING, 101.0)]
)
def test_a_job_waits_for_its_requested_memory_if_another_cannot_leave_now(state: str, retry_at_s: float | None) -> None:
    """A job suspended for a starting job resumed next to it. Both could then allocate all their requested memory."""
    second_job = model.Job("j2", "j2", state, 50, 0, 90.0, ("gpu0",), (5,), None, {"gpu0": 5}, retry_at_s=retry_at_s)
    assert decide(crowded(suspended("j1", 0.0), second_job), 100.0).actions == ()


def test_two_jobs_do_not_both_start_with_less_than_requested() -> None:
    queued = model.Job("j2", "j2", model.QUEUED, 80, 0, 90.0, (), (5,))
    decision = decide(crowded(suspended("j1", 0.0), queued), 100.0)
    assert [(action.kind, action.subject) for action in decision.actions] == [(model.START, "j2")]


def test_memory_that_a_lease_keeps_is_not_enough_for_a_kept_context() -> None:
    """The daemon counted leased memory as free and kept contexts. The beneficiary of a suspension had no memory."""
    running = model.Job("j2", "j2", model.RUNNING, 50, 0, 0.0, ("gpu0",), (15,), None, {"gpu0": 15})
    action = model.Action(model.SUSPEND, "j2", ("gpu0",), (15,), "its turn has ended", "j1", True)
    assert is_enough(action, {"gpu0": 10}, crowded(suspended("j1", 0.0), running))
    assert not is_enough(action, {"gpu0": 11}, crowded(suspended("j1", 0.0), running))


def test_memory_of_a_kept_context_is_counted_on_its_gpu() -> None:
    kept = worker("a", method="keep-context", gpu=None, previous_gpu="gpu0", stays_bytes=7)
    whole = worker("b", method="driver", gpu=None, previous_gpu="gpu0", stays_bytes=7)
    assert kept_by_gpu([kept, whole]) == {"gpu0": 7}


class KeepContextView(SharingView):
    """A view of a job that can only leave with its context kept. 20 bytes stay."""

    def _judge(self, *_about: object) -> SuspendOptions:
        return SuspendOptions("", 1.0, {"gpu0": 20}, keeps_context=True)


def test_kept_context_memory_is_not_reserved_twice() -> None:
    """A job held 30 bytes of the 60 that it requested. The daemon reserved 50 more for it: 20 too many."""
    nothing: Any = SimpleNamespace(queue={}, suspended={}, leases=())
    view = KeepContextView(
        *(nothing, nothing, nothing, nothing, nothing, History(), rules(method="keep-context")),
        acting=lambda _job: None,
        returns_to=lambda _job: (),
        starts_ranks=lambda _job: False,
        awaits_resume=lambda _job: False,
    )
    record = JobRecord(number=1, name="train", uid=0, runs=(), command="", started_utc=0.0, boot="")
    reserved = QueuedRecord(job=1, size_bytes=60, since_utc=0.0, placed="gpu0", has_trained=True)
    job, _ = view._running(record, (), {"gpu0": 30}, reserved, cast("Any", SimpleNamespace(gpus=())), 0.0)
    assert (job.held_bytes, job.needs_bytes) == ({"gpu0": 10}, (40,))


class HostCarrierOperations(JobOperationsOf):
    """The operations of jobs. Each is reported as if the GPU helper had copied its bytes."""

    def of(self, job: JobRecord) -> Operation | None:
        found = super().of(job)
        if found is None:
            return None
        return found.replace(workers=tuple([member.replace(carrier=HOST) for member in found.workers]))


@pytest.mark.thorough
async def test_a_suspended_job_needs_memory_for_the_context_that_copies_its_bytes_back(
    tmp_path: Path, process: Child
) -> None:
    """A second job kept its context in that memory after each turn. The daemon refused each resume."""
    async with sharing_on(tmp_path) as shared:
        await shared.node.attend(process.pid, BYTES)
        await shared.make_room(7 * MIB, until_free=True)
        await shared.until_states(j1="suspended")
        sharing, moving = shared.sharing, shared.node.moving
        needs = [
            (
                await SharingView(
                    *(moving.jobs, moving.workers, operations, moving.survey, sharing.memory, sharing.history, rules()),
                    acting=sharing.actions.of,
                    returns_to=lambda _job: (),
                    starts_ranks=lambda _job: False,
                    awaits_resume=lambda _job: False,
                ).take()
            ).snapshot.jobs[0]
            for operations in (JobOperationsOf(moving.runner), HostCarrierOperations(moving.runner))
        ]
        plain, by_host = needs
        assert plain.needs_bytes is not None
        assert by_host.needs_bytes == by_host.least_bytes == (plain.needs_bytes[0] + CONTEXT_BYTES,)
