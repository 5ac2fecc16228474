"""Connects `hegmctl top` to the daemon: snapshots of the node, its event stream, and commands.

Each runs in a thread with a connection of its own, so that the screen never waits. The threads end with the process:
operations belong to the daemon. An event triggers a new snapshot at once, but at most one a second; without events they
come at long intervals, so that watching a quiet node costs next to nothing. While the daemon is away the screen says
so, and the feed retries.
"""

from __future__ import annotations

import threading
from time import monotonic, time

from hegmctl.operating_text import AT_REST, operation_text, plan_text, progress_text
from hegmctl.tables import Style
from hegmctl.timeline_text import timeline_text
from hegmctl.top.picture import MIGRATE, SUSPEND, JobRow, Listener, NodeView
from hegmctl.watch import PASSING
from hegmd.errors import HegmError
from hegmd.protocol.messages import (
    Jobs,
    JobsReply,
    Migrate,
    OperationReply,
    Operations,
    OperationsReply,
    Resume,
    Story,
    StoryReply,
    Suspend,
)
from hegmd.protocol.operations import OperationProgress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmctl.connection import Connection
    from hegmd.protocol.jobs import Job
    from hegmd.protocol.messages import Request
    from hegmd.protocol.snapshots import Gpu

# Time between snapshots of operations while one makes progress, and the minimum between any two.
BRISK_S = 1.0
RETRY_S = 2.0
# The daemon asks each job for its progress. So snapshots of many jobs are taken less often: after this many times the
# duration of the last one, and after this time at the latest.
SPARE, SELDOM_S = 100.0, 30.0


class Feed:
    """A daemon, watched from `start` on until the process ends or `stop`."""

    def __init__(self, connect: Callable[[], Connection], interval_s: float) -> None:
        self._connect = connect
        self._interval_s = interval_s
        self._poked = threading.Event()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, listener: Listener) -> None:
        for work in (self._look, self._follow):
            thread = threading.Thread(target=work, args=(listener,), daemon=True, name=f"top: {work.__name__}")
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._poked.set()

    def join(self, within_s: float) -> None:
        """Wait until both threads have ended, after `stop`. A thread that waits for events ends with its connection."""
        for thread in self._threads:
            thread.join(within_s)

    def poke(self) -> None:
        """Look at the node soon."""
        self._poked.set()

    # -- watching ------------------------------------------------------------------------------------------------------

    def _look(self, listener: Listener) -> None:
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    self._look_on(connection, listener)
            except HegmError as error:
                if self._stopping.is_set():
                    return
                listener.away(f"waiting for the daemon: {error.message}" if error.code in PASSING else error.message)
                self._stopping.wait(RETRY_S)

    def _look_on(self, connection: Connection, listener: Listener) -> None:
        gpus: tuple[Gpu, ...] = ()
        jobs: tuple[JobRow, ...] = ()
        gpus_due = jobs_due = took_s = 0.0
        while not self._stopping.is_set():
            self._poked.clear()
            if monotonic() >= gpus_due:
                gpus = connection.gpus().gpus
                gpus_due = monotonic() + self._interval_s
            if monotonic() >= jobs_due:
                began = monotonic()
                jobs = tuple([row_of(job) for job in connection.call(Jobs(), JobsReply).jobs])
                took_s = monotonic() - began
                jobs_due = monotonic() + max(self._interval_s, min(SELDOM_S, SPARE * took_s))
            operations = connection.call(Operations(), OperationsReply).operations
            listener.on_view(NodeView(time(), connection.welcome.node, gpus, jobs, operations))
            moving = any(op.phase not in ("done", "rolled-back", "lost", *AT_REST) for op in operations)
            rest_s = max(0.0, min(gpus_due, jobs_due) - monotonic())
            if self._poked.wait(min(BRISK_S, rest_s) if moving else rest_s):
                jobs_due = min(jobs_due, monotonic() + max(BRISK_S, SPARE * took_s / 4))
                self._stopping.wait(BRISK_S)  # many events may come at once

    def _follow(self, listener: Listener) -> None:
        since, run = 0, None
        while not self._stopping.is_set():
            try:
                with self._connect() as connection:
                    if run not in (None, connection.welcome.run):
                        since = 0
                    run = connection.welcome.run
                    for event in connection.events(since, follow=True):
                        since = event.seq + 1
                        if self._stopping.is_set():
                            return
                        listener.happened(event)
                        if event.time_utc > time() - RETRY_S:
                            self.poke()
            except HegmError:  # the next snapshot reports it
                pass
            self._stopping.wait(RETRY_S)

    # -- commands ------------------------------------------------------------------------------------------------------

    def plan(self, action: str, job: str, to: str | None, columns: int) -> list[str]:
        """Return what the command would do, as with `--dry-run`. Raises HegmError with the reasons against it."""
        with self._connect() as connection:
            reply = connection.call(_request(action, job, to, dry_run=True), OperationReply)
        return plan_text(reply, Style(columns=columns))

    def carry_out(self, action: str, job: str, to: str | None, tell: Callable[[str], object]) -> str:
        """Run the command, report its progress, and return its result. Raises HegmError."""
        with self._connect() as connection:
            reply = connection.converse(
                _request(action, job, to),
                OperationProgress,
                OperationReply,
                lambda progress: tell(" ".join(progress_text(progress, Style()))),
                patient=True,
            )
        self.poke()
        return " ".join(operation_text(reply, Style()))

    def timeline(self, op_id: str, columns: int, ellipsis: str) -> list[str]:
        """Return the timeline of an operation. Raises HegmError."""
        with self._connect() as connection:
            reply = connection.call(Story(id=op_id), StoryReply)
        return timeline_text(reply, Style(columns=columns, ellipsis=ellipsis))


def row_of(job: Job) -> JobRow:
    return JobRow(
        job.id,
        job.name,
        job.state,
        pids=[process.pid for process in job.processes],
        gpus=job.gpus,
        vram_bytes=job.vram_bytes,
        steps_per_s=job.steps_per_s,
        age_s=max(0.0, time() - job.started_utc),
        command=job.command or "",
        waits=job.waits or "",
    )


def _request(action: str, job: str, to: str | None, *, dry_run: bool = False) -> Request:
    if action == MIGRATE:
        return Migrate(pids=(job,), to=to, dry_run=dry_run)
    if action == SUSPEND:
        return Suspend(pids=(job,), dry_run=dry_run)
    return Resume(pid=job, to=to, dry_run=dry_run)
