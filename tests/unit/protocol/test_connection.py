"""Both roles joined: what each may say when, and that a refused word changes nothing."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmd.errors import BAD_REQUEST, BUSY, CANCELLED, INCOMPATIBLE, NOT_FOUND, Bug, HegmError
from hegmd.protocol import codec
from hegmd.protocol.connection import (
    HELLO_FRAME_BYTES,
    MAX_FDS,
    REPLY_FRAME_BYTES,
    ClientConnection,
    Failure,
    IncomingRequest,
    InvalidRequest,
    Progress,
    ProtocolBroken,
    Reply,
    ServerConnection,
)
from hegmd.protocol.frames import HEADER_BYTES, frame
from hegmd.protocol.messages import (
    Caller,
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
from hegmd.protocol.snapshots import Event
from tests.cells import in_one_test

EVENT = Event(seq=1, time_utc=1.0, kind="gpu.lost", severity="error", message="gone")


def welcome(version: int = 2) -> Welcome:
    return Welcome(
        version=version,
        daemon_version="0",
        node="n",
        simulated=True,
        capabilities=(),
        limits=Limits(frame_bytes=1, requests_in_flight=1),
        you=Caller(uid=0, gid=0, pid=1, may_act_on_all=True),
    )


def server(*, in_flight: int = 4) -> ServerConnection:
    return ServerConnection(frame_bytes=100_000, requests_in_flight=in_flight)


def joined(*, in_flight: int = 4) -> tuple[ClientConnection, ServerConnection]:
    """Both ends, past hello."""
    client, daemon = ClientConnection(), server(in_flight=in_flight)
    request_id, data = client.request(Hello(versions=(2,), name="test"))
    daemon.feed(data)
    request = daemon.next_event()
    assert isinstance(request, IncomingRequest)
    client.feed(daemon.reply(request_id, welcome()))
    assert isinstance(client.next_event(), Reply)
    return client, daemon


def ask(daemon: ServerConnection, **envelope: object) -> IncomingRequest | InvalidRequest | None:
    daemon.feed(frame(codec.encode(envelope)))
    return daemon.next_event()


def test_requests_overlap_and_each_gets_its_own_answer() -> None:
    client, daemon = joined()
    first, first_data = client.request(Gpus())
    second, second_data = client.request(Ping())
    daemon.feed(first_data + second_data)
    request = [daemon.next_event(), daemon.next_event()]
    assert [event.id for event in request if event is not None] == [first, second]
    client.feed(daemon.reply(second, Pong()))
    client.feed(daemon.reply(first, GpusReply(taken_utc=1.0, gpus=(), vendors=())))
    answers = [client.next_event(), client.next_event()]
    assert [answer.id for answer in answers if isinstance(answer, Reply)] == [second, first]
    assert client.next_event() is None


def test_events_come_before_the_reply_and_not_after_it() -> None:
    client, daemon = joined()
    request_id, data = client.request(Events(follow=True))
    daemon.feed(data)
    daemon.next_event()
    with pytest.raises(Bug):
        daemon.event(request_id, Pong())
    client.feed(daemon.event(request_id, EVENT) + daemon.reply(request_id, EventsReply(next_seq=2)))
    progress = client.next_event()
    assert isinstance(progress, Progress)
    assert progress.event == EVENT
    assert isinstance(client.next_event(), Reply)
    with pytest.raises(Bug):
        daemon.event(request_id, EVENT)


def test_an_error_keeps_its_code_words_and_facts() -> None:
    client, daemon = joined()
    request_id, data = client.request(Processes(pids=(4,)))
    daemon.feed(data)
    daemon.next_event()
    client.feed(daemon.error(request_id, HegmError(NOT_FOUND, "no process 4", "look again", {"pids": [4]})))
    failure = client.next_event()
    assert isinstance(failure, Failure)
    assert failure.error.code is NOT_FOUND
    assert (failure.error.message, failure.error.hint) == ("no process 4", "look again")
    assert failure.error.facts == {"pids": [4]}


def test_an_error_code_from_a_newer_daemon_is_still_an_error() -> None:
    client, _ = joined()
    request_id, _ = client.request(Ping())
    client.feed(frame(codec.encode({"id": request_id, "err": {"code": "novel", "message": "m", "hint": "h"}})))
    failure = client.next_event()
    assert isinstance(failure, Failure)
    assert failure.error.code.name == "novel"


@given(st.integers(min_value=1, max_value=7))
def test_one_byte_at_a_time_gives_the_same_conversation(step: int) -> None:
    client, daemon = ClientConnection(), server()
    _, data = client.request(Hello(versions=(2,), name="drip"))
    requests: list[IncomingRequest | InvalidRequest] = []
    for start in range(0, len(data), step):
        daemon.feed(data[start : start + step])
        while (event := daemon.next_event()) is not None:
            requests.append(event)
    assert [type(event) for event in requests] == [IncomingRequest]
    assert not daemon.mid_frame


@in_one_test(
    ("envelope", "says"),
    [
        ({"v": 2, "id": 1, "op": "ping", "args": {}}, "hello"),
        ({"v": 1, "id": 1, "args": {}}, "hello"),
        ({"v": 1, "op": "hello", "args": {}}, "id"),
        ({"v": 1, "id": 0, "op": "hello", "args": {}}, "id"),
        ({"v": 1, "id": 2**53, "op": "hello", "args": {}}, "id"),
        ({"v": 1, "id": True, "op": "hello", "args": {}}, "id"),
        ({"v": 1, "id": "1", "op": "hello", "args": {}}, "id"),
        ({"v": 2, "id": 1, "op": "hello", "args": {"versions": [2], "name": "x"}}, "version"),
        ({"v": 1, "id": 1, "op": "hello", "args": {"versions": [7], "name": "x"}}, "no protocol version in common"),
        ({"v": 1, "id": 1, "op": "hello", "args": {"versions": [2]}}, "name"),
        ({"v": 1, "id": 1, "op": "hello", "args": []}, "map"),
        ({"v": 1, "id": 1, "op": "hello", "fds": 17, "args": {"versions": [2], "name": "x"}}, "fds"),
        ({"v": 1, "id": 1, "op": "hello", "fds": -1, "args": {"versions": [2], "name": "x"}}, "fds"),
    ],
)
def test_an_invalid_hello_ends_the_connection(envelope: dict[str, object], says: str) -> None:
    with pytest.raises(ProtocolBroken, match=says):
        ask(server(), **envelope)


def test_versions_are_negotiated_down_to_the_highest_in_common() -> None:
    daemon = server()
    request = ask(daemon, v=1, id=1, op="hello", args={"versions": [99, 2, 0], "name": "x"})
    assert isinstance(request, IncomingRequest)
    assert daemon.version == 2


@in_one_test(
    ("envelope", "code"),
    [
        ({"v": 2, "id": 5, "op": "no.such", "args": {}}, INCOMPATIBLE),
        ({"v": 3, "id": 5, "op": "ping", "args": {}}, INCOMPATIBLE),
        ({"id": 5, "op": "ping"}, INCOMPATIBLE),
        ({"v": 2, "id": 5, "op": ["ping"]}, BAD_REQUEST),
        ({"v": 2, "id": 5, "op": "processes", "args": {"pids": [1.5]}}, BAD_REQUEST),
        ({"v": 2, "id": 5, "op": "hello", "args": {"versions": [2], "name": "again"}}, BAD_REQUEST),
    ],
)
def test_an_unfit_request_is_answered_and_breaks_nothing(envelope: dict[str, object], code: object) -> None:
    client, daemon = joined()
    unfit = ask(daemon, **envelope)
    assert isinstance(unfit, InvalidRequest)
    assert unfit.error.code is code
    daemon.error(unfit.id, unfit.error)
    request_id, data = client.request(Ping())
    daemon.feed(data)
    assert isinstance(daemon.next_event(), IncomingRequest)
    assert daemon.reply(request_id, Pong())


def test_one_request_over_the_limit_is_busy_and_the_next_after_a_reply_is_not() -> None:
    client, daemon = joined(in_flight=2)
    ids: list[int] = []
    kinds: list[type] = []
    for _ in range(3):
        request_id, data = client.request(Ping())
        daemon.feed(data)
        event = daemon.next_event()
        ids.append(request_id)
        kinds.append(type(event))
        if isinstance(event, InvalidRequest):
            assert event.error.code is BUSY
            daemon.error(event.id, event.error)
    assert kinds == [IncomingRequest, IncomingRequest, InvalidRequest]
    daemon.reply(ids[0], Pong())
    _, data = client.request(Ping())
    daemon.feed(data)
    assert isinstance(daemon.next_event(), IncomingRequest)


def test_an_id_that_is_still_unanswered_breaks_the_connection() -> None:
    _, daemon = joined()
    assert isinstance(ask(daemon, v=2, id=9, op="ping"), IncomingRequest)
    with pytest.raises(ProtocolBroken, match="unanswered") as caught:
        ask(daemon, v=2, id=9, op="ping")
    assert caught.value.request_id is None
    assert daemon.reply(9, Pong()), "the request that has the id rightly was lost"


def test_the_frame_limit_is_small_until_hello_and_large_after_it() -> None:
    daemon = server()
    with pytest.raises(ProtocolBroken, match=str(HELLO_FRAME_BYTES)):
        ask(daemon, v=1, id=1, op="hello", args={"versions": [2], "name": "x" * HELLO_FRAME_BYTES})
    client, daemon = joined()
    _, data = client.request(Processes(gpus=("x" * (2 * HELLO_FRAME_BYTES),)))
    daemon.feed(data)
    assert isinstance(daemon.next_event(), IncomingRequest)


def test_the_number_of_descriptors_is_reported() -> None:
    client, daemon = joined()
    _, data = client.request(Ping(), fds=MAX_FDS)
    daemon.feed(data)
    event = daemon.next_event()
    assert isinstance(event, IncomingRequest)
    assert event.fds == MAX_FDS


def test_our_own_mistakes_are_bugs_and_change_nothing() -> None:
    client, daemon = joined()
    request_id, data = client.request(Ping())
    daemon.feed(data)
    daemon.next_event()
    with pytest.raises(Bug):
        daemon.reply(request_id, EventsReply(next_seq=1))
    with pytest.raises(Bug):
        daemon.event(request_id, EVENT)
    with pytest.raises(Bug):
        daemon.reply(request_id + 1, Pong())
    client.feed(daemon.reply(request_id, Pong()))
    assert isinstance(client.next_event(), Reply)
    with pytest.raises(Bug):
        client.request(Hello(versions=(2,), name="twice"))
    with pytest.raises(Bug):
        ClientConnection().request(Ping())


def test_a_value_that_msgpack_cannot_encode_is_a_bug_and_the_request_stays_open() -> None:
    client, daemon = joined()
    request_id, data = client.request(Events())
    daemon.feed(data)
    daemon.next_event()
    with pytest.raises(Bug):
        daemon.event(request_id, EVENT.replace(facts={"what": object()}))
    assert daemon.error(request_id, HegmError(CANCELLED, "m", "h"))


@pytest.mark.thorough
def test_a_message_may_be_as_long_as_the_limit() -> None:
    client, daemon = joined()
    request_id, data = client.request(Events())
    daemon.feed(data)
    daemon.next_event()
    # A text of 64 KiB or more begins with five bytes of its length.
    around_bytes = len(daemon.event(request_id, EVENT.replace(message="x" * 65536))) - HEADER_BYTES - 65536
    longest = "x" * (REPLY_FRAME_BYTES - around_bytes)
    assert len(daemon.event(request_id, EVENT.replace(message=longest))) == HEADER_BYTES + REPLY_FRAME_BYTES
    with pytest.raises(Bug, match=f"a message of {REPLY_FRAME_BYTES + 1} bytes"):
        daemon.event(request_id, EVENT.replace(message=f"{longest}x"))


def test_bytes_that_are_not_utf8_are_escaped_by_the_daemon_and_refused_in_a_request() -> None:
    """A name on the node may hold such bytes: the reply has to arrive, and a name in a request must stay unchanged."""
    client, daemon = joined()
    request_id, data = client.request(Events())
    daemon.feed(data)
    daemon.next_event()
    client.feed(daemon.event(request_id, EVENT.replace(message="gone: \udcff")))
    progress = client.next_event()
    assert isinstance(progress, Progress)
    assert progress.event == EVENT.replace(message=r"gone: \udcff")
    with pytest.raises(Bug):
        client.request(Processes(gpus=("\udcff",)))


@in_one_test(
    "envelope",
    [
        {"id": 77, "ok": {}},
        {"id": None, "ok": {}},
        {"id": 2},
        {"id": 2, "ok": []},
        {"id": 2, "ok": {"gpus": "x"}},
        {"id": 2, "event": {}},
        {"id": 2, "err": {"code": 1}},
        {"id": 2, "ok": {"taken_utc": 1, "gpus": [], "vendors": []}, "fds": 99},
    ],
)
def test_a_daemon_that_sends_nonsense_is_distinguished_from_one_that_refuses(envelope: dict[str, object]) -> None:
    client, _ = joined()
    client.request(Gpus())
    client.feed(frame(codec.encode(envelope)))
    with pytest.raises(ProtocolBroken):
        client.next_event()


def test_a_version_that_was_not_offered_is_nonsense() -> None:
    client, daemon = ClientConnection(), server()
    request_id, data = client.request(Hello(versions=(2,), name="test"))
    daemon.feed(data)
    daemon.next_event()
    client.feed(daemon.reply(request_id, welcome(version=9)))
    with pytest.raises(ProtocolBroken, match="version 9"):
        client.next_event()


def test_an_error_about_the_connection_has_no_request() -> None:
    client, daemon = joined()
    client.feed(daemon.error(None, HegmError(BUSY, "full", "later")))
    failure = client.next_event()
    assert isinstance(failure, Failure)
    assert failure.id is None


@given(st.binary(max_size=200))
def test_no_bytes_make_the_server_end_raise_anything_but_a_broken_protocol(data: bytes) -> None:
    _, daemon = joined()
    daemon.feed(frame(data) if data else data)
    with contextlib.suppress(ProtocolBroken):
        while daemon.next_event() is not None:
            pass


def test_an_event_states_how_many_descriptors_come_with_it() -> None:
    client, daemon = joined()
    request_id, data = client.request(Events(follow=True))
    daemon.feed(data)
    daemon.next_event()
    client.feed(daemon.event(request_id, EVENT, fds=2) + daemon.event(request_id, EVENT))
    counts = [event.fds for event in (client.next_event(), client.next_event()) if isinstance(event, Progress)]
    assert counts == [2, 0]
