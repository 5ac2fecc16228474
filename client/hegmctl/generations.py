"""The ranks of `hegmctl run --ranks` as one: their generation, and the step from which it starts.

Each fault ends a generation and starts the next: all ranks stop and join it (`GATHERING`), get the state of one step
(`RESTORING`), and run the block from there (`RUNNING`). Pure: `GenerationActions` performs the actions; the time is an
argument. Messages of an older generation are ignored. Longer than 400 lines because each message means another thing in
each phase, and both are read together.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Protocol

    class GenerationActions(Protocol):
        def send(self, rank: int, do: str, **what: Any) -> None: ...

        def kill(self, rank: int) -> None:
            """End a rank that does not answer; `died` is called then."""
            ...

        def replace(self, rank: int) -> None: ...

        def slots(self) -> Mapping[int, tuple[int, int]]:
            """Return number and step of the snapshot in each slot that has a whole one."""
            ...

        def has_record(self, rank: int, step: int) -> bool: ...

        def progress(self, rank: int) -> tuple[float, float, int]:
            """Return when the rank made progress, how long it may make none, and its step."""
            ...

        def forget_records(self) -> None:
            """Clear the board and the slots: another block begins."""
            ...

        def note(self, attempt: Attempt) -> None: ...

        def give_up(self, why: str, rank: int | None) -> None:
            """End all ranks; `rank` is the one that failed last, if known."""
            ...


GATHERING, RESTORING, RUNNING, BETWEEN, OVER = "gathering", "restoring", "running", "between", "over"
SLOTS = 2
# As for other recoveries: this many in a row may fail to advance the training.
MAX_FRUITLESS = 3
# A rank that was started to replace another has this long to reach its block.
START_LIMIT_S = 600.0
HARD_LIMIT_S = 30.0
# A rank that makes no step is asked once. It has this long to answer that it is parked for an operation.
ASK_S = 0.5


class Attempt:
    """A recovery: why, from where, and how long each phase took from the fault on."""

    __slots__ = (
        *("failed_at", "failed_utc", "from_step", "gathered_s", "generation"),
        *("restored_s", "result", "step", "trained_s", "why"),
    )

    def __init__(self, generation: int, why: str, step: int, failed_at: float) -> None:
        self.generation = generation
        self.why = why
        self.step = step
        self.failed_at = failed_at
        self.failed_utc: float | None = None
        self.from_step: int | None = None
        self.gathered_s: float | None = None
        self.restored_s: float | None = None
        self.trained_s: float | None = None
        self.result: str | None = None


class Source:
    """From where a generation begins: the step, and for ranks without its state the slot, or the rank that gives it."""

    __slots__ = ("donor", "slot", "step")

    def __init__(self, step: int | None, slot: int | None = None, donor: int | None = None) -> None:
        self.step = step
        self.slot = slot
        self.donor = donor


def choose(
    offers: Sequence[int | None],
    recorded: Sequence[frozenset[int]],
    slots: Mapping[int, int],
    *,
    gives: bool = True,
    is_new: bool = False,
) -> Source | None:
    """Return the newest step that every rank can be given; step None if all start from the beginning, None if none
    exists.

    `offers` has the step of each rank's own state, `recorded` the steps for which each rank's own data are known,
    `slots` the step of each slot, and `gives` whether a rank's state can be written into a slot. `is_new` is True if
    the training has not made a step yet, and all ranks are as their script created them.
    """
    if not slots and is_new:
        return Source(None)
    found: list[tuple[int, int, Source]] = [(step, 0, Source(step, slot)) for slot, step in slots.items()]
    for step in {step for step in offers if step is not None}:
        if not all(step in known for known in recorded):
            continue
        if all(step == offered for offered in offers):
            found.append((step, 2, Source(step)))
        elif gives and step not in slots.values():
            found.append((step, 1, Source(step, donor=offers.index(step))))
    return max(found, key=lambda one: one[:2])[2] if found else None


class Generations:
    """Those of one job. Its methods are what ranks say, what becomes of them, and the time."""

    def __init__(self, ranks: int, crew: GenerationActions, *, max_recoveries: int | None = None) -> None:
        self.ranks = ranks
        self.generation = 1
        self.phase = GATHERING
        self.hard_limit_s = HARD_LIMIT_S
        self._crew = crew
        self._max_recoveries = max_recoveries
        self._joined: dict[int, int | None] = {}
        self._ready: set[int] = set()
        self._past: set[int] = set()
        self._done: set[int] = set()
        #: Ranks that were started in the place of others and have not joined.
        self._fresh: set[int] = set()
        #: Ranks whose state is as their script has made it, and whether any has made a step.
        self._new: set[int] = set()
        self._has_stepped = False
        self._source: Source | None = None
        self._layout: Any = None
        self._gives = True
        #: The slot to write next, and snapshots that could not be used, by slot and number.
        self._following = 0
        self._bad: set[tuple[int, int]] = set()
        #: The one with which the block began.
        self._first_generation = 1
        self._since = 0.0
        self._asked_at: float | None = None
        self._attempt: Attempt | None = None
        self.recoveries = self._fruitless = 0
        self._furthest = -1

    # ---- what ranks say ---------------------------------------------------------------------------------------------

    def joined(self, rank: int, generation: int, step: int | None, now: float, *, is_new: bool = False) -> None:
        """A rank waits for the plan of a generation, and offers the state of that step.

        `is_new` is True for a process that has just come to the block.
        """
        if self.phase == BETWEEN:
            self._begin_block(now)
        if generation < self.generation:  # it has not received the newest one
            self._crew.send(rank, "abort", generation=self.generation)
        if generation != self.generation or self.phase != GATHERING:
            return
        (self._new.add if is_new else self._new.discard)(rank)
        self._fresh.discard(rank)
        self._joined[rank] = step
        if len(self._joined) == self.ranks:
            self._plan(now)

    def failed(self, rank: int, generation: int, why: str, now: float) -> None:
        if generation == self.generation and self.phase in (RESTORING, RUNNING):
            self._fall(f"rank {rank}: {why}", now, rank)

    def unusable(self, rank: int, generation: int, why: str, now: float) -> None:
        """A rank could not be given its state, or could not give it."""
        if generation != self.generation or self.phase != RESTORING or self._source is None:
            return
        slots = self._crew.slots()
        if self._source.donor == rank:
            self._gives = False
        elif self._source.slot is not None and self._source.slot in slots:
            self._bad.add((self._source.slot, slots[self._source.slot][0]))
        self._fall(f"rank {rank} could not load its state: {why}", now, rank)

    def restored(self, rank: int, generation: int, now: float) -> None:
        """A rank has the state of the plan's step."""
        if generation != self.generation or self.phase != RESTORING:
            return
        self._ready.add(rank)
        source = self._source
        if source is not None and rank == source.donor:
            if self._slots().get(self._following) != source.step:
                self.unusable(rank, generation, "it is not in its slot", now)
                return
            source.slot, self._since = self._following, now
            self._send_plans([other for other in range(self.ranks) if self._joined[other] != source.step])
        if len(self._ready) == self.ranks:
            self.phase, self._asked_at = RUNNING, None
            if self._attempt is not None:
                self._attempt.restored_s = now - self._attempt.failed_at
                self._crew.note(self._attempt)
            for one in range(self.ranks):
                self._crew.send(one, "go", generation=self.generation)

    def stepped(self, rank: int, generation: int, now: float) -> None:
        if generation != self.generation:
            return
        self._has_stepped = True
        self._past.add(rank)
        if len(self._past) == self.ranks and self._attempt is not None:
            self._attempt.trained_s = now - self._attempt.failed_at
            self._finish_attempt("recovered")

    def finished(self, rank: int, generation: int, now: float) -> None:
        """The block of a rank has ended. The others may still need its state."""
        if generation != self.generation or self.phase != RUNNING:
            return
        self._done.add(rank)
        if len(self._done) == self.ranks:
            self.phase, self._since = BETWEEN, now
            if self._attempt is not None:
                self._finish_attempt("recovered")
            for one in range(self.ranks):
                self._crew.send(one, "over", generation=self.generation)

    def learnt(self, layout: Any) -> None:
        """The order of DDP's buckets is known."""
        self._layout = layout

    def ends(self) -> None:
        """A rank ends the training by its own will: from now on nothing is a fault."""
        self.phase = OVER

    def hold(self, now: float) -> None:
        """The job is suspended, and ranks wait for its resume: none has to come before."""
        self._since = now

    def is_parked(self) -> None:
        """A rank that makes no step is parked for an operation: that is no hang."""
        self._asked_at = None

    # ---- what becomes of them ---------------------------------------------------------------------------------------

    @property
    def can_replace(self) -> bool:
        """Whether a rank that ends is a fault: not before it has come to its block, nor in a later block."""
        has_begun = self.phase in (RESTORING, RUNNING) or (self.phase == GATHERING and self.generation > 1)
        return has_begun and self._first_generation == 1

    def died(self, rank: int, why: str, now: float) -> None:
        """The process of a rank has ended, which is a fault."""
        why = f"rank {rank} {why}"
        is_counted = self.phase == GATHERING and self.generation > 1 and rank not in self._fresh
        self._joined.pop(rank, None)
        if is_counted:
            if self._attempt is not None and self._attempt.gathered_s is None:
                self._attempt.why = why
                self._crew.note(self._attempt)
        else:
            self._fall(why, now, rank)
        if self.phase != OVER:
            self._fresh.add(rank)
            self._since = now
            self._crew.replace(rank)

    def _fall(self, why: str, now: float, rank: int | None, failed_at: float | None = None) -> None:
        """Begin the next generation, or give up."""
        step = max(self._crew.progress(one)[2] for one in range(self.ranks))
        if self._attempt is not None:
            self._finish_attempt("failed")
        self._fruitless = 0 if step > self._furthest else self._fruitless + 1
        self._furthest = max(step, self._furthest)
        self._attempt = Attempt(self.generation + 1, why, step, now if failed_at is None else failed_at)
        if self._max_recoveries is not None and self.recoveries >= self._max_recoveries:
            self._give_up(f"it was recovered {self.recoveries} times, as often as --max-recoveries allows", rank)
            return
        if self._fruitless >= MAX_FRUITLESS:
            self._give_up(f"{self._fruitless} recoveries in a row made no progress", rank)
            return
        self.recoveries += 1
        self.generation += 1
        self.phase, self._since, self._source = GATHERING, now, None
        for names in (self._joined, self._ready, self._past, self._done):
            names.clear()
        self._crew.note(self._attempt)
        for one in range(self.ranks):
            self._crew.send(one, "abort", generation=self.generation)

    def _give_up(self, why: str, rank: int | None) -> None:
        self.phase = OVER
        if self._attempt is not None:
            why = f"{why}; {self._attempt.why}"
            self._finish_attempt("given up")
        self._crew.give_up(why, rank)

    def _finish_attempt(self, result: str) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.result = result
            self._crew.note(attempt)

    def _begin_block(self, now: float) -> None:
        """A script runs another block after the first one: nothing of that is used for it."""
        self._crew.forget_records()
        self.generation += 1
        self._first_generation = self.generation
        self.phase, self._since = GATHERING, now
        self._furthest, self._layout, self._has_stepped = -1, None, False
        self._new.clear()
        for names in (self._joined, self._ready, self._past, self._done):
            names.clear()
        for rank in range(self.ranks):
            self._crew.send(rank, "abort", generation=self.generation)

    # ---- from where -------------------------------------------------------------------------------------------------

    def _slots(self) -> dict[int, int]:
        """The step of each slot that can be used."""
        return {slot: step for slot, (number, step) in self._crew.slots().items() if (slot, number) not in self._bad}

    def _plan(self, now: float) -> None:
        offers = [self._joined[rank] for rank in range(self.ranks)]
        steps = {step for step in offers if step is not None}
        recorded = [
            frozenset(step for step in steps if self._crew.has_record(rank, step)) for rank in range(self.ranks)
        ]
        is_new = not self._has_stepped and len(self._new) == self.ranks
        source = choose(offers, recorded, self._slots(), gives=self._gives, is_new=is_new)
        if source is None:
            self._give_up("no step has a state that all ranks can restore", None)
            return
        self._source, self.phase, self._since = source, RESTORING, now
        if self._attempt is not None:
            self._attempt.gathered_s, self._attempt.from_step = now - self._attempt.failed_at, source.step
            self._crew.note(self._attempt)
        self._send_plans([rank for rank, step in enumerate(offers) if source.donor is None or step == source.step])

    def _send_plans(self, ranks: Sequence[int]) -> None:
        """Send these ranks the source of their state. The slot to write next is never one that is read now."""
        source = self._source
        if source is None:
            return
        slots = self._slots()
        newest = source.slot if source.slot is not None else max(slots, key=lambda slot: slots[slot], default=None)
        self._following = 0 if newest is None else (newest + 1) % SLOTS
        for rank in ranks:
            has_it = source.step is None or self._joined[rank] == source.step
            plan = {
                "generation": self.generation,
                "step": source.step,
                "slot": None if has_it else source.slot,
                "gives": rank == source.donor,
                "next_slot": self._following,
                "layout": self._layout,
            }
            self._crew.send(rank, "plan", **plan)

    # ---- the time ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """End what takes too long; returns after how many seconds to look again."""
        if self.phase == RUNNING:
            return self._look_for_hang(now)
        if self.phase not in (GATHERING, RESTORING) or self._attempt is None:
            return None
        since = self._since
        for rank in self._awaited():
            limit_s = START_LIMIT_S if rank in self._fresh else self.hard_limit_s
            if now - since > limit_s:
                self._since = now
                self._crew.kill(rank)
        return min(self.hard_limit_s / 4, 1.0)

    def _awaited(self) -> list[int]:
        """Return the ranks that the others wait for: not those that themselves wait for the state of another one."""
        source, ranks = self._source, range(self.ranks)
        if self.phase == GATHERING or source is None:
            return [rank for rank in ranks if rank not in self._joined]
        is_given = source.donor is not None and source.slot is None
        asked = [rank for rank in ranks if not is_given or self._joined[rank] == source.step]
        return [rank for rank in asked if rank not in self._ready]

    def _look_for_hang(self, now: float) -> float | None:
        limits: list[float] = []
        late: list[tuple[float, int]] = []
        for rank in set(range(self.ranks)) - self._done:
            at, limit_s, _ = self._crew.progress(rank)
            if limit_s > 0:
                limits.append(limit_s)
                if now - at > limit_s:
                    late.append((at, rank))
        if not late:
            self._asked_at = None
            return min(1.0, min(limits) / 8) if limits else 1.0
        if self._asked_at is None:
            self._asked_at = now
            for _, rank in late:
                self._crew.send(rank, "ask")
            return min(ASK_S, min(limits) / 8)
        if now - self._asked_at >= min(ASK_S, min(limits) / 8):
            at, rank = min(late)
            ended = ", ".join(map(str, sorted(self._done)))
            why = f", and the block of rank {ended} has ended: did it have fewer batches?" if ended else ""
            self._fall(f"rank {rank} completed no step for {now - at:.1f} s{why}", now, rank, at)
        return min(ASK_S, min(limits) / 8)
