"""The loopback port for Prometheus, over real sockets: what it answers, and what a bad neighbour can do to it."""

from __future__ import annotations

import contextlib
import http.client
import logging
import resource
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from hegmd.errors import REFUSED, UNAVAILABLE, HegmError
from hegmd.server.scrape import HttpLimits, ScrapePort, bind_loopback
from hegmd.telemetry.metrics import CONTENT_TYPE
from tests.patience import HANG_S

GET = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
TEXT = "# HELP hegmd_x X\u00fc.\n# TYPE hegmd_x gauge\nhegmd_x 1\n"


async def metrics() -> str:
    return TEXT


@contextlib.asynccontextmanager
async def serving(
    render: Callable[[], Awaitable[str]] = metrics, limits: HttpLimits | None = None
) -> AsyncIterator[int]:
    """A port that is scraped inside; its number."""
    first, *others = bind_loopback(0)  # port 0 is another one on each address
    for other in others:
        other.close()
    async with anyio.create_task_group() as tasks:
        await tasks.start(ScrapePort([first], render, limits).run)
        yield first.getsockname()[1]
        tasks.cancel_scope.cancel()


async def ask(port: int, request: bytes, host: str = "127.0.0.1") -> bytes:
    """Return the whole answer up to the end of the connection."""
    async with await anyio.connect_tcp(host, port) as stream:
        await stream.send(request)
        return await rest_of(stream)


async def rest_of(stream: anyio.abc.ByteReceiveStream) -> bytes:
    parts = [part async for part in stream]
    return b"".join(parts)


async def test_a_common_http_client_gets_the_metrics() -> None:
    def scrape(port: int, method: str) -> tuple[int, str | None, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        with contextlib.closing(connection):
            connection.request(method, "/metrics", headers={"Accept": "text/plain"})
            response = connection.getresponse()
            return response.status, response.getheader("Content-Type"), response.read()

    async with serving() as port:
        assert await anyio.to_thread.run_sync(scrape, port, "GET") == (200, CONTENT_TYPE, TEXT.encode())
        assert await anyio.to_thread.run_sync(scrape, port, "HEAD") == (200, CONTENT_TYPE, b"")
        assert (await anyio.to_thread.run_sync(scrape, port, "POST"))[0] == 405


async def test_a_request_may_come_byte_by_byte_and_end_early() -> None:
    async with serving() as port, await anyio.connect_tcp("127.0.0.1", port) as stream:
        for number in range(len(GET)):
            await stream.send(GET[number : number + 1])
        await stream.send_eof()
        answer = await rest_of(stream)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(TEXT.encode())


async def test_one_connection_is_one_request() -> None:
    async with serving() as port:
        answer = await ask(port, GET * 3)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"\r\nConnection: close\r\n" in answer


async def test_a_large_text_arrives_whole_also_if_the_request_was_longer_than_needed() -> None:
    async def large() -> str:
        return "x" * (8 << 20)

    async with serving(large) as port:
        answer = await ask(port, GET + b"surplus" * 1000)
    assert len(answer.partition(b"\r\n\r\n")[2]) == 8 << 20


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"404"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 20000, b"431"),
        (b"GET /metrics HTTP/1.1\r\n", b"408"),
        (b"", b"408"),
    ],
)
async def test_an_invalid_request_is_answered_and_the_next_one_gets_metrics(request_: bytes, status: bytes) -> None:
    limits = HttpLimits(head_deadline_s=0.05) if status == b"408" else HttpLimits(head_deadline_s=HANG_S)
    async with serving(limits=limits) as port:
        assert (await ask(port, request_)).startswith(b"HTTP/1.1 " + status)
        while not (await ask(port, GET)).startswith(b"HTTP/1.1 200"):
            pass  # on a busy machine a whole request may be too late as well, and is repeated


async def test_background_work_gives_way_to_requests() -> None:
    async with serving(limits=HttpLimits(connections=3)) as port, contextlib.AsyncExitStack() as held:
        idle = [await held.enter_async_context(await anyio.connect_tcp("127.0.0.1", port)) for _ in range(3)]
        assert (await ask(port, GET)).startswith(b"HTTP/1.1 200")
        assert await rest_of(idle[0]) == b""
        await idle[1].send(GET)
        assert (await rest_of(idle[1])).startswith(b"HTTP/1.1 200")


async def test_beyond_the_limit_connections_are_closed_when_all_others_are_being_served() -> None:
    requested, answer = anyio.Event(), anyio.Event()

    async def slow() -> str:
        requested.set()
        await answer.wait()
        return TEXT

    async with serving(slow, HttpLimits(connections=1)) as port, await anyio.connect_tcp("127.0.0.1", port) as first:
        await first.send(GET)
        await requested.wait()
        with contextlib.suppress(anyio.BrokenResourceError):
            assert await ask(port, GET) == b""
        answer.set()
        assert (await rest_of(first)).startswith(b"HTTP/1.1 200")


@pytest.mark.thorough
async def test_slow_readers_are_disconnected_after_the_limit() -> None:
    requested = anyio.Event()

    async def large_at_first() -> str:
        if requested.is_set():
            return TEXT
        requested.set()
        return "x" * (64 << 20)

    limits = HttpLimits(connections=1, send_deadline_s=0.05)
    async with serving(large_at_first, limits) as port:
        with socket.create_connection(("127.0.0.1", port)) as deaf:
            deaf.sendall(GET)
            await requested.wait()
            answer = b""
            while not answer:  # turned away until the place of the deaf one is free
                with contextlib.suppress(anyio.BrokenResourceError):
                    answer = await ask(port, GET)
    assert answer.startswith(b"HTTP/1.1 200")


