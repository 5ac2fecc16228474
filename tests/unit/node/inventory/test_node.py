"""The inventory as a whole: what it shows, who shares a look, and what it does when /proc does not answer."""

from __future__ import annotations

import os
import threading

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from hegmd.node.devices.base import DeviceAbsent, DeviceProvider, VendorSnapshot
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes.lookups import NOTE_STUCK, Lookups
from hegmd.node.processes.roll import NOTE_NOT_LOOKED_AT
from hegmd.node.processes.table import ProcessTable
from hegmd.protocol.snapshots import AgentInfo, Gpu
from hegmd.telemetry.events import EventLog
from tests.patience import HANG_S
from tests.unit.doubles import Provider, gpu, snapshot, use
from tests.unit.node.inventory.rig import LONG_S, ME, Node, entered, joined, node_of, process_of, shown, vendor_of


async def test_gpus_are_numbered_by_provider_and_index() -> None:
    async with node_of(Provider(gpu(1), gpu(0)), Provider(gpu(0, "amd"), vendor="amd")) as node:
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "nvidia-0", "ok"), ("gpu1", "nvidia-1", "ok"), ("gpu2", "amd-0", "ok")]
        assert [(vendor.vendor, vendor.state, vendor.age_s) for vendor in found.vendors] == [
            ("nvidia", "ok", 0.0),
            ("amd", "ok", 0.0),
        ]
        assert vendor_of(found).compute_version == "13.0"
        assert node.inventory.latest is found


async def test_a_gpu_that_reports_its_uuid_late_is_not_shown_twice() -> None:
    """A GPU that was reset during the daemon's start stayed listed as lost, next to itself with a new id."""
    silent = Gpu(id="1", index=1, uuid="GPU-unknown-at-index-1", vendor="nvidia", state="unknown")
    provider = Provider(gpu(0), silent, gpu(2))
    async with node_of(provider) as node:
        before = await node.inventory.refresh()
        assert shown(before)[1] == ("gpu1", "GPU-unknown-at-index-1", "unknown")
        provider.show(gpu(0), gpu(1), gpu(2))
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "nvidia-0", "ok"), ("gpu1", "nvidia-1", "ok"), ("gpu2", "nvidia-2", "ok")]


async def test_a_process_is_joined_with_the_nodes_facts() -> None:
    async with node_of(Provider(gpu(0), gpu(1), uses=[use(ME, 1)])) as node:
        node.agents[ME] = AgentInfo(name="hegm-agent", version="1")
        node.held[ME] = 4096
        process = process_of(await node.inventory.refresh())
        assert [(held.gpu, held.vram_bytes) for held in process.gpus] == [("gpu1", 1 << 30)]
        assert (process.agent, process.held_bytes) == (AgentInfo(name="hegm-agent", version="1"), 4096)
        assert process.command is not None


async def test_the_first_refresh_is_one_event() -> None:
    async with node_of(Provider(gpu(0), gpu(1), uses=[use(ME)])) as node:
        await node.inventory.refresh()
        (event,) = node.happened()
        assert (event.kind, event.facts) == ("inventory.ready", {"gpus": 2, "processes": 1})


async def test_disabled_vendors_are_reported_as_disabled() -> None:
    inventory = Inventory([], query_deadline_s=1, events=EventLog(), table=ProcessTable(), off=["amd"])
    async with inventory:
        found = await inventory.refresh()
    assert [(vendor.vendor, vendor.state) for vendor in found.vendors] == [("amd", "off")]


async def test_concurrent_callers_share_one_refresh() -> None:
    provider = Provider(gpu(0))
    found: list[NodeSnapshot] = []

    async def ask(node: Node) -> None:
        found.append(await node.inventory.refresh())

    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(ask, node)
            await entered(provider)
            provider.unblock()
        assert len(found) == 20
        assert len({id(each) for each in found}) == 1
        assert provider.count("snapshot") == 1
        assert node.inventory.refresh_count == 1


async def test_after_a_known_change_a_recent_snapshot_is_not_recent_enough() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        young = await node.inventory.fresh(LONG_S)
        assert await node.inventory.fresh(LONG_S) is young
        node.inventory.expire()
        newer = await node.inventory.fresh(LONG_S)
        assert newer is not young
        assert await node.inventory.fresh(LONG_S) is newer


async def test_a_change_during_a_refresh_makes_the_caller_wait_for_the_next_refresh() -> None:
    provider = Provider(gpu(0))
    found: list[NodeSnapshot] = []

    async def ask(node: Node) -> None:
        found.append(await node.inventory.fresh(0))

    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.inventory.refresh)
            await entered(provider)
            provider.show(gpu(0), gpu(1))
            node.inventory.expire()
            tasks.start_soon(ask, node)
            await wait_all_tasks_blocked()
            provider.unblock()
        assert [each.id for each in found[0].gpus] == ["gpu0", "gpu1"]


async def test_when_the_leader_is_cancelled_the_next_takes_over_and_queries_nothing_twice() -> None:
    provider = Provider(gpu(0))
    found: list[NodeSnapshot] = []
    leading, led = anyio.CancelScope(), anyio.Event()

    async def lead(node: Node) -> None:
        with leading:
            await node.inventory.refresh()
            pytest.fail("the leader was to be cancelled")
        led.set()

    async def ask(node: Node) -> None:
        found.append(await node.inventory.refresh())

    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lead, node)
            await entered(provider)
            tasks.start_soon(ask, node)
            tasks.start_soon(ask, node)
            await wait_all_tasks_blocked()
            leading.cancel()
            await led.wait()
            await wait_all_tasks_blocked()
            provider.unblock()
        assert [shown(each) for each in found] == [[("gpu0", "nvidia-0", "ok")]] * 2
        assert provider.count("snapshot") == 1


