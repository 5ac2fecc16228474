"""The node's GPUs and the processes on them, as of a moment ago.

Owns the snapshot that answers all requests, and its refresh. Must not block the loop, must not exceed the query
deadline for any caller, and one vendor's trouble must not affect another's. `vendors` calls the libraries, `register`
names GPUs, `rolls` reads processes, `changes` reports events; this module combines them.

A refresh is shared: callers that come while one runs get its result. Any of them can be cancelled. If that hits the
leader, the next one takes over and finds the calls to the libraries still running.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

import anyio
from anyio.abc import TaskStatus

from hegmd.node.inventory.changes import Changes
from hegmd.node.inventory.register import GpuRegister
from hegmd.node.inventory.rolls import ProcessListWatch
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes.roll import ProcessListBuilder, ProcessListInputs
from hegmd.node.processes.table import ProcessTable
from hegmd.protocol.snapshots import AgentInfo, Gpu, GpuProcess, Vendor
from hegmd.telemetry.events import EventLog

if TYPE_CHECKING:
    from typing_extensions import Self

# The libraries' share of the deadline; the rest is for reading processes.
VENDORS_SHARE = 0.75
# Number of repeated snapshots if something changed during one.
MORE_LOOKS = 4

# The pids of the simulated library come from the kernel's credentials of a connection, in our namespace. Drivers may
# count in another one. Measured with NVIDIA 580.159.04: NVML translates to the caller's namespace and omits processes
# outside it. KFD reports pids of the first namespace to every caller.
COUNTS_IN_OUR_NAMESPACE = frozenset({"simulated"})


class NodeSnapshot(NamedTuple):
    """GPUs, processes and vendors of the node at one moment; `monotonic` is its start."""

    taken_utc: float
    gpus: tuple[Gpu, ...]
    processes: tuple[GpuProcess, ...]
    vendors: tuple[Vendor, ...]
    monotonic: float


class _Refresh:
    """A refresh and its callers. Ends without a snapshot if its leader was cancelled."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.snapshot: NodeSnapshot | None = None


