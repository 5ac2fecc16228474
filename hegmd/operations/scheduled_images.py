"""Images of jobs at intervals, as requested by `hegmctl run` and reported by the job's agents.

Owns when the next image is due, its name, and the removal of earlier ones. An image is written as by `hegmctl
checkpoint --leave-running`, with the rights of the job's user. Only after it was verified are the oldest beyond the
number to keep removed, so the last good image is never removed for one that may fail.

Nothing is stored here: the agents repeat the request to the next daemon, and the journal of operations has the time of
the last image. A failure is reported and followed by the next attempt. The job's output reports the first failure in a
row, and the next success. An image that was due during another operation is written as soon as that ends.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Sequence

import anyio

from hegmd.errors import INTERNAL, NOT_FOUND, HegmError, Refused
from hegmd.migration.machine.next_effects import DONE
from hegmd.migration.machine.operation import CHECKPOINT
from hegmd.migration.run.runner import Runner
from hegmd.operations.request_context import OperationResult, RequestContext
from hegmd.protocol.operations import OperationProgress, PeriodicImages
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.programs import Rights
from hegmd.system.threads import run_detached
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields
from hegmd.workers.workers import BACK, CAME, AgentConnection, Workers

logger = logging.getLogger(__name__)

BY = "hegmctl run --checkpoint-every"
MIN_S, MAX_S, MAX_KEPT, MAX_PATH = 1.0, 1_000_000.0, 10_000, 3_000
# Jobs of a user that were started at one time are due at one time, and share the disk. Users do not wait for one
# another: a user's own processes write the images, and can be stopped.
AT_ONCE = 2
# A job that another operation has, or that does not train yet, is checked again after this time.
POLL_INTERVAL_S = 5.0

Take = Callable[[int, str, Rights, RequestContext], Awaitable[OperationResult]]
Trim = Callable[[str, str, int, Rights], Awaitable[Sequence[str]]]
Note = Callable[[AgentConnection, str, str], Awaitable[object]]
# A job, by its user and its run: which run it is of, a process says itself.
Whose = tuple[int, str | None]


async def _discard_progress(_worker: AgentConnection, _message: str, _hint: str) -> None:
    """Discard the message: no client follows."""


class ScheduledImages(BackgroundTasks):
    """Writes the scheduled images. `take` writes an image of a job that trains on, `trim` removes the oldest of a
    series.

    `note` writes a message and a hint to the job's output. `utc` and `sleep` are the clock. `run` must be running.
    """

    def __init__(
        self,
        workers: Workers,
        runner: Runner,
        events: EventLog,
        *,
        take: Take,
        trim: Trim,
        note: Note = _discard_progress,
        utc: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._workers = workers
        self._runner = runner
        self._events = events
        self._take = take
        self._trim = trim
        self._note = note
        self._without: set[Whose] = set()
        self._utc = utc
        self._sleep = sleep
        self._known: set[Whose] = set()
        self._slots: dict[int, anyio.Semaphore] = {}
        super().__init__()

    @property
    def missed(self) -> int:
        """Return how many jobs missed their last scheduled image."""
        return len(self._without)

    def on_event(self, event: str, worker: AgentConnection) -> None:
        """Listens to the workers: the first of a job that wants images begins to have them."""
        whose = _whose(worker)
        if event not in (CAME, BACK) or self._tasks is None or worker.about.run is None or worker.about.images is None:
            return
        if whose in self._known:
            return
        why = _against(worker.about.images)
        if why is not None:
            logger.warning("process %d requests scheduled images that hegmd cannot write: %s", worker.pid, why)
            worker.image_missed = f"its images cannot be scheduled: {why}"
            return
        self._known.add(whose)
        since_utc = self._last_utc(whose)
        first_utc = self._utc() if since_utc is None else since_utc
        self._tasks.start_soon(self._attend, whose, first_utc, name=f"images of {worker.about.run}")

    async def _attend(self, whose: Whose, since_utc: float) -> None:
        """Serve one job until it ends. `since_utc` is the start of its last image, or when it was first seen."""
        try:
            while (worker := self._one_of(whose)) is not None:
                wish = worker.about.images
                if wish is None:
                    return
                since_utc = min(since_utc, self._utc())  # the clock may have been set back
                due_s = since_utc + wish.every_s - self._utc()
                if due_s > 0:
                    await self._sleep(due_s)
                elif self._runner.of_process(worker.pid) is not None or not worker.boundary:
                    await self._sleep(min(POLL_INTERVAL_S, wish.every_s))
                else:
                    async with self._slots.setdefault(whose[0], anyio.Semaphore(AT_ONCE)):
                        begun_utc = self._utc()
                        await self._turn(worker, wish, begun_utc)
                    # If an image takes longer than the interval, the job still trains for half of the interval.
                    since_utc = max(begun_utc, self._utc() - wish.every_s / 2)
        finally:
            self._known.discard(whose)
            self._without.discard(whose)

    def _one_of(self, whose: Whose) -> AgentConnection | None:
        """Return a process of the job, a training one if possible: launchers have agents too."""
        found = [w for w in self._workers if _whose(w) == whose and w.about.images is not None]
        return max(found, key=lambda worker: (worker.gpu is not None, worker.boundary), default=None)

    def _last_utc(self, whose: Whose) -> float | None:
        """Return when its last image was requested, from any daemon that the journal remembers."""
        who = {(w.pid, w.identity.start_ticks) for w in self._workers if _whose(w) == whose}
        taken = [
            op.created_utc
            for op in self._runner.operations()
            if op.kind == CHECKPOINT and any(member.key in who for member in op.workers)
        ]
        return max(taken, default=None)

    async def _turn(self, worker: AgentConnection, wish: PeriodicImages, begun_utc: float) -> None:
        """Take one, and then let the oldest go. Raises nothing."""
        series = series_of(worker)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(begun_utc))
        path = os.path.join(wish.path, f"{series}.{stamp}")
        try:
            rights = await run_detached(lambda _: _rights_of(worker), name="hegmd-rights")
            answer = await self._take(worker.pid, path, rights, _context(rights))
            op = answer.operation
            if op is None or op.phase != DONE or op.failure is not None:
                failure = None if op is None else op.failure
                await self._missed(worker, path, "it was not written" if failure is None else failure.message)
                return
            await self._made(worker)
            logger.info("process %d has an image in %s", worker.pid, path, extra=fields(pid=worker.pid, path=path))
            gone = await self._trim(wish.path, series, wish.keep, rights)
            logger.debug("of the images of %s, %d were removed", series, len(gone))
        except HegmError as error:
            await self._missed(worker, path, error.message)
        except Exception as bug:  # the edge of one turn: the next image must not be missed because of it
            logger.exception("the image %s failed inside hegmd", path)
            await self._missed(worker, path, f"{INTERNAL.name}: {type(bug).__name__}: {bug}")

    async def _made(self, worker: AgentConnection) -> None:
        worker.image_missed = None
        if _whose(worker) in self._without:
            self._without.discard(_whose(worker))
            await self._note(worker, "hegmd writes images of this job again", "see them with: hegmctl images ls DIR")

    async def _missed(self, worker: AgentConnection, path: str, why: str) -> None:
        message = (
            f"process {worker.pid}: no image in {path}, or too many of them: {why}; hegmd tries again at the "
            "next interval"
        )
        worker.image_missed = f"no image at {time.strftime('%H:%M:%S', time.localtime(self._utc()))}: {why}"
        facts = {"path": path, "uid": worker.identity.uid}
        self._events.record("operation.image-missed", "warning", message, pid=worker.pid, facts=facts)
        logger.warning("%s", message, extra=fields(pid=worker.pid, path=path))
        if _whose(worker) not in self._without:
            self._without.add(_whose(worker))
            hint = "run hegmctl ps for the latest attempt; hegmd tries again at every interval"
            await self._note(worker, f"hegmd wrote no image of this job: {why}", hint)


def _whose(worker: AgentConnection) -> Whose:
    return worker.identity.uid, worker.about.run


def series_of(worker: AgentConnection) -> str:
    """Return the prefix of the names of a run's images, which contains no path separator."""
    name, run = (_UNSAFE.sub("_", text)[:_MAX_NAME] for text in (worker.about.job or "job", worker.about.run or ""))
    return f"{name.lstrip('.') or 'job'}-{run}"


