"""The library face for anyio programs: requests beside each other, cancellation, and daemons that are not well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hegmctl.async_connection import connect_async
from hegmctl.exchange import MAX_UNREAD
from hegmd.errors import BUSY, DISCONNECTED, INCOMPATIBLE, NO_DAEMON, NOT_FOUND, TIMEOUT, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.snapshots import Check
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, failing, remembering, saying, unanswered


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    with FakeDaemon(socket_path, node.answers(node.SIMULATED)) as daemon:
        yield daemon


async def test_every_operation_sends_its_own_request(daemon: FakeDaemon) -> None:
    checks: list[Check] = []

    async def on_check(check: Check) -> None:
        checks.append(check)

    async with connect_async(str(daemon.path), name="tester") as hegmd:
        assert hegmd.welcome == node.SIMULATED
        assert await hegmd.ping() == m.Pong()
        assert await hegmd.gpus() == node.GPUS
        assert await hegmd.processes([4711], ["gpu0"]) == node.PROCESSES
        assert await hegmd.config() == node.CONFIG
        assert (await hegmd.reload()).after_restart == ("metrics.port",)
        assert (await hegmd.metrics()).text.startswith("hegmd_build_info")
        assert [event async for event in hegmd.events()] == [*node.EVENTS]
        assert (await hegmd.doctor(on_check)).checks == tuple(checks) == node.CHECKS
        assert (await hegmd.simulate_hold("gpu0", 7)).vram_bytes == node.GIB
        assert (await hegmd.simulate_fault("gpu1", "lost")).faults == {"gpu1": "lost"}
    hello = daemon.wait_for(m.Hello)
    assert isinstance(hello, m.Hello)
    assert hello.name == "tester"
    assert daemon.requests[1:] == [
        m.Ping(),
        m.Gpus(),
        m.Processes(pids=(4711,), gpus=("gpu0",)),
        m.ShowConfig(),
        m.Reload(),
        m.Metrics(),
        m.Events(),
        m.Doctor(),
        m.SimulateHold(gpu="gpu0", vram_bytes=7),
        m.SimulateFault(target="gpu1", fault="lost"),
    ]


async def test_several_requests_run_concurrently(daemon: FakeDaemon) -> None:
    """The daemon answers the first request last. If requests waited for each other, none would get an answer."""
    kept: list[tuple[Caller, IncomingRequest]] = []
    daemon.answers[m.Gpus] = lambda caller, request: kept.append((caller, request))

    def answer(_caller: Caller, _asked: IncomingRequest) -> m.Pong:
        for caller, request in kept:
            caller.reply(request.id, node.GPUS)
        return m.Pong()

    daemon.answers[m.Ping] = answer
    got: list[object] = []

    async def ask_gpus() -> None:
        got.append(await hegmd.gpus())

    async with connect_async(str(daemon.path)) as hegmd, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(ask_gpus)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(daemon.wait_for, m.Gpus, 5)
        assert not got
        assert await hegmd.ping() == m.Pong()
    assert got == [node.GPUS] * 5


async def test_a_cancelled_request_is_cancelled_in_the_daemon_without_side_effects(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = unanswered
    async with connect_async(str(daemon.path)) as hegmd:
        with anyio.move_on_after(0.02) as scope:
            await hegmd.gpus()
        assert scope.cancelled_caught
        assert await hegmd.config() == node.CONFIG
    assert daemon.wait_for(m.Cancel) == m.Cancel(request=2)


async def test_a_cancelled_request_that_was_never_sent_leaves_whole_frames_behind(daemon: FakeDaemon) -> None:
    async with connect_async(str(daemon.path)) as hegmd:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await hegmd.gpus()
        assert await hegmd.ping() == m.Pong()


async def test_followed_events_come_as_they_happen_until_the_reader_leaves(daemon: FakeDaemon) -> None:
    followers: list[Caller] = []
    daemon.answers[m.Events] = remembering(node.EVENTS, then=followers.append)
    async with connect_async(str(daemon.path)) as hegmd:
        events = hegmd.events(follow=True, kinds=["gpu"])
        received = [await anext(events), await anext(events)]
        await anyio.to_thread.run_sync(daemon.wait_for, m.Events)
        followers[0].event(2, node.EVENTS[1].replace(seq=3))
        received.append(await anext(events))
        assert [event.seq for event in received] == [1, 2, 3]
        await events.aclose()
        assert await hegmd.ping() == m.Pong()
    assert daemon.wait_for(m.Events) == m.Events(follow=True, kinds=("gpu",))
    assert daemon.wait_for(m.Cancel) == m.Cancel(request=2)


async def test_a_reader_that_breaks_off_without_closing_still_cancels(daemon: FakeDaemon) -> None:
    daemon.answers[m.Events] = remembering(node.EVENTS, then=lambda _caller: None)
    async with connect_async(str(daemon.path)) as hegmd:
        async for _event in hegmd.events(follow=True):
            break
        await anyio.to_thread.run_sync(daemon.wait_for, m.Cancel)
        assert await hegmd.ping() == m.Pong()


async def test_calls_can_be_made_from_within_a_stream(daemon: FakeDaemon) -> None:
    async with connect_async(str(daemon.path)) as hegmd:
        async for _event in hegmd.events():
            assert await hegmd.gpus() == node.GPUS


@pytest.mark.thorough
async def test_a_reader_that_takes_nothing_loses_its_stream_and_not_the_connection(daemon: FakeDaemon) -> None:
    def flood(caller: Caller, request: IncomingRequest) -> None:
        caller.send(caller.protocol.event(request.id, node.EVENTS[0]) * (MAX_UNREAD + 2))

    daemon.answers[m.Events] = flood
    async with connect_async(str(daemon.path)) as hegmd:
        events = hegmd.events(follow=True)
        assert await anext(events) == node.EVENTS[0]
        await anyio.to_thread.run_sync(daemon.wait_for, m.Cancel)
        assert await hegmd.ping() == m.Pong()
        with pytest.raises(HegmError, match="were not read in time") as raised:
            async for _event in events:  # messages from before the end can still be read
                pass
        assert raised.value.code is BUSY


async def test_an_error_of_the_daemon_comes_out_bare(daemon: FakeDaemon) -> None:
    daemon.answers[m.Processes] = failing(HegmError(NOT_FOUND, "no process 7", "hegmctl ps lists them"))
    with pytest.raises(HegmError, match="no process 7") as raised:
        async with connect_async(str(daemon.path)) as hegmd:
            await hegmd.processes([7])
    assert raised.value.code is NOT_FOUND


async def test_an_error_of_the_program_itself_comes_out_bare(daemon: FakeDaemon) -> None:
    with pytest.raises(ZeroDivisionError):
        async with connect_async(str(daemon.path)):
            raise ZeroDivisionError


async def test_the_end_of_the_daemon_fails_all_open_requests(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = unanswered
    failures: list[HegmError] = []

    async def ask() -> None:
        try:
            await hegmd.gpus()
        except HegmError as error:
            failures.append(error)

    async with connect_async(str(daemon.path)) as hegmd:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
            await anyio.to_thread.run_sync(daemon.wait_for, m.Gpus, 2)
            daemon.hang_up()
        assert [failure.code for failure in failures] == [DISCONNECTED, DISCONNECTED]
        with pytest.raises(HegmError) as raised:
            await hegmd.ping()
        assert raised.value.code is DISCONNECTED


async def test_a_daemon_that_sends_nonsense_is_reported_as_incompatible(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = lambda caller, _asked: caller.send(b"\xff\xff\xff\xff")
    async with connect_async(str(daemon.path)) as hegmd:
        with pytest.raises(HegmError, match="does not understand") as raised:
            await hegmd.gpus()
        assert raised.value.code is INCOMPATIBLE


@pytest.mark.parametrize("words", [b"SSH-2.0-x\r\n", b"\0\0\0\1\xc0"])
async def test_a_server_other_than_hegmd_is_reported_as_such(socket_path: Path, words: bytes) -> None:
    with FakeDaemon(socket_path, {}, first_words=words), pytest.raises(HegmError, match="is not hegmd") as raised:
        async with connect_async(str(socket_path)):
            pytest.fail("greeted")
    assert raised.value.code is NO_DAEMON


async def test_a_missing_and_a_silent_daemon_are_reported_alike_by_both_interfaces(socket_path: Path) -> None:
    with pytest.raises(HegmError) as raised:
        async with connect_async(str(socket_path)):
            pytest.fail("connected")
    assert raised.value.code is NO_DAEMON
    with (
        FakeDaemon(socket_path, {m.Hello: unanswered}),
        pytest.raises(HegmError, match=r"hello within 0.02 s") as raised,
    ):
        async with connect_async(str(socket_path), timeout_s=0.02):
            pytest.fail("greeted")
    assert raised.value.code is TIMEOUT


async def test_descriptors_go_both_ways(daemon: FakeDaemon) -> None:
    def give_back(caller: Caller, request: IncomingRequest) -> None:
        assert request.fds == len(caller.fds) == 1
        caller.reply(request.id, m.Pong(), caller.fds)

    daemon.answers[m.Ping] = give_back
    read_end, write_end = os.pipe()
    async with connect_async(str(daemon.path)) as hegmd:
        reply, descriptors = await hegmd.call_with_descriptors(m.Ping(), m.Pong, fds=[write_end])
        os.close(write_end)
        assert reply == m.Pong()
        with descriptors:
            assert not os.get_inheritable(descriptors.numbers()[0])
            os.write(descriptors.numbers()[0], b"there and back")
    assert os.read(read_end, 100) == b"there and back"
    os.close(read_end)


async def test_a_full_queue_is_waited_for(socket_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(str(socket_path))
        listener.listen(0)
        first.connect(str(socket_path))
        with pytest.raises(HegmError, match="no answer to connecting") as raised:
            async with connect_async(str(socket_path), timeout_s=0.05):
                pytest.fail("connected")
    assert raised.value.code is TIMEOUT


async def test_the_connection_can_be_used_from_many_tasks(daemon: FakeDaemon) -> None:
    daemon.answers[m.Metrics] = saying(m.MetricsReply(text="x" * 100_000))
    texts: list[str] = []

    async def ask() -> None:
        texts.append((await hegmd.metrics()).text)

    async with connect_async(str(daemon.path)) as hegmd, anyio.create_task_group() as tasks:
        for _ in range(30):
            tasks.start_soon(ask)
    assert texts == ["x" * 100_000] * 30
