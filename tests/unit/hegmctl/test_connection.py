"""The synchronous library face, against a daemon that is well, and against all kinds that are not."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hegmctl.connection import Connection, connect
from hegmctl.failures import gone
from hegmd import __version__
from hegmd.errors import (
    BUSY,
    DENIED,
    DISCONNECTED,
    INCOMPATIBLE,
    NO_DAEMON,
    NOT_FOUND,
    REFUSED,
    TIMEOUT,
    Bug,
    HegmError,
)
from hegmd.protocol import messages as m
from hegmd.protocol.codec import encode
from hegmd.protocol.connection import IncomingRequest, ServerConnection
from hegmd.protocol.frames import frame
from hegmd.protocol.snapshots import Check
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, FakeDaemon, failing, remembering, saying, unanswered


def test_the_daemon_is_greeted_by_name_and_version(hegmd: Connection, daemon: FakeDaemon) -> None:
    assert hegmd.welcome == node.WELCOME
    assert daemon.wait_for(m.Hello) == m.Hello(versions=(2,), name="hegmctl", program_version=__version__)


def test_every_operation_sends_its_own_request(hegmd: Connection, daemon: FakeDaemon) -> None:
    assert hegmd.ping() == m.Pong()
    assert hegmd.gpus() == node.GPUS
    assert hegmd.processes([4711], ["gpu0"]) == node.PROCESSES
    assert hegmd.config() == node.CONFIG
    assert hegmd.reload().changed == ("log.level",)
    assert hegmd.metrics().text.startswith("hegmd_build_info")
    assert [*hegmd.events(since=2)] == [node.EVENTS[1]]
    checks: list[Check] = []
    assert hegmd.doctor(checks.append).checks == node.CHECKS
    assert tuple(checks) == node.CHECKS
    daemon.wait_for(m.Doctor)
    assert daemon.requests[1:] == [
        m.Ping(),
        m.Gpus(),
        m.Processes(pids=(4711,), gpus=("gpu0",)),
        m.ShowConfig(),
        m.Reload(),
        m.Metrics(),
        m.Events(since=2),
        m.Doctor(),
    ]


def test_simulation_is_requested_only_of_daemons_that_offer_it(socket_path: Path) -> None:
    with FakeDaemon(socket_path, node.answers(node.SIMULATED)), connect(str(socket_path)) as hegmd:
        assert hegmd.simulate_hold("gpu0", node.GIB).vram_bytes == node.GIB
        assert hegmd.simulate_fault("gpu1", "lost").faults == {"gpu1": "lost"}


def test_simulation_is_refused_without_a_request_to_a_daemon_of_real_gpus(
    hegmd: Connection, daemon: FakeDaemon
) -> None:
    with pytest.raises(HegmError, match="node7 does not support simulate") as raised:
        hegmd.simulate_fault("gpu1", "lost")
    assert raised.value.code is REFUSED
    assert "hegmd --simulate 2x8GiB --socket PATH" in raised.value.hint
    hegmd.ping()
    daemon.wait_for(m.Ping)
    assert m.SimulateFault not in {type(request) for request in daemon.requests}


def test_an_error_of_the_daemon_comes_out_as_it_is(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Processes] = failing(HegmError(NOT_FOUND, "no process 7", "hegmctl ps lists them", {"pids": [7]}))
    with pytest.raises(HegmError) as raised:
        hegmd.processes([7])
    error = raised.value
    assert (error.code, error.message, error.hint) == (NOT_FOUND, "no process 7", "hegmctl ps lists them")
    assert error.facts == {"pids": [7]}
    assert hegmd.ping() == m.Pong()


def test_events_can_be_read_on_after_calls_in_between(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Events] = remembering(node.EVENTS, then=lambda _caller: None)
    events = hegmd.events(follow=True)
    assert next(events) == node.EVENTS[0]
    assert hegmd.gpus() == node.GPUS  # while the second event waits to be read
    assert next(events) == node.EVENTS[1]
    events.close()
    cancelled = daemon.wait_for(m.Cancel)
    assert isinstance(cancelled, m.Cancel)
    assert cancelled.request == 2
    assert hegmd.gpus() == node.GPUS


def test_two_streams_do_not_take_each_others_events(hegmd: Connection) -> None:
    first, second = hegmd.events(), hegmd.events(since=2)
    assert next(first) == node.EVENTS[0]
    assert [*second] == [node.EVENTS[1]]
    assert [*first] == [node.EVENTS[1]]


def test_a_late_answer_is_not_matched_to_another_request(hegmd: Connection, daemon: FakeDaemon) -> None:
    late: list[tuple[Caller, IncomingRequest]] = []
    daemon.answers[m.Gpus] = lambda caller, request: late.append((caller, request))
    hegmd.timeout_s = 0.05
    with pytest.raises(HegmError, match=r"no answer to gpus within 0.05 s") as raised:
        hegmd.gpus()
    assert raised.value.code is TIMEOUT
    daemon.wait_for(m.Cancel)
    hegmd.timeout_s = 5
    assert hegmd.config() == node.CONFIG


def _serving_with_descriptors(fds: tuple[int, ...]) -> Answerer:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        caller.reply(request.id, m.Pong(), fds)

    return answer


def test_descriptors_come_with_the_reply_that_names_them(hegmd: Connection, daemon: FakeDaemon) -> None:
    read_end, write_end = os.pipe()
    daemon.answers[m.Ping] = _serving_with_descriptors((write_end,))
    reply, descriptors = hegmd.call_with_descriptors(m.Ping(), m.Pong)
    os.close(write_end)
    assert reply == m.Pong()
    with descriptors:
        os.write(descriptors.numbers()[0], b"through the socket")
    assert os.read(read_end, 100) == b"through the socket"
    assert os.read(read_end, 100) == b"", "the descriptor was closed with its owner"
    os.close(read_end)


def test_unrequested_descriptors_are_closed(hegmd: Connection, daemon: FakeDaemon) -> None:
    read_end, write_end = os.pipe()
    daemon.answers[m.Ping] = _serving_with_descriptors((write_end,))
    hegmd.ping()
    os.close(write_end)
    assert os.read(read_end, 1) == b""
    os.close(read_end)


def test_descriptors_are_sent_with_a_request(hegmd: Connection, daemon: FakeDaemon) -> None:
    observed: list[int] = []

    def answer(caller: Caller, request: IncomingRequest) -> m.Pong:
        observed.extend(os.fstat(fd).st_ino for fd in caller.fds)
        assert request.fds == 1
        return m.Pong()

    daemon.answers[m.Ping] = answer
    read_end, write_end = os.pipe()
    assert hegmd.call(m.Ping(), m.Pong, fds=[read_end]) == m.Pong()
    assert observed == [os.fstat(read_end).st_ino]
    os.close(read_end)
    os.close(write_end)


def test_announced_descriptors_that_do_not_come_break_the_connection(hegmd: Connection, daemon: FakeDaemon) -> None:
    daemon.answers[m.Ping] = lambda caller, request: caller.send(caller.protocol.reply(request.id, m.Pong(), 2))
    with pytest.raises(HegmError, match="2 descriptors were announced") as raised:
        hegmd.ping()
    assert raised.value.code is INCOMPATIBLE


def test_a_daemon_that_disconnects_during_a_request_is_reported_as_disconnected(
    hegmd: Connection, daemon: FakeDaemon
) -> None:
    daemon.answers[m.Gpus] = lambda caller, _asked: daemon.hang_up()
    with pytest.raises(HegmError, match="ended the connection before it answered gpus") as raised:
        hegmd.gpus()
    assert raised.value.code is DISCONNECTED
    with pytest.raises(HegmError, match="this connection is closed"):
        hegmd.gpus()


def test_a_daemon_that_disconnects_within_a_frame_is_reported_as_disconnected(
    hegmd: Connection, daemon: FakeDaemon
) -> None:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        caller.send(caller.protocol.reply(request.id, node.GPUS)[:-5])
        daemon.hang_up()

    daemon.answers[m.Gpus] = answer
    with pytest.raises(HegmError) as raised:
        hegmd.gpus()
    assert raised.value.code is DISCONNECTED


def test_the_reason_for_a_closed_connection_is_read_although_nothing_can_be_sent(
    hegmd: Connection, daemon: FakeDaemon
) -> None:
    hegmd.ping()
    caller = daemon.callers[0]
    caller.send(caller.protocol.error(None, HegmError(BUSY, "idle for too long", "connect again")))
    daemon.hang_up()
    daemon.wait_until(lambda: not daemon.callers)
    with pytest.raises(HegmError, match="idle for too long") as raised:
        hegmd.gpus()
    assert raised.value.code is BUSY


def _first_words(error: HegmError) -> bytes:
    return ServerConnection(frame_bytes=4096, requests_in_flight=1).error(None, error)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", NO_DAEMON, "is not hegmd"),
        (frame(b"\xc1"), NO_DAEMON, "is not hegmd"),
        (frame(encode({"id": 1, "ok": {"surprise": 1}})), NO_DAEMON, "is not hegmd"),
        (frame(encode({"id": 9, "ok": {}})), NO_DAEMON, "is not hegmd"),
        (b"", DISCONNECTED, "before it answered hello"),
        (_first_words(HegmError(BUSY, "4096 clients are connected", "try later")), BUSY, "4096 clients"),
        (_first_words(HegmError(DENIED, "uid 7 may not", "ask")), DENIED, "uid 7 may not"),
    ],
)
def test_the_caller_learns_what_answered_the_greeting(
    socket_path: Path, words: bytes, code: object, message: str
) -> None:
    with FakeDaemon(socket_path, {}, first_words=words), pytest.raises(HegmError, match=message) as raised:
        connect(str(socket_path), timeout_s=HANG_S)
    assert raised.value.code is code


def test_a_daemon_that_accepts_and_sends_nothing_costs_the_timeout(socket_path: Path) -> None:
    with (
        FakeDaemon(socket_path, {m.Hello: unanswered}),
        pytest.raises(HegmError, match=r"no answer to hello within 0.05 s") as raised,
    ):
        connect(str(socket_path), timeout_s=0.05)
    assert raised.value.code is TIMEOUT


def test_a_daemon_without_a_common_version_is_reported_with_both_versions(socket_path: Path) -> None:
    refusal = HegmError(INCOMPATIBLE, "no protocol version in common: caller [1], daemon [7]", "same release")
    with (
        FakeDaemon(socket_path, {m.Hello: failing(refusal)}),
        pytest.raises(HegmError, match=rf"daemon \[7\]; this is hegmctl {__version__}") as raised,
    ):
        connect(str(socket_path), timeout_s=HANG_S)
    assert raised.value.code is INCOMPATIBLE


@pytest.mark.parametrize(
    ("version", "hint"),
    [
        ("0.0.1", "the daemon is older"),
        ("9.0.0", "use the hegmctl of the daemon's release: this one is older"),
        (__version__, "same release"),
    ],
)
def test_an_operation_that_the_daemon_lacks_names_both_versions_and_the_older(
    socket_path: Path, version: str, hint: str
) -> None:
    answers = node.answers(node.WELCOME.replace(daemon_version=version))
    answers[m.Metrics] = failing(
        HegmError(INCOMPATIBLE, "this daemon has no operation 'metrics'", "x", {"op": "metrics"})
    )
    with (
        FakeDaemon(socket_path, answers),
        connect(str(socket_path), timeout_s=HANG_S) as hegmd,
        pytest.raises(HegmError, match=rf"\(hegmctl {__version__}, hegmd {version}\)") as raised,
    ):
        hegmd.metrics()
    assert hint in raised.value.hint
    assert raised.value.facts == {"op": "metrics", "hegmctl": __version__, "hegmd": version}


def test_a_reply_that_is_not_understood_is_blamed_on_the_versions(hegmd: Connection, daemon: FakeDaemon) -> None:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        caller.send(frame(encode({"id": request.id, "ok": {"taken_utc": "yesterday"}})))

    daemon.answers[m.Gpus] = answer
    with pytest.raises(HegmError, match=r"does not understand: gpus\.taken_utc") as raised:
        hegmd.gpus()
    assert raised.value.code is INCOMPATIBLE


def test_fields_of_a_newer_daemon_are_ignored(hegmd: Connection, daemon: FakeDaemon) -> None:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        plain = {**m.Pong().to_plain(), "mood": "fine"}
        caller.send(frame(encode({"id": request.id, "ok": plain, "more": 1})))

    daemon.answers[m.Ping] = answer
    assert hegmd.ping() == m.Pong()


def test_a_reply_one_byte_at_a_time_is_a_reply(hegmd: Connection, daemon: FakeDaemon) -> None:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        for byte in caller.protocol.reply(request.id, m.Pong()):
            caller.send(bytes([byte]))

    daemon.answers[m.Ping] = answer
    assert hegmd.ping() == m.Pong()


def test_waiting_for_the_end_ends_with_the_daemon(hegmd: Connection, daemon: FakeDaemon) -> None:
    hanging_up = threading.Thread(target=daemon.hang_up)
    hanging_up.start()
    with pytest.raises(HegmError) as raised:
        hegmd.wait_for_its_end()
    hanging_up.join()
    assert raised.value.code is DISCONNECTED
    assert raised.value.message == f"{daemon.path}: the daemon ended the connection"


def test_closing_twice_is_fine_and_using_it_afterwards_is_an_error(hegmd: Connection) -> None:
    events = hegmd.events()
    next(events)
    hegmd.close()
    hegmd.close()
    events.close()
    with pytest.raises(HegmError, match="closed"):
        hegmd.ping()


def test_asking_for_another_reply_than_the_message_has_is_a_bug(hegmd: Connection) -> None:
    with pytest.raises(Bug, match="Pong was read where GpusReply is expected"):
        hegmd.call(m.Ping(), m.GpusReply)


def test_the_generator_of_events_returns_the_reply(hegmd: Connection) -> None:
    events = hegmd.events()
    assert (next(events), next(events)) == node.EVENTS
    with pytest.raises(StopIteration) as ended:
        next(events)
    assert ended.value.value == m.EventsReply(next_seq=3)


def test_a_hello_reply_of_other_kind_is_not_swallowed(socket_path: Path) -> None:
    with (
        FakeDaemon(socket_path, {m.Hello: saying(node.WELCOME.replace(version=99))}),
        pytest.raises(HegmError, match="chose version 99"),
    ):
        connect(str(socket_path), timeout_s=HANG_S)


@pytest.mark.parametrize(("requested", "hint"), [("migrate", "hegmctl ops"), ("gpus", "try again")])
def test_a_client_that_waits_for_a_running_move_is_not_told_to_retry(requested: str, hint: str) -> None:
    assert hint in gone("/run/hegm/hegmd.sock", requested).hint
