"""One connection against every kind of peer: polite, slow, hostile, half-closed, gone."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pytest

from hegmd.errors import BAD_REQUEST, CANCELLED, NOT_FOUND, TIMEOUT, UNAVAILABLE, HegmError
from hegmd.protocol import codec
from hegmd.protocol.connection import Failure, Progress, Reply
from hegmd.protocol.frames import frame
from hegmd.protocol.messages import (
    Caller,
    Cancel,
    CancelReply,
    ErrorInfo,
    Events,
    EventsReply,
    Gpus,
    GpusReply,
    Hello,
    Limits,
    Ping,
    Pong,
    Processes,
    Welcome,
)
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import Event
from hegmd.server.auth import Peer
from hegmd.server.session import Call, Session, SessionLimits
from hegmd.setting_types import Amount
from hegmd.settings import ROWS
from hegmd.system.stream import PeerStream
from hegmd.telemetry.metrics import Counters
from tests.unit.server.talker import RawClient

PATIENT = SessionLimits(
    frame_bytes=65_536, requests_in_flight=4, hello_deadline_s=60, frame_deadline_s=60, send_deadline_s=60
)
PEER = Peer(pid=os.getpid(), uid=os.getuid(), gid=os.getgid())
BIG_EVENT = Event(seq=1, time_utc=1.0, kind="big", severity="info", message="x" * 100_000)


class Daemon:
    """Answers in the session's stead; `gpus` never ends unless it is cancelled or `go_on` is set."""

    def __init__(self) -> None:
        self.waiting = anyio.Event()
        self.go_on = anyio.Event()
        self.ended: list[str] = []
        self.taken_fds: list[int] = []
        self.sent_fds: list[int] = []

    async def answer(self, call: Call) -> Record:
        request = call.request
        if isinstance(request, Hello):
            return self._welcome()
        if isinstance(request, Ping):
            self.taken_fds += call.fds.take()
            return Pong()
        if isinstance(request, Processes):
            raise HegmError(NOT_FOUND, "no such process", "look again")
        if isinstance(request, Events):
            while True:
                await call.emit(BIG_EVENT, self.sent_fds)
        try:
            self.waiting.set()
            await self.go_on.wait()
        finally:
            self.ended.append(request.op)
        return GpusReply(taken_utc=1.0, gpus=(), vendors=())

    def _welcome(self) -> Welcome:
        return Welcome(
            version=2,
            daemon_version="0",
            node="n",
            simulated=True,
            capabilities=(),
            limits=Limits(frame_bytes=65_536, requests_in_flight=4),
            you=Caller(uid=0, gid=0, pid=1, may_act_on_all=True),
        )


@asynccontextmanager
async def talking(limits: SessionLimits = PATIENT) -> AsyncIterator[tuple[RawClient, Session, Daemon, anyio.Event]]:
    """A session being served, its peer, its handler, and an event that its end sets."""
    here, there = socket.socketpair()
    daemon = Daemon()
    session = Session(PeerStream(there), PEER, daemon.answer, limits, Counters())
    ended = anyio.Event()

    async def serve() -> None:
        await session.serve()
        ended.set()

    with RawClient(here) as talker:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            yield talker, session, daemon, ended
            tasks.cancel_scope.cancel()


async def test_requests_overlap_and_the_quick_one_is_answered_first() -> None:
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        slow_id, slow = talker.protocol.request(Gpus())
        quick_id, quick = talker.protocol.request(Ping())
        await talker.send(slow + quick)
        first = await talker.next()
        daemon.go_on.set()
        second = await talker.next()
        assert isinstance(first, Reply)
        assert isinstance(second, Reply)
        assert (first.id, second.id) == (quick_id, slow_id)


async def test_a_refusal_is_answered_and_the_connection_stays_open() -> None:
    async with talking() as (talker, _, _, _):
        await talker.hello()
        refused = await talker.ask(Processes(pids=(1,)))
        assert isinstance(refused, Failure)
        assert refused.error.code is NOT_FOUND
        assert isinstance(await talker.ask(Ping()), Reply)


async def test_cancel_ends_the_request_and_nothing_else() -> None:
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        slow_id, slow = talker.protocol.request(Gpus())
        await talker.send(slow)
        await daemon.waiting.wait()
        _, cancel = talker.protocol.request(Cancel(request=slow_id))
        await talker.send(cancel)
        answers = {type(event): event for event in (await talker.next(), await talker.next())}
        failure, done = answers[Failure], answers[Reply]
        assert isinstance(failure, Failure)
        assert isinstance(done, Reply)
        assert failure.id == slow_id
        assert failure.error.code is CANCELLED
        assert done.reply == CancelReply(found=True)
        assert daemon.ended == ["gpus"]
        nothing = await talker.ask(Cancel(request=slow_id))
        assert isinstance(nothing, Reply)
        assert nothing.reply == CancelReply(found=False)


