"""NVIDIA's provider on a bad day: errors, GPUs off the bus, hangs. Over the stub library.

The rule behind all of it: nothing crashes, nothing unknown is shown as 0, and one bad GPU costs the others nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hegmd.node.devices.base import DeviceError, VendorSnapshot
from hegmd.node.devices.nvidia import NvidiaProvider
from hegmd.protocol.snapshots import Gpu
from tests.kit.contracts import check_snapshot
from tests.patience import HANG_S
from tests.stubs.nvml.node import MakeNode, NvidiaNode
from tests.stubs.nvml.scenario import uuid
from tests.wide import quick_first

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, UNKNOWN = 3, 4, 13, 21, 999

# Each question, and what is not known when it has no answer.
QUESTIONS = {
    "nvmlDeviceGetName": ["name"],
    "nvmlDeviceGetPciInfo_v3": ["pci_address", "chip"],
    "nvmlDeviceGetArchitecture": ["chip"],
    "nvmlDeviceGetCudaComputeCapability": ["chip"],
    "nvmlDeviceGetUtilizationRates": ["utilisation_percent"],
    "nvmlDeviceGetPowerUsage": ["power_watts"],
    "nvmlDeviceGetEnforcedPowerLimit": ["power_limit_watts"],
    "nvmlDeviceGetPersistenceMode": ["persistence"],
    "nvmlDeviceGetMigMode": ["mig"],
    "nvmlDeviceGetMPSComputeRunningProcesses_v3": ["mps"],
    "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
    "nvmlDeviceRegisterEvents": [],
}
HEALTH_QUESTIONS = {
    "nvmlDeviceGetTotalEccErrors": ["ecc_corrected", "ecc_uncorrected"],
    "nvmlDeviceGetRemappedRows": ["retired_pages"],
    "nvmlDeviceGetCurrentClocksEventReasons": [],
    "nvmlDeviceGetFieldValues": [],
    "nvmlDeviceGetGpuFabricInfoV": [],
}


@pytest.fixture
def node(tmp_path: Path, make_nvidia_node: MakeNode) -> NvidiaNode:
    node = make_nvidia_node(tmp_path)
    node.scenario.processes = ["0 compute 10 1024", "1 compute 11 2048"]
    node.scenario.write()
    return node


@pytest.fixture
def provider(node: NvidiaNode) -> Iterator[NvidiaProvider]:
    provider = node.provider()
    provider.open()
    yield provider
    provider.close()


def unknowns(gpu: Gpu) -> set[str]:
    """Return the names of the fields that the record, with its health, does not know."""
    return {name for name, value in {**gpu.to_plain(), **gpu.health.to_plain()}.items() if value is None}


# ---- one question without an answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*QUESTIONS, *HEALTH_QUESTIONS])
@pytest.mark.parametrize("code", quick_first([NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, UNKNOWN], 1))
def test_a_question_without_an_answer_leaves_its_field_unknown(
    node: NvidiaNode, provider: NvidiaProvider, function: str, code: int
) -> None:
    healthy = provider.snapshot()
    provider.close()
    provider.open()
    node.scenario.order(f"error {function}@0 {code}")
    snapshot = provider.snapshot()
    gpu = snapshot.gpus[0]
    expected = QUESTIONS.get(function) or HEALTH_QUESTIONS.get(function, [])
    assert unknowns(gpu) == unknowns(healthy.gpus[0]) | set(expected)
    assert gpu.state == "ok"
    assert snapshot.gpus[1] == healthy.gpus[1]
    assert snapshot.uses == healthy.uses


@pytest.mark.parametrize("function", sorted(set(QUESTIONS) - {"nvmlDeviceRegisterEvents"}))
def test_values_that_the_driver_failed_to_report_are_noted(
    node: NvidiaNode, provider: NvidiaProvider, function: str
) -> None:
    node.scenario.order(f"error {function}@0 {UNKNOWN}")
    health = provider.snapshot().gpus[0].health
    assert health.state == "warn"
    assert any("the driver failed to report: " in note and "Unknown Error" in note for note in health.notes)


def test_a_failed_query_is_repeated(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order(f"error nvmlDeviceGetName@0 {UNKNOWN}")
    assert provider.snapshot().gpus[0].name is None
    node.scenario.mend()
    assert provider.snapshot().gpus[0].name == "NVIDIA H200"


def test_a_gpu_that_reports_only_its_uuid(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.gpus[0] = {"uuid": uuid(0)}
    node.scenario.processes = []
    node.scenario.write()
    gpu = provider.snapshot().gpus[0]
    known = {name for name, value in gpu.to_plain().items() if value is not None}
    assert known == {"id", "index", "uuid", "vendor", "state", "links", "mps", "driver_version", "health"}
    assert gpu.health.state == "unknown"


def test_placeholders_for_unknown_numbers_are_not_shown(node: NvidiaNode, provider: NvidiaProvider) -> None:
    highest_u32, highest_u64 = 2**32 - 1, 2**64 - 1
    node.scenario.gpus[0] |= {
        "power_mw": highest_u32,
        "power_limit_mw": highest_u32,
        "temperature": highest_u32,
        "utilisation": highest_u32,
        "architecture": highest_u32,
        "memory_used": highest_u64,
        "ecc_corrected": highest_u64,
        "name": "N/A",
    }
    node.scenario.write()
    assert unknowns(provider.snapshot().gpus[0]) >= {
        "power_watts",
        "power_limit_watts",
        "temperature_celsius",
        "utilisation_percent",
        "chip",
        "memory_total_bytes",
        "memory_used_bytes",
        "memory_free_bytes",
        "ecc_corrected",
        "name",
    }


# ---- one GPU that is not well ---------------------------------------------------------------------------------------


def check_lost(gpu: Gpu, healthy: Gpu) -> None:
    """Its identity is kept and nothing else is claimed."""
    for name in ("id", "index", "uuid", "pci_address", "name", "chip", "numa_node"):
        assert getattr(gpu, name) == getattr(healthy, name)
    assert gpu.state == "lost"
    assert unknowns(gpu) >= {
        "memory_total_bytes",
        "memory_used_bytes",
        "memory_free_bytes",
        "utilisation_percent",
        "temperature_celsius",
        "power_watts",
        "power_limit_watts",
        "mig",
        "mps",
        "persistence",
        "ecc_corrected",
        "ecc_uncorrected",
        "retired_pages",
    }
    assert (gpu.links, gpu.health.state) == ((), "failed")


@pytest.mark.thorough
def test_a_gpu_lost_at_any_moment_of_a_snapshot_and_back(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all()
    node.scenario.write()
    links = list(node.scenario.orders)
    healthy = provider.snapshot()
    whole = lost = 0
    for calls in range(150):
        node.scenario.orders = [*links, f"lost_after 0 {calls}"]
        node.scenario.write()
        snapshot = provider.snapshot()
        check_snapshot(snapshot, "nvidia")
        if snapshot.gpus[0].state == "ok":
            whole += 1
            assert snapshot.gpus[0] == healthy.gpus[0]
            assert snapshot.uses == healthy.uses
        else:
            lost += 1
            check_lost(snapshot.gpus[0], healthy.gpus[0])
            assert snapshot.uses == healthy.uses[1:]
        assert snapshot.gpus[1].replace(links=()) == healthy.gpus[1].replace(links=())
        node.scenario.orders = list(links)
        node.scenario.write()
        assert provider.snapshot() == healthy
    assert lost > 15, "the loss has to strike in the middle"
    assert whole > 15, "and after the end"


@pytest.mark.thorough
def test_a_gpu_that_falls_off_the_bus_while_its_links_are_read(node: NvidiaNode) -> None:
    for calls in range(100):  # by a provider that sees it for the first time, and asks for more
        provider = node.provider()
        provider.open()
        node.scenario.orders = []
        node.scenario.link_all()
        node.scenario.orders.append(f"lost_after 0 {calls}")
        node.scenario.write()
        for _ in range(2):
            snapshot = provider.snapshot()
            check_snapshot(snapshot, "nvidia")
            assert snapshot.gpus[1].state == "ok"
        assert snapshot.gpus[0].state == "lost"
        assert snapshot.gpus[1].links == ()
        provider.close()


def test_a_gpu_that_was_never_read_correctly_has_its_own_name(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("lost_after 1 0")
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "nvidia")
    assert [(gpu.uuid, gpu.state) for gpu in snapshot.gpus] == [(uuid(0), "ok"), ("GPU-unknown-at-index-1", "lost")]


def test_a_lost_gpu_keeps_its_name_when_the_library_is_opened_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    node.scenario.order("lost_after 1 0")
    provider.close()
    provider.open()
    check_lost(provider.snapshot().gpus[1], healthy.gpus[1])


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (f"error nvmlDeviceGetHandleByIndex_v2@0 {NO_PERMISSION}", "denies access"),
        (f"error nvmlDeviceGetHandleByIndex_v2@0 {UNKNOWN}", "Unknown Error"),
        (f"error nvmlDeviceGetUUID@0 {NO_DATA}", "nvmlDeviceGetUUID"),
        (f"error nvmlDeviceGetUUID@0 {NOT_SUPPORTED}", "no UUID"),
        (f"error nvmlDeviceGetMemoryInfo_v2@0 {UNKNOWN}", "Unknown Error"),
        (f"error *@0 {NO_DATA}", "nvmlDeviceGetHandleByIndex"),
    ],
)
def test_a_gpu_that_does_not_answer_is_unknown_and_stays(
    node: NvidiaNode, provider: NvidiaProvider, order: str, words: str
) -> None:
    healthy = provider.snapshot()
    node.scenario.order(order)
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "nvidia")
    gpu = snapshot.gpus[0]
    assert (gpu.uuid, gpu.name, gpu.state) == (uuid(0), "NVIDIA H200", "unknown")
    assert gpu.memory_used_bytes is None
    assert gpu.health.state == "unknown"
    assert words in gpu.health.notes[0]
    assert (snapshot.gpus[1], snapshot.uses) == (healthy.gpus[1], healthy.uses[1:])


# ---- hangs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo_v2@0", "nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2"])
def test_a_hanging_call_is_left_alone_and_returns(node: NvidiaNode, provider: NvidiaProvider, function: str) -> None:
    healthy = provider.snapshot()
    fifo = node.folder / "fifo"
    os.mkfifo(fifo)
    node.scenario.order(f"hold {function} {fifo}")
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(provider.snapshot)
        with fifo.open("wb"):  # opens as soon as the call is in there
            node.scenario.mend()
            with pytest.raises(DeviceError, match="an earlier call of the NVIDIA library has not returned"):
                provider.snapshot()
            with pytest.raises(DeviceError, match="an earlier call of the NVIDIA library has not returned"):
                provider.open()
            provider.close()  # must not shut the library down under the call
            assert node.is_driver_open()
            assert not hung.done()
        assert hung.result(timeout=HANG_S) == healthy
    assert provider.snapshot() == healthy


def test_a_call_that_hangs_until_the_driver_recovers(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    node.scenario.order("hang nvmlDeviceGetUtilizationRates@1")
    got: list[VendorSnapshot] = []
    thread = threading.Thread(target=lambda: got.append(provider.snapshot()))
    thread.start()
    node.scenario.mend()
    thread.join(timeout=HANG_S)
    assert got == [healthy]


def test_a_slow_driver_is_slow_and_right(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    node.scenario.order("delay nvmlDeviceGetPowerUsage 30000")
    assert provider.snapshot() == healthy
