"""GPUs that are shared, by command: room for an urgent job, the queue, turns. The daemon is killed in between.

Jobs lose no batch and no loss is different: each is compared with an undisturbed run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from hegmctl.connection import Connection, connect
from hegmd.errors import REFUSED, HegmError
from hegmd.protocol.sharing import QUEUED, RUNNING, SUSPENDED
from tests.e2e.daemon import RunningDaemon
from tests.e2e.test_moving import LONG, Job, is_as_undisturbed
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

MIB = 1 << 20
# One of the trainings fills more than half of the only GPU, with and without gradients.
GPU = "1x11MiB"
ARGV = [LONG, "0"]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    settings = '[sharing]\nslices = "on"\nmin_quantum_s = 0.2\n'
    with RunningDaemon(tmp_path, "--simulate", GPU).configured(settings) as running:
        yield running


def _kill(daemon: RunningDaemon) -> None:
    """Kill it, and start the next one on what it has left."""
    daemon.stop(signal.SIGKILL)
    daemon.start()


def _command(daemon: RunningDaemon, *words: str) -> subprocess.Popen[str]:
    """A command that runs."""
    environ = {**os.environ, "HEGM_SOCKET": str(daemon.socket_path)}
    argv = [sys.executable, "-m", "hegmctl", *words]
    return subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _await(what: Callable[[], bool]) -> None:
    while not what():
        pause()


def _states(hegmd: Connection) -> dict[str, str]:
    """Return the state of each job in the queue, by its id."""
    return {job.job: job.state for job in hegmd.queue().jobs}


def _are(hegmd: Connection, states: dict[str, str]) -> bool:
    return _states(hegmd) == states


def _job_of(hegmd: Connection, pid: int) -> str:
    return next(job.id for job in hegmd.jobs().jobs if job.pid == pid)


def _counted(hegmd: Connection, job: Job) -> None:
    """Have its agent count what it holds by now, as a driver would know it."""
    job.await_gpu()
    hegmd.suspend(job.process.pid, dry_run=True)


def test_memory_is_freed_for_a_lease_and_returned_although_the_daemon_is_killed(daemon: RunningDaemon) -> None:
    with Job(daemon, ARGV, "--gpu", "gpu0") as job:
        with job.connect() as hegmd:
            _counted(hegmd, job)
            name = _job_of(hegmd, job.process.pid)
            planned = hegmd.make_room(10 * MIB, gpu="gpu0", dry_run=True)
            assert [(step.job, step.action, step.gpu) for step in planned.steps] == [(name, "suspend", "gpu0")]
            assert _states(hegmd) == {name: RUNNING}
            hegmd.priority(name, "production")
        words = ["--gpu", "gpu0", "--bytes", "10MiB", "--for", str(os.getpid()), "--wait", "--timeout", "99"]
        with _command(daemon, "make-room", *words) as making:
            with job.connect() as hegmd:
                _await(lambda: [lease.state for lease in hegmd.queue().leases] == ["pending"])
            _kill(daemon)
            with job.connect() as hegmd:
                hegmd.priority(name, "best-effort")
            made, errors = making.communicate(timeout=HANG_S)
        assert (making.returncode, made) == (0, "l1\n"), errors
        with job.connect() as hegmd:
            assert (hegmd.gpus().gpus[0].memory_free_bytes or 0) >= 10 * MIB
            with pytest.raises(HegmError, match="of it kept for") as refused:
                hegmd.resume(job.process.pid)
            assert refused.value.code is REFUSED
        _kill(daemon)
        with job.connect() as hegmd:
            _await(lambda: _states(hegmd) == {name: SUSPENDED})
            (lease,) = hegmd.queue().leases
            assert (lease.state, lease.gpu, lease.size_bytes) == ("held", "gpu0", 10 * MIB)
            assert hegmd.jobs(jobs=[name]).jobs[0].priority == 20
            assert hegmd.release("l1").size_bytes == 10 * MIB
            _await(lambda: _states(hegmd) == {name: RUNNING})
            kinds = [event.kind for event in hegmd.events(kinds=["sharing"])]
            assert kinds == ["sharing.lease-ended", "sharing.resumed"]
        printed = job.output()
    is_as_undisturbed(ARGV, printed)


def test_jobs_of_equal_priority_take_turns_on_a_gpu_that_fits_one(daemon: RunningDaemon) -> None:
    with Job(daemon, ARGV, "--gpu", "gpu0") as one, one.connect() as hegmd:
        _counted(hegmd, one)
        lease = hegmd.make_room(10 * MIB, until_free=True).lease
        assert lease is not None
        with Job(daemon, ARGV, "--gpu", "gpu0") as other:
            _counted(hegmd, other)
            first, second = (_job_of(hegmd, job.process.pid) for job in (one, other))
            hegmd.release(lease.id)
            for states in ({first: RUNNING, second: SUSPENDED}, {first: SUSPENDED, second: RUNNING}):
                _await(partial(_are, hegmd, states))
            hegmd.priority(first, "production")  # whatever turn it is
            printed = [one.output()]
            printed.append(other.output())
            # The agent kept the gradients of each turn, until Python collected what refers to itself.
            assert len({operation.size_bytes for operation in hegmd.operations().operations}) == 1
    for each in printed:
        is_as_undisturbed(ARGV, each)


@contextmanager
def _process_of_a_lease() -> Iterator[int]:
    """A process that a lease is for. The jobs of the tests are not started by it: they would use the lease's memory."""
    with subprocess.Popen(["sleep", "infinity"]) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def test_a_job_without_memory_waits_in_the_queue_and_starts(daemon: RunningDaemon) -> None:
    run = ("run", "--gpu", "auto", "--bytes", "10MiB", "--priority", "best-effort", "--", "printenv", "HEGM_GPU")
    with _process_of_a_lease() as holder:
        with connect(str(daemon.socket_path)) as hegmd:
            lease = hegmd.make_room(10 * MIB, pid=holder, until_free=True).lease
            assert lease is not None
            waiting, left = [_command(daemon, *run) for _ in range(2)]
            _await(lambda: sorted(_states(hegmd).values()) == [QUEUED, QUEUED])
            assert [(job.state, job.priority) for job in hegmd.jobs().jobs] == [("waiting", 20)] * 2
            left.send_signal(signal.SIGINT)
            assert left.wait(HANG_S) == -signal.SIGINT
            left.communicate()
            _await(lambda: list(_states(hegmd).values()) == [QUEUED])
        assert waiting.stderr is not None
        assert "the job waits:" in waiting.stderr.readline()
        _kill(daemon)
        with connect(str(daemon.socket_path)) as hegmd:
            assert list(_states(hegmd).values()) == [QUEUED]
            hegmd.release(lease.id)
    output, _ = waiting.communicate(timeout=HANG_S)
    assert (waiting.returncode, output) == (0, "gpu0\n")