async def test_a_cancelled_follower_does_not_disturb_others() -> None:
    provider = Provider(gpu(0))
    found: list[NodeSnapshot] = []

    async def ask(node: Node) -> None:
        found.append(await node.inventory.refresh())

    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, node)
            await entered(provider)
            with anyio.move_on_after(0):
                await node.inventory.refresh()
            provider.unblock()
        assert len(found) == 1


async def test_a_young_snapshot_is_good_enough() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        first = await node.inventory.fresh(1.0)
        node.clock.advance(1.0)
        assert await node.inventory.fresh(1.0) is first
        node.clock.advance(0.1)
        assert await node.inventory.fresh(1.0) is not first
        assert provider.count("snapshot") == 2


async def test_the_background_keeps_up_and_is_ready_after_the_first_look() -> None:
    provider, snapshot_taken = Provider(gpu(0)), threading.Semaphore(0)

    def answer() -> VendorSnapshot:
        snapshot_taken.release()
        return snapshot([gpu(0)])

    provider.answer = answer
    events = EventLog()
    inventory = Inventory([VendorWatch(provider)], query_deadline_s=LONG_S, events=events, table=ProcessTable())
    async with inventory, anyio.create_task_group() as tasks:
        await tasks.start(inventory.run, 3600.0)
        assert inventory.latest is not None
        assert snapshot_taken.acquire(blocking=False)
        inventory.set_refresh(0.001)
        for _ in range(3):
            assert await anyio.to_thread.run_sync(snapshot_taken.acquire, True, 10)
        tasks.cancel_scope.cancel()


async def test_reopening_closes_and_opens_whatever_the_interval() -> None:
    provider = Provider(gpu(0))
    provider.answer = DeviceAbsent("no NVIDIA driver", "install one")
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(0))
        found = await node.inventory.reopen()
        assert shown(found) == [("gpu0", "nvidia-0", "ok")]
        assert provider.calls[-3:] == ["close", "open", "snapshot"]


async def test_reopening_during_a_refresh_takes_effect() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        provider.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(node.inventory.refresh)
            await entered(provider)
            tasks.start_soon(node.inventory.reopen)
            await wait_all_tasks_blocked()
            provider.unblock()
        assert provider.calls == ["open", "snapshot", "close", "open", "snapshot"]


async def test_closing_closes_the_libraries_and_the_processes_once() -> None:
    provider, table = Provider(gpu(0), uses=[use(ME)]), ProcessTable()
    async with node_of(provider, table=table) as node:
        await node.inventory.refresh()
        assert table.pidfd_count == 1
        await node.inventory.aclose()
        assert (table.pidfd_count, provider.calls[-1]) == (0, "close")


async def test_a_proc_that_hangs_is_waited_for_no_longer_than_allowed() -> None:
    gate = threading.Event()

    def open_pidfd(pid: int) -> int:
        assert gate.wait(HANG_S)
        return os.pidfd_open(pid)

    provider = Provider(gpu(0), uses=[use(ME)])
    async with node_of(provider, table=ProcessTable(open_pidfd=open_pidfd), deadline_s=0.1) as node:
        found = await node.inventory.refresh()
        assert found.gpus[0].state == "ok"
        assert (process_of(found).note, process_of(found).start_ticks) == (NOTE_NOT_LOOKED_AT, None)
        gate.set()
        node.inventory.set_query_deadline(LONG_S)
        assert process_of(await node.inventory.refresh()).start_ticks is not None
        assert node.kinds("inventory", "process") == ["inventory.stale", "inventory.ready", "inventory.fresh"]


async def test_a_command_line_that_hangs_holds_up_only_itself() -> None:
    gate = threading.Event()

    def read_command(root: str, pid: int) -> str:
        assert gate.wait(HANG_S)
        return "late.py"

    provider = Provider(gpu(0), uses=[use(ME)])
    table = ProcessTable(lookups=Lookups(read_command=read_command))
    async with node_of(provider, table=table, deadline_s=0.1) as node:
        found = process_of(await node.inventory.refresh())
        assert (found.command, found.note) == (None, NOTE_STUCK)
        assert found.start_ticks is not None
        node.inventory.set_query_deadline(LONG_S)
        with anyio.fail_after(LONG_S / 2):  # known to hang, so not waited for
            await node.inventory.refresh()
        gate.set()
        await anyio.to_thread.run_sync(joined, "hegmd-processes-lookups")
        found = process_of(await node.inventory.refresh())
        assert (found.command, found.note) == ("late.py", None)
        assert node.kinds("inventory", "process") == ["inventory.ready"]


def test_doubles_return_the_types_of_a_provider() -> None:
    provider: DeviceProvider = Provider(gpu(0), uses=[use(ME)])
    provider.open()
    found = provider.snapshot()
    assert all(isinstance(each, Gpu) for each in found.gpus)
    assert {each.use.gpu for each in found.uses} <= {each.uuid for each in found.gpus}
