"""One protected job, from its first agent to its end: its snapshots, and its starts from them in turn.

A daemon that is started meanwhile continues from what the supervisor says and from the slots.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio

from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.node.gpu_sets import HINT_UNNUMBERED, ONLY_ITS_GPUS, UNNUMBERED, gpus_of, unseen_device
from hegmd.node.processes.procfs import TICKS_PER_S, seconds_since_boot
from hegmd.protocol.agents import UNSEEN
from hegmd.protocol.recovery import UNDER_WAY
from hegmd.recovery.job import ProtectedJob, stacks_of
from hegmd.recovery.policy import HangWatch, gone_of, gpus_to_start_on, raised, usual_interval_s
from hegmd.recovery.snapshots import (
    FIRST_BATCH_S,
    MAX_RANKS,
    BesideImage,
    SnapshotPostponed,
    SnapshotRounds,
    Unprotected,
)
from hegmd.recovery.starts import Starts
from hegmd.workers.supervisors import SupervisorAway
from hegmd.workers.workers import AgentConnection

logger = logging.getLogger(__name__)

# How often the training is asked how far it has come.
LOOK_S = 1.0
# The delay before another attempt while there is no snapshot, and after a failed attempt.
SOON_S, AGAIN_S = 0.1, 1.0
# A job that cannot be protected is tried again after this time: its script may have passed the obstacle.
UNPROTECTED_S = 30.0
# A job has this many checks to end by itself after its GPU was gone.
GONE_LOOKS = 3


class Protection:
    """Runs for one job. `why` is what prevents its snapshots, `taken` how many there were."""

    def __init__(self, job: ProtectedJob) -> None:
        self.job = job
        self.why: str | None = None
        self.taken = 0
        self._rounds = SnapshotRounds(job)
        self._starts = Starts(job)
        self._since = self._due = anyio.current_time()
        #: The snapshot at the boundary of the last image, until it is known whether it is whole.
        self._beside: BesideImage | None = None
        self._beside_lock = anyio.Lock()
        self._has_noted_raised = False
        #: The boundary of a hang without a snapshot, of which the user was told; and whether its processes were seen
        #: before their first one.
        self._hung_at: int | None = None
        self._is_before_first_step = False
        #: True while the supervisor has still to learn that the job has a snapshot.
        self._is_untold = False

    # -- views ---------------------------------------------------------------------------------------------------------

    @property
    def is_recovering(self) -> bool:
        """Return True if the job is being started from a snapshot."""
        return self._starts.is_recovering

    @property
    def returns_to(self) -> tuple[str, ...]:
        """The GPUs of the job while no process of it trains and its command will be started again; none otherwise."""
        job, attempts = self.job, self.job.record.attempts
        if job.newest is None or not job.supervisor.is_alive or not (self.is_recovering or not job.own_workers()):
            return ()
        chosen = attempts[-1].gpus if attempts and attempts[-1].result == UNDER_WAY else ()
        return chosen or job.record.gpus

    @property
    def cost_s(self) -> float | None:
        """Return how long the training was paused for the last snapshot."""
        return self._rounds.cost_s if self.taken else None

    @property
    def copied_s(self) -> float | None:
        """Return how long that was copied to the host while the training ran; None if it was paused meanwhile."""
        return self._rounds.copied_s if self.taken else None

    @property
    def interval_s(self) -> float | None:
        """The time between two snapshots now."""
        if not self.taken:
            return None
        return usual_interval_s(self.job.wish.interval_s, self._rounds.costs)

    # -- its life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Protect it until its supervisor has ended."""
        await self._find_newest()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            while self.job.supervisor.is_alive:
                try:
                    await self._turn()
                except SupervisorAway as error:
                    logger.info("%s: %s", self.job, error.message)
                with anyio.move_on_after(max(0.0, min(self._due - anyio.current_time(), LOOK_S))):
                    await self.job.node.changed.wait()
            tasks.cancel_scope.cancel()

    async def _turn(self) -> None:
        """Do the next step. Raises SupervisorAway."""
        supervisor = self.job.supervisor
        if not supervisor.connected:
            return
        if self._is_untold:
            await self._tell_protected()
        if self._starts.is_wanted():
            await self._starts.recover()
            self._begin_anew()
        elif self._starts.is_under_way():
            await self._starts.go_on()
            self._begin_anew()
        elif supervisor.offer.pid is not None and anyio.current_time() >= self._due:
            await self._take_while_it_runs()

    def _begin_anew(self) -> None:
        self._since = anyio.current_time()
        self._wait(self.interval_s or AGAIN_S)

    async def _take_while_it_runs(self) -> None:
        """Take a snapshot, and leave it once the command has failed: its ranks may never answer."""
        async with anyio.create_task_group() as tasks:

            async def give_up() -> None:
                while not self._starts.is_wanted():
                    await self.job.node.changed.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(give_up)
            await self._take()
            tasks.cancel_scope.cancel()

    async def _watch(self) -> None:
        """Check the training's progress, and end the job once it hangs or its GPU is gone, until cancelled."""
        hangs, looks = HangWatch(self.job.wish.hang_limit_s), 0
        while True:
            await anyio.sleep(LOOK_S)
            looks = 0 if self.is_recovering else await self._look_at_gpus(looks)
            workers = self.job.own_workers()
            own = [worker for worker in workers if worker.boundary]
            self._learn_start([] if self.is_recovering else workers, own)
            await self.job.count([worker for worker in own if worker.connected])
            is_off = self.is_recovering or is_stopped(self.job.supervisor.pid)  # as by Ctrl-Z
            is_held = any(self.job.node.is_kept_from_training(worker.pid) for worker in own or workers)
            await self._starts.check_restart_by_torchrun(is_possible=not (own or is_off or is_held))
            if not own or is_off:
                hangs.forget()
                continue
            if is_held:
                hangs.hold(anyio.current_time())
                continue
            self.job.boundary = min(worker.boundary for worker in own)
            is_parked = any(worker.parked for worker in own)
            without_s = hangs.see(self.job.boundary, anyio.current_time(), is_parked=is_parked)
            if without_s is not None:
                await self._end_hung(own, without_s)
                hangs.forget()

    async def _look_at_gpus(self, looks: int) -> int:
        """Update the job's GPUs. End the job if it can run on others and its GPU was gone at that many checks before.

        Return the number of such checks.
        """
        own = sorted([one for one in self.job.own_workers() if one.boundary], key=lambda worker: worker.about.rank or 0)
        if not own or any(self.job.node.is_in_hand(worker.pid) for worker in own):
            return 0
        places, gpus = self._gpus_of(own), self.job.node.gpus()
        if places != self.job.record.gpus and len(own) == self.job.record.ranks:  # it was moved since its last snapshot
            self.job.put(self.job.record.replace(gpus=places))
        gone = gone_of(places, gpus)
        if gone is None:
            return 0
        if looks == GONE_LOOKS:
            why = f"was on {gone.id}, which is gone ({gone.health.reason}), "
            if self.job.newest is None or gpus_to_start_on(places, gpus) is None:
                why += "and " + ("has no snapshot" if self.job.newest is None else "no other GPU is healthy")
                self.job.record_event("job.gpu-gone", "error", f"{self.job} {why}: it is not changed")
            else:
                await self.job.kill(own, why + "and was killed", None, "job.gpu-gone")
        return looks + 1

    async def _end_hung(self, own: Sequence[AgentConnection], without_s: float) -> None:
        """Note where the threads of a training are that hangs, and kill its processes; not if nothing is gained."""
        if self.job.newest is not None:
            # Ranks that torchrun has started again may hang before their first batch, and the others wait for them.
            own_ranks = [one for one in self.job.own_workers() if one.boundary or one.about.rank is not None]
            stacks = await stacks_of(own_ranks)
            is_paused = any(self.job.node.is_kept_from_training(worker.pid) for worker in own)
            is_paused = is_paused or is_stopped(self.job.supervisor.pid) or self.is_recovering  # by now
            if not is_paused and min(worker.boundary for worker in own) == self.job.boundary:
                why = f"completed no step for {without_s:.0f} s, and was killed"
                await self.job.kill(own_ranks, why, stacks, "job.hung")
        elif self.job.boundary != self._hung_at:
            self._hung_at = self.job.boundary
            message = f"{self.job} has completed no step for {without_s:.0f} s, and has no snapshot: it is not changed"
            self.job.record_event("job.hung", "warning", message)
            await self.job.note(message, "end it if it hangs: only a job with a snapshot can be recovered")

    def _learn_start(self, workers: Sequence[AgentConnection], own: Sequence[AgentConnection]) -> None:
        """Learn how long the job takes to its first step, if it was seen before that."""
        if own and self._is_before_first_step:
            began = min(worker.identity.start_ticks for worker in own) / TICKS_PER_S
            took_s = seconds_since_boot() - began
            record = self.job.record
            self.job.put(record.replace(longest_start_s=max(record.longest_start_s, round(took_s, 1))))
        self._is_before_first_step = bool(workers) and not own

    async def _find_newest(self) -> None:
        """Find the snapshots that an earlier daemon left."""
        whole = await self.job.whole()
        if whole:
            self.job.newest = whole[0]
            await self._tell_protected()

    def _wait(self, seconds: float) -> None:
        self._due = anyio.current_time() + seconds

    # -- snapshots -----------------------------------------------------------------------------------------------------

    async def slot_beside_image(self, operation: str, worker: AgentConnection) -> tuple[int, int] | None:
        """Return the slot and the number of the snapshot that this process takes where it is parked for an image.

        None if no snapshot is due: within half an interval, so that the training is not paused twice for nothing.
        """
        async with self._beside_lock:  # all ranks ask at one time
            if self._beside is None or self._beside.operation != operation:
                is_due = self._due - anyio.current_time() <= max(AGAIN_S, (self.interval_s or 0.0) / 2)
                if self.job.newest is None or self.why is not None or self.is_recovering or not is_due:
                    return None
                record = self.job.record
                self._beside = await self._rounds.beside_image(operation, record.generation + 1, record.bad)
            return await self._rounds.slot_of(worker, self._beside)

    async def _took_beside_image(self) -> bool:
        """Return True if the last image's boundary has a snapshot too, which is the newest one then."""
        beside, self._beside = self._beside, None
        whole = [] if beside is None else await self.job.whole()
        if beside is None or not whole or whole[0].generation != beside.generation:
            return False
        self.job.put(self.job.record.replace(generation=beside.generation))
        self.job.newest, self.taken = whole[0], self.taken + 1
        self._wait(self.interval_s or AGAIN_S)
        return True

    async def _take(self) -> None:
        """Take one snapshot, and say once where none can be taken."""
        self._wait(AGAIN_S)
        is_in_hand = any(self.job.node.is_in_hand(worker.pid) for worker in self.job.own_workers())
        if not is_in_hand and await self._took_beside_image():
            return
        try:
            ranks, launched = await self._processes()
            require_devices(ranks, self._gpus_of(ranks))
            generation = self.job.record.generation + 1
            taken = await self._rounds.take(ranks, generation, self.job.record.bad)
        except SnapshotPostponed as error:
            logger.debug("%s: no snapshot now: %s", self.job, error)
            if anyio.current_time() - self._since > error.patience_s and self.job.newest is None:
                await self._unprotect(f"{error}", "see docs/recovery.md for what can be protected")
            self._wait(SOON_S if self.job.newest is None and self.why is None else AGAIN_S)
            return
        except Unprotected as error:
            await self._unprotect(error.why, error.hint)
            self._wait(UNPROTECTED_S)
            return
        is_first = self.job.newest is None
        anew = [name for name in self._rounds.begins_anew if name not in self.job.record.begins_anew]
        is_behind = (
            self.job.newest is not None and taken.step < self.job.newest.step
        )  # an operation has restarted it meanwhile
        self.job.put(
            self.job.record.replace(
                furthest_step=None if is_behind else self.job.record.furthest_step,
                ranks=len(ranks),
                launched=launched,
                gpus=self._gpus_of(ranks),
                generation=taken.generation,
                begins_anew=self._rounds.begins_anew,
                images=None if ranks[0].about.images is None else ranks[0].about.images.path,
            )
        )
        self.job.newest, self.taken = taken, self.taken + 1
        if is_first or self.why is not None:
            await self._protect()
        await self._note_anew([name for name in anew if not name.startswith(UNSEEN)])
        await self._note_raised()
        self._wait(self.interval_s or AGAIN_S)

    async def _note_anew(self, names: Sequence[str]) -> None:
        """Say which variables would start over, at the first snapshot that does not keep them."""
        if names:
            message = f"a recovery of {self.job} starts over with: {', '.join(names)}"
            self.job.record_event("job.protected", "warning", message)
            await self.job.note(message, "keep such values with hegm.keep; see docs/restarts.md")

    async def _note_raised(self) -> None:
        """Say once that snapshots are further apart than was asked for. The first one takes longer than the others."""
        why = raised(self.job.wish.interval_s, self._rounds.cost_s) if self.taken > 1 else None
        if why is not None and not self._has_noted_raised:
            self._has_noted_raised = True
            await self.job.note(why, f"see: hegmctl recovery {self.job.record.job}")

    def _gpus_of(self, ranks: Sequence[AgentConnection]) -> tuple[str, ...]:
        """The GPUs that they are on, each once, in the order of the ranks. A GPU that is lost is still theirs."""
        known = [name for worker in ranks if worker.gpu is not None for name in gpus_of(worker.gpu)]
        if any(worker.gpu is None and not worker.on_cpu for worker in ranks) and self.job.record.gpus:
            return self.job.record.gpus
        return tuple(dict.fromkeys(known))

    async def _processes(self) -> tuple[list[AgentConnection], bool]:
        """Its processes by rank, and whether a launcher starts them. Raises SnapshotPostponed or Unprotected."""
        own = [worker for worker in self.job.own_workers() if worker.connected]
        await self.job.count(own)
        training = [worker for worker in own if worker.boundary]
        if not training or self.job.supervisor.offer.pid is None:
            raise SnapshotPostponed("it has not reached its first batch", FIRST_BATCH_S)
        ranked = [worker for worker in training if worker.about.rank is not None]
        if not ranked or (len(training) == 1 and (training[0].about.world_size or 1) == 1 and self._is_child(training)):
            if len(training) > 1:
                raise Unprotected(f"{len(training)} processes train, and have {UNNUMBERED}", HINT_UNNUMBERED)
            if not self._is_child(training):
                hint = "make the script that starts it exec it: exec python3 train.py"
                why = f"process {training[0].pid} was not started by its hegmctl run itself"
                raise Unprotected(why, hint)
            return training, False
        world = max(worker.about.world_size or 1 for worker in ranked)
        if world > MAX_RANKS:
            raise Unprotected(
                f"it has {world} ranks, and {MAX_RANKS} can be protected", "use images: hegmctl checkpoint"
            )
        by_number = {worker.about.rank: worker for worker in ranked}
        if sorted(rank for rank in by_number if rank is not None) != list(range(world)):
            idle = {rank for worker in own if (rank := worker.about.rank) is not None} - by_number.keys()
            if len(by_number) + len(idle) == world:
                raise SnapshotPostponed(f"rank {min(idle)} of {world} has not reached its first batch")
            raise SnapshotPostponed(f"{len(by_number)} of {world} ranks are on this node")
        return [by_number[rank] for rank in range(world)], True

    def _is_child(self, training: Sequence[AgentConnection]) -> bool:
        return training[0].pid == self.job.supervisor.offer.pid

    async def _unprotect(self, why: str, hint: str) -> None:
        if self.why == why:
            return
        is_news, self.why = self.why is None, why
        if is_news:
            message = f"{self.job} is not protected: {why}"
            self.job.record_event("job.unprotected", "warning", message)
            await self.job.note(message, hint)

    async def _protect(self) -> None:
        self.why = None
        step = 0 if self.job.newest is None else self.job.newest.step
        self.job.record_event("job.protected", "info", f"{self.job} has a snapshot of step {step}")
        await self._tell_protected()

    async def _tell_protected(self) -> None:
        """Have the supervisor keep the job if it fails; one that is away is told once it is back."""
        self._is_untold = True
        try:
            await self.job.supervisor.tell("protect", self.job.record.job)
        except SupervisorAway as error:
            logger.info("%s: %s", self.job, error.message)
        else:
            self._is_untold = False


def require_devices(ranks: Sequence[AgentConnection], gpus: Sequence[str]) -> None:
    """Require that a new process, which sees these GPUs only, has every device that is used. Raises Unprotected."""
    used = [device.number for worker in ranks if worker.cuda is not None for device in worker.cuda.devices]
    if gpus and (why := unseen_device(used, len(gpus))) is not None:
        raise Unprotected(f"it {why}", ONLY_ITS_GPUS)
