"""GPUs and processes that come, go and change: their names, what is shown of them, and the events."""

from __future__ import annotations

import signal
import subprocess

import pytest

from hegmd.node.devices.base import DeviceAbsent
from hegmd.node.inventory.vendors import ABSENT_RETRY_S
from hegmd.protocol.snapshots import Health
from tests.unit.doubles import Provider, gpu, lost_gpu, use
from tests.unit.node.inventory.rig import ME, node_of, process_of, shown


async def test_a_gpu_keeps_its_id_while_others_come_and_go() -> None:
    provider = Provider(gpu(0), gpu(1))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(1, index=0), gpu(2, index=1))
        found = await node.inventory.refresh()
        assert shown(found) == [("gpu0", "nvidia-0", "lost"), ("gpu1", "nvidia-1", "ok"), ("gpu2", "nvidia-2", "ok")]
        provider.show(gpu(0), gpu(1), gpu(2))
        assert shown(await node.inventory.refresh())[0] == ("gpu0", "nvidia-0", "ok")
        assert node.kinds("gpu") == ["gpu.lost", "gpu.found", "gpu.back"]


async def test_a_vanished_gpu_shows_its_identity_and_no_figures() -> None:
    provider = Provider(gpu(0), gpu(1))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(0))
        lost = (await node.inventory.refresh()).gpus[1]
        assert (lost.name, lost.chip, lost.memory_total_bytes) == ("Test GPU", "chip-1", 8 << 30)
        assert (lost.memory_used_bytes, lost.temperature_celsius, lost.mig, lost.health.state) == (
            None,
            None,
            None,
            "failed",
        )


async def test_a_gpu_lost_for_one_snapshot_keeps_its_processes_with_unknown_memory() -> None:
    provider = Provider(gpu(0), gpu(1), uses=[use(ME, 0), use(ME, 1)])
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(lost_gpu(0), gpu(1), uses=[use(ME, 1)])
        found = await node.inventory.refresh()
        assert found.gpus[0].state == "lost"
        assert {held.gpu: held.vram_bytes for held in process_of(found).gpus} == {"gpu0": None, "gpu1": 1 << 30}
        provider.show(gpu(0), gpu(1), uses=[use(ME, 1)])
        found = await node.inventory.refresh()
        assert [held.gpu for held in process_of(found).gpus] == ["gpu1"]
        assert node.kinds("gpu", "process") == ["gpu.lost", "gpu.back"]


async def test_a_process_that_ended_on_a_lost_gpu_stayed_there_for_ever(child: subprocess.Popen[bytes]) -> None:
    """Its pid is free: the next process that got it counted as being on that GPU, and could be killed for that."""
    provider = Provider(gpu(0), uses=[use(child.pid)])
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(lost_gpu(0))
        assert [found.pid for found in (await node.inventory.refresh()).processes] == [child.pid]
        child.kill()
        child.wait()
        await node.inventory.refresh()
        assert (await node.inventory.refresh()).processes == ()


async def test_a_gpu_that_does_not_answer_is_not_called_lost() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(lost_gpu(0, state="unknown", health=Health(state="unknown")))
        await node.inventory.refresh()
        provider.show(gpu(0))
        await node.inventory.refresh()
        assert [(event.kind, event.severity) for event in node.happened("gpu")] == [
            ("gpu.health", "warning"),
            ("gpu.health", "info"),
        ]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "kind", "severity", "words"),
    [
        ({"health": Health(state="ok", last_xid=79)}, "gpu.health", "warning", "XID 79"),
        ({"health": Health(state="ok", ecc_uncorrected=2)}, "gpu.health", "error", "2 uncorrected"),
        ({"health": Health(state="ok", retired_pages=1)}, "gpu.health", "warning", "1 retired"),
        ({"health": Health(state="failed", notes=("row remapping failed",))}, "gpu.health", "error", "row remapping"),
        ({"health": Health(state="warn", last_xid=48)}, "gpu.health", "warning", "XID 48; health is warn"),
        ({"health": Health(state="ok", condition="failing")}, "gpu.health", "warning", "it is failing"),
        ({"health": Health(state="ok", condition="gone")}, "gpu.health", "error", "it is gone"),
        ({"mig": True}, "gpu.mode", "info", "MIG mode is on now"),
        ({"mps": True, "persistence": False}, "gpu.mode", "info", "MPS is on now, persistence mode is off now"),
    ],
)
async def test_a_change_of_a_gpu_is_reported_once(
    change: dict[str, object], kind: str, severity: str, words: str
) -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(0, **change))
        await node.inventory.refresh()
        await node.inventory.refresh()
        (event,) = node.happened("gpu")
        assert (event.kind, event.severity, event.gpu) == (kind, severity, "gpu0")
        assert words in event.message