# The file is written before the next step, so before the next boundary.
NOTES_SIGNALS = """
import os, runpy, signal, sys
notes = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for number in (signal.SIGTSTP, signal.SIGCONT):
    signal.signal(number, lambda number, _: os.write(notes, signal.Signals(number).name.encode() + b" "))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_job_leaves_its_gpu_at_sigtstp_and_returns_at_sigcont_and_its_own_handlers_run(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    script, notes = tmp_path / "notes.py", tmp_path / "notes"
    script.write_text(NOTES_SIGNALS)
    argv = [str(script), str(notes), *ARGV]
    with Job(daemon, argv, "--slurm", "--gpu", "gpu0", forks=False) as job, job.connect() as hegmd:
        job.steps(5)
        (worker,) = psutil.Process(job.process.pid).children()
        name = _job_of(hegmd, job.process.pid)

        def tell(number: signal.Signals) -> None:
            for pid in (job.process.pid, worker.pid):  # as Slurm: each process of the step
                os.kill(pid, number)

        tell(signal.SIGCONT)  # a job that no operation has suspended
        tell(signal.SIGTSTP)
        _await(lambda: _states(hegmd) == {name: SUSPENDED})
        tell(signal.SIGSTOP)
        _await(lambda: worker.status() == psutil.STATUS_STOPPED)
        lease = hegmd.make_room(10 * MIB, until_free=True).lease
        assert lease is not None
        tell(signal.SIGCONT)  # its GPU has no room for it yet
        hegmd.release(lease.id)
        _await(lambda: _states(hegmd) == {name: RUNNING})
        job.steps(5)
        printed = job.output()
    assert {"SIGTSTP", "SIGCONT"} == set(notes.read_text().split())
    is_as_undisturbed(ARGV, printed)
