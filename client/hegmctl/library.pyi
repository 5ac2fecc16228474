# Written from the table of commands by `python3 -m tools.docs.hegmctl stub client/hegmctl/library.pyi`.

from collections.abc import Awaitable, Callable, Iterable, Mapping

from hegmctl.grammar.rows import Command
from hegmd.protocol import messages as m
from hegmd.protocol.operations import OperationProgress

def calls_of(rows: Iterable[Command]) -> dict[str, type[m.Request]]: ...
def parameters(kind: type[m.Request]) -> tuple[list[str], list[str]]: ...
def is_operation(kind: type[m.Request]) -> bool: ...
def waits(kind: type[m.Request]) -> bool: ...
def add_calls(sync: type, asynchronous: type, rows: Iterable[Command]) -> None: ...

class SyncCalls:
    def gpus(self) -> m.GpusReply: ...
    def processes(
        self, pids: int | str | Iterable[int | str] = ..., gpus: Iterable[str] = ..., *, ways: bool = ...
    ) -> m.ProcessesReply: ...
    def jobs(self, *, jobs: int | str | Iterable[int | str] = ..., all: bool = ...) -> m.JobsReply: ...
    def job(self, job: int | str) -> m.JobReply: ...
    def job_wait(self, job: int | str, *, on_progress: Callable[[m.Job], object] | None = None) -> m.JobReply: ...
    def recovery(self, *, jobs: int | str | Iterable[int | str] = ...) -> m.RecoveryReply: ...
    def drop_recovery(self, job: int | str) -> m.RecoveryDropped: ...
    def config(self) -> m.ConfigReply: ...
    def reload(self) -> m.ReloadReply: ...
    def metrics(self) -> m.MetricsReply: ...
    def ping(self) -> m.Pong: ...
    def simulate_hold(self, gpu: str, vram_bytes: int) -> m.HoldReply: ...
    def simulate_fault(self, target: str, fault: str) -> m.FaultReply: ...
    def migrate(
        self,
        pids: int | str | Iterable[int | str],
        to: str | None = ...,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        via: str | None = ...,
        allow_restart: bool = ...,
        set: Mapping[str, str] = ...,
        unset: Iterable[str] = ...,
        python: str | None = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def suspend(
        self,
        pids: int | str | Iterable[int | str],
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        spill: bool = ...,
        keep_context: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def quiesce(
        self,
        pids: int | str | Iterable[int | str],
        *,
        hold_s: float | None = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def handoff(
        self,
        pid: int | str,
        path: str,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def resume(
        self,
        pid: int | str,
        to: str | None = ...,
        *,
        queue: bool = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def drain(
        self,
        gpu: str,
        to: Iterable[str] = ...,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.Drained: ...
    def swap(
        self,
        first: int | str,
        second: int | str,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.Drained: ...
    def operations(self) -> m.OperationsReply: ...
    def story(self, id: str) -> m.StoryReply: ...
    def cancel(self, id: str, *, drop: bool = ...) -> m.OperationReply: ...
    def orphans(self) -> m.OrphansReply: ...
    def adopt(
        self,
        pid: int | str,
        to: str | None = ...,
        *,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def drop_orphan(self, name: str) -> m.Dropped: ...
    def make_room(
        self,
        size_bytes: int,
        *,
        gpu: str = ...,
        pid: int | None = ...,
        hold_s: float | None = ...,
        name: str | None = ...,
        priority: int | str | None = ...,
        until_free: bool = ...,
        limit_s: float | None = ...,
        keep_context: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[m.RoomProgress], object] | None = None,
    ) -> m.RoomReply: ...
    def release(self, lease: str) -> m.Released: ...
    def queue(self) -> m.QueueReply: ...
    def priority(self, job: int | str, priority: int | str) -> m.JobReply: ...
    def checkpoint(
        self,
        pid: int | str,
        path: str,
        *,
        leave_running: bool = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...
    def restore(
        self,
        path: str,
        to: str | None = ...,
        *,
        as_then: bool = ...,
        outlets: Mapping[str, int] | None = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], object] | None = None,
    ) -> m.OperationReply: ...

class AsyncCalls:
    async def gpus(self) -> m.GpusReply: ...
    async def processes(
        self, pids: int | str | Iterable[int | str] = ..., gpus: Iterable[str] = ..., *, ways: bool = ...
    ) -> m.ProcessesReply: ...
    async def jobs(self, *, jobs: int | str | Iterable[int | str] = ..., all: bool = ...) -> m.JobsReply: ...
    async def job(self, job: int | str) -> m.JobReply: ...
    async def job_wait(
        self, job: int | str, *, on_progress: Callable[[m.Job], Awaitable[object]] | None = None
    ) -> m.JobReply: ...
    async def recovery(self, *, jobs: int | str | Iterable[int | str] = ...) -> m.RecoveryReply: ...
    async def drop_recovery(self, job: int | str) -> m.RecoveryDropped: ...
    async def config(self) -> m.ConfigReply: ...
    async def reload(self) -> m.ReloadReply: ...
    async def metrics(self) -> m.MetricsReply: ...
    async def ping(self) -> m.Pong: ...
    async def simulate_hold(self, gpu: str, vram_bytes: int) -> m.HoldReply: ...
    async def simulate_fault(self, target: str, fault: str) -> m.FaultReply: ...
    async def migrate(
        self,
        pids: int | str | Iterable[int | str],
        to: str | None = ...,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        via: str | None = ...,
        allow_restart: bool = ...,
        set: Mapping[str, str] = ...,
        unset: Iterable[str] = ...,
        python: str | None = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def suspend(
        self,
        pids: int | str | Iterable[int | str],
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        spill: bool = ...,
        keep_context: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def quiesce(
        self,
        pids: int | str | Iterable[int | str],
        *,
        hold_s: float | None = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def handoff(
        self,
        pid: int | str,
        path: str,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def resume(
        self,
        pid: int | str,
        to: str | None = ...,
        *,
        queue: bool = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def drain(
        self,
        gpu: str,
        to: Iterable[str] = ...,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.Drained: ...
    async def swap(
        self,
        first: int | str,
        second: int | str,
        *,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.Drained: ...
    async def operations(self) -> m.OperationsReply: ...
    async def story(self, id: str) -> m.StoryReply: ...
    async def cancel(self, id: str, *, drop: bool = ...) -> m.OperationReply: ...
    async def orphans(self) -> m.OrphansReply: ...
    async def adopt(
        self,
        pid: int | str,
        to: str | None = ...,
        *,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def drop_orphan(self, name: str) -> m.Dropped: ...
    async def make_room(
        self,
        size_bytes: int,
        *,
        gpu: str = ...,
        pid: int | None = ...,
        hold_s: float | None = ...,
        name: str | None = ...,
        priority: int | str | None = ...,
        until_free: bool = ...,
        limit_s: float | None = ...,
        keep_context: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[m.RoomProgress], Awaitable[object]] | None = None,
    ) -> m.RoomReply: ...
    async def release(self, lease: str) -> m.Released: ...
    async def queue(self) -> m.QueueReply: ...
    async def priority(self, job: int | str, priority: int | str) -> m.JobReply: ...
    async def checkpoint(
        self,
        pid: int | str,
        path: str,
        *,
        leave_running: bool = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        carrier: str | None = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
    async def restore(
        self,
        path: str,
        to: str | None = ...,
        *,
        as_then: bool = ...,
        outlets: Mapping[str, int] | None = ...,
        limit_s: float | None = ...,
        wait: bool = ...,
        dry_run: bool = ...,
        on_progress: Callable[[OperationProgress], Awaitable[object]] | None = None,
    ) -> m.OperationReply: ...
