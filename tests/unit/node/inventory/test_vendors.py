"""Libraries that hang, answer late, fail, go away and come back."""

from __future__ import annotations

import subprocess
import sys

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from hegmd.node.devices.base import DeviceAbsent, DeviceError
from hegmd.node.inventory.node import VENDORS_SHARE
from hegmd.node.inventory.vendors import ABSENT_RETRY_S, FIRST_RETRY_S, LAST_RETRY_S
from tests.patience import HANG_S
from tests.unit.doubles import Provider, gpu, use
from tests.unit.node.inventory.rig import (
    LONG_S,
    ME,
    SHORT_S,
    Node,
    entered,
    joined,
    node_of,
    process_of,
    shown,
    vendor_of,
)


async def test_a_hanging_library_is_awaited_once_and_delays_no_other_caller() -> None:
    hanging, well = Provider(gpu(0)), Provider(gpu(0, "amd"), vendor="amd", uses=[use(ME, 0, "amd")])
    hanging.hang()
    async with node_of(hanging, well, deadline_s=SHORT_S) as node:
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "amd-0", "ok")]
        assert (vendor_of(found).state, vendor_of(found).age_s) == ("stale", None)
        assert "has not answered" in vendor_of(found).message
        assert vendor_of(found).hint
        node.inventory.set_query_deadline(LONG_S)
        with anyio.fail_after(LONG_S * VENDORS_SHARE / 2):  # not waited for again, though it could be
            found = await node.inventory.refresh()
        assert vendor_of(found).state == "stale"
        assert hanging.count("snapshot") == 1
        assert well.count("snapshot") == 2
        assert node.kinds("inventory") == ["inventory.stale", "inventory.ready"]


async def test_the_first_refresh_takes_the_answer_of_a_library_that_was_called_before() -> None:
    provider = Provider(gpu(0))
    provider.hang()
    async with node_of(provider) as node:
        node.vendors[0].begin()
        await entered(provider)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.inventory.refresh)
            await wait_all_tasks_blocked()
            provider.unblock()
        assert provider.calls == ["open", "snapshot"]
        assert node.inventory.latest is not None
        assert shown(node.inventory.latest) == [("gpu0", "nvidia-0", "ok")]


async def test_the_first_refresh_asked_again_what_had_just_been_answered() -> None:
    """A start of the daemon read all GPUs twice, once beside the imports and once before it served."""
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        node.vendors[0].begin()
        await anyio.to_thread.run_sync(joined, "hegmd-nvidia")
        assert shown(await node.inventory.refresh()) == [("gpu0", "nvidia-0", "ok")]
        assert provider.calls == ["open", "snapshot"]
        await node.inventory.refresh()
        assert provider.count("snapshot") == 2


async def test_a_library_that_hangs_later_is_shown_with_its_last_answer() -> None:
    provider = Provider(gpu(0), uses=[use(ME)])
    async with node_of(provider) as node:
        before = await node.inventory.refresh()
        provider.hang()
        node.inventory.set_query_deadline(SHORT_S)
        node.clock.advance(5)
        found = await node.inventory.refresh()
        assert (vendor_of(found).state, vendor_of(found).age_s) == ("stale", 5.0)
        assert found.gpus == before.gpus
        assert process_of(found).gpus == process_of(before).gpus
        node.clock.advance(7)
        found = await node.inventory.refresh()
        assert vendor_of(found).age_s == 12.0
        assert "for 7.0 s" in vendor_of(found).message
        provider.unblock()
        await anyio.to_thread.run_sync(joined, "hegmd-nvidia")
        node.inventory.set_query_deadline(LONG_S)
        found = await node.inventory.refresh()
        assert (vendor_of(found).state, vendor_of(found).age_s) == ("ok", 0.0)
        assert node.kinds("inventory", "vendor", "gpu", "process") == [
            "inventory.ready",
            "inventory.stale",
            "inventory.fresh",
        ]


