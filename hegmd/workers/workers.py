"""Workers: processes with an agent, one handle for each, over any number of connections.

A worker is identified by pid and start time, which the kernel reports, and by the token that its agent drew. The end of
a connection keeps the handle: running orders fail as `AgentAway`, and an agent that reconnects with the same token gets
its handle back. Only the pidfd shows the end of the process. Another token from the same process means a new program.

Owns orders in flight and agents' last reports. Tells listeners that a worker `came`, was `left`, is `back` or `ended`.

Longer than 400 lines because all that an agent reports, and the orders to it, are of one handle.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from hegmd.errors import DENIED, TIMEOUT, HegmError, Refused
from hegmd.node.gpu_sets import gpus_of
from hegmd.protocol.messages import AgentAttend, AgentReport, Communicators, CudaFacts, LeftAlone, Order
from hegmd.protocol.snapshots import AgentInfo
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.condition import Condition
from hegmd.system.process_ends import until_ended
from hegmd.telemetry.log import fields
from hegmd.telemetry.step_timings import AGENT, COPIES, note_step
from hegmd.workers.agent_orders import (
    COLLECTIVE,
    COPIED,
    DONE,
    LIMITED,
    MOVING,
    SNAPSHOT,
    AgentAway,
    AgentLink,
    OrderFailed,
    Progress,
    Send,
    SentOrder,
    answered_within_s,
)

__all__ = ["AgentAway", "SentOrder", "Identity", "OrderFailed", "AgentConnection", "Workers"]

logger = logging.getLogger(__name__)

# Number of an order's parts that are logged.
MAX_PARTS = 16
# How long another job's snapshot is waited for where its GPU has too little memory. The copy of 64 GiB takes 2 s.
SNAPSHOTS_WITHIN_S = 3.0

CAME, LEFT, BACK, ENDED = "came", "left", "back", "ended"

Listener = Callable[[str, "AgentConnection"], object]


class Identity(NamedTuple):
    """The peer as the kernel identifies it."""

    pid: int
    start_ticks: int
    uid: int


class AgentConnection:
    """A process with an agent, from its first message to the end of the process."""

    def __init__(self, identity: Identity, program: AgentInfo, about: AgentAttend) -> None:
        self.identity = identity
        self.program = program
        self.about = about
        self.token, self.ended = about.token, False
        #: The watch on its process, which holds a descriptor. It ends with the handle.
        self.watch: anyio.CancelScope | None = None
        #: The end of its process in words, if known.
        self.how_ended: str | None = None
        #: Its GPU, if known; operations and the simulation set it.
        self.gpu: str | None = None
        #: True if it trains without a GPU; None while unknown. `simulated_placement` sets it.
        self.on_cpu: bool | None = None
        self.boundary, self.parked, self.held_bytes = about.boundary, about.parked, about.held_bytes
        #: When its training thread was last released, by the event loop's clock.
        self.trains_since = 0.0
        #: Bytes of the storages that its agent can offload; None before they are counted.
        self.size_bytes: int | None = about.size_bytes or None
        self.left_alone: tuple[LeftAlone, ...] = ()
        #: Size of its state and what prevents a restart, by its last report; None before the first.
        self.state_bytes: int | None = None
        self.refusals: tuple[str, ...] = ()
        self.unweighed: tuple[str, str] | None = None  # why the size of its state is unknown, and a hint
        self.begin_anew: tuple[str, ...] | None = None
        #: Modules that a prestarted process may import, and the path of its script's modules.
        self.imports: tuple[str, ...] = ()
        self.path: tuple[str, ...] = ()
        #: Its use of CUDA as reported; None if it uses none or did not report it.
        self.cuda: CudaFacts | None = None
        #: Its communicator groups as reported; None if it has none or did not report them.
        self.communicators: Communicators | None = about.communicators
        #: Whether it has reported its memory to this daemon, at a boundary.
        self.is_surveyed = False
        #: Whether the driver has ever restored it; `agent_effects` sets it.
        self.driver_restored = about.driver_restored
        #: Why its last scheduled image was not written; `scheduled_images` sets it.
        self.image_missed: str | None = None
        #: Held during a `weigh` order: a second one would replace the first.
        self.weighing = anyio.Lock()
        self._link: AgentLink | None = None
        #: Number of its agent's connections, so that an order can be bound to one of them.
        self.connection = 0

    @property
    def pid(self) -> int:
        return self.identity.pid

    @property
    def name(self) -> str:
        """Return the name that operations use: unique on this node until the next boot."""
        return f"{self.identity.pid}-{self.identity.start_ticks}"

    @property
    def connected(self) -> bool:
        """Return True if its agent can take orders now."""
        return self._link is not None and not self.ended

    @property
    def busy(self) -> bool:
        """Return True while its bytes move or its communicators change."""
        return self._link is not None and any(order.do in MOVING | COLLECTIVE for order in self._link.order.values())

    @property
    def snapshot(self) -> SentOrder | None:
        """Return the order for a snapshot that is not answered. Until then a copy of its state may be on its GPU."""
        orders = () if self._link is None else self._link.order.values()
        return next((order for order in orders if order.do == SNAPSHOT), None)

    async def order(
        self, do: str, *, fds: Sequence[int] = (), on_progress: Progress | None = None, **how: Any
    ) -> AgentReport:
        """Send an order and wait for its end. Raises OrderFailed, AgentAway. If the caller is cancelled, the order
        continues.

        `how` gives other fields of `Order`, such as `limit_s`. An agent keeps the limit of a survey itself; if it does
        not, TIMEOUT is raised.
        """
        began = time.monotonic()
        order = await self.give(do, fds=fds, on_progress=on_progress, **how)
        with anyio.CancelScope() as in_time:
            if do in LIMITED:
                in_time.deadline = order.deadline
            report = await order.report()
            ended = time.monotonic()
            note_step(AGENT, do, began, ended)
            if do in COPIED:
                note_step(COPIES, COPIED[do], began, ended, report.size_bytes or 0)
            logger.debug("process %d: %s took %.1f ms", self.pid, do, (ended - began) * 1e3)
            for part, took_ms in tuple(report.spent_ms.items())[:MAX_PARTS]:
                logger.debug("process %d: %s.%s took %.1f ms", self.pid, do, part[:20], took_ms)
            return report
        raise HegmError(
            TIMEOUT,
            f"the agent of process {self.pid} has not answered a {do} within {order.deadline - began:.1f} s",
            "start the job with HEGM_AGENT_DEBUG=FILE to log what its agent does; the job continues",
            {"pid": self.pid, "do": do},
        )

    async def give(
        self, do: str, *, fds: Sequence[int] = (), on_progress: Progress | None = None, **how: Any
    ) -> SentOrder:
        """Send an order without waiting for its end. The descriptors stay the caller's. Raises AgentAway.

        An agent waits for one boundary at a time. So an order waits for earlier ones, except `withdraw`, which ends
        them, and a `park` that replaces another. It goes over the current connection: an agent that reconnects may have
        resumed by itself and has to be inspected first.
        """
        link = self._link
        while do != "withdraw" and (before := self._under_way(do)) is not None and (do, before.do) != ("park", "park"):
            with anyio.CancelScope(deadline=before.deadline):
                await before.over.wait()
        if link is None or self._link is not link:
            raise AgentAway(self.pid, f"it cannot get the order {do}")
        within_s = answered_within_s(do, how.get("limit_s"))
        order = SentOrder(self.pid, do, on_progress, anyio.current_time() + within_s)
        number = link.enter(order)
        try:
            await link.send(Order(order=number, do=do, **how), fds)
        except BaseException as error:  # also if cancelled: no byte was sent, so no answer comes
            link.order.pop(number, None)
            order.end()
            if isinstance(error, (OSError, anyio.ClosedResourceError, HegmError)):
                raise AgentAway(self.pid, f"it cannot get the order {do}") from error
            raise
        return order

    async def count_boundaries(self, within_s: float) -> bool:
        """Have its agent say how many boundaries it has passed, without the training thread. Return whether it did."""
        with anyio.move_on_after(within_s), contextlib.suppress(HegmError):
            await self.order("count", limit_s=within_s)
            return True
        return False

    def _under_way(self, do: str) -> SentOrder | None:
        return None if self._link is None else next(self._link.in_the_way(do), None)

    def take(self, link: object, report: AgentReport) -> None:
        """Handle a report of that connection. A report of an order that was abandoned changes nothing."""
        if self._link is None or self._link is not link:
            return
        order = self._link.order.get(report.order)
        if order is None:
            return
        self._note(order.do, report)
        if order.take(report):
            del self._link.order[report.order]

    def _note(self, do: str, report: AgentReport) -> None:
        """Store what a report says about the worker."""
        if report.boundary is not None:
            self.boundary = report.boundary
        if report.result != DONE:
            return
        if do in {"park", "withdraw", "release"}:
            self.parked = do == "park"
            self.trains_since = anyio.current_time()
        if do == "survey":
            if report.size_bytes is not None:  # without a boundary the report has no sizes
                self.size_bytes, self.left_alone, self.cuda = report.size_bytes, report.left_alone, report.cuda
                self.communicators, self.is_surveyed = report.communicators, True
            self.parked = self.parked if report.parked is None else report.parked
            self.held_bytes = self.held_bytes if report.held_bytes is None else report.held_bytes
        if do == "weigh":
            self.state_bytes, self.refusals = report.state_bytes, report.refusals
            self.begin_anew, self.unweighed = report.begin_anew, None
        if do in {"weigh", "beforehand"}:
            self.imports, self.path = report.imports, report.path
        if do == "filled" and report.held_bytes is not None:
            self.held_bytes = report.held_bytes
        if do in {"offload", "free", "reload"}:
            self.held_bytes = 0 if do == "reload" else report.size_bytes or 0

    def info(self) -> AgentInfo:
        """Return the public record of its agent."""
        return self.program.replace(
            framework=self.about.framework,
            framework_version=self.about.framework_version,
            job=self.about.job,
            run=self.about.run,
            rank=self.about.rank,
            boundary=self.boundary,
            parked=self.parked,
            held_bytes=self.held_bytes,
            image_missed=self.image_missed,
            on_cpu=self.gpu is None and bool(self.on_cpu),
            unknown=self.about.unknown,
        )

    # -- for Workers ---------------------------------------------------------------------------------------------------

    def connect(self, send: Send, about: AgentAttend) -> AgentLink:
        """Take a new connection of its agent; it replaces the earlier one."""
        before = self._link
        self._link = link = AgentLink(send)
        self.connection += 1
        self.about = about
        self.boundary, self.parked, self.held_bytes = about.boundary, about.parked, about.held_bytes
        self.driver_restored = self.driver_restored or about.driver_restored
        if about.size_bytes:
            self.size_bytes, self.communicators = about.size_bytes, about.communicators
        if before is not None:
            before.end()
            before.replaced.set()
        return link

    def disconnect(self, link: AgentLink) -> bool:
        """End that connection. Returns True if it was the current one."""
        link.end()
        if self._link is not link:
            return False
        self._link = None
        return True


class Workers(BackgroundTasks):
    """All workers of the node. `run` has to be running while agents attend.

    `start_ticks` returns a process's start time, None if it does not exist, and raises HegmError if that is unknown
    now. `how_ended` says how an ended process ended, if known.
    """

    def __init__(
        self,
        start_ticks: Callable[[int], int | None] = lambda _pid: None,
        how_ended: Callable[[int, int], str | None] = lambda _pid, _ticks: None,
    ) -> None:
        self._start_ticks = start_ticks
        self._how_ended = how_ended
        self._introduced: dict[int, AgentInfo] = {}
        self._workers: dict[int, AgentConnection] = {}
        self._links: dict[object, tuple[AgentConnection, AgentLink]] = {}
        self._listeners: list[Listener] = []
        #: Notified at each change, for tasks that wait for a state.
        self.changed = Condition()
        super().__init__()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each change and its worker. It runs on the event loop and must not wait."""
        self._listeners.append(listener)

    # -- who is there --------------------------------------------------------------------------------------------------

    def register(self, pid: int, agent: AgentInfo) -> Callable[[], None]:
        """Add an agent that introduced itself; returns the function that removes it. The newest of a pid counts."""
        self._introduced[pid] = agent

        def leave() -> None:
            if self._introduced.get(pid) is agent:
                del self._introduced[pid]

        return leave

    def agents(self) -> Mapping[int, AgentInfo]:
        """Return every connected agent by pid."""
        attending = {worker.pid: worker.info() for worker in self if worker.connected}
        return {**self._introduced, **attending}

    def __iter__(self) -> Iterator[AgentConnection]:
        return iter(tuple(self._workers.values()))

    def find(self, pid: int) -> AgentConnection | None:
        return self._workers.get(pid)

    def named(self, name: str) -> AgentConnection | None:
        """Return the worker of that name, if its process lives."""
        return next((worker for worker in self if worker.name == name), None)

    async def wait_for_snapshots(self, gpus: Collection[str]) -> bool:
        """Wait until the snapshots that are now taken on these GPUs have ended, and their copies there are freed.

        Return True if any has ended in time, so that more memory may be free.
        """
        there = [worker for worker in self if not worker.on_cpu and not set(gpus_of(worker.gpu)).isdisjoint(gpus)]
        orders = [worker.snapshot for worker in there]
        pending = [order for order in orders if order is not None]
        with anyio.move_on_after(SNAPSHOTS_WITHIN_S):
            for order in pending:
                await order.over.wait()
        return any(order.over.is_set() for order in pending)

    # -- what agents say -----------------------------------------------------------------------------------------------

    async def attend(self, key: object, pid: int, uid: int, program: AgentInfo, about: AgentAttend, send: Send) -> None:
        """Serve an agent on the connection `key`, until a newer one replaces it or this is cancelled."""
        with contextlib.ExitStack() as held:
            worker, event = self._admit(pid, uid, program, about)
            link = worker.connect(send, about)
            self._links[key] = (worker, link)
            held.callback(self._leave, key, worker, link)
            self._tell(event, worker)
            await link.replaced.wait()

    def report(self, key: object, report: AgentReport) -> None:
        """Handle an agent's report on that connection. Raises Refused if it does not attend there."""
        attending = self._links.get(key)
        if attending is None:
            raise Refused("this connection takes no orders", "send agent.attend first, on the same connection")
        worker, link = attending
        worker.take(link, report)

    def _admit(self, pid: int, uid: int, program: AgentInfo, about: AgentAttend) -> tuple[AgentConnection, str]:
        """Return the handle for an agent: its earlier one, or a new one. Raises HegmError."""
        tasks = self._open_tasks()
        known = self._workers.get(pid)
        ticks = self._start_ticks(pid)
        if ticks is None:
            raise HegmError(
                DENIED,
                f"hegmd cannot see process {pid}",
                "run hegmd where it sees the processes of the node: in its pid namespace, with its /proc",
            )
        identity = Identity(pid, ticks, uid)
        if known is not None and known.identity == identity and known.token == about.token:
            return known, BACK
        if known is not None:
            self._end(known)
        worker = AgentConnection(identity, program, about)
        pidfd = os.pidfd_open(pid)
        try:
            if self._start_ticks(pid) != ticks:  # the pid was reused between the two reads
                raise AgentAway(pid, "the process has ended")
        except BaseException:
            os.close(pidfd)
            raise
        self._workers[pid] = worker
        worker.watch = anyio.CancelScope()
        tasks.start_soon(self._watch, worker, worker.watch, pidfd)
        return worker, CAME

    async def _watch(self, worker: AgentConnection, watch: anyio.CancelScope, pidfd: int) -> None:
        """Wait for the end of the process; one task for each worker."""
        with watch:
            await until_ended(pidfd)
            worker.how_ended = self._how_ended(worker.pid, worker.identity.start_ticks)
        self._end(worker)

    def _end(self, worker: AgentConnection) -> None:
        """Remove the handle: the process, or its program, has ended."""
        if worker.ended:
            return
        worker.ended = True
        if worker.watch is not None:
            worker.watch.cancel()
        if self._workers.get(worker.pid) is worker:
            del self._workers[worker.pid]
        for key, (other, link) in tuple(self._links.items()):
            if other is worker:
                del self._links[key]
                worker.disconnect(link)
                link.replaced.set()
        self._tell(ENDED, worker)

    def _leave(self, key: object, worker: AgentConnection, link: AgentLink) -> None:
        if self._links.get(key) == (worker, link):
            del self._links[key]
        if worker.disconnect(link) and not worker.ended:
            self._tell(LEFT, worker)

    def _tell(self, event: str, worker: AgentConnection) -> None:
        logger.info("worker %d: %s", worker.pid, event, extra=fields(pid=worker.pid, news=event))
        for listener in self._listeners:
            listener(event, worker)
        self.changed.notify_all()
