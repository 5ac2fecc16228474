"""A helper that is late, killed, gone or sends nonsense: every caller gets an error, and the next call a new helper."""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import PeerError
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link, Stuck
from hegmd.gpu_helper.wire import Channel, packed
from tests.unit.gpu_helper.linking import SOON_S, TRICKS, ProgressLog, ask, has_ended, linked

# -- over its time -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_a_call_over_its_deadline_takes_the_helper_along_and_the_next_call_has_a_new_one() -> None:
    async with linked("well") as link:
        lost: list[HelperLost] = []
        progress = ProgressLog()

        async def wait() -> None:
            with pytest.raises(HelperLost) as raised:
                await link.call("wait", deadline_s=SOON_S, on_progress=progress)
            lost.append(raised.value)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await progress.first.wait()
            first = link.pid
            with pytest.raises(HelperLost, match=r"`hang` was not done after 0\.1 s; in flight: wait, hang") as raised:
                await link.call("hang", deadline_s=0.1)
        assert raised.value.in_flight == lost[0].in_flight == ("wait", "hang")
        assert await ask(link, "ping") == {"pong": {}}
        assert first is not None
        assert has_ended(first), "the next one starts when the one before is gone"
        assert link.pid not in (None, first)


async def test_a_helper_stopped_before_it_began_was_waited_for_for_ever() -> None:
    async with linked("well") as link:

        async def start() -> None:
            with pytest.raises(HelperLost, match="was stopped: the test says so"):
                await link.start()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(start)
            await anyio.lowlevel.checkpoint()  # its program has not been started
            link.kill("the test says so")
        with anyio.fail_after(SOON_S):
            assert await ask(link, "ping") == {"pong": {}}


@pytest.mark.thorough
async def test_a_stopped_helper_is_killed_too() -> None:
    async with linked("well") as link:
        first = (await link.start())["pid"]
        with pytest.raises(HelperLost):
            await link.call("stop", deadline_s=0.2)
        assert await ask(link, "ping") == {"pong": {}}
        assert has_ended(first)


@pytest.mark.thorough
async def test_a_helper_that_could_no_longer_run_was_noticed_only_at_the_deadlines_of_its_calls() -> None:
    async with linked("brisk") as link:
        first = (await link.start())["pid"]
        with pytest.raises(HelperLost, match=r"reported nothing for 0\.2 s"), anyio.fail_after(SOON_S):
            await link.call("stop", deadline_s=600)
        assert await ask(link, "ping") == {"pong": {}}
        assert has_ended(first)


def test_a_helper_reports_its_current_calls_while_they_hang() -> None:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs, subprocess.Popen([*TRICKS, "brisk", "0"], stdin=theirs.fileno(), env=environment) as helper, ours:
        theirs.close()
        channel = Channel(ours)

        def next_message() -> dict[str, Any]:
            came = channel.receive()
            assert came is not None
            return came[0]

        assert next_message()["hello"]["beat_s"] == 0.02
        ours.sendall(packed({"id": 7, "op": "hang", "args": {}, "fds": 0}))
        assert next_message()["id"] == 7, "its own word comes first"
        (first,), (later,) = next_message()["beat"], next_message()["beat"]
        assert first[0] == later[0] == 7
        assert later[1] > first[1]
        helper.kill()


async def test_an_abandoned_call_does_not_end_the_helper_of_other_callers() -> None:
    async with linked("well", idle_after_s=0.2) as link:
        progress, started = ProgressLog(), await link.start()
        before = len(os.listdir("/proc/self/fd"))

        async def give_up() -> Stuck:
            await progress.first.wait()
            return Stuck("it comes to nothing", "look at it", "wait")

        with pytest.raises(Stuck, match="comes to nothing"):
            await link.call("wait", deadline_s=SOON_S, on_progress=progress, watch=give_up)
        await ask(link, "release")  # now it ends, and its result is closed
        await ask(link, "ping")
        assert link.pid == started["pid"]
        assert len(os.listdir("/proc/self/fd")) == before
        pidfd = os.pidfd_open(started["pid"])
        progress = ProgressLog()
        try:
            with pytest.raises(Stuck):
                await link.call("hang", deadline_s=600, on_progress=progress, watch=give_up)
            with anyio.fail_after(SOON_S):
                await anyio.wait_readable(pidfd)  # it has nothing else to do
        finally:
            os.close(pidfd)


async def test_a_watcher_of_a_call_is_notified_at_its_end() -> None:
    async with linked("well") as link:
        ended = anyio.Event()

        async def watch() -> Stuck:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()
            raise AssertionError

        answer = await link.call("ping", deadline_s=SOON_S, watch=watch)
        assert answer.values == {"pong": {}}
        assert ended.is_set()


@pytest.mark.thorough
async def test_a_call_without_a_waiting_caller_keeps_its_deadline() -> None:
    """A thread stuck in the driver would otherwise stay stuck as long as the daemon lives."""
    async with linked("well") as link:
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: link.call("hang", deadline_s=0.5, on_progress=progress))
            await progress.first.wait()
            tasks.cancel_scope.cancel()
        pidfd = os.pidfd_open(progress.events[0]["pid"])
        try:
            with anyio.fail_after(SOON_S):
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)