async def test_clients_that_disconnect_halfway_disturb_no_other() -> None:
    async with serving() as port:
        for request in (b"", b"GET /met", GET):
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(request)
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # leaves with a reset
        assert (await ask(port, GET)).startswith(b"HTTP/1.1 200")


async def test_a_failing_driver_is_an_answer_with_its_hint() -> None:
    async def unavailable() -> str:
        raise HegmError(UNAVAILABLE, "NVML does not answer", "look at dmesg")

    async with serving(unavailable) as port:
        answer = await ask(port, GET)
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"NVML does not answer (unavailable); look at dmesg" in answer


async def test_a_bug_is_an_answer_and_a_traceback_in_the_log_under_the_same_reference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken() -> str:
        raise ZeroDivisionError

    async with serving(broken) as port:
        answer = await ask(port, GET)
        assert (await ask(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 404")
    assert answer.startswith(b"HTTP/1.1 500")
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info
    assert record.__dict__["fields"]["error_ref"].encode() in answer


class FirstRecord(logging.Handler):
    """Tells when the first record has come."""

    def __init__(self) -> None:
        super().__init__()
        self.record: logging.LogRecord | None = None
        self.came = anyio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.record = record
        self.came.set()


async def test_running_out_of_descriptors_is_logged_and_waiting_clients_are_served_later() -> None:
    """Issue 14, row 20: no test missed the line in the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    records = FirstRecord()
    log = logging.getLogger("hegmd.server.scrape")
    log.addHandler(records)
    try:
        async with serving() as port:
            with socket.socket() as waiting:
                resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
                waiting.setblocking(False)
                waiting.connect_ex(("127.0.0.1", port))
                await records.came.wait()
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                await anyio.wait_writable(waiting)
                waiting.send(GET)
                await anyio.wait_readable(waiting)
                assert waiting.recv(15) == b"HTTP/1.1 200 OK"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        log.removeHandler(records)
    assert records.record is not None
    assert records.record.levelno == logging.ERROR
    assert records.record.getMessage() == "cannot accept connections: Too many open files"


async def test_both_loopback_addresses_are_served_and_no_other() -> None:
    sockets = bind_loopback(0)
    addresses = {listening.getsockname()[0] for listening in sockets}
    assert addresses <= {"127.0.0.1", "::1"}
    async with anyio.create_task_group() as tasks:
        await tasks.start(ScrapePort(sockets, metrics).run)
        for listening in sockets:
            host, port = listening.getsockname()[:2]
            assert (await ask(port, GET, host)).startswith(b"HTTP/1.1 200")
        tasks.cancel_scope.cancel()
    assert all(listening.fileno() == -1 for listening in sockets)


def test_a_port_in_use_is_refused_with_the_command_that_finds_its_user() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HegmError, match="Address already in use") as caught:
            bind_loopback(port)
    assert caught.value.code is REFUSED
    assert f"sport = :{port}" in caught.value.hint


def test_a_port_in_use_on_one_address_is_bound_on_none() -> None:
    """The socket that was bound first would stay open."""
    with socket.socket(socket.AF_INET6) as other:
        try:
            other.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(HegmError, match="Address already in use") as caught:
            bind_loopback(port)
        del caught
        with socket.socket() as free:
            free.bind(("127.0.0.1", port))


async def test_a_request_may_have_as_many_bytes_as_the_limit() -> None:
    first, rest = GET[:30], GET[30:]
    async with (
        serving(limits=HttpLimits(head_bytes=len(first))) as port,
        await anyio.connect_tcp("127.0.0.1", port) as stream,
    ):
        await stream.send(first)
        await anyio.wait_all_tasks_blocked()
        await stream.send(rest)
        assert (await rest_of(stream)).startswith(b"HTTP/1.1 200")


async def test_other_tasks_run_between_two_connections_and_between_two_reads() -> None:
    """Peers that connect and send without a pause must not hold up the daemon."""
    turn = 0
    accepted_at: list[int] = []
    peers: list[RawClient] = []

    class RawClient(socket.socket):
        def __init__(self) -> None:
            super().__init__()
            self.read_at: list[int] = []

        def recv(self, *_: object) -> bytes:
            self.read_at.append(turn)
            return GET[len(self.read_at) - 1 :][:1]

    class ManyClients(socket.socket):
        def accept(self) -> tuple[socket.socket, None]:
            if len(peers) == 5:
                raise BlockingIOError
            accepted_at.append(turn)
            peers.append(RawClient())
            return peers[-1], None

    async def other_task() -> None:
        nonlocal turn
        while True:
            turn += 1
            await anyio.lowlevel.checkpoint()

    crowd = ManyClients()
    crowd.bind(("127.0.0.1", 0))
    crowd.listen()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other_task)
        await tasks.start(ScrapePort([crowd], metrics).run)
        while not (len(peers) == 5 and all(peer.fileno() == -1 for peer in peers)):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert len(set(accepted_at)) == 5
    assert [len(set(peer.read_at)) for peer in peers] == [len(GET)] * 5


def test_a_restart_does_not_wait_for_old_connections() -> None:
    sockets = bind_loopback(0)
    for listening in sockets:
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        listening.close()
