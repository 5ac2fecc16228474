"""The listening socket: how it appears, who may connect, and what clients get when it closes."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BUSY, DENIED, REFUSED, UNAVAILABLE, HegmError
from hegmd.protocol.connection import Failure, Reply, ServerConnection
from hegmd.protocol.messages import Caller, Hello, Limits, Ping, Pong, Welcome
from hegmd.protocol.record import Record
from hegmd.server.auth import Peer, Policy
from hegmd.server.listener import Admission, Listener, bind, take_away
from hegmd.server.session import Call, Session, SessionLimits
from hegmd.system.stream import PeerStream
from hegmd.telemetry.metrics import Counters
from tests.unit.server.talker import RawClient

LIMITS = SessionLimits(
    frame_bytes=65_536, requests_in_flight=4, hello_deadline_s=60, frame_deadline_s=60, send_deadline_s=60
)
ANYBODY = Policy(daemon_uid=os.getuid())


async def answer(call: Call) -> Record:
    if not isinstance(call.request, Hello):
        return Pong()
    return Welcome(
        version=2,
        daemon_version="0",
        node="n",
        simulated=True,
        capabilities=(),
        limits=Limits(frame_bytes=65_536, requests_in_flight=4),
        you=Caller(uid=call.peer.uid, gid=0, pid=call.peer.pid, may_act_on_all=True),
    )


@asynccontextmanager
async def listening(
    path: Path, *, clients: int = 100, clients_per_uid: int = 100, policy: Policy = ANYBODY
) -> AsyncIterator[tuple[Listener, Admission, Counters]]:
    counters = Counters()
    admission = Admission(policy, clients, clients_per_uid)

    def open_session(stream: PeerStream, peer: Peer) -> Session:
        return Session(stream, peer, answer, LIMITS, counters)

    listener = Listener(bind(path, 0o600, None), admission, open_session, counters)
    async with anyio.create_task_group() as tasks:
        await tasks.start(listener.run)
        yield listener, admission, counters
        tasks.cancel_scope.cancel()


def connected(path: Path) -> RawClient:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return RawClient(connection)


async def test_clients_come_and_go_and_are_counted(socket_path: Path) -> None:
    async with listening(socket_path) as (_, admission, _):
        with connected(socket_path) as one, connected(socket_path) as two:
            assert isinstance(await one.hello(), Reply)
            assert isinstance(await two.hello(), Reply)
            assert admission.current == 2
            assert isinstance(await one.ask(Ping()), Reply)
        with connected(socket_path) as three:
            await three.hello()
            while admission.current > 1:
                await anyio.lowlevel.checkpoint()


@pytest.mark.thorough
async def test_nothing_of_a_connection_stays_when_it_has_ended(socket_path: Path) -> None:
    """Issue 14, row 17: the daemon's memory grew with 2,000 connections and stayed there."""
    kinds = (Session, Call, PeerStream, ServerConnection)

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(found), kinds) for found in gc.get_objects())  # isinstance() runs code of strangers

    async with listening(socket_path) as (_, admission, counters):
        before = alive()
        for _ in range(3):
            with contextlib.ExitStack() as held:
                for _ in range(30):
                    talker = held.enter_context(connected(socket_path))
                    await talker.hello()
                    await talker.ask(Ping())
                assert alive() > before
            while admission.current:
                await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        assert counters.connections_total == 90
        assert alive() == before


async def _refusal(talker: RawClient) -> HegmError:
    reply = await talker.next()
    assert isinstance(reply, Failure)
    assert reply.id is None
    assert await talker.next() is None
    return reply.error


@pytest.mark.parametrize(("clients", "clients_per_uid"), [(1, 100), (100, 1)])
async def test_a_client_over_the_limit_gets_the_reason_and_the_others_stay(
    socket_path: Path, clients: int, clients_per_uid: int
) -> None:
    async with listening(socket_path, clients=clients, clients_per_uid=clients_per_uid) as (_, admission, counters):
        with connected(socket_path) as one:
            await one.hello()
            with connected(socket_path) as two:
                assert (await _refusal(two)).code is BUSY
            assert isinstance(await one.ask(Ping()), Reply)
            assert admission.current == 1
        assert dict(counters.refusals) == {BUSY.name: 1}


def test_users_together_cannot_shut_out_administrators() -> None:
    """Limits for each user were no help against several, and one person can have thousands of ids for containers."""
    admission = Admission(Policy(daemon_uid=0), clients=32, clients_per_uid=1)
    for uid in range(1000, 1030):
        admission.enter(Peer(pid=1, uid=uid, gid=uid))
    with pytest.raises(HegmError) as caught:
        admission.enter(Peer(pid=1, uid=2000, gid=2000))
    assert caught.value.code is BUSY
    admission.enter(Peer(pid=1, uid=0, gid=0))
    assert admission.current == 31


class ServesNobody(Policy):
    """Refuses every client, including root, which every real daemon serves."""

    def may_connect(self, peer: Peer) -> bool:
        return False


async def test_a_user_whom_the_daemon_does_not_serve_gets_the_reason(socket_path: Path) -> None:
    async with listening(socket_path, policy=ServesNobody(daemon_uid=0)) as (_, admission, counters):
        with connected(socket_path) as talker:
            assert (await _refusal(talker)).code is DENIED
        assert dict(counters.refusals) == {DENIED.name: 1}
        assert admission.current == 0


