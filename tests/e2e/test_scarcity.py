"""When the kernel gives no more: descriptors by a real limit, memory by a real control group, and no time at all."""

from __future__ import annotations

import os
import resource
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hegmctl.connection import Connection, connect
from hegmd.errors import HegmError
from hegmd.protocol.messages import Migrate, OperationReply, Story, StoryReply
from tests.chaos.jobs import WITH_TORCH, descriptors, undisturbed
from tests.chaos.jobs import Job as Endless
from tests.e2e.daemon import RunningDaemon
from tests.e2e.test_moving import Job
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

MIB = 1 << 20
V2, V1 = Path("/sys/fs/cgroup/cgroup.controllers"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


@pytest.fixture
def daemon(socket_dir: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(socket_dir) as running:
        yield running


def on_a_gpu(daemon: RunningDaemon, pid: int) -> None:
    """Its agent is there and has been counted, and all GPUs are well."""
    with connect(str(daemon.socket_path)) as hegmd:
        while not any(process.pid == pid and process.gpus for process in hegmd.processes().processes):
            pause()
        while any(gpu.state != "ok" for gpu in hegmd.gpus().gpus):
            pause()


# -- descriptors -------------------------------------------------------------------------------------------------------


@contextmanager
def few_descriptors(pid: int, spare: int) -> Iterator[int]:
    """Let that process open so many more descriptors."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(link.name) for link in Path(f"/proc/{pid}/fd").iterdir()}
    free = [number for number in range(len(taken) + spare + 1) if number not in taken]
    limit = free[spare]  # the kernel gives the lowest number that is free
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_daemon_without_descriptors_reports_it_once_and_serves_again(daemon: RunningDaemon) -> None:
    with Endless(WITH_TORCH, 7, "gpu0", daemon.socket_path) as job:
        on_a_gpu(daemon, job.pid)
        pid = daemon.process.pid
        with ExitStack() as callers, few_descriptors(pid, spare=2) as limit:
            for _ in range(8):  # they wait in the backlog
                caller = callers.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                caller.connect(str(daemon.socket_path))
            while "cannot accept" not in daemon.log_text():
                job.make_steps(1)
            job.make_steps(20)
            messages = [line for line in daemon.log_text().splitlines() if "cannot accept" in line]
            assert len(messages) == 1, messages
            assert f"hegmd may have {limit} open" in messages[0]
        before = descriptors(pid)
        with connect(str(daemon.socket_path)) as hegmd:
            reply = hegmd.migrate(job.pid, "gpu1")
        assert reply.operation is not None
        assert reply.operation.phase == "done"
        assert "Traceback" not in daemon.log_text()
        lines = job.output()
    assert lines == undisturbed(WITH_TORCH, 7, len(lines))
    assert sum(before.values()) >= sum(descriptors(pid).values())


def other_gpu(hegmd: Connection, pid: int) -> str:
    (here,) = [process.gpus[0].gpu for process in hegmd.processes().processes if process.pid == pid]
    return "gpu1" if here == "gpu0" else "gpu0"


def job_moved(hegmd: Connection, pid: int, gpu: str) -> str:
    """How a migration to that GPU ended: refused at once, or as an operation."""
    try:
        operation = hegmd.migrate(pid, gpu).operation
    except HegmError as refusal:
        return refusal.code.name
    assert operation is not None
    return operation.phase


def test_a_move_for_which_descriptors_run_out_is_refused_or_turned_back(daemon: RunningDaemon) -> None:
    with Endless(WITH_TORCH, 8, "gpu0", daemon.socket_path) as job:
        on_a_gpu(daemon, job.pid)
        ends: list[str] = []
        with connect(str(daemon.socket_path)) as hegmd:
            for spare in (8, 0, 1, 3):
                to = other_gpu(hegmd, job.pid)  # with few descriptors that question may have no answer
                with few_descriptors(daemon.process.pid, spare):
                    ends.append(job_moved(hegmd, job.pid, to))
                job.make_steps(3)
                on_a_gpu(daemon, job.pid)  # what could not be read meanwhile is read again
            assert "Traceback" not in daemon.log_text()
            assert job_moved(hegmd, job.pid, other_gpu(hegmd, job.pid)) == "done"
        assert set(ends) <= {"done", "rolled-back", "refused", "unavailable"}, ends
        assert "done" in ends
        assert set(ends) != {"done"}, "there were always enough"
        lines = job.output()
    assert lines == undisturbed(WITH_TORCH, 8, len(lines))


# -- memory ------------------------------------------------------------------------------------------------------------


class MemoryGroup:
    """A control group of its own for the processes that are put in, in the unified hierarchy or in the older one."""

    def __init__(self) -> None:
        is_unified = V2.exists() and "memory" in V2.read_text().split()
        self._parent = V2.parent if is_unified else V1.parent
        self._limit = "memory.max" if is_unified else "memory.limit_in_bytes"
        self.path = Path(tempfile.mkdtemp(prefix="hegm-test-", dir=self._parent))

    def limit(self, size_bytes: int) -> None:
        (self.path / self._limit).write_text(str(size_bytes))

    def take(self, pid: int) -> None:
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def used_bytes(self) -> int:
        for name in ("memory.current", "memory.usage_in_bytes"):
            if (self.path / name).exists():
                return int((self.path / name).read_text())
        raise FileNotFoundError(self.path)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    if not (V1.exists() or V2.exists()):
        pytest.skip("no control groups of memory are mounted at /sys/fs/cgroup")
    try:
        made = MemoryGroup()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    yield made
    made.path.rmdir()


BALLAST = """
import torch
from torch.utils.data import DataLoader
ballast = torch.randn(64, 1 << 20)
weights = torch.nn.Parameter(torch.randn(1000))
optimizer = torch.optim.SGD([weights], lr=1e-3)
for batch in DataLoader(range(1_000_000)):
    loss = (weights[:8] * batch).sum() + ballast[int(batch) % 64, 0]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item(), flush=True)
"""


def large_job(daemon: RunningDaemon, folder: Path, group: MemoryGroup) -> Job:
    """A job of 256 MiB, all charged to the control group: it joins the group before it allocates."""
    script = folder / "large.py"
    script.write_text(f"open({str(group.path / 'cgroup.procs')!r}, 'w').write('0')\n" + BALLAST)
    return Job(daemon, [str(script)])


@pytest.mark.xdist_group("memory of the node")
def test_a_job_at_its_memory_limit_is_offloaded_and_reloaded_within_it(
    daemon: RunningDaemon, group: MemoryGroup, tmp_path: Path
) -> None:
    """Its bytes are in the pool, which is charged to hegmd: the limit of the job does not have to hold them twice."""
    with large_job(daemon, tmp_path, group) as job:
        job.steps(5)
        pid = str(job.process.pid)
        on_a_gpu(daemon, job.process.pid)
        group.limit(group.used_bytes + 64 * MIB)
        full_bytes = group.used_bytes
        job.operation("suspend", pid)
        assert full_bytes - group.used_bytes > 200 * MIB, "the bytes that are out still count for the job"
        assert job.operation("resume", pid)["phase"] == "done"
        job.steps(5)


@pytest.mark.xdist_group("memory of the node")
def test_a_job_killed_by_the_kernel_during_its_resume_is_lost_and_its_memory_freed(
    daemon: RunningDaemon, group: MemoryGroup, tmp_path: Path
) -> None:
    """Its limit was lowered while it was suspended. Nothing can save it; hegmd reports that."""
    with large_job(daemon, tmp_path, group) as job:
        job.steps(5)
        pid = str(job.process.pid)
        on_a_gpu(daemon, job.process.pid)
        job.operation("suspend", pid)
        group.limit(group.used_bytes + 64 * MIB)
        ended = job.operation("resume", pid, status=5)
        assert job.process.wait(HANG_S) == -signal.SIGKILL
        assert ended["phase"] == "lost"
        assert "while its state was offloaded" in ended["failure"]["message"]
        with job.connect() as hegmd:
            assert all(gpu.memory_used_bytes == 0 for gpu in hegmd.gpus().gpus)
            assert 'hegmd_pool_bytes{what="memory"} 0\n' in hegmd.metrics().text


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_worker_parked_after_the_limit_is_released(daemon: RunningDaemon) -> None:
    with Endless(WITH_TORCH, 9, "gpu0", daemon.socket_path) as job:
        on_a_gpu(daemon, job.pid)
        os.kill(job.pid, signal.SIGSTOP)
        with connect(str(daemon.socket_path), timeout_s=HANG_S) as hegmd:
            begun = hegmd.call(Migrate(pids=(job.pid,), to="gpu1", limit_s=1.0, wait=False), OperationReply)
            assert begun.operation is not None
            while not (operation := hegmd.call(Story(id=begun.operation.id), StoryReply).operation).failure:
                pause()
            assert operation.failure is not None
            os.kill(job.pid, signal.SIGCONT)
            ended = hegmd.call(Story(id=begun.operation.id, follow=True), StoryReply).operation
            assert ended.phase == "rolled-back", ended
            job.make_steps(3)
            moved = hegmd.migrate(job.pid, "gpu1").operation
            assert moved is not None
            assert moved.phase == "done"
        lines = job.output()
    assert lines == undisturbed(WITH_TORCH, 9, len(lines))