async def test_the_descriptors_of_an_unawaited_answer_are_closed() -> None:
    async with linked("well") as link:
        progress = ProgressLog()
        before = len(os.listdir("/proc/self/fd"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask(link, "wait", on_progress=progress))
            await progress.first.wait()
            before = len(os.listdir("/proc/self/fd"))
            tasks.cancel_scope.cancel()
        await ask(link, "release")
        await ask(link, "ping")
        assert len(os.listdir("/proc/self/fd")) == before


# -- gone ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("op", "args", "why"),
    [
        ("leave", {"status": 7}, "ended with status 7: the last words"),
        ("nonsense", {"bytes": b"\xff\xff\xff\xff", "leave": False}, "was stopped: frame of 4294967295 bytes"),
        ("nonsense", {"bytes": b"\0\0\0\1\xc0", "leave": False}, "was stopped: malformed payload"),
        ("nonsense", {"bytes": b"\0\0\0\5\x81\xa2id\x63", "leave": False}, "request 99, which is not in flight"),
        ("nonsense", {"bytes": b"\0\0\1\0half a fr", "leave": True}, "ended with status 0"),
    ],
    ids=["leaves", "no-frame", "no-map", "wrong-id", "half-a-frame"],
)
async def test_a_helper_that_ends_or_talks_nonsense(op: str, args: Mapping[str, object], why: str) -> None:
    async with linked("well") as link:
        first = (await link.start())["pid"]
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:

            async def other() -> None:
                with pytest.raises(HelperLost, match=f"{why}.*; in flight: wait"):
                    await link.call("wait", deadline_s=SOON_S, on_progress=progress)

            tasks.start_soon(other)
            await progress.first.wait()
            with suppress(HelperLost):  # nonsense may be read after its own request's answer
                await link.call(op, args, deadline_s=SOON_S)
        assert await ask(link, "ping") == {"pong": {}}
        assert has_ended(first)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGKILL, "signal 9"), (signal.SIGBUS, r"signal 7 \(SIGBUS\): a page of the pool .*")]
)
async def test_a_helper_killed_from_outside(number: signal.Signals, why: str) -> None:
    """SIGBUS kills it when it maps a page of broken memory (issue 14, row 3): the message says that."""
    async with linked("well") as link:
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:

            async def other() -> None:
                with pytest.raises(HelperLost, match=f"was killed by {why}; in flight: hang"):
                    await link.call("hang", deadline_s=SOON_S, on_progress=progress)

            tasks.start_soon(other)
            await progress.first.wait()
            os.kill(progress.events[0]["pid"], number)
        assert await ask(link, "ping") == {"pong": {}}


@pytest.mark.thorough
async def test_a_helper_that_cannot_work_reports_the_reason_each_time() -> None:
    async with linked("refuse") as link:
        for _ in range(2):
            with pytest.raises(DriverFailed, match="cuInit failed with 100") as raised:
                await link.start()
            assert "/dev/nvidia" in raised.value.hint


async def test_a_helper_that_breaks_down_at_its_start() -> None:
    async with linked("crash") as link:
        with pytest.raises(HelperLost, match=r"ended with status 1: RuntimeError: no libcuda\.so\.1 anywhere"):
            await link.start()


async def test_a_helper_that_does_not_get_ready() -> None:
    async with linked("deaf", start_within_s=0.3) as link:
        with pytest.raises(HelperLost, match=r"was not ready within 0\.3 s"):
            await link.start()


async def test_a_missing_helper() -> None:
    link = Link(program=["/nowhere/at/all"])
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        with pytest.raises(HelperLost, match="cannot be started"):
            await link.start()
        tasks.cancel_scope.cancel()


@pytest.mark.thorough
async def test_a_lack_of_descriptors_at_the_start_of_a_helper_is_reported_and_ends_nothing_else() -> None:
    """Once it ended the link, and with it the daemon."""
    async with linked() as link:
        with no_descriptors_left(), pytest.raises(HelperLost, match="cannot be started: Too many open files"):
            await link.start()
        assert (await link.start())["pid"] == link.pid


@contextmanager
def no_descriptors_left() -> Generator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_a_started_but_abandoned_call_ends_with_the_daemon() -> None:
    async with linked("deaf") as link, anyio.create_task_group() as tasks:
        tasks.start_soon(link.start)
        await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    gc.collect()


async def test_callers_are_notified_when_the_daemon_stops() -> None:
    progress = ProgressLog()
    async with anyio.create_task_group() as outer:

        async def call(link: Link) -> None:
            with pytest.raises(HelperLost, match="with hegmd"):
                await link.call("hang", deadline_s=SOON_S, on_progress=progress)

        async with linked("well") as link:
            outer.start_soon(call, link)
            await progress.first.wait()


# -- without the daemon --------------------------------------------------------------------------------------------

DAEMON = """
import os, signal, sys
import anyio
from hegmd.gpu_helper.link import Link

async def main():
    link = Link(program=sys.argv[2:])
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        if sys.argv[1] == "stop":
            tasks.start_soon(lambda: link.call("stop", deadline_s=600))
        print((await link.start())["pid"], flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("state", ["idle", "stop"])
def test_it_does_not_outlive_a_daemon_that_was_killed(state: str) -> None:
    """With KillMode=process the helper has to exit itself; the kernel ends a helper that cannot run."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", DAEMON, state, *TRICKS, "well"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as daemon:
        assert daemon.stdout is not None
        pid = int(daemon.stdout.readline())
        pidfd = os.pidfd_open(pid)
        try:
            daemon.kill()
            assert select.select([pidfd], [], [], SOON_S)[0], "the helper goes on"
        finally:
            os.close(pidfd)


async def test_a_program_other_than_the_helper_is_recognised(tmp_path: Path) -> None:
    link = Link(program=["/bin/cat"], start_within_s=SOON_S)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        with pytest.raises(HelperLost, match="status 1"):
            await link.start()
        tasks.cancel_scope.cancel()
    assert not issubclass(HelperLost, PeerError)