@pytest.mark.thorough
async def test_a_slow_library_delivers_its_answer_at_the_next_refresh() -> None:
    provider = Provider(gpu(0))
    provider.hang()
    async with node_of(provider, deadline_s=SHORT_S) as node:
        assert (await node.inventory.refresh()).gpus == ()
        provider.unblock()
        await anyio.to_thread.run_sync(joined, "hegmd-nvidia")
        node.clock.advance(4)
        provider.hang()
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "nvidia-0", "ok")]
        assert (vendor_of(found).state, vendor_of(found).age_s) == ("stale", 4.0)
        assert provider.count("snapshot") == 2


async def test_exits_of_processes_are_noticed_while_the_library_hangs(child: subprocess.Popen[bytes]) -> None:
    provider = Provider(gpu(0), uses=[use(child.pid)])
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.hang()
        node.inventory.set_query_deadline(SHORT_S)
        await node.inventory.refresh()
        child.kill()
        child.wait()
        node.inventory.set_query_deadline(LONG_S)
        assert process_of(await node.inventory.refresh(), child.pid).start_ticks is None
        assert node.kinds("process") == ["process.ended"]


async def test_closing_does_not_wait_for_a_library_that_hangs() -> None:
    provider = Provider(gpu(0))
    provider.hang()
    node = Node(provider, deadline_s=SHORT_S)
    async with node.inventory:
        await node.inventory.refresh()
        node.inventory.set_query_deadline(LONG_S)
        with anyio.fail_after(LONG_S / 2):
            await node.inventory.aclose()
        assert provider.count("close") == 0
    provider.unblock()


async def test_closing_waits_for_a_library_call_in_progress() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.inventory.refresh)
            await entered(provider)
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.inventory.aclose)
            await wait_all_tasks_blocked()
            assert provider.count("close") == 0
            provider.unblock()
        assert provider.calls == ["open", "snapshot", "close"]


HANGING_DAEMON = """
import threading, anyio
from hegmd.telemetry.events import EventLog
from hegmd.node.inventory import Inventory
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes import ProcessTable

class Hanging:
    vendor = "nvidia"
    def open(self): threading.Event().wait()
    def snapshot(self): raise AssertionError
    def close(self): raise AssertionError

async def main():
    vendors, events = [VendorWatch(Hanging())], EventLog()
    async with Inventory(vendors, query_deadline_s=0.05, events=events, table=ProcessTable()) as inventory:
        print((await inventory.refresh()).vendors[0].state)

anyio.run(main)
"""


@pytest.mark.thorough
def test_a_process_with_a_hanging_library_can_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGING_DAEMON], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert (done.returncode, done.stdout) == (0, "stale\n"), done.stderr


async def test_a_failing_library_leaves_its_gpus_listed_and_unknown() -> None:
    provider = Provider(gpu(0), uses=[use(ME)])
    async with node_of(provider, Provider(gpu(0, "amd"), vendor="amd")) as node:
        await node.inventory.refresh()
        provider.answer = DeviceError("driver and library differ", "reboot, or reload the driver")
        node.clock.advance(3)
        found = await node.inventory.refresh()
        vendor = vendor_of(found)
        assert (vendor.state, vendor.message, vendor.hint) == (
            "failed",
            "driver and library differ",
            "reboot, or reload the driver",
        )
        assert (vendor.age_s, vendor.driver_version) == (3.0, None)
        assert shown(found) == [("gpu0", "nvidia-0", "unknown"), ("gpu1", "amd-0", "ok")]
        assert found.gpus[0].memory_used_bytes is None
        assert [(held.gpu, held.vram_bytes) for held in process_of(found).gpus] == [("gpu0", None)]
        assert provider.calls[-1] == "close"
        assert node.kinds("vendor", "gpu", "process") == ["vendor.failed"]


@pytest.mark.thorough
async def test_a_failed_library_is_opened_again_at_growing_intervals() -> None:
    provider = Provider(gpu(0))
    working, provider.answer = provider.answer, DeviceError("broken", "mend it")
    async with node_of(provider) as node:
        waited: list[float] = []
        await node.inventory.refresh()
        for _ in range(7):
            waited.append(0.0)
            count = provider.count("snapshot")
            while provider.count("snapshot") == count:
                node.clock.advance(1)
                waited[-1] += 1
                assert vendor_of(await node.inventory.refresh()).state == "failed"
        assert waited == [FIRST_RETRY_S, 2, 4, 8, 16, LAST_RETRY_S, LAST_RETRY_S]
        provider.answer = working
        node.clock.advance(LAST_RETRY_S)
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "nvidia-0", "ok")]
        assert node.kinds("vendor", "gpu") == ["vendor.failed", "vendor.recovered", "gpu.found"]