_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME = 64


def _against(wish: PeriodicImages) -> str | None:
    """Return why such a request is refused; None if it is granted."""
    if not MIN_S <= wish.every_s <= MAX_S:  # NaN fails both comparisons
        return f"every {wish.every_s:g} s is not between {MIN_S:g} and {MAX_S:,.0f} s"
    if not 1 <= wish.keep <= MAX_KEPT:
        return f"{wish.keep} images cannot be kept; use 1 to {MAX_KEPT}"
    if not os.path.isabs(wish.path) or "\0" in wish.path or len(wish.path) > MAX_PATH:
        return f"{wish.path[:200]!r} is not an absolute path"
    return None


def _context(rights: Rights) -> RequestContext:
    async def discard_progress(_: OperationProgress) -> None:
        """Discard progress: no client follows."""

    return RequestContext(by=BY, may=lambda uid: rights.uid in (0, uid), emit=discard_progress)


def _rights_of(worker: AgentConnection) -> Rights:
    """Those of its process, as its files would be made. Blocks. Raises HegmError."""
    try:
        with open(f"/proc/{worker.pid}/status", encoding="utf-8", errors="replace") as file:
            lines = {key: value for key, _, value in (line.partition(":") for line in file)}
        uid, gid = (int(lines[key].split()[1]) for key in ("Uid", "Gid"))
        groups = tuple(int(word) for word in lines["Groups"].split())
    except (OSError, KeyError, ValueError) as error:
        raise HegmError(NOT_FOUND, f"process {worker.pid} has ended: {error}", "read the log of the job") from error
    if uid != worker.identity.uid:
        message = f"process {worker.pid} acts as uid {uid}, but its agent connected as uid {worker.identity.uid}"
        raise Refused(message, "run: hegmctl checkpoint --leave-running")
    return Rights(uid, gid, groups)