async def test_every_peer_is_notified_when_the_daemon_stops(socket_path: Path) -> None:
    async with listening(socket_path) as (listener, admission, _):
        with connected(socket_path) as one, connected(socket_path) as two:
            await one.hello()
            await two.hello()
            listener.stop()
            for talker in (one, two):
                assert (await _refusal(talker)).code is UNAVAILABLE
            while admission.current:
                await anyio.lowlevel.checkpoint()
            with pytest.raises(ConnectionRefusedError):
                connected(socket_path)


@pytest.mark.thorough
async def test_a_burst_of_connections_is_served_whole(socket_path: Path) -> None:
    async with listening(socket_path, clients=300, clients_per_uid=300) as (_, admission, _):
        talkers = [connected(socket_path) for _ in range(200)]
        for talker in talkers:
            assert isinstance(await talker.hello(), Reply)
        assert admission.current == 200
        for talker in talkers:
            talker.socket.close()


def test_the_socket_appears_with_its_mode(socket_path: Path) -> None:
    with bind(socket_path, 0o660, os.getgid()):
        found = socket_path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert [name.name for name in socket_path.parent.iterdir()] == [socket_path.name]


def test_a_socket_without_a_listener_is_replaced(socket_path: Path) -> None:
    bind(socket_path, 0o600, None).close()
    assert socket_path.exists()
    with bind(socket_path, 0o600, None), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(socket_path))


def test_a_socket_that_is_answered_is_left_alone(socket_path: Path) -> None:
    with bind(socket_path, 0o600, None), pytest.raises(HegmError, match="another hegmd") as caught:
        bind(socket_path, 0o600, None)
    assert caught.value.code is REFUSED


def test_a_daemon_too_busy_to_accept_connections_is_left_alone(socket_path: Path) -> None:
    """The start waited for ever for space in the backlog of a hung daemon."""
    with socket.socket(socket.AF_UNIX) as hung, socket.socket(socket.AF_UNIX) as waiting:
        hung.bind(str(socket_path))
        hung.listen(0)
        waiting.connect(str(socket_path))
        with pytest.raises(HegmError, match="another hegmd"):
            bind(socket_path, 0o600, None)
        assert socket_path.exists()


def test_an_exiting_daemon_does_not_remove_its_successors_socket(socket_path: Path) -> None:
    """A stopping daemon removed the socket of its successor seconds after it had closed its own."""
    bind(socket_path, 0o600, None).close()
    bound = socket_path.lstat()
    with bind(socket_path, 0o600, None), socket.socket(socket.AF_UNIX) as client:
        take_away(socket_path, bound)
        client.connect(str(socket_path))
        take_away(socket_path, socket_path.lstat())
        assert not socket_path.exists()


def test_a_file_in_the_way_is_left_alone(socket_path: Path) -> None:
    socket_path.write_text("precious")
    with pytest.raises(HegmError, match="not a socket"):
        bind(socket_path, 0o600, None)
    assert socket_path.read_text() == "precious"


def test_a_path_that_cannot_be_bound_is_reported(socket_dir: Path) -> None:
    (socket_dir / "file").touch()
    for path in (socket_dir / "file" / "s", Path("/proc/no/such/s"), socket_dir / ("x" * 120)):
        with pytest.raises(HegmError, match="cannot listen") as caught:
            bind(path, 0o600, None)
        assert "--socket" in caught.value.hint
    assert [name.name for name in socket_dir.iterdir()] == ["file"]


def test_the_directory_is_made_with_its_mode(socket_dir: Path) -> None:
    with bind(socket_dir / "new" / "s", 0o600, None, directory_mode=0o700):
        assert stat.S_IMODE((socket_dir / "new").stat().st_mode) == 0o700


async def test_a_client_that_was_not_accepted_yet_is_served_after_the_socket_was_replaced(socket_path: Path) -> None:
    """Issue 14, row 16: a client in the backlog of the older socket was dropped, or waited for ever."""
    async with listening(socket_path) as (listener, admission, _):
        with connected(socket_path) as accepted:
            await accepted.hello()
            with connected(socket_path) as waiting:
                for _ in range(2):  # a daemon that has not taken over yet is replaced too
                    _delete(socket_path)
                    assert not listener.is_found
                    listener.take(bind(socket_path, 0o600, None))
                    assert listener.is_found
                assert isinstance(await waiting.hello(), Reply)
                with connected(socket_path) as after:
                    assert isinstance(await after.hello(), Reply)
                    assert isinstance(await accepted.ask(Ping()), Reply)
                    assert admission.current == 3


def _delete(path: Path) -> None:
    path.unlink()


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_replaced_socket_is_closed_even_if_the_daemon_was_busy_with_it(socket_path: Path) -> None:
    """Issue 14, row 16: only a socket that was being waited for was closed; the other was left to chance."""
    async with listening(socket_path) as (listener, _, _):
        with connected(socket_path) as client:
            await client.hello()
            before = _descriptors()
            sockets = [bind(socket_path.with_name(str(number)), 0o600, None) for number in range(3)]
            for replacement in sockets:
                listener.take(replacement)
            assert isinstance(await client.ask(Ping()), Reply)
            assert [one.fileno() == -1 for one in sockets] == [True, True, False]
            assert _descriptors() == before


async def test_a_client_is_served_later_while_no_descriptor_is_free(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening(socket_path):
        with connected(socket_path) as waiting:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                while "cannot accept connections: Too many open files" not in caplog.text:
                    await anyio.lowlevel.checkpoint()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert isinstance(await waiting.hello(), Reply)
