"""The gate that the training thread passes at every batch boundary: counts boundaries, and parks the thread on request.

Keeps the count, the identity of the training thread, and the parked threads. Touches no tensor and no socket. Hooks
call it in the script's threads; the agent's thread sets requests. An idle pass is an addition and one attribute test;
everything else is behind `requested`. A parked thread waits on a lock of its own. It holds neither the interpreter nor
a lock of the script.

The training thread is the one that steps optimizers. A loader that another thread reads ahead is no boundary, and that
thread is stopped at its own next batch too. Before the first step, the thread that reads a loader counts as the
training thread.

The training thread is parked in a second place: at the start and at the end of a `hegm.released()` block (`lending`).

Longer than 400 lines because all that changes which threads are parked is under one lock.
"""

from __future__ import annotations

import sys
from _thread import allocate_lock, get_ident
from time import monotonic

from .notes import note
from .signals import CannotHoldSignals, HeldSignals
from .trap import Trap

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# A loader that was not read for this many optimizer steps does not pace this training.
STEPS_WITHOUT_LOADER = 16
_NOBODY = 0

PARK = "park"
WATCH = "watch"
CALL = "call"


class ParkRequest:
    """The order for the training thread at its next boundary with that count or a higher one."""

    __slots__ = ("at", "call", "fits", "what")

    def __init__(
        self, what: str, at: int = 0, call: Callable[[], None] | None = None, fits: Callable[[], bool] | None = None
    ) -> None:
        self.what = what
        self.at = at
        self.call = call
        self.fits = fits  # checked in that thread at each boundary: whether it can be parked there


