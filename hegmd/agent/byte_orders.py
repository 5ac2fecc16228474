"""Orders about what a parked process holds: its bytes and its communicator groups.

Each order is done at once: the training thread is parked and nothing else is pending, which `order_state` checks. Only
a step of the communicators runs in a thread of its own, so that bytes can move meanwhile. Checks what an order needs
and reports its result; `storage_transfer` moves the bytes.
"""

from __future__ import annotations

from ..errors import HegmError
from ..protocol.agents import unpacked_spans
from . import departing
from .answers import counted
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..protocol.messages import Order
    from .answers import ReportSender
    from .group_step import Step
    from .order_state import OrderState


class ByteOrders:
    """Obeys those orders."""

    def __init__(self, state: OrderState, answers: ReportSender) -> None:
        self._state = state
        self._carrying = state.carrying
        self._answers = answers
        #: The step of its communicators that is under way, and the order that it answers.
        self._stepping: tuple[int, Step] | None = None

    def table(self) -> dict[str, Callable[[Order, int | None], None]]:
        return {
            "offload": self._offload,
            "entrust": self._entrust,
            "reload": self._reload,
            "export": self._export,
            "free": self._free,
            "make": self._make,
            "copy": self._copy,
            "filled": self._filled,
            "part": self._part,
            "save": self._save,
            "disconnect": self._disconnect,
            "reconnect": self._reconnect,
        }

    def _offload(self, order: Order, fd: int | None) -> None:
        found = self._state.storages_while_parked("offload")
        storages = self._carrying.offload(fd, found, self._progress_of(order))
        size_bytes = self._carrying.held_bytes
        self._answers.done(order.order, storages=storages, size_bytes=size_bytes, left_alone=counted(found))

    def _entrust(self, order: Order, _fd: int | None) -> None:
        """Close the descriptor: the daemon has the bytes elsewhere, and can free their memory."""
        self._carrying.entrust()
        self._state.is_suspended = True
        self._answers.done(order.order)

    def _reload(self, order: Order, fd: int | None) -> None:
        offloaded = self._carrying.reload(fd, self._progress_of(order))
        counts = {"storages": len(offloaded), "size_bytes": offloaded.size_bytes}
        self._answers.done(order.order, **counts, short_bytes=offloaded.short_bytes)

    def _export(self, order: Order, _fd: int | None) -> None:
        found = self._state.storages_while_parked("export")
        self._answers.view(order, *self._carrying.show(found, partly=order.partly))

    def _free(self, order: Order, _fd: int | None) -> None:
        self._state.require_parked("free")
        shown = self._carrying.shown("free")
        shown.free()
        spent_ms = shown.laps.spent_ms
        self._answers.done(order.order, storages=len(shown), size_bytes=shown.size_bytes, spent_ms=spent_ms)
        self._carrying.note_left()  # after the answer: the job is parked, and the daemon can go ahead

    def _make(self, order: Order, _fd: int | None) -> None:
        self._state.require_parked("make")
        shown = self._carrying.shown("make")
        self._answers.view(order, shown, shown.make(order.size_bytes, partly=order.partly))

    def _copy(self, order: Order, fd: int | None) -> None:
        """Copy storages that the daemon cannot open."""
        self._state.require_parked("copy")
        if fd is None:
            raise refusal("the order has no descriptor", "send the memory to copy to or from with it")
        spans = unpacked_spans(order.spans or b"")
        progress = self._progress_of(order)
        self._carrying.shown("copy").copy(order.direction or "", fd, spans, progress)
        self._answers.done(order.order, size_bytes=sum(size_bytes for _, _, size_bytes, _ in spans))

    def _filled(self, order: Order, _fd: int | None) -> None:
        self._state.require_parked("filled")
        shown = self._carrying.shown("filled")
        shown.fill(order.first or 0, len(shown) if order.count is None else order.count)
        self._answers.done(order.order, held_bytes=self._carrying.held_bytes)

    def _part(self, order: Order, _fd: int | None) -> None:
        """Remove peer access between its GPUs until the training thread continues."""
        self._state.require_parked("part")
        self._carrying.part()
        self._answers.done(order.order)

    def _save(self, order: Order, fd: int | None) -> None:
        self._state.storages_while_parked("save")  # no thread uses the storages to save
        if fd is None:
            raise refusal("the order has no memory", "send a descriptor with it")
        self._state.gate.release_other_threads()  # one of them may have a lock that the script's own code needs here
        size_bytes = departing.save(fd, self._answers.progress_of(order.order))
        self._answers.done(order.order, size_bytes=size_bytes)

    def _disconnect(self, order: Order, _fd: int | None) -> None:
        """Begin to take its communicator groups down, together with the other ranks."""
        self._state.require_parked("disconnect")
        found = self._state.found  # of this park: what was alive then still is
        alive = None if found is None else found.others
        step = self._state.groups.begin_disconnect(order.limit_s, self._wake, abort=order.abort, alive=alive)
        self._begin(order, step)

    def _reconnect(self, order: Order, _fd: int | None) -> None:
        """Begin to bring them up again, together with the other ranks; also after a disconnect that failed."""
        self._state.require_parked("reconnect")
        self._begin(order, self._state.groups.begin_reconnect(order.generation, order.limit_s, self._wake))

    def _progress_of(self, order: Order) -> Callable[[int], None]:
        """Return a function that reports progress, and answers a step of the communicators that has ended meanwhile."""
        tell = self._answers.progress_of(order.order)

        def progress(so_far_bytes: int) -> None:
            tell(so_far_bytes)
            self.tick()

        return progress

    def _wake(self) -> None:
        self._state.gate.on_change()

    # ---- a step of its communicators; bytes can move meanwhile ----------------------------------------------------

    def _begin(self, order: Order, step: Step) -> None:
        self.finish()  # answers an earlier order whose step has ended
        self._stepping = order.order, step
        self.tick()

    def next_deadline(self) -> float | None:
        """Return when `tick` has to be called at the latest."""
        return None if self._stepping is None else self._stepping[1].is_due

    def tick(self) -> None:
        """Answer the step that is over."""
        if self._stepping is not None and self._stepping[1].is_over:
            self.finish()

    def finish(self) -> None:
        """Wait for the step, at most until its limit, and answer it."""
        if self._stepping is None:
            return
        (order, step), self._stepping = self._stepping, None
        try:
            self._answers.done(order, communicators=step.result())
        except HegmError as error:
            self._answers.failed(order, error)
