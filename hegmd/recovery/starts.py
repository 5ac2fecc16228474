"""Starts a job from its newest snapshot after its command has failed, and decides when to give up.

The supervisor starts the command. This ends what the failed command has left, chooses snapshot and GPUs, and waits
until the training has made a step. A start without a step counts as a recovery too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from signal import SIGKILL

import anyio
import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.migration.methods import launchers
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.migration.methods.restore_lock import claimed, lock_path, was_damaged, was_edited, was_restored
from hegmd.node.gpu_sets import place_of
from hegmd.protocol.recovery import FAILED, GIVEN_UP, INTERRUPTED, RECOVERED, UNDER_WAY, RecoveryAttempt
from hegmd.protocol.slots import SlotRecord
from hegmd.recovery.job import COUNT_S, ProtectedJob, stacks_of
from hegmd.recovery.policy import LEAST_START_S, Budget, RestartWatch, are_fit, gpus_to_start_on, start_limit_s
from hegmd.recovery.records import JobSnapshots
from hegmd.system.threads import BoundedReads
from hegmd.workers.job_names import status_text
from hegmd.workers.supervisors import SupervisorAway
from hegmd.workers.workers import AgentConnection

logger = logging.getLogger(__name__)

# How often it is seen whether a start has come to its next step.
SOON_S, LOOK_S = 0.1, 1.0
# The exit status of a process that could not restore its state.
UNRESTORED_STATUS = 98
# The status of a command that SIGKILL ended, and of a shell whose command SIGKILL ended.
KILLED_STATUSES = (-SIGKILL, 128 + SIGKILL)
MAX_BAD = 8
# The boundary at which a state is restored: that batch is requested, and then the next.
_BATCH = 1


class Starts:
    """The starts of one job."""

    def __init__(self, job: ProtectedJob, *, least_start_s: float = LEAST_START_S) -> None:
        self._job = job
        self.is_recovering = False
        self._least_start_s = least_start_s
        #: How many starts have hung: each has twice the time of the one before.
        self._hung = 0
        self._by_torchrun = RestartWatch()
        self._reads = BoundedReads(COUNT_S, most=1)  # of processes that may hang in the kernel
        #: When the newest attempt began, by the wall clock, which identifies it, and by the loop's clock.
        self._failed_at = 0.0, 0.0

    def is_wanted(self) -> bool:
        """Return True if its command has failed, or a new `hegmctl run` wants to continue from its kept state."""
        offer = self._job.supervisor.offer
        is_resumed = offer.resumes == self._job.record.job and offer.pid is None and not offer.started
        return offer.fell is not None or is_resumed

    def is_under_way(self) -> bool:
        """Return True if its command was started from a snapshot, and has not come to its next step."""
        offer = self._job.supervisor.offer
        return offer.started and offer.operation == self._job.record.job

    async def recover(self) -> None:
        """Start the job from its newest snapshot, or give it up. Raises SupervisorAway."""
        self.is_recovering = True
        try:
            await self._recover()
        finally:
            self.is_recovering = False

    async def go_on(self) -> None:
        """Wait for the start that an earlier daemon has ordered. Raises SupervisorAway."""
        attempts = self._job.record.attempts
        self.is_recovering = True
        try:
            await self._await_start(
                attempts[-1] if attempts else RecoveryAttempt(failed_utc=self._job.node.utc(), why="")
            )
        finally:
            self.is_recovering = False

    async def _recover(self) -> None:
        fell = self._job.supervisor.offer.fell
        if fell is not None and (end := await self._job.end_in_image()) is not None:
            await self._give_up(self._begun_attempt(), f"it was {end}", "run: hegmctl restore, with that image")
            return
        is_edited = await self._judge_last_start(fell)
        attempt = self._begun_attempt()
        await self._end_rest()
        whole = await self._job.whole()
        exhausted = self._job.record.budget.exhausted(self._job.wish.max_recoveries) if fell is not None else None
        if is_edited:
            exhausted = "its script was edited after the snapshot; put it back as it was"
        if exhausted is None and whole:
            await self._await_room()
        gpus = await self._gpus(whole[0] if exhausted is None and whole else None)
        if exhausted is not None or not whole:
            await self._give_up(attempt, exhausted or self._without_snapshot())
        elif gpus is None:
            await self._give_up(attempt, "the node has no healthy GPU for it")
        else:
            self._job.newest = whole[0]
            attempt = attempt.replace(from_step=whole[0].step, generation=whole[0].generation, gpus=gpus)
            try:
                await self._start(whole[0], gpus)
            except SupervisorAway:
                raise
            except HegmError as error:
                await self._give_up(attempt, error.message)
                return
            attempt = attempt.replace(started_s=self._since_failure_s(attempt))
            budget = self._job.record.budget
            record = self._job.record.spending(budget if fell is None else budget.spent()).with_attempt(attempt)
            # They are its own from now on, also before its first batch.
            self._job.put(record.replace(gpus=tuple(gpus), kept=None, kept_boot_s=None))
            await self._await_start(attempt)

    async def _gpus(self, snapshot: SlotRecord | None) -> tuple[str, ...] | None:
        """Return the GPUs to start on; None if there are none. Raises SupervisorAway.

        Others may use the GPUs that take the place of its own, and its own may have been leased to others while no
        daemon knew that it returns. There it waits for its turn, and for room.
        """
        job, own = self._job, self._job.record.gpus
        gpus = gpus_to_start_on(own, (await job.node.look()).gpus)  # what ended it may be its GPU
        is_own = gpus == own
        if snapshot is None or gpus is None or (is_own and not job.node.is_leased(job.supervisor.pid, own)):
            return gpus
        job.newest = snapshot
        why = f"{place_of(own)} {'is leased to others' if is_own else 'has failed'}"
        job.node.queue_for_room(job.record.job, own, snapshot.size_bytes * max(1, job.record.ranks), why)
        await self._await_room("cannot return to its GPU", quiet_s=LOOK_S)
        return gpus_to_start_on(job.record.gpus, (await job.node.look()).gpus)

    def _begun_attempt(self) -> RecoveryAttempt:
        """Enter a new recovery into the record, or return one that has begun and was not started."""
        fell, before = (
            self._job.supervisor.offer.fell,
            self._job.record.attempts[-1] if self._job.record.attempts else None,
        )
        if before is not None and before.result == UNDER_WAY and before.started_s is None:
            return before
        step = self._job.known_step
        why = "was continued by hegmctl run" if fell is None else f"ended {status_text(fell)}"
        killed, self._job.killed = self._job.killed, None
        why, stacks = (why, None) if killed is None else killed
        attempt = RecoveryAttempt(failed_utc=self._job.node.utc(), why=why, step=step, stacks=stacks)
        former = self._job.record.budget
        budget = Budget(furthest_step=former.furthest_step) if fell is None else former.fell(step)
        self._since_failure_s(attempt)  # from here on the wall clock may be set
        self._job.put(self._job.record.spending(budget).with_attempt(attempt))
        self._job.record_event("job.fell", "warning", f"{self._job} {why} at step {step}")
        return attempt

    async def _judge_last_start(self, fell: int | None) -> bool:
        """Record the result of the start that has just failed, if its training had made no step.

        Return True if its script is not the one that its snapshot is of, which says nothing about the snapshot.
        A snapshot that could not be restored is not used again. A start that was interrupted from outside says nothing
        about its snapshot: by SIGKILL, which the kernel sends too when memory is short, by a GPU that has failed, by an
        edited script, or because `hegmctl run` was killed. Two other failures before the state was restored make the
        snapshot suspect: an older one is tried, if there is one.
        """
        job, attempts = self._job, self._job.record.attempts
        if not attempts or attempts[-1].result != UNDER_WAY or attempts[-1].started_s is None:
            return False
        before = attempts[-1]
        is_own_kill = job.killed is not None
        is_edited = fell is not None and was_edited(job.node.state_dir, job.record.job)
        is_interrupted = (
            fell is None
            or is_edited
            or (fell in KILLED_STATUSES and not is_own_kill)
            or not are_fit(before.gpus, (await job.node.look()).gpus)
        )
        is_restored = before.restored_s is not None or was_restored(job.node.state_dir, job.record.job)
        result = INTERRUPTED if is_interrupted and not is_restored else FAILED
        record = job.record.with_attempt(before.replace(result=result))
        unrestored = [
            one
            for one in record.attempts
            if (one.generation, one.restored_s, one.result) == (before.generation, None, FAILED)
        ]
        is_suspect = len(unrestored) > 1 and len(await job.whole()) > 1
        is_unreadable = fell == UNRESTORED_STATUS or was_damaged(job.node.state_dir, job.record.job)
        is_bad = result == FAILED and not is_restored and (is_unreadable or is_suspect)
        if is_bad and before.generation is not None:
            record = record.replace(bad=(*record.bad, before.generation)[-MAX_BAD:])
        job.put(record)
        return is_edited and not is_restored

    def _without_snapshot(self) -> str:
        """Return why there is no snapshot to start from."""
        bad = self._job.record.bad
        if not bad:
            return "it has no complete snapshot to start from"
        tried = next((one for one in reversed(self._job.record.attempts) if one.generation == bad[-1]), None)
        step = "" if tried is None or tried.from_step is None else f", of step {tried.from_step},"
        return f"its last snapshot{step} could not be restored, and it has no other"

    async def _end_rest(self) -> None:
        """End the remains of the failed command: ranks whose launcher or supervisor was killed would train on.

        A rank that was still importing connects later, and is ended then.
        """
        while self._job.supervisor.is_alive and (rest := self._job.rest()):
            following = self._job.node.changed.next
            for worker in rest:
                await anyio.to_thread.run_sync(launchers.end_one, worker.pid, worker.identity.start_ticks)
            with anyio.move_on_after(LOOK_S):
                await following.wait()

    async def _await_room(self, why: str = "", quiet_s: float = 0.0) -> None:
        """Wait until a job may return that failed while it was off its GPU, or that lost its GPU: until its user
        resumes it, and until there is room. Its user is told so after a while. Raises SupervisorAway.
        """
        job, told = self._job, ""
        quiet_until = anyio.current_time() + quiet_s
        while job.supervisor.is_alive and job.node.must_wait(job.record.job):
            waits = "until it is resumed" if job.record.awaits_resume else "for room"
            where = "suspended" if job.record.awaits_resume else "off its GPU"  # a migrate had it, or others its GPU
            if waits != told and anyio.current_time() >= quiet_until:
                told = waits
                hint = f"hegmctl resume {job.record.job}" if job.record.awaits_resume else "hegmctl queue"
                await job.note(f"{job} {why or f'failed while it was {where}'}, and waits {waits}", hint)
            with anyio.move_on_after(LOOK_S):
                await job.node.changed.wait()
        if not job.supervisor.is_alive:
            raise SupervisorAway(job.supervisor.run, job.record.job, "it has ended while its job waited to return")

    async def _start(self, snapshot: SlotRecord, gpus: Sequence[str]) -> None:
        """Have the command started from that snapshot. Raises OrderFailed, SupervisorAway, Refused."""
        records = await self._job.slots.read()
        places = [place for place, record in records.items() if record and record.generation == snapshot.generation]
        memories = [(await self._job.slots.memory(*place)).fd for place in sorted(places)]
        lock = await anyio.to_thread.run_sync(self._fresh_lock)
        ranks = tuple(range(snapshot.ranks)) if self._job.record.launched else ()
        try:
            await self._job.supervisor.order(
                "start",
                self._job.record.job,
                fds=[*memories, lock],
                ranks=ranks,
                key=str(snapshot.generation),
                **(self._job.node.variables(gpus) if gpus else {}),
            )
        finally:
            os.close(lock)

    def _fresh_lock(self) -> int:
        """A lock of this start's own: a child that a killed process has left may still have the former one. Blocks."""
        lock_path(self._job.node.state_dir, self._job.record.job).unlink(missing_ok=True)
        return claimed(self._job.node.state_dir, self._job.record.job)

    async def _await_start(self, attempt: RecoveryAttempt) -> None:
        """Wait until all processes have their state and have made a step, or the command has failed again."""
        if attempt.result == RECOVERED:  # the supervisor was disconnected when the result was sent
            await self._job.supervisor.tell("forget", self._job.record.job)
            return
        since = anyio.current_time()
        limit_s = self._limit_s()
        while self._job.supervisor.is_alive and self.is_under_way():
            back = self._back()
            if len(back) >= max(1, self._job.record.ranks):
                if attempt.restored_s is None:
                    attempt = attempt.replace(restored_s=self._since_failure_s(attempt))
                    self._job.put(self._job.record.with_attempt(attempt))
                await self._job.count(back)
                if self._has_trained(back):
                    self._hung = 0
                    await self._note_recovered(attempt, back)
                    return
            if self._is_paused():
                since = anyio.current_time()
            if limit_s is not None and anyio.current_time() - since > limit_s:
                if await self._end_start(limit_s):
                    return
                continue
            with anyio.move_on_after(SOON_S if back else LOOK_S):
                await self._job.node.changed.wait()

    def _limit_s(self) -> float | None:
        """Return how long a start may take; None for no limit."""
        longest_s = self._job.record.longest_start_s
        return start_limit_s(self._job.wish.hang_limit_s, longest_s, self._hung, self._least_start_s)

    def _is_paused(self) -> bool:
        """Whether the job is stopped, as by Ctrl-Z or Slurm, or an operation has it: then no step can come."""
        pids = [worker.pid for worker in self._job.own_workers()]
        is_held = any(self._job.node.is_kept_from_training(pid) for pid in pids)
        return is_held or any(is_stopped(pid) for pid in (self._job.supervisor.pid, *pids))

    async def _end_start(self, limit_s: float) -> bool:
        """Kill a start that came to no step, its command first: its end is a failure like any other.

        Return False if it has made a step or was stopped while its stacks were asked for.
        """
        own = self._job.own_workers()
        stacks = await stacks_of(own)
        if self._has_trained(self._back()) or self._is_paused() or not self.is_under_way():
            return False
        self._hung += 1
        await self._kill(own, f"completed no step within {limit_s:.0f} s of its start from a snapshot", stacks)
        return True

    async def _kill(self, own: Sequence[AgentConnection], why: str, stacks: str) -> None:
        """Kill the command with all that it has started, then the processes that are left of the job."""
        supervisor = self._job.supervisor
        if supervisor.offer.pid is not None:
            await anyio.to_thread.run_sync(launchers.end_child, supervisor.offer.pid, supervisor.pid)
        await self._job.kill(own, f"{why}, and was killed", stacks, "job.hung")

    async def check_restart_by_torchrun(self, *, is_possible: bool) -> None:
        """Kill the job if torchrun has started its ranks again by itself, and these reach no batch within the limit of
        a start. `is_possible` is False while a process of the job trains, or is kept from it.
        """
        job, pid = self._job, self._job.supervisor.offer.pid
        number = 0
        if is_possible and pid is not None and job.newest is not None and job.record.launched:
            try:
                number = await self._reads.at(lambda _: launchers.restarts_by_torchrun(pid), name="hegmd-restarts")
            except HegmError as error:
                logger.debug("%s: %s", job, error.message)
                return
        limit_s = self._limit_s()
        if limit_s is None or not self._by_torchrun.see(number, anyio.current_time(), limit_s):
            return
        own = job.own_workers()
        stacks = await stacks_of(own)
        has_changed = self.is_recovering or self._is_paused() or job.supervisor.offer.pid != pid
        if not has_changed and not any(worker.boundary for worker in job.own_workers()):
            self._hung += 1
            await self._kill(own, f"reached no batch within {limit_s:.0f} s of its restart by torchrun", stacks)

    def _since_failure_s(self, attempt: RecoveryAttempt) -> float:
        """Return how long ago the attempt began. The wall clock is read once: it may be set, by hours, during a start,
        and the longest start decides how long the next ones may hang.
        """
        now = anyio.current_time()
        if self._failed_at[0] != attempt.failed_utc:
            self._failed_at = attempt.failed_utc, now - max(0.0, self._job.node.utc() - attempt.failed_utc)
        return now - self._failed_at[1]

    def _back(self) -> list[AgentConnection]:
        """The processes that were started from the snapshot."""
        return [one for one in self._job.own_workers() if one.about.restarted == self._job.record.job]

    def _has_trained(self, back: Sequence[AgentConnection]) -> bool:
        """Return True if all ranks are among these, and each has made a step."""
        has_all = len(back) >= max(1, self._job.record.ranks)
        return has_all and all(worker.boundary > worker.about.boundary + _BATCH for worker in back)

    async def _note_recovered(self, attempt: RecoveryAttempt, back: Sequence[AgentConnection]) -> None:
        attempt = attempt.replace(trained_s=self._since_failure_s(attempt), result=RECOVERED)
        record = self._job.record.with_attempt(attempt)
        took_s = (attempt.trained_s or 0.0) - (attempt.started_s or 0.0)
        self._job.put(record.replace(longest_start_s=max(record.longest_start_s, took_s)))
        self._job.first_step = max(0, (attempt.from_step or 0) - back[0].about.boundary)
        self._job.boundary = back[0].boundary
        message = f"{self._job} was recovered from step {attempt.from_step} in {attempt.trained_s or 0.0:.1f} s"
        self._job.record_event("job.recovered", "info", message)
        await self._job.note(message, f"see: hegmctl recovery {self._job.record.job}")
        await self._job.supervisor.tell("forget", self._job.record.job)

    async def _give_up(self, attempt: RecoveryAttempt, why: str, hint: str | None = None) -> None:
        """Have the supervisor end as its command did, and keep the state."""
        step = attempt.step if self._job.newest is None else self._job.newest.step
        message = f"{self._job} is not recovered: {why}; it {attempt.why}, and its last snapshot is of step {step}"
        hint = hint or give_up_hint(self._job.record, has_whole=bool(await self._job.whole()))
        self._job.put(self._job.record.with_attempt(attempt.replace(result=GIVEN_UP)).replace(kept=why))
        self._job.record_event("job.given-up", "error", message)
        await self._job.supervisor.tell("give-up", self._job.record.job, message=message, hint=hint)
        self._job.supervisor.offer = self._job.supervisor.offer.replace(fell=None, resumes=None)


def give_up_hint(record: JobSnapshots, *, has_whole: bool) -> str:
    """Return what the user of an abandoned job can do."""
    drop = f"hegmctl recovery --drop {record.job} deletes it"
    if has_whole:
        return f"its state is kept: hegmctl run --recover --resume {record.job} -- COMMAND continues from it, {drop}"
    if record.images is not None:
        return f"none of its snapshots can be used: hegmctl restore --newest {record.images} restores its newest image"
    return f"none of its snapshots can be used, and it has no images (--checkpoint-every); {drop}"
