"""The helper as the daemon uses it: started when it is called, shared by all, ended when there is nothing to do."""

from __future__ import annotations

import os

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, child_environment
from hegmd.gpu_helper.wire import MAX_FDS
from tests.unit.gpu_helper.linking import SOON_S, ProgressLog, ask, has_ended, linked

# -- as it should be -----------------------------------------------------------------------------------------------


async def test_it_starts_on_the_first_call_and_serves_callers_concurrently() -> None:
    async with linked("well") as link:
        assert link.pid is None
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask(link, "wait", on_progress=progress))
            await progress.first.wait()
            pid = link.pid
            assert await ask(link, "ping", n=1) == {"pong": {"n": 1}}, "while another request is under way"
            await ask(link, "release")
            tasks.cancel_scope.cancel()
        assert link.pid == pid
        assert pid is not None
    assert has_ended(pid)


async def test_concurrent_callers_share_one_start() -> None:
    async with linked("well") as link:
        pids: list[object] = []

        async def start() -> None:
            pids.append((await link.start())["pid"])

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(start)
        assert pids == [link.pid] * 5


async def test_descriptors_are_passed_in_both_directions_and_none_leaks() -> None:
    async with linked("well") as link:
        before = (await ask(link, "environment"))["descriptors"]
        ours = [os.memfd_create(f"ours {i}") for i in range(3)]
        answer = await link.call("give-back", deadline_s=SOON_S, fds=ours)
        with answer.fds:
            came = answer.fds.view()
            assert [os.fstat(fd).st_ino for fd in came] == [os.fstat(fd).st_ino for fd in ours]
            assert not any(os.get_inheritable(fd) for fd in came)
        for fd in ours:
            os.close(fd)
        with anyio.fail_after(SOON_S):  # the helper closes its own after the reply is on its way
            while (await ask(link, "environment"))["descriptors"] != before:
                await anyio.lowlevel.checkpoint()


async def test_one_reply_carries_as_many_descriptors_as_the_kernel_allows() -> None:
    async with linked("well") as link:
        answer = await link.call("make", {"count": MAX_FDS}, deadline_s=SOON_S)
        with answer.fds:
            names = [os.readlink(f"/proc/self/fd/{fd}") for fd in answer.fds.view()]
        assert names == [f"/memfd:made {i} (deleted)" for i in range(MAX_FDS)]


@pytest.mark.thorough
async def test_a_large_request_and_a_large_answer_come_whole() -> None:
    places = [[i, i * 512, 511, i << 30] for i in range(60_000)]
    async with linked("well") as link:
        assert await ask(link, "ping", places=places) == {"pong": {"places": places}}


async def test_progress_comes_in_order_and_before_the_answer() -> None:
    async with linked("well") as link:
        progress = ProgressLog()
        await link.call("count", {"to": 100}, deadline_s=SOON_S, on_progress=progress)
        assert progress.events == [{"at": number} for number in range(100)]


async def test_failures_keep_their_type() -> None:
    async with linked("well") as link:
        with pytest.raises(Refused, match="7 of 9") as refused:
            await ask(link, "refuse")
        assert (refused.value.hint, refused.value.facts) == ("try later", {"free_bytes": 7})
        with pytest.raises(DriverFailed, match="600") as failed:
            await ask(link, "driver", number=600)
        assert (failed.value.call, failed.value.number) == ("cuCheckpointProcessLock", 600)
        assert failed.value.name == "CUDA_ERROR_NOT_READY"
        with pytest.raises(HegmError, match=r"stumble.*a mistake in the helper") as stumbled:
            await ask(link, "stumble")
        assert stumbled.value.code.name == "internal"
        with pytest.raises(HegmError, match="unknown request"):
            await ask(link, "dance")
        assert await ask(link, "ping") == {"pong": {}}, "none of these ends the helper"


@pytest.mark.thorough
async def test_a_helper_whose_contexts_are_ruined_is_replaced() -> None:
    """After an illegal address every call in the process fails, those of other operations too."""
    async with linked("well") as link:
        first = (await link.start())["pid"]
        with pytest.raises(DriverFailed, match="failed with 700"):
            await ask(link, "driver", number=700)
        assert await ask(link, "ping") == {"pong": {}}
        assert has_ended(first)


async def test_the_command_gets_its_own_environment() -> None:
    given = child_environment({"HOME": "/root", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/opt/driver"})
    assert given["LD_LIBRARY_PATH"] == "/opt/driver"
    assert not {"HOME", "CUDA_VISIBLE_DEVICES"} & set(given)
    async with linked("well") as link:
        reply = await ask(link, "environment")
    assert "HOME" not in reply["environment"]
    assert reply["environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert reply["descriptors"] <= 4, "it inherited descriptors of the daemon"


# -- nothing to do -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_an_idle_helper_exits_unless_it_holds_memory() -> None:
    async with linked("well", idle_after_s=0.2) as link:
        await ask(link, "hold", count=2)
        pid = link.pid
        assert pid is not None
        pidfd = os.pidfd_open(pid)
        try:
            with anyio.move_on_after(1.0):
                await anyio.wait_readable(pidfd)
                pytest.fail("it ended with what it held")
            await ask(link, "hold", count=0)
            with anyio.fail_after(SOON_S):
                await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)
        assert await ask(link, "ping") == {"pong": {}}
        assert link.pid != pid


@pytest.mark.thorough
async def test_a_long_call_does_not_count_as_idle() -> None:
    async with linked("well", idle_after_s=0.1) as link:
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: ask(link, "wait", on_progress=progress))
            await progress.first.wait()
            with anyio.move_on_after(0.5):
                await anyio.sleep_forever()
            await ask(link, "release")


async def test_killing_it_fails_the_calls_in_flight() -> None:
    async with linked("well") as link:
        progress = ProgressLog()
        async with anyio.create_task_group() as tasks:

            async def other() -> None:
                with pytest.raises(HelperLost, match="was stopped: the driver is reloaded"):
                    await link.call("hang", deadline_s=SOON_S, on_progress=progress)

            tasks.start_soon(other)
            await progress.first.wait()
            link.kill("the driver is reloaded")
