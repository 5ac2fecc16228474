"""The synchronous library face while the daemon is stopped, or started again."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from hegmctl.connection import Connection, connect
from hegmctl.supervision_line import SupervisionConnection
from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.record import Record
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, FakeDaemon, saying

STOPPING = HegmError(UNAVAILABLE, "hegmd is stopping", "connect again when it is back")


def leaving(*, times: int) -> Answerer:
    """Answer as a stopping daemon so many times, then as the next daemon."""
    left = times

    def answer(caller: Caller, request: IncomingRequest) -> m.GpusReply | None:
        nonlocal left
        if not left:
            return node.GPUS
        left -= 1
        caller.send(caller.protocol.error(None, STOPPING))
        caller.socket.shutdown(socket.SHUT_RDWR)
        return None

    return answer


def test_read_requests_survive_a_restart_of_the_daemon(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = leaving(times=2)
    assert hegmd.gpus() == node.GPUS
    assert hegmd.ping() == m.Pong()


def test_a_daemon_that_stops_during_hello_is_replaced_by_the_next_one(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = leaving(times=1)
    welcomes = daemon.answers[m.Hello]
    refused = 0

    def greet(caller: Caller, request: IncomingRequest) -> Record | None:
        nonlocal refused
        if refused:
            return welcomes(caller, request)
        refused += 1
        caller.send(caller.protocol.error(None, STOPPING))
        caller.socket.shutdown(socket.SHUT_RDWR)
        return None

    daemon.answers[m.Hello] = greet
    assert hegmd.gpus() == node.GPUS
    with connect(str(daemon.path), timeout_s=HANG_S) as another:
        assert another.gpus() == node.GPUS
    assert refused == 1


def test_requests_that_change_something_are_sent_once_only(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Reload] = daemon.answers[m.Gpus] = leaving(times=1)
    with pytest.raises(HegmError, match="hegmd is stopping") as raised:
        hegmd.reload()
    assert raised.value.code is UNAVAILABLE


def test_the_next_daemon_does_not_hold_what_its_predecessor_held_for_a_connection(socket_path: Path) -> None:
    with FakeDaemon(socket_path, node.answers(node.SIMULATED)) as daemon, connect(str(socket_path)) as hegmd:
        hegmd.simulate_hold("gpu0", node.GIB)
        daemon.answers[m.Gpus] = leaving(times=1)
        with pytest.raises(HegmError, match="hegmd is stopping"):
            hegmd.gpus()


def test_a_daemon_that_stops_without_a_successor_is_noticed(hegmd: Connection, daemon: FakeDaemon) -> None:
    leave = leaving(times=1)

    def answer(caller: Caller, request: IncomingRequest) -> Record | None:
        daemon.path.unlink()
        return leave(caller, request)

    daemon.answers[m.Gpus] = answer
    with pytest.raises(HegmError, match="hegmd is stopping") as raised:
        hegmd.gpus()
    assert raised.value.code is UNAVAILABLE


def test_a_command_that_ended_before_its_daemons_welcome_ended_with_another_status(daemon: FakeDaemon) -> None:
    """So a job that failed just after a restart of its daemon was not recovered."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    daemon.answers |= {m.Supervise: lambda _caller, _request: None, m.SuperviseReport: saying(m.Noted())}
    line = SupervisionConnection(str(daemon.path), m.Supervise(run="run-1", python=False))
    try:
        line.ask(m.SuperviseReport(result="ended", status=7))
        line.settle()
        daemon.wait_for(m.SuperviseReport)
        assert [type(request) for request in daemon.requests] == [m.Hello, m.Supervise, m.SuperviseReport]
    finally:
        line.close()
        signal.signal(signal.SIGIO, before)
