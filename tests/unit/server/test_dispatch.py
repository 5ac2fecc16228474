"""From request to reply: permission first, the audit record, and the reply to an unexpected exception."""

from __future__ import annotations

import errno
import inspect
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from hegmd.errors import DENIED, INTERNAL, NOT_FOUND, UNAVAILABLE, HegmError
from hegmd.protocol import codec
from hegmd.protocol.frames import frame
from hegmd.protocol.messages import (
    REQUESTS,
    Cancel,
    Events,
    EventsReply,
    Hello,
    Ping,
    Pong,
    Reload,
    ReloadReply,
    Request,
)
from hegmd.protocol.record import Record
from hegmd.protocol.snapshots import Event
from hegmd.server import handlers, operation_handlers, sharing_handlers
from hegmd.server.auth import Peer, Policy
from hegmd.server.dispatch import Dispatcher
from hegmd.server.session import Call, PeerGone, Session, SessionLimits
from hegmd.system.descriptors import Descriptors
from hegmd.system.stream import PeerStream
from hegmd.telemetry.audit import Audit
from hegmd.telemetry.log import current_operation
from hegmd.telemetry.metrics import Counters

POLICY = Policy(daemon_uid=0)
ROOT = Peer(pid=os.getpid(), uid=0, gid=0)
STRANGER = Peer(pid=os.getpid(), uid=1234, gid=1234)
LIMITS = SessionLimits(
    frame_bytes=65_536, requests_in_flight=4, hello_deadline_s=60, frame_deadline_s=60, send_deadline_s=60
)


class Bench:
    """A dispatcher, what it counts and what it audits."""

    def __init__(self, audit_file: Path) -> None:
        self.counters = Counters()
        self.audit = Audit(audit_file)
        self.audit_file = audit_file
        self._sockets = socket.socketpair()
        self._stream = PeerStream(self._sockets[0])

    def close(self) -> None:
        self._stream.close()
        self._sockets[1].close()
        self.audit.close()

    def hang_up(self) -> None:
        self._sockets[1].close()

    def audited(self) -> list[str]:
        self.audit.close()
        return self.audit_file.read_text().splitlines()

    async def answer(
        self, request: Request, handler: Callable[[Call, Request], Awaitable[Record]], peer: Peer = ROOT
    ) -> Record:
        dispatcher = Dispatcher({type(request): handler}, POLICY, self.counters, self.audit)
        session = Session(self._stream, peer, dispatcher.answer, LIMITS, self.counters)
        return await dispatcher.answer(Call(session, 1, request, Descriptors([])))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path / "audit.jsonl")
    yield made
    made.close()


async def pong(call: Call, request: Request) -> Record:
    return Pong()


async def reloaded(call: Call, request: Request) -> Record:
    return ReloadReply(changed=(), after_restart=())


async def test_an_answer_is_counted_and_one_that_changes_nothing_leaves_no_audit(bench: Bench) -> None:
    assert await bench.answer(Ping(), pong) == Pong()
    assert bench.counters.requests["ping", "ok"] == 1
    assert bench.counters.durations["ping"].count == 1
    assert bench.audited() == []


async def test_requests_that_change_state_are_audited_with_caller_and_request(bench: Bench) -> None:
    await bench.answer(Reload(), reloaded)
    (line,) = bench.audited()
    for part in ('"op":"reload"', '"uid":0', f'"pid":{ROOT.pid}', '"result":"ok"'):
        assert part in line.replace(": ", ":")


async def test_a_denied_request_never_reaches_the_handler_and_is_audited(bench: Bench) -> None:
    async def unreachable(call: Call, request: Request) -> Record:
        raise AssertionError("the handler was called")

    with pytest.raises(HegmError) as caught:
        await bench.answer(Reload(), unreachable, STRANGER)
    assert caught.value.code is DENIED
    assert bench.counters.requests["reload", "denied"] == 1
    (line,) = bench.audited()
    assert "1234" in line


async def test_a_refusal_passes_as_it_is(bench: Bench) -> None:
    refusal = HegmError(NOT_FOUND, "no such thing", "look again")

    async def refuse(call: Call, request: Request) -> Record:
        raise refusal

    with pytest.raises(HegmError) as caught:
        await bench.answer(Ping(), refuse)
    assert caught.value is refusal