@pytest.mark.parametrize(
    "change",
    [
        {"memory_used_bytes": 7, "memory_free_bytes": 8},
        {"mig": None, "health": Health(state="ok")},
        {"health": Health(state="ok", ecc_uncorrected=0, retired_pages=0, ecc_corrected=9)},
    ],
)
async def test_changed_figures_and_values_that_become_unknown_cause_no_event(change: dict[str, object]) -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(0, **change))
        await node.inventory.refresh()
        provider.show(gpu(0))
        await node.inventory.refresh()
        assert node.kinds("gpu") == []


async def test_a_repeated_xid_is_reported_again() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        for count in (1, 2, 2, 5):
            provider.show(gpu(0, health=Health(state="ok", last_xid=31, xid_count=count)))
            await node.inventory.refresh()
        messages = [(event.message, event.facts["xid_count"]) for event in node.happened("gpu")]
        assert messages == [("gpu0: XID 31", 1), ("gpu0: XID 31", 2), ("gpu0: XID 31", 5)]


@pytest.mark.thorough
async def test_errors_counted_before_a_gpu_was_lost_are_not_reported_again_when_it_returns() -> None:
    bad = Health(state="ok", ecc_uncorrected=3, last_xid=63)
    provider = Provider(gpu(0, health=bad))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        node.happened("gpu")
        provider.show(lost_gpu(0))
        await node.inventory.refresh()
        provider.show(gpu(0, health=bad))
        await node.inventory.refresh()
        assert node.kinds("gpu") == ["gpu.lost", "gpu.back"]


async def test_a_process_that_starts_and_stops_using_a_gpu_is_reported() -> None:
    provider = Provider(gpu(0))
    async with node_of(provider) as node:
        await node.inventory.refresh()
        provider.show(gpu(0), uses=[use(ME)])
        await node.inventory.refresh()
        provider.show(gpu(0))
        await node.inventory.refresh()
        started, ended = node.happened("process")
        assert (started.kind, started.pid, started.gpu) == ("process.started", ME, "gpu0")
        assert (ended.kind, ended.pid, ended.facts["let_go"]) == ("process.ended", ME, True)
        assert "command" not in started.facts


async def test_an_exit_is_reported_once_although_the_driver_still_lists_the_process(
    child: subprocess.Popen[bytes],
) -> None:
    provider = Provider(gpu(0), uses=[use(child.pid)])
    async with node_of(provider) as node:
        assert process_of(await node.inventory.refresh(), child.pid).name == "sleep"
        child.send_signal(signal.SIGKILL)
        child.wait()
        found = process_of(await node.inventory.refresh(), child.pid)
        assert (found.start_ticks, found.command) == (None, None)
        assert found.note is not None
        await node.inventory.refresh()
        provider.show(gpu(0))
        assert (await node.inventory.refresh()).processes == ()
        (event,) = node.happened("process")
        assert (event.kind, event.pid, event.facts["let_go"]) == ("process.ended", child.pid, False)
        assert event.facts["name"] == "sleep"


async def test_the_processes_of_a_library_that_answers_late_are_no_flood() -> None:
    provider = Provider(gpu(0), uses=[use(ME)])
    answer, provider.answer = provider.answer, DeviceAbsent("no driver", "load it")
    async with node_of(provider, Provider(gpu(0, "amd"), vendor="amd")) as node:
        await node.inventory.refresh()
        provider.answer = answer
        node.clock.advance(ABSENT_RETRY_S)
        found = await node.inventory.refresh()
        assert process_of(found).gpus[0].gpu == "gpu1"
        assert node.kinds() == ["inventory.ready", "gpu.found"]