async def test_a_cancel_while_an_event_is_being_written_leaves_whole_frames() -> None:
    async with talking() as (talker, _, _, _):
        await talker.hello()
        stream_id, data = talker.protocol.request(Events(follow=True))
        await talker.send(data)
        assert isinstance(await talker.next(), Progress)
        _, cancel = talker.protocol.request(Cancel(request=stream_id))
        await talker.send(cancel)
        observed: list[type] = []
        while len([kind for kind in observed if kind is not Progress]) < 2:
            observed.append(type(await talker.next()))
        assert {Failure, Reply} <= set(observed)
        assert isinstance(await talker.ask(Ping()), Reply)


async def test_descriptors_of_an_event_come_with_its_own_frame_though_the_socket_is_full() -> None:
    read_end, write_end = os.pipe()
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        daemon.sent_fds = [read_end]
        _, data = talker.protocol.request(Events(follow=True))
        await talker.send(data)
        await anyio.wait_all_tasks_blocked()  # now frames wait for room: the first part of one is sent without us
        got: list[int] = []
        events = 0
        while events < 5:
            await anyio.wait_readable(talker.socket)
            received, fds, _, _ = socket.recv_fds(talker.socket, 65_536, 16)
            got += fds
            talker.protocol.feed(received)
            while isinstance(progress := talker.protocol.next_event(), Progress):
                events += 1
                assert progress.fds == 1
                assert len(got) >= events
        os.write(write_end, b"x")
        assert os.read(got[0], 1) == b"x"
        for fd in (*got, read_end, write_end):
            os.close(fd)
        talker.socket.close()  # a frame that was begun is finished, or cut short by the peer's leaving


async def test_a_peer_that_leaves_takes_its_requests_along() -> None:
    async with talking() as (talker, _, daemon, ended):
        await talker.hello()
        _, slow = talker.protocol.request(Gpus())
        await talker.send(slow)
        await daemon.waiting.wait()
        talker.socket.shutdown(socket.SHUT_WR)
        await ended.wait()
        assert daemon.ended == ["gpus"]


async def test_cleanups_of_handlers_run_at_the_end() -> None:
    undone: list[str] = []
    async with talking() as (talker, session, _, ended):
        for what in ("once", "again"):
            session.at_end("hold", partial(undone.append, what))
        await talker.hello()
        talker.socket.close()
        await ended.wait()
    assert undone == ["again"], "asked for twice under one key, undone once"


async def _last_word(talker: RawClient) -> HegmError | None:
    """The error about the connection itself, and that it is closed after it."""
    last = await talker.next()
    assert await talker.next() is None
    return last.error if isinstance(last, Failure) else None


async def test_no_hello_in_time_is_the_end() -> None:
    async with talking(_impatient(hello_deadline_s=0.01)) as (talker, _, _, ended):
        error = await _last_word(talker)
        assert error is not None
        assert error.code is TIMEOUT
        await ended.wait()


@pytest.mark.parametrize("beginning", [b"\x00", frame(b"x" * 100)[:50]])
async def test_an_unfinished_frame_ends_the_connection(beginning: bytes) -> None:
    async with talking(_impatient(frame_deadline_s=0.01)) as (talker, _, _, ended):
        await talker.hello()
        await talker.send(beginning)
        error = await _last_word(talker)
        assert error is not None
        assert "rest of a frame" in error.message
        await ended.wait()


async def test_an_idle_peer_between_frames_stays() -> None:
    async with talking(_impatient(frame_deadline_s=0.001)) as (talker, _, _, _):
        await talker.hello()
        await talker.send(frame(b"")[:0])
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert isinstance(await talker.ask(Ping()), Reply)


async def test_a_peer_that_never_reads_loses_its_connection() -> None:
    async with talking(_impatient(send_deadline_s=0.01)) as (talker, _, _, ended):
        await talker.hello()
        _, data = talker.protocol.request(Events(follow=True))
        await talker.send(data)
        await ended.wait()


