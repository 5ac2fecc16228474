"""An agent for the tests of the daemon: obeys orders as the real one does, over a real descriptor, without a process.

Its storages are one piece of bytes, which really goes to the memory that comes with the order and comes back from it.
Every order is noted, and a test can hold an order up, refuse it, or take the connection away under it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.lowlevel

from hegmd.errors import Refused
from hegmd.protocol.messages import AgentAttend, AgentReport, Order
from hegmd.protocol.snapshots import AgentInfo
from hegmd.workers.workers import Workers

PROGRAM = AgentInfo(name="model agent", version="1")


class ModelAgent:
    """Attends for a process that lives; `data` is what its storages hold, None while that is out."""

    def __init__(self, workers: Workers, pid: int, data: bytes = b"weights", token: str = "a" * 32) -> None:
        self.workers = workers
        self.pid = pid
        self.uid = os.getuid()
        self.token = token
        self.data: bytes | None = data
        self.size_bytes = len(data)
        self.boundary = 5
        self.parked = False
        #: True after the order to rest; and after it has closed its own descriptor of its bytes.
        self.is_suspended = False
        self.entrusted = False
        self.orders: list[str] = []
        #: The limits that came with orders, the last of each kind.
        self.limits_s: dict[str, float | None] = {}
        #: The requests it refuses, with these words.
        self.refuses: dict[str, str] = {}
        #: Orders that it does not answer before `go_on` is set.
        self.slow: set[str] = set()
        #: Whether it reaches no boundary within the limit of a survey, and so does not say what it holds.
        self.is_late = False
        self.go_on = anyio.Event()
        self.waiting = anyio.Event()
        #: Its storages' contents from the boundary on at which it is parked; None for the former ones.
        self.at_boundary: bytes | None = None
        #: Additional facts in its reports, such as its rank.
        self.about: dict[str, object] = {}
        self._key: object = None
        self._tasks: anyio.abc.TaskGroup | None = None
        self._scope = anyio.CancelScope()

    async def attend(self, tasks: anyio.abc.TaskGroup) -> None:
        """Connect, and stay until `leave`."""
        self._tasks = tasks
        self._key = object()
        self._scope = anyio.CancelScope()
        tasks.start_soon(self._attend, self._key, self._scope)
        await anyio.wait_all_tasks_blocked()

    async def _attend(self, key: object, scope: anyio.CancelScope) -> None:
        about = AgentAttend(
            token=self.token,
            python_version="3.11",
            framework="torch",
            boundary=self.boundary,
            parked=self.parked,
            held_bytes=self.size_bytes if self.data is None else 0,
            size_bytes=self.size_bytes,
            entrusted=self.entrusted,
        ).replace(**self.about)
        with scope:
            await self.workers.attend(key, self.pid, self.uid, PROGRAM, about, self.take)

    async def leave(self) -> None:
        """The connection ends."""
        self._scope.cancel()
        await anyio.wait_all_tasks_blocked()

    async def take(self, order: Order, fds: Sequence[int]) -> None:
        """An order came."""
        assert self._tasks is not None
        await anyio.lowlevel.checkpoint()  # a connection takes its turn first
        self.orders.append(order.do)
        self.limits_s[order.do] = order.limit_s
        copies = [os.dup(fd) for fd in fds]
        self._tasks.start_soon(self._obey, self._key, order, copies)

    async def _obey(self, key: object, order: Order, fds: list[int]) -> None:
        try:
            if order.do in self.slow:
                self.waiting.set()
                await self.go_on.wait()
            if order.do in self.refuses:
                self._report(key, order, "failed", message=self.refuses[order.do], hint="ask the test")
                return
            self._do(order, fds)
            standing = {"parked": self.parked, "held_bytes": self.size_bytes if self.data is None else 0}
            sizes = {} if order.do == "survey" and self.is_late else {"size_bytes": self.size_bytes, "storages": 1}
            more = standing if order.do == "survey" else {}
            self._report(key, order, "done", **sizes, **more)
        finally:
            for fd in fds:
                os.close(fd)

    def _do(self, order: Order, fds: list[int]) -> None:
        if order.do == "park":
            self.parked = True
            if self.at_boundary is not None:
                self.data, self.size_bytes = self.at_boundary, len(self.at_boundary)
            self.boundary = max(self.boundary + 1, order.at or 0)
        elif order.do in {"withdraw", "release"}:
            assert self.data is not None, "a thread was let go without its bytes"
            self.parked = False
            self.boundary += 1
        elif order.do == "offload":
            assert self.parked
            assert self.data is not None
            os.pwrite(fds[0], self.data, 0)
            self.data = None
        elif order.do == "reload":
            assert self.parked
            assert fds, "its bytes are with the daemon, and none came"
            self.data = os.pread(fds[0], self.size_bytes, 0)
            self.is_suspended = self.entrusted = False
        elif order.do == "rest":
            assert self.parked
            self.is_suspended = True
        elif order.do == "entrust":
            assert self.data is None
            self.is_suspended = self.entrusted = True

    def _report(self, key: object, order: Order, result: str, **values: object) -> None:
        if self._key is not key or self._scope.cancel_called:
            return
        report = AgentReport(order=order.order, result=result, boundary=self.boundary)
        with contextlib.suppress(Refused):  # the daemon has gone; the next one gets the state at the connection
            self.workers.report(key, report.replace(**values))
