"""When a snapshot is due, when a training hangs, and from which snapshot, where and how often a job starts. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from hegmd.protocol.slots import SlotRecord
from hegmd.protocol.snapshots import GONE, HEALTHY, Gpu

# The training is paused for one part in this many of its time.
SHARE = 100
# For nine parts in ten of its time, the training runs without a concurrent copy, which may slow it down.
COPY_SHARE = 10
# A client may ask for any interval.
LEAST_WISHED_S = 0.1
# A tiny model is not stopped more often than this.
LEAST_INTERVAL_S = 1.0
# A requested interval is at least this many times the cost of a snapshot.
LEAST_SHARE = 2
# The first pause may be far from the usual: by default, the second snapshot comes after this time at most. Later a
# single pause that was much longer or shorter changes nothing: the interval follows the median of this many.
SECOND_WITHIN_S, MAX_COSTS = 60.0, 3
# This many recoveries in a row may fail to advance the training.
MAX_FRUITLESS = 3
# A training counts as hung after this many times the longest time seen between two boundaries, which an evaluation
# between two epochs lengthens, and not before this minimum. Time during an operation on the job does not count.
LEARNED_TIMES = 5.0
LEAST_HANG_S = 60.0
# A start from a snapshot counts as hung after this many times the time that the job took for its first step, and not
# before this minimum: a script may take long to prepare its data, and has to skip trained batches.
LEAST_START_S = 600.0


def interval_s(wished_s: float | None, cost_s: float, copied_s: float = 0.0) -> float:
    """Return the time from the end of one snapshot to the start of the next.

    `cost_s` is how long the training was paused for one, `copied_s` how long that was copied while the training ran.
    """
    if wished_s is None:
        return max(LEAST_INTERVAL_S, SHARE * cost_s, (COPY_SHARE - 1) * copied_s)
    return max(LEAST_WISHED_S, wished_s, LEAST_SHARE * cost_s)  # in this order, which NaN does not pass


def usual_interval_s(wished_s: float | None, costs: Sequence[tuple[float, float]]) -> float:
    """Return the interval that follows from the last snapshots, of each the pause and the copy beside the training."""
    intervals = sorted([interval_s(wished_s, *cost) for cost in costs] or [interval_s(wished_s, 0.0)])
    usual_s = intervals[(len(intervals) - 1) // 2]
    return min(usual_s, SECOND_WITHIN_S) if wished_s is None and len(costs) == 1 else usual_s


def raised(wished_s: float | None, cost_s: float) -> str | None:
    """Return, in words for the user, that the interval that was asked for is too short; None if it is not."""
    used_s = interval_s(wished_s, cost_s)
    if wished_s is None or used_s <= wished_s:
        return None
    return f"--recover={wished_s:g}s is too short: a snapshot takes {cost_s:.2g} s, so the interval is {used_s:.2g} s"


def complete_generations(
    slots: Mapping[int, Sequence[SlotRecord]], ranks: int, bad: Container[int] = ()
) -> list[SlotRecord]:
    """Return the record of rank 0 for every snapshot that all ranks have at one step, the newest first.

    `slots` has the whole records of each rank. Generations in `bad` are left out.
    """
    found: list[SlotRecord] = []
    for first in slots.get(0, ()):
        mates = [
            [record for record in slots.get(rank, ()) if record.generation == first.generation] for rank in range(ranks)
        ]
        is_whole = all(len(mate) == 1 and _fits(mate[0], rank, ranks, first) for rank, mate in enumerate(mates))
        if is_whole and first.generation not in bad:
            found.append(first)
    return sorted(found, key=lambda record: -record.generation)


def _fits(record: SlotRecord, rank: int, ranks: int, first: SlotRecord) -> bool:
    return (record.rank, record.ranks, record.step) == (rank, ranks, first.step)


class Budget(NamedTuple):
    """The recoveries of a job so far, and its progress."""

    recoveries: int = 0
    fruitless: int = 0
    furthest_step: int | None = None

    def fell(self, step: int | None) -> Budget:
        """Return the budget after the job failed at that step."""
        if step is not None and (self.furthest_step is None or step > self.furthest_step):
            return self._replace(fruitless=0, furthest_step=step)
        return self._replace(fruitless=self.fruitless + 1)

    def spent(self) -> Budget:
        """Return the budget after one more recovery."""
        return self._replace(recoveries=self.recoveries + 1)

    def exhausted(self, most: int | None) -> str | None:
        """Return why the job must not be recovered again; None if it may."""
        if most is not None and self.recoveries >= most:
            return f"it was recovered {self.recoveries} times, as often as --max-recoveries allows"
        if self.fruitless >= MAX_FRUITLESS:
            return f"{self.fruitless} recoveries in a row made no progress"
        return None


def gpus_to_start_on(former: Sequence[str], gpus: Sequence[Gpu]) -> tuple[str, ...] | None:
    """Return the GPUs for a start: the former ones where they are healthy, others of their vendor for the rest.

    A former GPU that is failing is taken if no healthy one is left. None if there are not enough. The
    replacement is the healthy GPU with the most free memory.
    """
    known = {gpu.id: gpu for gpu in gpus}
    vendors = {known[name].vendor for name in former if name in known}
    spare = sorted(
        (gpu for gpu in gpus if is_fit(gpu) and gpu.id not in former and (not vendors or gpu.vendor in vendors)),
        key=lambda gpu: (-(gpu.memory_free_bytes or 0), gpu.index),
    )
    chosen: list[str] = []
    for name in former:
        gpu = known.get(name)
        if gpu is not None and is_fit(gpu):
            chosen.append(name)
        elif spare:
            chosen.append(spare.pop(0).id)
        elif gpu is not None and gpu.state == "ok" and gpu.health.condition != GONE:
            chosen.append(name)
        else:
            return None
    return tuple(chosen)


def is_fit(gpu: Gpu) -> bool:
    """Return True if a job may be started there."""
    return gpu.state == "ok" and gpu.health.condition == HEALTHY


def are_fit(names: Sequence[str], gpus: Sequence[Gpu]) -> bool:
    """Return True if none of these GPUs has failed or is failing."""
    known = {gpu.id: gpu for gpu in gpus}
    return all(name in known and is_fit(known[name]) for name in names)


def gone_of(names: Sequence[str], gpus: Sequence[Gpu]) -> Gpu | None:
    """Return the first of these GPUs that is gone."""
    return next((gpu for gpu in gpus if gpu.id in names and gpu.health.condition == GONE), None)


def start_limit_s(wished_s: float | None, longest_s: float, hung: int, least_s: float = LEAST_START_S) -> float | None:
    """Return how long a start from a snapshot may take to its next step; None for no limit.

    `wished_s` is the limit for hangs that was asked for, `longest_s` the longest start of the job so far, and `hung`
    how many starts were ended in a row: each of them doubles the limit.
    """
    if wished_s == 0.0:
        return None
    return max(least_s, wished_s or 0.0, LEARNED_TIMES * longest_s) * (1 << hung)


class RestartWatch:
    """The ranks of a job that torchrun has started again by itself, before their first boundary."""

    def __init__(self) -> None:
        self._number, self._since = 0, 0.0

    def see(self, number: int, now: float, limit_s: float | None) -> bool:
        """Take the number of the start that is under way, 0 if none is. Return True if it takes too long."""
        if number != self._number:
            self._number, self._since = number, now
        return number > 0 and limit_s is not None and now - self._since > limit_s


class HangWatch:
    """A training. `wished_s` is its limit; None for the learned one, 0 for none."""

    def __init__(self, wished_s: float | None) -> None:
        self._wished_s = wished_s
        self._boundary: int | None = None
        self._since = self._seen = 0.0
        self._longest_s = 0.0
        self._least_s = LEAST_HANG_S

    @property
    def limit_s(self) -> float | None:
        """After how long without a boundary it counts as hung; None for never."""
        if self._wished_s is None:
            return max(self._least_s, LEARNED_TIMES * self._longest_s)
        return self._wished_s or None

    def forget(self) -> None:
        """Reset: the training is not expected to make a step now."""
        self._boundary = None

    def hold(self, now: float) -> None:
        """Leave out the time since the last call: an operation kept the training from its next step.

        The time before counts on. Otherwise images at short intervals, for each of which a training that hangs is
        waited for, would hide the hang.
        """
        self._since += now - self._seen
        self._seen = now

    def see(self, boundary: int, now: float, *, is_parked: bool = False) -> float | None:
        """Take its count of boundaries at that moment. Return how long it has not changed, if that is too long.

        A training that is parked for a snapshot has more time: the snapshot may be large. A learned limit doubles each
        time that it is reached, so that a long evaluation is not taken for a hang until the job is given up.
        """
        self._seen = now
        if self._boundary is None or boundary != self._boundary:
            if self._boundary is not None:
                self._longest_s = max(self._longest_s, now - self._since)
            self._boundary, self._since = boundary, now
            return None
        limit_s = self.limit_s
        without_s = now - self._since
        spare_s = LEAST_HANG_S if is_parked else 0.0
        if not boundary or limit_s is None or without_s <= limit_s + spare_s:
            return None
        self._least_s = 2 * limit_s
        return without_s