@pytest.mark.parametrize(
    "data",
    [
        frame(b"\xc1"),
        frame(b"\xc0"),
        frame(codec.encode({"v": 2, "id": 1, "op": "ping"})),
        bytes(4),
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_a_peer_that_breaks_the_protocol_gets_the_reason_and_is_closed(data: bytes) -> None:
    async with talking() as (talker, _, _, ended):
        await talker.send(data)
        await ended.wait()
        raw = await talker.receive()
        error = ErrorInfo.from_plain(codec.decode(raw[4:])["err"], "err")
        assert error.code == BAD_REQUEST.name
        assert error.hint


async def test_a_flood_over_the_limit_is_answered_busy_and_breaks_nothing() -> None:
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        flood = [talker.protocol.request(Gpus()) for _ in range(20)]
        await talker.send(b"".join(data for _, data in flood))
        refused = [await talker.next() for _ in range(16)]
        assert all(isinstance(event, Failure) and event.error.code.name == "busy" for event in refused)
        daemon.go_on.set()
        served = [await talker.next() for _ in range(4)]
        assert all(isinstance(event, Reply) for event in served)


async def test_the_least_limit_of_requests_takes_all_reports_of_an_agent() -> None:
    """With a limit of 1, `agent.attend` was all that an agent could send: its job never counted as training."""
    least = ROWS["limits.requests_in_flight"].kind
    assert isinstance(least, Amount)
    async with talking(PATIENT._replace(requests_in_flight=int(least.minimum))) as (talker, _, daemon, _):
        await talker.hello()
        await talker.send(talker.protocol.request(Gpus())[1])
        await daemon.waiting.wait()
        await talker.send(b"".join(talker.protocol.request(Ping())[1] for _ in range(100)))
        for _ in range(100):
            assert isinstance(await talker.next(), Reply)


async def test_at_the_limit_of_requests_one_of_them_can_be_cancelled() -> None:
    """The cancel was refused as one request too many, and the client could only close the connection."""
    async with talking() as (talker, _, _, _):
        await talker.hello()
        flood = [talker.protocol.request(Gpus()) for _ in range(4)]
        await talker.send(b"".join(data for _, data in flood))
        _, cancel = talker.protocol.request(Cancel(request=flood[0][0]))
        await talker.send(cancel)
        answers = [await talker.next(), await talker.next()]
        assert [event.reply for event in answers if isinstance(event, Reply)] == [CancelReply(found=True)]
        assert [event.id for event in answers if isinstance(event, Failure)] == [flood[0][0]]


async def test_an_error_with_a_path_that_is_not_utf8_reaches_the_peer() -> None:
    """Such an error could not be encoded, which ended the daemon."""
    async with talking() as (talker, session, _, _):
        await talker.hello()
        path = os.fsdecode(b"/etc/h\xe9gm.toml")

        async def fail(_: Call) -> Record:
            raise HegmError(NOT_FOUND, f"{path}: there is no such file", "name another", {"path": path})

        session._answer = fail
        failure = await talker.ask(Ping())
        assert isinstance(failure, Failure)
        assert failure.error.message == "/etc/h\\udce9gm.toml: there is no such file"
        assert isinstance(await talker.ask(Ping()), Failure)


async def test_a_bug_of_the_session_ends_that_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The error reached the listener and ended the daemon."""
    async with talking() as (talker, session, _, ended):
        await talker.hello()
        undone: list[str] = []
        session.at_end("hold", partial(undone.append, "hold"))

        async def fail(_: Call) -> Record:
            raise HegmError(NOT_FOUND, "no such thing", "look again", {"what": object()})

        session._answer = fail
        with caplog.at_level(logging.ERROR):
            assert await talker.ask(Ping()) is None
            await ended.wait()
        assert undone == ["hold"]
        (record,) = caplog.records
        assert record.exc_info is not None


async def test_a_stopping_daemon_tells_the_peer() -> None:
    async with talking() as (talker, session, daemon, ended):
        await talker.hello()
        _, slow = talker.protocol.request(Gpus())
        await talker.send(slow)
        await daemon.waiting.wait()
        await session.stop()
        await ended.wait()
        last = await talker.next()
        assert isinstance(last, Failure)
        assert last.id is None
        assert last.error.code is UNAVAILABLE


async def test_a_reply_of_the_wrong_kind_is_an_error_to_the_peer_and_not_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with talking() as (talker, session, _, _):

        async def wrong(_: Call) -> Record:
            return EventsReply(next_seq=1)

        await talker.hello()
        session._answer = wrong
        with caplog.at_level(logging.ERROR):
            failure = await talker.ask(Ping())
        assert isinstance(failure, Failure)
        assert failure.error.code.name == "internal"
        (record,) = caplog.records
        assert record.exc_info is not None, "whoever reads the hint looks for it in the log"
        assert isinstance(await talker.ask(Ping()), Failure)


def _impatient(**changes: float) -> SessionLimits:
    return SessionLimits(
        frame_bytes=65_536,
        requests_in_flight=4,
        hello_deadline_s=changes.get("hello_deadline_s", 60),
        frame_deadline_s=changes.get("frame_deadline_s", 60),
        send_deadline_s=changes.get("send_deadline_s", 60),
    )