async def test_an_unexpected_exception_is_an_internal_error_with_a_reference_into_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(call: Call, request: Request) -> Record:
        raise ZeroDivisionError("a secret detail")

    with caplog.at_level(logging.ERROR), pytest.raises(HegmError) as caught:
        await bench.answer(Ping(), broken)
    assert caught.value.code is INTERNAL
    assert "secret" not in caught.value.message
    reference = caught.value.facts["reference"]
    (record,) = caplog.records
    assert str(reference) in record.getMessage()
    assert record.exc_info is not None


NO_MORE = OSError(errno.EMFILE, "Too many open files", "/proc")


@pytest.mark.parametrize("beside", [False, True])
async def test_a_restore_without_a_free_descriptor_was_an_internal_error(bench: Bench, *, beside: bool) -> None:
    """The message did not name the limit, nor that the request can be repeated."""

    async def looking(call: Call, request: Request) -> Record:
        if not beside:
            raise NO_MORE
        async with anyio.create_task_group(), anyio.create_task_group():
            raise NO_MORE
        raise AssertionError

    with pytest.raises(HegmError, match="hegmd has reached its limit of") as caught:
        await bench.answer(Ping(), looking)
    assert caught.value.code is UNAVAILABLE
    assert "LimitNOFILE=" in caught.value.hint
    assert caught.value.facts["files"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def test_an_unhandled_message_is_a_bug_of_hegmd(bench: Bench) -> None:
    dispatcher = Dispatcher({}, POLICY, bench.counters, bench.audit)
    session = Session(bench._stream, ROOT, dispatcher.answer, LIMITS, bench.counters)
    with pytest.raises(HegmError) as caught:
        await dispatcher.answer(Call(session, 1, Ping(), Descriptors([])))
    assert caught.value.code is INTERNAL


async def test_a_cancelled_request_is_counted_and_the_cancellation_is_raised_again(bench: Bench) -> None:
    async def endless(call: Call, request: Request) -> Record:
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.CancelScope() as scope:
        scope.cancel()
        await bench.answer(Reload(), endless)
    assert scope.cancelled_caught
    assert bench.counters.requests["reload", "cancelled"] == 1
    (line,) = bench.audited()
    assert "cancelled" in line


async def test_how_long_a_stream_lasted_is_not_a_latency(bench: Bench) -> None:
    async def ended(call: Call, request: Request) -> Record:
        return EventsReply(next_seq=1)

    await bench.answer(Events(), ended)
    assert bench.counters.requests["events", "ok"] == 1
    assert "events" not in bench.counters.durations


async def test_a_handler_runs_as_part_of_an_operation(bench: Bench) -> None:
    observed: list[object] = []

    async def look(call: Call, request: Request) -> Record:
        observed.append(current_operation())
        return Pong()

    await bench.answer(Ping(), look)
    assert observed != [None]
    assert current_operation() is None


async def test_a_peer_that_hangs_up_on_its_events_is_no_bug_of_the_handler(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Every such peer left the traceback of an internal error in the log, as often as it liked."""
    happened = Event(seq=1, time_utc=1.0, kind="gpu.lost", severity="error", message="gone")

    async def stream(call: Call, request: Request) -> Record:
        call.session.protocol.hello = Hello(versions=(2,), name="peer")
        call.session.protocol.feed(frame(codec.encode({"v": 1, "id": 1, "op": "events"})))
        assert call.session.protocol.next_event() is not None
        bench.hang_up()
        await call.emit(happened)
        raise AssertionError("there was nobody to send it to")

    with caplog.at_level(logging.ERROR), pytest.raises(PeerGone):
        await bench.answer(Events(), stream)
    assert caplog.records == []
    assert bench.counters.requests["events", "disconnected"] == 1


def test_every_message_is_handled() -> None:
    every = (handlers.Handlers, operation_handlers.OperationHandlers, sharing_handlers.SharingHandlers)
    tables = [each.table for each in every]
    source = "".join(inspect.getsource(table) for table in tables)
    missing = [message.__name__ for message in REQUESTS.values() if f"m.{message.__name__}:" not in source]
    assert missing == [Cancel.__name__], "Cancel alone is answered by the session"