class Inventory:
    """Maintains the node's inventory. Belongs to the event loop; use as an asynchronous context manager.

    The libraries of `vendors` may have been called already; the first refresh waits for those that are still busy.
    `agents` and `held` return the connected agents and the bytes that hegmd keeps, by pid. `on_look` gets each
    snapshot's duration. `off` are vendors that the configuration disables.
    """

    def __init__(  # noqa: PLR0913 - the parts that it is made of, each named, put together in one place only
        self,
        vendors: Sequence[VendorWatch],
        *,
        query_deadline_s: float,
        events: EventLog,
        table: ProcessTable,
        agents: Callable[[], Mapping[int, AgentInfo]] = dict,
        held: Callable[[], Mapping[int, int]] = dict,
        off: Sequence[str] = (),
        on_look: Callable[[NodeSnapshot, float], object] = lambda _snapshot, _took_s: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._vendors = tuple(vendors)
        self._query_deadline_s = query_deadline_s
        self._changes = Changes(events)
        self._table = table
        self._rolls = ProcessListWatch(ProcessListBuilder(table), monotonic=monotonic)
        self._register = GpuRegister()
        self._agents = agents
        self._held = held
        self._off = tuple(Vendor(vendor=name, state="off", message="switched off by configuration") for name in off)
        self._on_look = on_look
        self._monotonic = monotonic
        self._round: _Refresh | None = None
        self._rhythm_changed = anyio.Event()
        self._refresh_s = 0.0
        # How many changes were announced by `expire`, and how many of them the newest snapshot was made after.
        self._changes_known = 0
        self._changes_covered = 0
        #: The newest snapshot; None before the first.
        self.latest: NodeSnapshot | None = None
        #: How many refreshes were finished, and how long the last one took.
        self.refresh_count = 0
        self.last_refresh_s: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ---- asking -----------------------------------------------------------------------------------------------------

    async def fresh(self, max_age_s: float) -> NodeSnapshot:
        """Return a snapshot of at most that age, as far as the libraries answer within the query deadline."""
        latest = self.latest
        known = self._changes_known
        if latest is not None and self._changes_covered >= known and self._monotonic() - latest.monotonic <= max_age_s:
            return latest
        latest = await self.refresh()
        # The running round may have begun before the change that the caller knows of.
        return await self.refresh() if self._changes_covered < known else latest

    async def settled(self, max_age_s: float = 0.0) -> NodeSnapshot:
        """Return a snapshot of at most that age without announced changes since it began.

        If changes do not end, it is the last of several.
        """
        latest = await self.fresh(max_age_s)
        for _ in range(MORE_LOOKS):
            if self._changes_covered >= self._changes_known:
                break
            latest = await self.refresh()
        return latest

    def expire(self) -> None:
        """Announce a change: later callers get a snapshot that includes it."""
        self._changes_known += 1

    async def refresh(self) -> NodeSnapshot:
        """Return a snapshot that was not finished when this was called. Takes at most the query deadline."""
        while (under_way := self._round) is not None:
            await under_way.over.wait()
            if under_way.snapshot is not None:
                return under_way.snapshot
        self._round = mine = _Refresh()
        try:
            mine.snapshot = await self._look()
        finally:
            self._round = None
            mine.over.set()
        return mine.snapshot

    # ---- keeping up -------------------------------------------------------------------------------------------------

    async def run(self, refresh_s: float, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the snapshot no older than that, until cancelled. Started once there is a first snapshot."""
        self._refresh_s = refresh_s
        latest = await self.refresh()
        task_status.started()
        while True:
            due_in_s = latest.monotonic + self._refresh_s - self._monotonic()
            if due_in_s > 0:
                with anyio.move_on_after(due_in_s):
                    await self._rhythm_changed.wait()
                latest = self.latest or latest
            else:
                latest = await self.refresh()

    def set_refresh(self, refresh_s: float) -> None:
        """Change the interval of refreshes."""
        self._refresh_s = refresh_s
        self._rhythm_changed.set()
        self._rhythm_changed = anyio.Event()

    def set_query_deadline(self, query_deadline_s: float) -> None:
        """Change how long to wait for the libraries, from the next refresh on."""
        self._query_deadline_s = query_deadline_s

    async def reopen(self) -> NodeSnapshot:
        """Close and open all libraries, which finds new drivers and cards, and refresh."""
        for vendor in self._vendors:
            vendor.reopen()
        while self._round is not None:
            await self._round.over.wait()
        return await self.refresh()

    async def aclose(self) -> None:
        """Close the libraries and release all processes, within the query deadline. Twice is fine."""
        limit_s = self._query_deadline_s
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for vendor in self._vendors:
                    tasks.start_soon(vendor.close, limit_s)
                tasks.start_soon(self._rolls.close, limit_s)

    # ---- one look ---------------------------------------------------------------------------------------------------

    async def _look(self) -> NodeSnapshot:
        began, taken_utc = self._monotonic(), time.time()
        known = self._changes_known
        deadline_s = self._query_deadline_s
        async with anyio.create_task_group() as tasks:
            for vendor in self._vendors:
                tasks.start_soon(vendor.update, VENDORS_SHARE * deadline_s)
        views = [vendor.view() for vendor in self._vendors]
        for view in views:
            self._register.place(view)
        left_s = max(began + deadline_s - self._monotonic(), (1 - VENDORS_SHARE) * deadline_s)
        await self._rolls.update(self._roll_call(), left_s)
        self._register.forget(self._rolls.roll.ended)
        snapshot = NodeSnapshot(
            taken_utc=taken_utc,
            gpus=self._register.gpus,
            processes=self._rolls.roll.processes,
            vendors=(*(view.vendor for view in views), *self._off),
            monotonic=began,
        )
        self._changes.tell(snapshot.gpus, self._rolls.roll, snapshot.vendors, roll_is_late=self._rolls.late)
        self.latest = snapshot
        self._changes_covered = known
        self.refresh_count += 1
        self.last_refresh_s = self._monotonic() - began
        self._on_look(snapshot, self.last_refresh_s)
        return snapshot

    def _roll_call(self) -> ProcessListInputs:
        hardware = frozenset(vendor.name for vendor in self._vendors) - COUNTS_IN_OUR_NAMESPACE
        doubted = not self._table.in_first_namespace
        return ProcessListInputs(
            uses=self._register.uses,
            ids=self._register.ids,
            unproven=self._register.pids_of(hardware) if doubted else frozenset(),
            agents=dict(self._agents()),
            held_bytes=dict(self._held()),
        )
