"""NVIDIA's provider when the library as a whole is of no use: missing, broken, failing, without its driver or any GPU.

Over the stub library. Nothing crashes, every refusal says what to do, and it works again once the cause is gone.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.devices.base import DeviceAbsent, DeviceError
from hegmd.node.devices.nvidia import NvidiaProvider
from tests.kit.contracts import check_absent
from tests.stubs.build import COMPILER
from tests.stubs.nvml.node import MakeNode, NvidiaNode

UNINITIALIZED, NO_PERMISSION, DRIVER_NOT_LOADED, LOST = 1, 4, 9, 15
OPERATING_SYSTEM, VERSION_MISMATCH, UNKNOWN = 17, 18, 999


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


@pytest.mark.parametrize("code", [UNINITIALIZED, DRIVER_NOT_LOADED, VERSION_MISMATCH])
@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetPowerUsage", "nvmlEventSetWait_v2", "*"],
)
def test_a_library_that_fails_is_reported_and_used_again_once_it_works(
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
        (DRIVER_NOT_LOADED, False, DeviceAbsent, "no NVIDIA GPU", "lspci -d 10de:"),
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


def test_a_file_that_is_not_a_library_is_an_error_and_not_a_missing_library(node: NvidiaNode) -> None:
    broken = node.folder / "broken.so"
    broken.write_bytes(b"half a download")
    with pytest.raises(DeviceError) as raised:
        node.provider(broken).open()
    assert not isinstance(raised.value, DeviceAbsent)
    assert "broken.so" in raised.value.message


def test_a_library_with_a_missing_dependency_is_an_error_and_not_absent(node: NvidiaNode) -> None:
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
