"""Snapshots: the state of the training is written into a slot of the host pool while the training goes on.

One order does all of it in the agent's thread: the training thread is parked at a boundary from which a new process
could continue, its state is written, the record of the slot is set, and the thread is released. So no other order comes
in between, and a daemon that ends meanwhile leaves no parked training. Owns the descriptor of the slot while the order
waits for its boundary, and the number of the step, which counts on in a process that was started from a snapshot.
"""

from __future__ import annotations

import os
from time import monotonic, time

from ..errors import HegmError
from ..protocol.slots import RECORD_BYTES, SlotRecord, packed
from . import copying, departing
from .other_threads import Attempts
from .quiesce import PARK, Asked
from .refusals import DEBUG_HINT, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..protocol.messages import Order
    from .answers import Answers
    from .order_state import Pending, Standing

SNAPSHOT = "snapshot"
# Orders that may come while a snapshot waits for its boundary. Any other one comes first.
BESIDE = frozenset((SNAPSHOT, "count", "stacks"))
_NONE = -1


class Snapshots:
    """Takes them. Runs in the agent's thread only."""

    def __init__(self, standing: Standing, answers: Answers) -> None:
        self._standing = standing
        self._answers = answers
        self._slot = _NONE
        self._order: Order | None = None
        #: The step of boundary 0 of this process.
        self._first_step = 0

    def note_restored(self, step: int | None, boundary: int) -> None:
        """The state of that step is restored in this process, at that boundary of its own. From the training thread."""
        if step is not None:
            self._first_step = step - boundary

    def attempts_for(self, order: Order) -> Attempts:
        """Return the attempts to park for the order. Raises HegmError where the training is not to be touched now."""
        gate = self._standing.gate
        self._standing.require_all_here("reload it first")
        if gate.parked:
            raise refusal("its training thread is parked for an operation", "wait until that is over")
        return Attempts(gate, Asked(PARK, at=order.at or 0, fits=departing.fits_of(gate)), order.max_park_s)

    def begin(self, order: Order, fd: int | None) -> None:
        """Keep the slot until the training is parked. The descriptor stays the caller's. Raises OSError."""
        self.close()
        self._order = order
        self._slot = _NONE if fd is None else os.dup(fd)

    def write(self, pending: Pending, attempts: Attempts) -> None:
        """Write the state of the training, which is parked, answer the order, and let the training go on."""
        order, gate = self._order, self._standing.gate
        try:
            gate.let_others_go()  # one of them may have a lock that the script's own code needs here
            size_bytes, anew = self._write(0 if order is None else order.generation or 0)
        except HegmError as error:
            self._let_go()
            self._answers.failed(pending.order, error, parked_s=attempts.parked_s)
        except Exception as error:  # noqa: BLE001 - the edge: whatever fails in here, the training goes on
            self._let_go()
            why = refusal(f"its state was not written: {error!r}", DEBUG_HINT)
            self._answers.failed(pending.order, why, parked_s=attempts.parked_s)
        else:
            parked_s, boundary = attempts.parked_s, gate.count
            self._let_go()
            told = {"size_bytes": size_bytes, "parked_s": parked_s, "boundary": boundary, "begin_anew": anew}
            self._answers.done(pending.order, **told)

    def _write(self, generation: int) -> tuple[int, tuple[str, ...]]:
        began, slot = monotonic(), self._slot
        end = 0 if slot == _NONE else os.fstat(slot).st_size - RECORD_BYTES
        if end <= 0:
            return departing.snapshot(None, 0, _nothing)

        def clear() -> None:
            """From here on the slot has no whole snapshot until its record is set again."""
            copying.write_small(slot, end, bytes(RECORD_BYTES))

        size_bytes, anew = departing.snapshot(slot, end, clear)
        rank, ranks = _number("RANK", 0), _number("WORLD_SIZE", 1)
        record = SlotRecord(
            generation=generation,
            step=max(0, self._first_step + self._standing.gate.count),
            rank=rank,
            ranks=ranks,
            size_bytes=size_bytes,
            taken_utc=time(),
            took_s=monotonic() - began,
        )
        copying.write_small(slot, end, packed(record))
        return size_bytes, anew

    def _let_go(self) -> None:
        self.close()
        self._standing.let_go()

    def close(self) -> None:
        """Let go of the slot. Closing twice is fine."""
        slot, self._slot, self._order = self._slot, _NONE, None
        if slot != _NONE:
            os.close(slot)


def _nothing() -> None:
    pass


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else default
