"""NVIDIA's provider on a bad day: errors, GPUs off the bus, hangs, a driver that is not there. Over the stub library.

The rule behind all of it: nothing crashes, nothing unknown is shown as 0, and one bad GPU costs the others nothing.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hegmd.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from hegmd.devices.nvidia import NvidiaProvider
from hegmd.protocol.snapshots import Gpu
from hegmd.testing.contracts import check_absent, check_snapshot
from tests.stubs.build import COMPILER
from tests.stubs.nvml.node import MakeNode, NvidiaNode
from tests.stubs.nvml.scenario import uuid

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, LOST, NO_DATA, UNKNOWN = 3, 4, 13, 15, 21, 999
UNINITIALIZED, DRIVER_NOT_LOADED, OPERATING_SYSTEM, VERSION_MISMATCH = 1, 9, 17, 18

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
    """What the record, with its health, does not know."""
    return {name for name, value in {**gpu.to_plain(), **gpu.health.to_plain()}.items() if value is None}


# ---- one question without an answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [*QUESTIONS, *HEALTH_QUESTIONS])
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NO_DATA, UNKNOWN])
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
def test_what_the_driver_failed_to_tell_is_noted(node: NvidiaNode, provider: NvidiaProvider, function: str) -> None:
    node.scenario.order(f"error {function}@0 {UNKNOWN}")
    health = provider.snapshot().gpus[0].health
    assert health.state == "warn"
    assert any("the driver failed to tell" in note and "Unknown Error" in note for note in health.notes)


def test_an_answer_that_failed_once_is_asked_for_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order(f"error nvmlDeviceGetName@0 {UNKNOWN}")
    assert provider.snapshot().gpus[0].name is None
    node.scenario.mend()
    assert provider.snapshot().gpus[0].name == "NVIDIA H200"


def test_a_gpu_that_tells_nothing_but_its_uuid(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.gpus[0] = {"uuid": uuid(0)}
    node.scenario.processes = []
    node.scenario.write()
    gpu = provider.snapshot().gpus[0]
    known = {name for name, value in gpu.to_plain().items() if value is not None}
    assert known == {"id", "index", "uuid", "vendor", "state", "links", "mps", "driver_version", "health"}
    assert gpu.health.state == "unknown"


def test_numbers_that_stand_for_unknown_are_not_shown(node: NvidiaNode, provider: NvidiaProvider) -> None:
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


def test_a_gpu_that_was_never_seen_well_has_a_name_of_its_own(node: NvidiaNode, provider: NvidiaProvider) -> None:
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


# ---- the library as a whole -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH])
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2", "*"],
)
def test_a_library_that_stopped_working_says_so_and_works_again(
    node: NvidiaNode, provider: NvidiaProvider, function: str, code: int
) -> None:
    healthy = provider.snapshot()
    node.scenario.order(f"error {function} {code}")
    with pytest.raises(DeviceError) as raised:
        provider.snapshot()
    assert not isinstance(raised.value, DeviceAbsent)
    assert len(raised.value.hint.split()) > 3
    provider.close()
    assert not node.is_driver_open()
    node.scenario.mend()
    provider.open()
    assert provider.snapshot() == healthy


@pytest.mark.parametrize(
    ("code", "cards", "kind", "message", "hint"),
    [
        (DRIVER_NOT_LOADED, True, DeviceError, "driver is not loaded", "modprobe nvidia"),
        (DRIVER_NOT_LOADED, False, DeviceAbsent, "no NVIDIA GPU", "nothing"),
        (VERSION_MISMATCH, True, DeviceError, "580.126.09", "rmmod nvidia_uvm"),
        (OPERATING_SYSTEM, True, DeviceError, "blocked", "nvidia-smi"),
        (NO_PERMISSION, True, DeviceError, "Insufficient Permissions", "nvidia-smi"),
        (UNKNOWN, True, DeviceError, "Unknown Error", "dmesg"),
        (LOST, True, DeviceError, "lost", "dmesg"),
    ],
)
def test_a_library_that_cannot_be_opened(
    node: NvidiaNode, code: int, cards: bool, kind: type[DeviceError], message: str, hint: str
) -> None:
    if not cards:
        for device in (node.sys_root / "bus/pci/devices").iterdir():
            (device / "vendor").write_text("0x1002\n")
    (node.sys_root / "module/nvidia").mkdir(parents=True)
    (node.sys_root / "module/nvidia/version").write_text("580.126.09\n")
    node.scenario.order(f"error nvmlInitWithFlags {code}")
    provider = node.provider()
    for _ in range(2):
        with pytest.raises(DeviceError) as raised:
            provider.open()
        assert type(raised.value) is kind
        assert message in raised.value.message
        assert hint in raised.value.hint
        assert not node.is_driver_open()
    provider.close()
    node.scenario.mend()
    provider.open()
    assert len(provider.snapshot().gpus) == 2
    provider.close()


@pytest.mark.contract
def test_a_node_without_the_library(node: NvidiaNode) -> None:
    absent = check_absent(lambda: node.provider("libnvidia-ml-that-is-not-there.so.1"))
    assert "0000:19:00.0, 0000:29:00.0" in absent.message  # the cards are there
    for device in (node.sys_root / "bus/pci/devices").iterdir():
        (device / "class").write_text("0x040300\n")  # the sound part of a card is no GPU
    absent = check_absent(lambda: node.provider("libnvidia-ml-that-is-not-there.so.1"))
    assert "no NVIDIA GPU" in absent.message


def test_a_library_that_disappeared_is_an_absence_until_it_is_back(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    away = node.library.rename(node.folder / "away")
    assert provider.snapshot() == healthy, "what is loaded goes on working"
    provider.close()
    for _ in range(2):
        with pytest.raises(DeviceAbsent, match=r"but no .*libnvidia-ml"):
            provider.open()
        provider.close()
    away.rename(node.library)
    provider.open()
    assert provider.snapshot() == healthy


@pytest.mark.contract
def test_a_driver_without_gpus(node: NvidiaNode) -> None:
    node.scenario.gpus = []
    node.scenario.processes = []
    node.scenario.write()
    check_absent(node.provider)
    assert not node.is_driver_open()


def test_a_file_that_is_no_library_is_an_error_and_not_an_absence(node: NvidiaNode) -> None:
    broken = node.folder / "broken.so"
    broken.write_bytes(b"half a download")
    with pytest.raises(DeviceError) as raised:
        node.provider(broken).open()
    assert not isinstance(raised.value, DeviceAbsent)
    assert "broken.so" in raised.value.message


def test_a_library_without_one_that_it_needs_is_an_error_and_not_an_absence(node: NvidiaNode) -> None:
    needed, unlinked = node.folder / "libneeded.so.1", node.folder / "unlinked.so"
    compiler = [COMPILER, "-shared", "-Wl,--no-as-needed"]
    subprocess.run([*compiler, f"-Wl,-soname,{needed.name}", "-o", needed, node.library], check=True)
    subprocess.run([*compiler, "-o", unlinked, needed], check=True)
    needed.unlink()
    with pytest.raises(DeviceError) as raised:
        node.provider(unlinked).open()
    assert not isinstance(raised.value, DeviceAbsent)
    assert needed.name in raised.value.message


def test_closing_after_the_driver_went_away_is_fine(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order(f"error * {UNINITIALIZED}")
    provider.close()
    provider.close()
    assert not node.is_driver_open()


# ---- hangs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo_v2@0", "nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2"])
def test_a_hanging_call_is_left_alone_and_comes_back(node: NvidiaNode, provider: NvidiaProvider, function: str) -> None:
    healthy = provider.snapshot()
    fifo = node.folder / "fifo"
    os.mkfifo(fifo)
    node.scenario.order(f"hold {function} {fifo}")
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(provider.snapshot)
        with fifo.open("wb"):  # opens as soon as the call is in there
            node.scenario.mend()
            with pytest.raises(DeviceError, match="has not come back"):
                provider.snapshot()
            with pytest.raises(DeviceError, match="has not come back"):
                provider.open()
            provider.close()  # must not shut the library down under the call
            assert node.is_driver_open()
            assert not hung.done()
        assert hung.result(timeout=10) == healthy
    assert provider.snapshot() == healthy


def test_a_call_that_hangs_until_the_driver_recovers(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    node.scenario.order("hang nvmlDeviceGetUtilizationRates@1")
    got: list[VendorSnapshot] = []
    thread = threading.Thread(target=lambda: got.append(provider.snapshot()))
    thread.start()
    node.scenario.mend()
    thread.join(timeout=10)
    assert got == [healthy]


def test_a_slow_driver_is_slow_and_right(node: NvidiaNode, provider: NvidiaProvider) -> None:
    healthy = provider.snapshot()
    node.scenario.order("delay nvmlDeviceGetPowerUsage 30000")
    assert provider.snapshot() == healthy
