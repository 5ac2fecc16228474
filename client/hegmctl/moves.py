"""Moving jobs, in the synchronous library face: the part of a Connection that asks for operations.

Owns the requests and what each is answered with. A call waits until its operation has ended, unless it is told not to;
`on_progress` hears of every step meanwhile. The operation belongs to the daemon: who leaves early leaves it going. One
that was turned back is an answer too, whose `failure` says why; a refusal before anything began is a HegmError.
"""

from __future__ import annotations

from hegmd.protocol.messages import (
    CancelOperation,
    Checkpoint,
    Drain,
    Drained,
    Handoff,
    Migrate,
    OperationReply,
    Operations,
    OperationsReply,
    Quiesce,
    Request,
    Restore,
    Resume,
    Story,
    StoryReply,
    Suspend,
    Swap,
)
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from typing import TypeVar

    OnProgress = Callable[[OperationProgress], object] | None
    R = TypeVar("R", bound=Record)
    E = TypeVar("E", bound=Record)


class Moves:
    """What can be asked about operations. A Connection says how."""

    def migrate(  # noqa: PLR0913 - what can be asked of a move, each named
        self,
        pids: int | Iterable[int],
        to: str | None,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        carrier: str | None = None,
        via: str | None = None,
        allow_restart: bool = False,
    ) -> OperationReply:
        """Move jobs to another GPU and wait until they train on there. `limit_s` is for the wait for a boundary.

        With `via` of restart, or where that is allowed and nothing better is possible, they leave and are started
        again there; what else is to be different for them is a Migrate of one's own.
        """
        request = Migrate(
            pids=pids_of(pids),
            to=to,
            wait=wait,
            dry_run=dry_run,
            limit_s=limit_s,
            carrier=carrier,
            via=via,
            allow_restart=allow_restart,
        )
        return self._watch(request, OperationReply, on_progress)

    def quiesce(
        self,
        pids: int | Iterable[int],
        *,
        hold_s: float | None = None,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> OperationReply:
        """Have jobs stand between two batches with all that they have, for at most `hold_s`. Resume lets them go on."""
        request = Quiesce(pids=pids_of(pids), hold_s=hold_s, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, OperationReply, on_progress)

    def suspend(
        self,
        pids: int | Iterable[int],
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        carrier: str | None = None,
    ) -> OperationReply:
        """Take jobs off their GPUs; their bytes are held until they are resumed."""
        request = Suspend(pids=pids_of(pids), wait=wait, dry_run=dry_run, limit_s=limit_s, carrier=carrier)
        return self._watch(request, OperationReply, on_progress)

    def resume(
        self,
        pid: int,
        to: str | None = None,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> OperationReply:
        """Let a suspended job go on, where it was or on another GPU; after `limit_s` it is suspended again."""
        request = Resume(pid=pid, to=to, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, OperationReply, on_progress)

    def checkpoint(
        self,
        pid: int,
        path: str,
        *,
        leave_running: bool = False,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        carrier: str | None = None,
    ) -> OperationReply:
        """Write a job into an image at that absolute path, then end it, or let it go on."""
        request = Checkpoint(
            pid=pid,
            path=path,
            leave_running=leave_running,
            wait=wait,
            dry_run=dry_run,
            limit_s=limit_s,
            carrier=carrier,
        )
        return self._watch(request, OperationReply, on_progress)

    def handoff(
        self,
        pid: int,
        path: str,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> OperationReply:
        """Write a suspended job into an image at that absolute path, then end it."""
        request = Handoff(pid=pid, path=path, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, OperationReply, on_progress)

    def restore(
        self,
        path: str,
        to: str | None = None,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        outlets: Mapping[str, int] | None = None,
    ) -> OperationReply:
        """Bring a job back from the image at that absolute path, where it was or on another GPU.

        `outlets` are descriptors, which stay the caller's, for `stdout` and `stderr` of a job whose streams led out.
        """
        led = outlets or {}
        request = Restore(path=path, to=to, outlets=tuple(led), wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, OperationReply, on_progress, tuple(led.values()))

    def drain(
        self,
        gpu: str,
        to: Iterable[str] = (),
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> Drained:
        """Move everything off a GPU, one job after the other. Without `wait` all moves begin at once."""
        request = Drain(gpu=gpu, to=tuple(to), wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, Drained, on_progress)

    def swap(
        self,
        first: int,
        second: int,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> Drained:
        """Let two jobs change places. Once begun it is carried out to its end, whoever leaves."""
        request = Swap(first=first, second=second, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return self._watch(request, Drained, on_progress)

    def operations(self) -> OperationsReply:
        """The operations: those under way, the suspended, and the last ones that are over."""
        return self.call(Operations(), OperationsReply)

    def story(self, op_id: str) -> StoryReply:
        """One operation as it stands, and its story."""
        return self.call(Story(id=op_id), StoryReply)

    def follow(self, op_id: str) -> Generator[OperationProgress, None, StoryReply]:
        """How an operation comes on, until it is at rest; its story is what the generator returns."""
        return self.stream(Story(id=op_id, follow=True), OperationProgress, StoryReply, patient=True)

    def cancel(self, op_id: str, *, drop: bool = False) -> OperationReply:
        """Have an operation turned back. Raises REFUSED where going on is shorter than going back.

        With `drop`, give up for good the state that it holds for a process that is gone.
        """
        return self.call(CancelOperation(id=op_id, drop=drop), OperationReply)

    def _watch(self, request: Request, reply: type[R], on_progress: OnProgress, fds: Sequence[int] = ()) -> R:
        progress = self.stream(request, OperationProgress, reply, fds=fds, patient=True)
        while True:
            try:
                told = next(progress)
            except StopIteration as end:
                answer: R = end.value
                return answer
            if on_progress is not None:
                on_progress(told)

    # What a Connection is to have.

    def call(self, request: Request, reply: type[R]) -> R:
        """The answer to a request."""
        raise NotImplementedError

    def stream(
        self, request: Request, event: type[E], reply: type[R], *, fds: Sequence[int] = (), patient: bool = False
    ) -> Generator[E, None, R]:
        """The events of a request, then its answer."""
        raise NotImplementedError


def pids_of(pids: int | Iterable[int]) -> tuple[int, ...]:
    """One process or several, as requests have them."""
    return (pids,) if isinstance(pids, int) else tuple(pids)