@pytest.mark.thorough
async def test_a_library_that_recovers_has_its_gpus_under_their_old_names() -> None:
    provider = Provider(gpu(0), gpu(1))
    working = provider.answer
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.answer = DeviceError("driver is being reloaded", "wait")
        await node.inventory.refresh()
        provider.answer = working
        node.clock.advance(FIRST_RETRY_S)
        found = await node.inventory.refresh()
        assert [gpu.id for gpu in found.gpus] == ["gpu0", "gpu1"]
        assert found.gpus[0].memory_used_bytes == 2 << 30
        assert provider.calls[-2:] == ["open", "snapshot"]
        assert node.kinds("vendor", "gpu") == ["vendor.failed", "vendor.recovered"]


async def test_each_failure_and_each_recovery_is_reported_once() -> None:
    provider = Provider(gpu(0))
    working = provider.answer
    async with node_of(provider) as node:
        for _ in range(2):
            for answer in (DeviceError("broken", "mend it"), working):
                provider.answer = answer
                node.clock.advance(LAST_RETRY_S)
                await node.inventory.refresh()
                await node.inventory.refresh()
        assert node.kinds("vendor") == ["vendor.failed", "vendor.recovered"] * 2


async def test_a_missing_library_is_searched_at_intervals() -> None:
    provider = Provider(gpu(0))
    provider.answer = DeviceAbsent("no NVIDIA driver", "install one")
    async with node_of(provider) as node:
        assert vendor_of(await node.inventory.refresh()).state == "absent"
        node.clock.advance(ABSENT_RETRY_S - 1)
        await node.inventory.refresh()
        assert provider.count("snapshot") == 1
        node.clock.advance(1)
        await node.inventory.refresh()
        assert provider.count("snapshot") == 2
        assert node.kinds("vendor") == []


async def test_a_driver_that_disappears_is_reported() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.answer = DeviceAbsent("the driver is not loaded", "modprobe nvidia")
        found = await node.inventory.refresh()
        assert (vendor_of(found).state, found.gpus[0].state) == ("absent", "unknown")
        assert node.kinds("vendor") == ["vendor.failed"]


async def test_an_unforeseen_error_in_a_provider_is_a_failure_of_that_vendor(caplog: pytest.LogCaptureFixture) -> None:
    provider = Provider(gpu(0))
    provider.answer = ZeroDivisionError("oh")
    async with node_of(provider, Provider(gpu(0, "amd"), vendor="amd")) as node:
        found = await node.inventory.refresh()
        assert (vendor_of(found).state, vendor_of(found, "amd").state) == ("failed", "ok")
        assert "ZeroDivisionError" in vendor_of(found).message
        assert "unforeseen" in caplog.text


@pytest.mark.thorough
async def test_a_failure_that_becomes_a_hang_and_a_failure_again_is_reported_each_time() -> None:
    provider = Provider(gpu(0))
    working = provider.answer
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.answer = DeviceError("broken", "mend it")
        await node.inventory.refresh()
        provider.answer = working
        provider.hang()
        node.clock.advance(LAST_RETRY_S)
        node.inventory.set_query_deadline(SHORT_S)
        found = await node.inventory.refresh()
        assert (vendor_of(found).state, found.gpus[0].state) == ("stale", "unknown")
        provider.unblock()
        await anyio.to_thread.run_sync(joined, "hegmd-nvidia")
        node.inventory.set_query_deadline(LONG_S)
        assert shown(await node.inventory.refresh()) == [("gpu0", "nvidia-0", "ok")]
        assert node.kinds("vendor", "inventory") == [
            "inventory.ready",
            "vendor.failed",
            "inventory.stale",
            "inventory.fresh",
            "vendor.recovered",
        ]