class Gate:
    """The gate of this process. `on_change` is called, from any thread, when a request was carried out."""

    __slots__ = (
        "_beside",
        "_by_hand",
        "_count_at_step",
        "_home",
        "_inert",
        "_lock",
        "_parked_locks",
        "_patience",
        "_request",
        "_stepped",
        "_streak",
        "_taken",
        "_trainers",
        "_trap",
        "count",
        "declined",
        "lent",
        "on_change",
        "on_signal",
        "parked_since",
        "passed",
        "requested",
        "thread",
    )

    def __init__(self) -> None:
        self.requested = False
        self.count: int = 0
        self.thread = _NOBODY
        self.declined: str | None = None  # why no thread could be parked, since the last request
        self.lent = False  # True from the moment a hegm.released() block runs until its storages are back
        self.passed: int | None = None
        self.parked_since: float | None = None  # the monotonic instant from which the training thread is parked
        self.on_change: Callable[[], None] = _ignore
        self.on_signal: Callable[[int], None] = _ignore_signal
        self._request: ParkRequest | None = None
        self._beside: Callable[[], None] | None = None
        self._by_hand = False
        self._count_at_step: int = 0
        self._parked_locks: dict[int, object] = {}
        self._home = _NOBODY  # the training thread; `thread` is the same while the hooks are to count its batches
        self._inert = False
        self._lock = allocate_lock()
        self._patience = 0
        self._stepped = False
        self._streak = 0
        self._taken: ParkRequest | None = None  # what the training thread is doing, unless there is a newer request
        self._trainers: set[int] = set()
        self._trap = Trap(self._park_trapped)

    # ---- from the agent's thread ------------------------------------------------------------------------------------

    @property
    def parked(self) -> bool:
        """True while the training thread is parked, or in a hegm.released() block whose storages are away."""
        return self.lent or self._home in self._parked_locks

    @property
    def home(self) -> int:
        """Return the training thread; 0 while there is none."""
        return self._home

    @property
    def parked_threads(self) -> frozenset[int]:
        return frozenset(self._parked_locks)

    @property
    def training_thread(self) -> int:
        return self._home

    @property
    def trainers(self) -> frozenset[int]:
        """Return the threads that have stepped an optimizer: each has to be parked itself, being idle is not enough."""
        return frozenset(self._trainers)

    def ask(self, request: ParkRequest) -> None:
        """Request something of the training thread; an earlier request is forgotten."""
        with self._lock:
            if not self._inert:
                self.passed = self.declined = None
                self._request, self._taken = request, None
                self.requested = True

    def call_beside(self, call: Callable[[], None]) -> None:
        """Have the training thread call this at its next boundary, whatever else it is to do at which boundary.

        Only while something else is requested: an idle pass does not look at it.
        """
        self._beside = call

    def count_from(self, count: int) -> None:
        """Count on from that number: all ranks are parked at the boundary that has it."""
        with self._lock:
            self._count_at_step += count - self.count
            self.count = count

    def ask_on(self, request: ParkRequest) -> None:
        """Replace the request; a parked thread continues to the new one without a moment without a request."""
        with self._lock:
            if not self._inert:
                self.passed = self.declined = None
                self._request, self._taken = request, None
                self.requested = True
                self._open()

    def withdraw(self) -> bool:
        """Withdraw the request and release parked threads; True if the training thread was parked."""
        with self._lock:
            was_parked = self.parked
            self.requested = self.lent = False
            self._request = self._taken = None
            self._open()
        return was_parked

    def run_block(self) -> None:
        """Let the parked training thread run the body of its block. It counts as parked, and nothing stops others."""
        with self._lock:
            self.requested, self.lent = False, True
            self._request = self._taken = None
            self._open()

    def release_and_watch(self) -> None:
        """Release all threads, and set `passed` when the training thread reaches its next boundary."""
        with self._lock:
            self.passed = self._taken = None
            self.lent = False
            self._request = ParkRequest(WATCH)
            self.requested = True
            self._open()

    def stop_others(self) -> frozenset[int]:
        """Stop every other thread at its next instruction of the script. Returns those that are or will be stopped.

        Only while the training thread is parked: a thread that is stopped there may hold a lock that it needs.
        """
        return self._trap.set(frozenset(self._trainers | {self._home}))

    def release_other_threads(self) -> None:
        """Release all but the training threads, because code of the script will run in the agent's thread."""
        with self._lock:
            self._trap.lift()
            for ident in self._parked_locks.keys() - self._trainers - {self._home}:
                _unlock(self._parked_locks.pop(ident))

    def make_inert(self) -> None:
        """Disable the gate in a forked child. Another thread may have held the lock."""
        self._inert = True
        self._trap.lift()
        self.requested = self.lent = False
        self._request = self._beside = None
        self._lock = allocate_lock()
        self._parked_locks = {}
        self.on_change = _ignore
        self.on_signal = _ignore_signal

    def _open(self) -> None:
        self._trap.lift()
        self.parked_since = None
        doors, self._parked_locks = self._parked_locks, {}
        for door in doors.values():
            _unlock(door)

    # ---- from the script's threads ----------------------------------------------------------------------------------

    def at_boundary(self) -> None:
        """Do what is requested at a boundary of the training thread, or park it."""
        beside = self._beside
        if beside is not None:
            self._beside = None
            beside()
            self.on_change()
        request = self._request
        if request is None or self.count < request.at:
            return
        if request.what == PARK:
            if request.fits is None or request.fits():
                self._wait(request)
            return
        with self._lock:
            if self._request is not request:
                return
            self._request = None
            self._taken = request
            self.requested = False
        if request.call is not None:
            request.call()
        with self._lock:
            if self._taken is not request:  # too late: this is no answer to the newer request
                return
            self._taken = None
            self.passed = self.count
        self.on_change()

    def arrive_late(self) -> None:
        """Park the training thread at a place after the requested boundary."""
        request = self._request
        if self.requested and request is not None and request.what == PARK:
            self._wait(request)

    def batch_from_other_thread(self) -> None:
        """Handle a batch that another thread than the training thread asks for."""
        if self._by_hand or self._inert:
            return
        if _is_alive(self.thread):
            self._wait_for_park_request()
            return
        self._adopt(STEPS_WITHOUT_LOADER)
        self.count += 1
        if self.requested:
            self.at_boundary()

    def step(self) -> None:
        if not self._stepped:
            self._stepped = True
            self._trainers.add(self._home)
        if self._by_hand:
            return
        if self.count == self._count_at_step:
            self._streak += 1
        else:  # a loader was asked since the last step: it paces the training
            self._streak = 1
            self._patience = STEPS_WITHOUT_LOADER
        if self._streak > self._patience:
            self.count += 1
            if self.requested:
                self.at_boundary()
        self._count_at_step = self.count

    def other_thread_steps(self) -> None:
        if self._inert:
            return
        if self._by_hand or (self._stepped and _is_alive(self.thread)):
            self._trainers.add(get_ident())
            self._wait_for_park_request()
            return
        if not self._stepped:  # only read ahead so far, by a thread that does not train: its batches do not count
            self.count = 0
        self._adopt(0)
        self._count_at_step = self.count
        self.step()

    def explicit_boundary(self) -> None:
        """Handle a boundary that the script marks. From the first one on only those count."""
        if self._inert:
            return
        ident = get_ident()
        if not self._by_hand:
            self._by_hand = True
            self.thread = _NOBODY
            self._home = ident
        if self._home != ident and _is_alive(self._home):
            self._trainers.add(ident)
            self._wait_for_park_request()
            return
        self._home = ident
        self._trainers.add(ident)
        self.count += 1
        if self.requested:
            self.at_boundary()

    def pass_block(self) -> bool:
        """Handle the start or the end of a block, which is a boundary. Returns False for another thread."""
        ident = get_ident()
        if self._inert or (self._home != ident and _is_alive(self._home)):
            return False
        if self._home != ident:
            self._adopt(0)
            self.thread = _NOBODY if self._by_hand else ident
        self.count += 1
        if self.requested:
            self.at_boundary()
        return True

    def park_here(self, is_wanted: Callable[[], bool]) -> None:
        """Park the training thread here while `wanted()`; it counts as parked at any boundary that orders name.

        All ranks of a job come to the same block, so a raised count is raised in each of them.
        """
        while is_wanted():
            with self._lock:
                request = self._request if self.requested else None
                if request is None and is_wanted() and not self._inert:
                    request = self._request = ParkRequest(PARK)
                    self._taken = self.declined = None
                    self.requested = True
            if request is None or request.fits is not None:
                return
            if request.what == PARK:
                self._wait(request)
                if self.declined is not None:
                    return
            else:
                self.at_boundary()

    def _adopt(self, patience: int) -> None:
        with self._lock:
            self._trainers.discard(self._home)
            self.thread = self._home = get_ident()
            self._stepped = False
            self._streak = 0
            self._patience = patience

    def _wait_for_park_request(self) -> None:
        """Let another thread wait while the training thread is asked to park. It is not counted."""
        request = self._request
        if not self.requested or request is None or request.what != PARK:
            return
        if self.parked or (request.fits is None and self.count + 1 >= request.at):
            self._wait(request)

    def _park_trapped(self) -> None:
        """Park a thread that the trap has stopped."""
        request = self._request
        if self.parked and request is not None and request.what == PARK:
            self._wait(request)

    def _wait(self, request: ParkRequest) -> None:
        """Wait until the door is opened. Signals that would run the script's handlers meanwhile are held back.

        If they cannot be held back no thread is parked, and the training continues. But beside a parked training
        thread, whose storages may be offloaded, every thread has to be parked.
        """
        try:
            with HeldSignals(self.on_signal):
                raised = self._stay(request)
        except CannotHoldSignals as error:
            note(f"signals cannot be held back: {error}")
            raised = [] if self._decline(request, str(error)) else self._stay(request)
        if raised:
            raise raised.pop()

    def _decline(self, request: ParkRequest, why: str) -> bool:
        """Decline to park for this request. Returns False if it is too late to decline."""
        with self._lock:
            if self.parked:
                return False
            if self._request is request:
                self.declined = why
                self._request = None
                self.requested = False
        self.on_change()
        return True

    def _stay(self, request: ParkRequest) -> list[BaseException]:
        """Wait until the door is opened. Returns what was raised meanwhile: the last exception, or none.

        Other threads can raise in this one at any step (PyThreadState_SetAsyncExc). The script gets that only after the
        door is open: a thread that counts as parked stays.
        """
        door = allocate_lock()
        door.acquire()
        raised: list[BaseException] = []  # for the caller to take from it: the exception has this frame
        while True:
            try:
                if self._enter(request, door):
                    self.on_change()
                    note(f"parked at boundary {self.count}")
                    wait_at_lock(door)
                return raised
            except BaseException as error:  # noqa: BLE001 - the script's
                raised[:] = [error]

    def _enter(self, request: ParkRequest, door: object) -> bool:
        """Count this thread as parked, unless the request was withdrawn. Calling it again is fine."""
        with self._lock:
            if self._parked_locks.get(get_ident()) is not door:
                if self._request is not request:
                    return False
                self._parked_locks[get_ident()] = door
                if get_ident() == self._home:
                    self.count = max(self.count, request.at)  # larger only at a block, see `park_here`
                    self.parked_since = monotonic()
        return True


def wait_at_lock(door: Any) -> None:
    """Wait at the door. This is the last step of a parked thread: in this function it runs nothing of the script."""
    door.acquire()


def _unlock(door: Any) -> None:
    door.release()


def _is_alive(ident: int) -> bool:
    return ident in sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented all the same


def _ignore() -> None:
    pass


def _ignore_signal(_number: int) -> None:
    pass
