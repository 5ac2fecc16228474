"""A daemon of a few lines that gives agents orders, one after the other, over a real socket and our own protocol.

It replaces hegmd if a test is about the agent alone: what the agent says is read from the wire, and what moves
is a real memfd. Blocking, with a limit on every wait.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import Self

from hegmd.protocol.connection import IncomingRequest, ServerConnection
from hegmd.protocol.messages import AgentAttend, AgentReport, Caller, Hello, Limits, Noted, Order, Ping, Pong, Welcome
from tests.patience import HANG_S

PATIENCE_S = HANG_S


class Gone(Exception):
    """The agent's connection ended."""


class AgentConnected:
    """An agent's connection: its introduction, and orders to it."""

    def __init__(self, connected: socket.socket) -> None:
        connected.settimeout(PATIENCE_S)
        self._socket = connected
        self._protocol = ServerConnection(frame_bytes=1 << 20, requests_in_flight=64)
        self._orders = 0
        self._reports: dict[int, list[AgentReport]] = {}
        self.progress: list[AgentReport] = []
        self.attended: AgentAttend | None = None
        while self.attended is None:
            self._read()

    def close(self) -> None:
        self._socket.close()

    def send(self, do: str, fd: int | None = None, **more: Any) -> int:
        """Give an order; its number."""
        self._orders += 1
        order = Order(order=self._orders, do=do, **more)
        frame = self._protocol.event(self._attend_id, order, fds=0 if fd is None else 1)
        try:
            if fd is None:
                self._socket.sendall(frame)
            else:
                socket.send_fds(self._socket, [frame], [fd])
        except BrokenPipeError:
            raise Gone from None
        return self._orders

    def answer(self, order: int) -> AgentReport:
        """Return the reply to the order. Raises Gone if the agent closes the connection instead."""
        while not self._reports.get(order):
            self._read()
        return self._reports[order].pop(0)

    def order(self, do: str, fd: int | None = None, **more: Any) -> AgentReport:
        """Send an order with these fields, and wait for its reply."""
        return self.answer(self.send(do, fd, **more))

    def done(self, do: str, fd: int | None = None, **more: Any) -> AgentReport:
        """The same, for an order that has to succeed."""
        report = self.order(do, fd, **more)
        assert report.result == "done", f"{do}: {report.message}; {report.hint}"
        return report

    def wait_until_gone(self) -> None:
        """Read until the agent hangs up."""
        try:
            while True:
                self._read()
        except Gone:
            pass

    def move(self, *, at: int | None = None, by_driver: bool = False) -> tuple[AgentReport, AgentReport]:
        """A whole move: park, survey, out, back, release and verify. Returns what was parked and what was offloaded."""
        parked = self.done("park", at=at, limit_s=PATIENCE_S)
        with self.offloaded() as out:
            pass
        self.done("release", limit_s=PATIENCE_S, by_driver=by_driver)
        return parked, out

    @contextmanager
    def offloaded(self) -> Iterator[AgentReport]:
        """The parked process with its bytes out, and back after it."""
        survey = self.done("survey")
        assert survey.size_bytes is not None
        fd = os.memfd_create("pool", os.MFD_CLOEXEC)
        try:
            os.truncate(fd, survey.size_bytes)
            out = self.done("offload", fd)
            yield out
            if out.storages:
                self.done("reload", fd)
        finally:
            os.close(fd)

    def _read(self) -> None:
        try:
            data = self._socket.recv(65_536)
        except ConnectionResetError:
            data = b""
        if not data:
            raise Gone
        self._protocol.feed(data)
        while (request := self._protocol.next_event()) is not None:
            assert isinstance(request, IncomingRequest), f"the agent sent what cannot be served: {request.error}"
            self._take(request)

    def _take(self, received: IncomingRequest) -> None:
        request = received.request
        if isinstance(request, Hello):
            assert request.role == "agent"
            self._socket.sendall(self._protocol.reply(received.id, _welcome()))
        elif isinstance(request, AgentAttend):
            self.attended = request
            self._attend_id = received.id
        elif isinstance(request, Ping):
            self._socket.sendall(self._protocol.reply(received.id, Pong()))
        elif isinstance(request, AgentReport):
            with contextlib.suppress(BrokenPipeError):  # one that steps aside says so and hangs up
                self._socket.sendall(self._protocol.reply(received.id, Noted()))
            if request.result == "progress":
                self.progress.append(request)
            else:
                self._reports.setdefault(request.order, []).append(request)


def _welcome() -> Welcome:
    me = Caller(uid=os.getuid(), gid=os.getgid(), pid=os.getpid(), may_act_on_all=False)
    limits = Limits(frame_bytes=1 << 20, requests_in_flight=64)
    return Welcome(
        version=2, daemon_version="test", node="here", simulated=True, capabilities=(), limits=limits, you=me
    )


class ScriptedDaemon:
    """Listens; each agent that attends is an `AgentConnected`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(16)
        self._socket.settimeout(PATIENCE_S)
        self._attended: list[AgentConnected] = []

    def attended(self) -> AgentConnected:
        """The next agent that comes."""
        connected, _address = self._socket.accept()
        agent = AgentConnected(connected)
        self._attended.append(agent)
        return agent

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        """Gone at once, as a daemon that was killed: its agents see the end of the connection."""
        self._socket.close()
        self.path.unlink()
        for agent in self._attended:
            agent.close()
