"""Moving jobs, in the asynchronous library face: the part of an AsyncConnection that asks for operations.

The same calls as in `moves`, with the same meaning. `on_progress` is awaited; cancelled, a call leaves its operation
going, and `cancel` is what turns one back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from hegmctl.moves import pids_of
from hegmd.protocol import messages as m
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record

R = TypeVar("R", bound=Record)
E = TypeVar("E", bound=Record)
OnProgress = Callable[[OperationProgress], Awaitable[object]] | None


class AsyncMoves:
    """What can be asked about operations. An AsyncConnection says how."""

    async def migrate(  # noqa: PLR0913 - what can be asked of a move, each named
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
    ) -> m.OperationReply:
        """Move jobs to another GPU and wait until they train on there; the words are those of `Moves.migrate`."""
        request = m.Migrate(
            pids=pids_of(pids),
            to=to,
            wait=wait,
            dry_run=dry_run,
            limit_s=limit_s,
            carrier=carrier,
            via=via,
            allow_restart=allow_restart,
        )
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def quiesce(
        self,
        pids: int | Iterable[int],
        *,
        hold_s: float | None = None,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> m.OperationReply:
        """Have jobs stand between two batches with all that they have, for at most `hold_s`. Resume lets them go on."""
        request = m.Quiesce(pids=pids_of(pids), hold_s=hold_s, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def suspend(
        self,
        pids: int | Iterable[int],
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        carrier: str | None = None,
    ) -> m.OperationReply:
        """Take jobs off their GPUs; their bytes are held until they are resumed."""
        request = m.Suspend(pids=pids_of(pids), wait=wait, dry_run=dry_run, limit_s=limit_s, carrier=carrier)
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def resume(
        self,
        pid: int,
        to: str | None = None,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> m.OperationReply:
        """Let a suspended job go on, where it was or on another GPU; after `limit_s` it is suspended again."""
        request = m.Resume(pid=pid, to=to, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def checkpoint(
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
    ) -> m.OperationReply:
        """Write a job into an image at that absolute path, then end it, or let it go on."""
        request = m.Checkpoint(
            pid=pid,
            path=path,
            leave_running=leave_running,
            wait=wait,
            dry_run=dry_run,
            limit_s=limit_s,
            carrier=carrier,
        )
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def handoff(
        self,
        pid: int,
        path: str,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> m.OperationReply:
        """Write a suspended job into an image at that absolute path, then end it."""
        request = m.Handoff(pid=pid, path=path, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress)

    async def restore(
        self,
        path: str,
        to: str | None = None,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
        outlets: Mapping[str, int] | None = None,
    ) -> m.OperationReply:
        """Bring a job back from the image at that absolute path, where it was or on another GPU.

        `outlets` are descriptors, which stay the caller's, for `stdout` and `stderr` of a job whose streams led out.
        """
        led = outlets or {}
        request = m.Restore(path=path, to=to, outlets=tuple(led), wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.OperationReply, on_progress, fds=tuple(led.values()))

    async def drain(
        self,
        gpu: str,
        to: Iterable[str] = (),
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> m.Drained:
        """Move everything off a GPU, one job after the other. Without `wait` all moves begin at once."""
        request = m.Drain(gpu=gpu, to=tuple(to), wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.Drained, on_progress)

    async def swap(
        self,
        first: int,
        second: int,
        *,
        on_progress: OnProgress = None,
        wait: bool = True,
        dry_run: bool = False,
        limit_s: float | None = None,
    ) -> m.Drained:
        """Let two jobs change places. Once begun it is carried out to its end, whoever leaves."""
        request = m.Swap(first=first, second=second, wait=wait, dry_run=dry_run, limit_s=limit_s)
        return await self.converse(request, OperationProgress, m.Drained, on_progress)

    async def operations(self) -> m.OperationsReply:
        """The operations: those under way, the suspended, and the last ones that are over."""
        return await self.call(m.Operations(), m.OperationsReply)

    async def story(self, op_id: str) -> m.StoryReply:
        """One operation as it stands, and its story."""
        return await self.call(m.Story(id=op_id), m.StoryReply)

    def follow(self, op_id: str) -> AsyncGenerator[OperationProgress, None]:
        """How an operation comes on, until it is at rest; `story` tells how it ended."""
        return self.stream(m.Story(id=op_id, follow=True), OperationProgress)

    async def cancel(self, op_id: str, *, drop: bool = False) -> m.OperationReply:
        """Have an operation turned back. Raises REFUSED where going on is shorter than going back.

        With `drop`, give up for good the state that it holds for a process that is gone.
        """
        return await self.call(m.CancelOperation(id=op_id, drop=drop), m.OperationReply)

    # What an AsyncConnection is to have.

    async def call(self, request: m.Request, reply: type[R]) -> R:
        """The answer to a request."""
        raise NotImplementedError

    def stream(self, request: m.Request, event: type[E]) -> AsyncGenerator[E, None]:
        """The events of a request."""
        raise NotImplementedError

    async def converse(
        self,
        request: m.Request,
        event: type[E],
        reply: type[R],
        on_event: Callable[[E], Awaitable[object]] | None,
        *,
        fds: Sequence[int] = (),
    ) -> R:
        """The answer to a request, with its events handed to `on_event` as they come."""
        raise NotImplementedError
