"""The leases: memory of GPUs that is kept for one user, and when each of them ends.

A lease ends with a process, at a time, by a release, or with the boot of the kernel. A pending one also ends with the
process that waits for it. A process is known by pid and start time, and watched by a pidfd, so a reused pid never
prolongs a lease. Times are seconds since boot, so that no lease ends sooner or later when the clock is set. Owns the
records and their watches. Frees no memory: `service` does, by the policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import anyio

from hegmd.errors import BAD_REQUEST, BUSY, NOT_FOUND, HegmError, Refused
from hegmd.node.processes.procfs import seconds_since_boot
from hegmd.protocol.names import closest, why_no_name
from hegmd.sharing.records import LeaseRecord
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.process_ends import ended as process_ended

# A few users cannot fill the list, and no user can keep administrators out.
MAX_LEASES, MAX_LEASES_OF_USER = 1024, 64

StartTicks = Callable[[int], "int | None"]


class Leases(BackgroundTasks):
    """Every open lease. `changed` is called after each change; `ended` with a lease that ended by itself, and why."""

    def __init__(
        self,
        start_ticks: StartTicks,
        *,
        boot: str,
        changed: Callable[[], object],
        ended: Callable[[LeaseRecord, str], object],
        clock: Callable[[], float] | None = None,
        utc: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._start_ticks = start_ticks
        self._boot = boot
        self._changed = changed
        self._on_end = ended
        self._clock = clock or seconds_since_boot
        self._utc = utc
        self._leases: dict[int, LeaseRecord] = {}
        self._watches: dict[tuple[int, int], anyio.CancelScope] = {}
        self.next_number = 1

    # -- the life of the part ------------------------------------------------------------------------------------------

    def enter(self, leases: Sequence[LeaseRecord], next_number: int) -> None:
        """Take over the leases of the previous daemon, except those of an earlier boot."""
        self.next_number = max([next_number, *(lease.number + 1 for lease in leases)])
        self._leases = {lease.number: lease for lease in leases if lease.boot == self._boot}

    def _on_start(self) -> None:
        for lease in tuple(self._leases.values()):
            self._watch_soon(lease)

    # -- queries -------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[LeaseRecord]:
        return iter(tuple(self._leases.values()))

    def find(self, lease_id: str) -> LeaseRecord | None:
        """The lease of that id."""
        return next((lease for lease in self if lease.id == lease_id), None)

    def named(self, text: str, may: Callable[[int | None], bool], own_uid: int | None = None) -> LeaseRecord:
        """The lease of that id or name: the caller's own first, then those on which they may act.

        Raises NOT_FOUND, and BAD_REQUEST with a list to choose from.
        """
        found = [lease for lease in self if text in (lease.id, lease.name)]
        allowed = [lease for lease in found if may(lease.uid)]
        allowed = [lease for lease in allowed if lease.uid == own_uid] or allowed
        if len(allowed) == 1 or (found and not allowed):
            return (allowed or found)[0]
        if found:
            listed = ", ".join(f"{lease.id} (uid {lease.uid})" for lease in allowed[:10])
            message = f"{len(allowed)} leases are called {text[:60]!r}: {listed}"
            raise HegmError(BAD_REQUEST, message, f"write the id of one, such as {allowed[-1].id}")
        close = closest(text, [name for lease in self if may(lease.uid) for name in (lease.id, lease.name) if name])
        hint = f"did you mean {close}? run: hegmctl queue" if close else "run: hegmctl queue; it may have ended"
        raise HegmError(NOT_FOUND, f"there is no lease {text[:60]!r}", hint, {"lease": text[:60]})

    def ages_s(self) -> dict[int, float]:
        """Return how long ago each lease was requested, by its number and one reading of the clock."""
        now, ticks_per_s = self._clock(), os.sysconf("SC_CLK_TCK")
        return {lease.number: max(0.0, now - lease.made_ticks / ticks_per_s) for lease in self}

    def until_utc(self, lease: LeaseRecord) -> float | None:
        """Return the latest end of the lease by the present wall clock; None if it has no time limit."""
        return None if lease.until_s is None else self._utc() + lease.until_s - self._clock()

    def stamped(self, lease: LeaseRecord, limit_s: float | None) -> LeaseRecord:
        """Return the lease as requested now, to end after that time at the latest."""
        now = self._clock()
        return lease.replace(made_ticks=_ticks(now), until_s=None if limit_s is None else now + limit_s)

    def check_name(self, name: str | None, uid: int, *, is_admin: bool = False) -> None:
        """Check that a new lease of that user can have that name, and that the limits allow one. Raises HegmError."""
        own = [lease for lease in self if lease.uid == uid]
        if len(own) >= MAX_LEASES_OF_USER or (len(self._leases) >= MAX_LEASES and not is_admin):
            message = f"{len(own)} leases of uid {uid} are open, and {len(self._leases)} in all"
            raise HegmError(BUSY, message, "release some: hegmctl queue, hegmctl release LEASE")
        if name is None:
            return
        why = "it looks like the id of a lease" if name[:1] == "l" and name[1:].isdigit() else why_no_name(name)
        if why is not None:
            raise Refused(f"a lease cannot be called {name[:80]!r}: {why}", "choose another name")
        taken = next((lease for lease in own if lease.name == name), None)
        if taken is not None:
            hint = f"release it first: hegmctl release {taken.id}; or choose another name"
            raise Refused(f"lease {taken.id} is called {name!r} already", hint, {"lease": taken.id})

    def add(self, lease: LeaseRecord) -> LeaseRecord:
        """Enter a lease, which gets its number, and watch it. Raises REFUSED if its process has ended."""
        for pid, ticks in ((lease.pid, lease.start_ticks), (lease.waiter_pid, lease.waiter_ticks)):
            if pid is not None and (ticks is None or self._start_ticks(pid) != ticks):
                raise Refused(f"process {pid} has ended", "name a process that runs: --for PID", {"pid": pid})
        lease = lease.replace(number=self.next_number, boot=self._boot, made_ticks=_ticks(self._clock()))
        self.next_number += 1
        self._put(lease)
        self._watch_soon(lease)
        return lease

    def hold(self, number: int, gpu: str) -> None:
        """Hold its memory, which was found free on that GPU. Its time begins, unless a process waits for it."""
        lease = self._leases.get(number)
        if lease is not None:
            self._begin(lease.replace(is_held=True, gpu=gpu))

    def answer(self, number: int) -> LeaseRecord | None:
        """The waiting process gets the reply now: its time begins. The lease no longer ends with that process.

        Returns the lease; None if it has ended.
        """
        lease = self._leases.get(number)
        if lease is None:
            return None
        if lease.waiter_pid not in (None, lease.pid):
            self._end_watch(number, lease.waiter_pid)
        return self._begin(lease.replace(waiter_pid=None, waiter_ticks=None))

    def _begin(self, lease: LeaseRecord) -> LeaseRecord:
        if lease.hold_s is not None and lease.waiter_pid is None:
            lease = lease.replace(until_s=self._clock() + lease.hold_s)
        self._put(lease)
        self._watch_soon(lease)
        return lease

    def waited_for(self, like: LeaseRecord, awaited: Collection[int] = ()) -> LeaseRecord | None:
        """The lease for which that very process asked already, in the same words, and was not answered yet.

        None of those with the numbers `awaited`: another request waits for them.
        """
        words = ("name", "size_bytes", "priority", "uid", "pid", "waiter_pid", "waiter_ticks")
        for lease in self:
            is_same = all(getattr(lease, word) == getattr(like, word) for word in words)
            is_free = like.waiter_pid is not None and lease.number not in awaited
            if is_free and is_same and like.gpu in (None, lease.gpu):
                return lease
        return None

    def drop(self, number: int) -> LeaseRecord | None:
        """End a lease. None if it has ended already."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            for pid in (lease.pid, lease.waiter_pid, 0):
                self._end_watch(number, pid)
            self._changed()
        return lease

    # -- their ends ----------------------------------------------------------------------------------------------------

    def _put(self, lease: LeaseRecord) -> None:
        self._leases[lease.number] = lease
        self._changed()

    def _end_watch(self, number: int, pid: int | None) -> None:
        """Watch that process no longer for the lease; 0 is its time."""
        scope = None if pid is None else self._watches.pop((number, pid), None)
        if scope is not None:
            scope.cancel()

    def _watch_soon(self, lease: LeaseRecord) -> None:
        if self._tasks is None:
            return
        watched = [(lease.pid, lease.start_ticks, f"process {lease.pid} has ended")]
        if lease.waiter_pid is not None:
            watched.append(
                (lease.waiter_pid, lease.waiter_ticks, f"process {lease.waiter_pid}, which waited, has ended")
            )
        for pid, ticks, why in watched:
            if pid is not None and ticks is not None and (lease.number, pid) not in self._watches:
                scope = self._watches[lease.number, pid] = anyio.CancelScope()
                self._tasks.start_soon(self._end_with, lease.number, pid, ticks, why, scope)
        if lease.until_s is not None:
            self._end_watch(lease.number, 0)
            scope = self._watches[lease.number, 0] = anyio.CancelScope()
            self._tasks.start_soon(self._end_at, lease.number, lease.until_s, scope)

    async def _end_with(self, number: int, pid: int, ticks: int, why: str, scope: anyio.CancelScope) -> None:
        with scope:
            await process_ended(pid, lambda: self._start_ticks(pid) == ticks)
            lease = self._leases.get(number)
            if lease is not None and pid in (lease.pid, lease.waiter_pid):
                self._watches.pop((number, pid), None)
                self._end(lease, why)

    async def _end_at(self, number: int, until_s: float, scope: anyio.CancelScope) -> None:
        with scope:
            await self._sleep_until(until_s)
            lease = self._leases.get(number)
            if lease is not None:
                self._watches.pop((number, 0), None)
                self._end(lease, "its time is over")

    async def _sleep_until(self, until_s: float) -> None:
        left_s = until_s - self._clock()
        while left_s > 0:  # the machine may be asleep meanwhile, which a pause does not count
            await anyio.sleep(min(left_s, 3600.0))
            left_s = until_s - self._clock()

    def _end(self, lease: LeaseRecord, why: str) -> None:
        self.drop(lease.number)
        self._on_end(lease, why)


def _ticks(seconds: float) -> int:
    return int(seconds * os.sysconf("SC_CLK_TCK"))
