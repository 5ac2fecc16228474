"""Snapshots: writes the state of the training into a slot of the host pool while the training continues.

One order does all of it: the training thread is parked at a boundary from which a new process could continue, its state
is written, and the thread is released. A GPU makes a shadow of as much of its part of the state as it has memory for.
Then the thread is released as soon as the shadow exists and the rest is written, and another thread copies the shadow
to the slot. The record of the slot is set last. So no other order runs in between, and a daemon that ends meanwhile
leaves no parked training. An order that changes something stops the copying, and the shadow is freed before it runs.

An order to park, such as for an image, may have a slot too. The state is then written before that order is answered,
and the training stays parked. So no other order is obeyed until the slot is whole, or has no snapshot.

Owns the descriptor of the slot until the order is answered, and the number of the step, which continues to count in a
process that was started from a snapshot.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, start_new_thread
from time import monotonic, time

from ..errors import HegmError
from ..protocol.slots import RECORD_BYTES, SlotRecord, packed
from . import copying, departing
from .notes import note
from .other_threads import Attempts
from .quiesce import PARK, ParkRequest
from .refusals import DEBUG_HINT, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol.messages import Order
    from .answers import ReportSender
    from .order_state import OrderState, Pending
    from .state.storage.state_file import UnwrittenRest

    Save = Callable[[int | None, int, Callable[[], object]], tuple[int, tuple[str, ...], UnwrittenRest | None]]

SNAPSHOT = "snapshot"
# Orders that may come while a snapshot waits for its boundary. Any other one comes first.
BESIDE = frozenset((SNAPSHOT, "count", "stacks", "survey"))
# Orders that may run while a shadow is copied.
BESIDE_FETCHING = BESIDE - {SNAPSHOT} | {"weigh", "beforehand"}
_EFBIG = 27  # beyond the process's limit on the size of files
_NONE = -1
_LOOK_S = 0.01


class SnapshotFetch:
    """The rest of a snapshot whose training has continued. Owns the slot, and a thread until `ended` is set."""

    def __init__(self, slot: int, end: int, rest: UnwrittenRest, record: SlotRecord) -> None:
        self._slot, self._end, self._rest, self._record = slot, end, rest, record
        self._is_over = False
        self._began = monotonic()
        self.took_s = 0.0
        self._errors: list[Exception] = []
        #: The order that expects an answer, and the answer.
        self.order: int | None = None
        self.facts: dict[str, object] = {}
        self._ended = allocate_lock()
        self._ended.acquire()

    def start(self) -> None:
        try:
            start_new_thread(self._live, ())
        except RuntimeError:
            self._live()

    def _live(self) -> None:
        try:
            self._rest.write(self._slot, lambda: self._is_over)
            copying.write_small(self._slot, self._end, packed(self._record))
        except BaseException as error:  # noqa: BLE001 - the agent's thread reports it
            self._errors.append(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        finally:
            self.took_s = monotonic() - self._began
            self._ended.release()

    def write_now(self) -> None:
        """Write it before anything else is done. Raises what prevents that."""
        self.start()
        with self._ended:
            pass
        self.close()
        if self._errors:
            raise self._errors.pop()

    def taken_error(self) -> Exception | None:
        """Return why it failed, and forget that: the traceback refers to frames that refer to this object."""
        return self._errors.pop() if self._errors else None

    def is_done(self) -> bool:
        if not self._ended.acquire(blocking=False):
            return False
        self._ended.release()
        return True

    def end(self) -> None:
        """End it, if it has not ended. A slot that was not written to its end has no record."""
        self._is_over = True
        with self._ended:
            pass

    def close(self) -> None:
        """Once it has ended: release the slot."""
        os.close(self._slot)

    def close_in_child(self) -> None:
        """A forked child has not the thread, and no business with the slot."""
        try:
            os.close(self._slot)
        except OSError:
            pass


def _unwritten(error: Exception) -> HegmError:
    """Return the answer for a state that could not be written."""
    if not isinstance(error, OSError) or error.errno != _EFBIG:
        return refusal(f"its state was not written: {error!r}", DEBUG_HINT)
    why, hint = "its state is larger than the files that it may write", "raise the limit: ulimit -f unlimited"
    refused = refusal(why, hint)
    refused.facts["refusals"] = [f"{why}; {hint}"]  # the next attempt would fail as well
    return refused


class Snapshots:
    """Takes them. Runs in the agent's thread only."""

    def __init__(self, state: OrderState, answers: ReportSender) -> None:
        self._state = state
        self._answers = answers
        self._slot = _NONE
        self._order: Order | None = None
        self._fetching: SnapshotFetch | None = None
        #: Writes the state of the parked training.
        self.save: Save = departing.snapshot
        #: The step of boundary 0 of this process.
        self._first_step = 0

    def note_restored(self, step: int | None, boundary: int) -> None:
        """Record that the state of that step is restored here, at this own boundary. In the training thread."""
        if step is not None:
            self._first_step = step - boundary

    def attempts_for(self, order: Order) -> Attempts:
        """Return the attempts to park for the order. Raises HegmError where the training is not to be touched now."""
        gate = self._state.gate
        self._state.require_all_here("reload it first")
        if gate.parked:
            raise refusal("its training thread is parked for an operation", "wait until that is over")
        return Attempts(gate, ParkRequest(PARK, at=order.at or 0, fits=departing.fits_of(gate)), order.max_park_s)

    def begin(self, order: Order, fd: int | None) -> None:
        """Keep the slot until the training is parked. The descriptor stays the caller's. Raises OSError."""
        self.close()
        self._order = order
        self._slot = _NONE if fd is None else os.dup(fd)

    def write(self, pending: Pending, attempts: Attempts) -> None:
        """Write the state of the parked training and release it. Answer now, or later if a shadow is copied."""
        order, gate = self._order, self._state.gate
        try:
            gate.release_other_threads()  # one of them may have a lock that the script's own code needs here
            size_bytes, anew, rest = self._write(0 if order is None else order.generation or 0)
        except HegmError as error:
            self._end_snapshot()
            self._answers.failed(pending.order, error, parked_s=attempts.parked_s)
        except Exception as error:  # noqa: BLE001 - the edge: whatever fails in here, the training continues
            self._end_snapshot()
            self._answers.failed(pending.order, _unwritten(error), parked_s=attempts.parked_s)
        else:
            facts: dict[str, object] = {"size_bytes": size_bytes, "parked_s": attempts.parked_s}
            facts |= {"boundary": gate.count, "begin_anew": anew}
            self._end_snapshot()
            if rest is None:
                self._answers.done(pending.order, **facts)
            else:
                self.fetch(rest, pending.order, facts)

    def write_beside_park(self) -> float:
        """Write the state of a training that stays parked for an operation, if there is a slot for it; how long that
        took. Without a snapshot the operation continues all the same.
        """
        order, began = self._order, monotonic()
        if order is None or self._slot == _NONE:
            return 0.0
        try:
            self._state.gate.release_other_threads()  # one may have a lock that code of the script needs
            _, _, rest = self._write(order.generation or 0)
            if rest is not None:
                rest.write_now()
        except Exception as error:  # noqa: BLE001 - the edge: the operation does not depend on it
            note(f"no snapshot beside order {order.order}: {error!r}")
        self.close()
        return monotonic() - began

    def _write(self, generation: int) -> tuple[int, tuple[str, ...], SnapshotFetch | None]:
        began, slot = monotonic(), self._slot
        end = 0 if slot == _NONE else os.fstat(slot).st_size - RECORD_BYTES
        if end <= 0:
            size_bytes, anew, _rest = self.save(None, 0, _nothing)
            return size_bytes, anew, None

        def clear() -> None:
            """From here on the slot has no complete snapshot until its record is set again."""
            copying.write_small(slot, end, bytes(RECORD_BYTES))

        size_bytes, anew, rest = self.save(slot, end, clear)
        rank, ranks = _number("RANK", 0), _number("WORLD_SIZE", 1)
        record = SlotRecord(
            generation=generation,
            step=max(0, self._first_step + self._state.gate.count),
            rank=rank,
            ranks=ranks,
            size_bytes=size_bytes,
            taken_utc=time(),
            took_s=monotonic() - began,
        )
        if rest is not None:
            self._slot = _NONE  # the copying thread owns it now
            return size_bytes, anew, SnapshotFetch(slot, end, rest, record)
        copying.write_small(slot, end, packed(record))
        return size_bytes, anew, None

    # ---- copies while the training continues -------------------------------------------------------------------------

    def fetch(self, rest: SnapshotFetch, order: int, facts: dict[str, object]) -> None:
        """Begin to write the rest, and answer the order with this and the time that it took."""
        rest.order, rest.facts, self._fetching = order, facts, rest
        rest.start()

    def next_deadline(self) -> float | None:
        return None if self._fetching is None else monotonic() + _LOOK_S

    def tick(self) -> None:
        """Answer the order of a finished copy."""
        if self._fetching is not None and self._fetching.is_done():
            self._answer("")

    def end_fetching(self, why: str) -> None:
        """Stop the copying, if it runs, and free its memory."""
        if self._fetching is not None:
            self._fetching.end()
            self._answer(why)

    def leave_unanswered(self) -> None:
        """Continue without answering: the daemon that sent the order has disconnected."""
        if self._fetching is not None:
            self._fetching.order = None

    def _answer(self, why: str) -> None:
        fetched, self._fetching = self._fetching, None
        if fetched is None:
            return
        fetched.close()
        error = fetched.taken_error()
        if error is not None:
            note(f"snapshot: not fetched: {error!r}")
        if fetched.order is None:
            return
        if error is None:
            self._answers.done(fetched.order, **fetched.facts, copied_s=fetched.took_s)
            return
        if not isinstance(error, HegmError):
            error = refusal(why, "it is taken at a later boundary") if why else _unwritten(error)
        self._answers.failed(fetched.order, error)

    def close_in_child(self) -> None:
        """Close what a forked child inherited: a loader's worker would keep the slot's memory as long as it lives."""
        if self._fetching is not None:
            self._fetching.close_in_child()
        self.close()

    def _end_snapshot(self) -> None:
        self.close()
        self._state.resume_training()

    def close(self) -> None:
        """Release the slot. Closing twice is fine."""
        slot, self._slot, self._order = self._slot, _NONE, None
        if slot != _NONE:
            os.close(slot)


def _nothing() -> None:
    pass


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
