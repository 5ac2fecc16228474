"""NVIDIA's provider against other versions of driver and library, and against changes of them while it runs.

Over the stub library: functions that an older one lacks are hidden from the dynamic loader, so that looking them up
fails as it would there; a driver that is loaded again, and a library that is replaced on disk, are the real thing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.devices.base import DeviceError
from hegmd.node.devices.nvidia import NvidiaProvider
from tests.kit.contracts import check_provider, check_snapshot
from tests.patience import HANG_S
from tests.stubs.build import build_stub
from tests.stubs.nvml.node import MakeNode, NvidiaNode
from tests.stubs.nvml.scenario import MIB, h200, uuid

REPOSITORY = Path(__file__).resolve().parents[2]
PROCESS_LISTS_V3 = [f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in ("Compute", "Graphics", "MPSCompute")]
PROCESS_LISTS_V2 = [name.replace("_v3", "_v2") for name in PROCESS_LISTS_V3]
# Functions that came after driver 470, the oldest one supported.
SINCE_470 = [
    *PROCESS_LISTS_V3,
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetGpuFabricInfoV",
]


@pytest.fixture
def node(tmp_path: Path, make_nvidia_node: MakeNode) -> NvidiaNode:
    return given_node(tmp_path, make_nvidia_node, hide=())


def given_node(folder: Path, make_nvidia_node: MakeNode, *, hide: list[str] | tuple[str, ...]) -> NvidiaNode:
    node = make_nvidia_node(folder, hide=hide)
    node.scenario.log = folder / "calls"
    node.scenario.processes = ["0 compute 10 1024", "0 graphics 12 N/A", "1 compute 11 2048"]
    node.scenario.link_all()
    node.scenario.write()
    return node


@pytest.fixture
def provider(node: NvidiaNode) -> Iterator[NvidiaProvider]:
    provider = node.provider()
    provider.open()
    yield provider
    provider.close()


def calls(node: NvidiaNode) -> set[str]:
    assert node.scenario.log is not None
    return set(node.scenario.log.read_text().split())


# ---- older and odd libraries ----------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.contract
def test_a_library_of_driver_470_reports_the_same(tmp_path: Path, make_nvidia_node: MakeNode) -> None:
    newer = check_provider(given_node(tmp_path, make_nvidia_node, hide=()).provider)
    (tmp_path / "old").mkdir()
    node = given_node(tmp_path / "old", make_nvidia_node, hide=SINCE_470)
    older = check_provider(node.provider, expect_gpus=2)
    assert older.uses == newer.uses
    used = [gpu.memory_used_bytes for gpu in older.gpus]
    assert used == [606 * MIB, 606 * MIB], "before driver 510 the reserve counted as used, also in nvidia-smi"
    assert [gpu.memory_free_bytes for gpu in older.gpus] == [143165 * MIB, 143165 * MIB]
    assert [gpu.replace(memory_used_bytes=0) for gpu in older.gpus] == list(newer.gpus)
    assert calls(node) >= set(PROCESS_LISTS_V2) | {
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
    }


def test_the_newest_of_two_process_lists_is_read(node: NvidiaNode, provider: NvidiaProvider) -> None:
    provider.snapshot()
    assert set(PROCESS_LISTS_V3) <= calls(node)
    assert not set(PROCESS_LISTS_V2) & calls(node)


@pytest.mark.thorough
def test_a_library_without_process_lists_is_reported_as_such(tmp_path: Path, make_nvidia_node: MakeNode) -> None:
    node = given_node(tmp_path, make_nvidia_node, hide=PROCESS_LISTS_V3 + PROCESS_LISTS_V2)
    provider = node.provider()
    provider.open()
    snapshot = provider.snapshot()
    provider.close()
    assert snapshot.uses == ()
    assert [gpu.mps for gpu in snapshot.gpus] == [None, None]
    assert all(
        "the driver does not report which processes use this GPU" in gpu.health.notes[0] for gpu in snapshot.gpus
    )


@pytest.mark.thorough
def test_a_library_from_before_our_time_is_refused_with_words(tmp_path: Path, make_nvidia_node: MakeNode) -> None:
    node = given_node(tmp_path, make_nvidia_node, hide=["nvmlInitWithFlags"])
    with pytest.raises(DeviceError, match="Function Not Found"):
        node.provider().open()
    assert not node.is_driver_open()


@pytest.mark.thorough
def test_temperature_where_only_the_newer_question_is_left(tmp_path: Path, make_nvidia_node: MakeNode) -> None:
    node = given_node(tmp_path, make_nvidia_node, hide=["nvmlDeviceGetTemperature"])
    provider = node.provider()
    provider.open()
    assert provider.snapshot().gpus[0].temperature_celsius == 27.0
    provider.close()


@pytest.mark.parametrize("entry_bytes", [16, 24, 32])
def test_process_lists_whose_entries_have_another_length(
    node: NvidiaNode, provider: NvidiaProvider, entry_bytes: int
) -> None:
    """Drivers 535.43 to 535.86 changed the entries' length without changing the function's name."""
    node.scenario.orders.append(f"process_stride {entry_bytes}")
    node.scenario.processes = [f"0 compute {pid} {pid * MIB}" for pid in range(100, 400)]
    node.scenario.write()
    for _ in range(2):
        snapshot = provider.snapshot()
        check_snapshot(snapshot, "nvidia")
        assert {(use.pid, use.use.vram_bytes) for use in snapshot.uses} == {(pid, pid * MIB) for pid in range(100, 400)}


# ---- changes while it runs ------------------------------------------------------------------------------------------


def test_a_reloaded_driver_is_found_by_opening_the_library_again(node: NvidiaNode, provider: NvidiaProvider) -> None:
    before = provider.snapshot()
    node.scenario.epoch += 1
    node.scenario.driver_version, node.scenario.nvml_version = "590.10", "13.590.10"
    node.scenario.write()
    with pytest.raises(DeviceError, match="Uninitialized"):
        provider.snapshot()
    provider.close()
    provider.open()
    after = provider.snapshot()
    assert (after.driver_version, after.library_version) == ("590.10", "13.590.10")
    assert [gpu.replace(driver_version=None) for gpu in after.gpus] == [
        gpu.replace(driver_version=None) for gpu in before.gpus
    ]


def test_opening_again_neither_loads_the_library_again_nor_leaves_anything_open(
    node: NvidiaNode, provider: NvidiaProvider
) -> None:
    """Each unloading of the real library leaves a descriptor behind permanently (seen with driver 580.159.04)."""
    for _ in range(5):
        provider.close()
        assert not node.is_driver_open()
        provider.open()
        assert node.is_driver_open()
    assert len(node.kept_descriptors()) == 1


@pytest.mark.thorough
def test_a_library_replaced_on_disk_is_loaded_next(node: NvidiaNode, provider: NvidiaProvider) -> None:
    provider.snapshot()
    assert not set(PROCESS_LISTS_V2) & calls(node)
    build_stub("nvml", node.folder, hide=PROCESS_LISTS_V3)  # under the same name
    provider.snapshot()
    assert not set(PROCESS_LISTS_V2) & calls(node), "what is loaded stays loaded"
    provider.close()
    provider.open()
    provider.snapshot()
    assert set(PROCESS_LISTS_V2) <= calls(node)


@pytest.mark.thorough
@pytest.mark.parametrize("old_stays", [True, False])
def test_a_library_whose_name_leads_to_another_file_is_loaded_again(node: NvidiaNode, old_stays: bool) -> None:
    """As a driver's package does it: libnvidia-ml.so.1 is a link to libnvidia-ml.so.580.159.04, and then to .590.10."""
    name = node.folder / "linked" / "libnvidia-ml.so.1"
    name.parent.mkdir()
    name.symlink_to(node.library)
    (node.folder / "newer").mkdir()
    newer = build_stub("nvml", node.folder / "newer", hide=PROCESS_LISTS_V3)
    provider = node.provider(name)
    provider.open()
    provider.snapshot()
    assert not set(PROCESS_LISTS_V2) & calls(node)
    name.unlink()
    name.symlink_to(newer)
    if not old_stays:
        node.library.unlink()
    provider.close()
    provider.open()
    provider.snapshot()
    assert set(PROCESS_LISTS_V2) <= calls(node)
    provider.close()


def test_gpus_that_are_plugged_in_or_out_are_found(node: NvidiaNode, provider: NvidiaProvider) -> None:
    assert len(provider.snapshot().gpus) == 2
    node.scenario.gpus.append(h200(2))
    node.scenario.write()
    node.plug("0000:39:00.0", numa_node=0)
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "nvidia")
    assert [gpu.uuid for gpu in snapshot.gpus] == [uuid(0), uuid(1), uuid(2)]
    del node.scenario.gpus[0], node.scenario.orders[:]
    node.scenario.processes = ["0 compute 11 2048"]
    node.scenario.write()
    (node.proc_root / "driver/nvidia/gpus/0000:19:00.0").rmdir()
    snapshot = provider.snapshot()
    assert [(gpu.index, gpu.uuid) for gpu in snapshot.gpus] == [(0, uuid(1)), (1, uuid(2))]
    assert [(use.pid, use.use.gpu) for use in snapshot.uses] == [(11, uuid(1))]


def test_the_library_is_initialised_again_only_when_gpus_came_or_went(
    node: NvidiaNode, provider: NvidiaProvider
) -> None:
    for _ in range(3):
        provider.snapshot()
    assert node.scenario.log is not None
    assert node.scenario.log.read_text().split().count("nvmlInitWithFlags") == 1
    node.plug("0000:39:00.0", numa_node=0)
    provider.snapshot()
    assert node.scenario.log.read_text().split().count("nvmlInitWithFlags") == 2


def test_fixed_facts_are_read_once_and_the_others_each_time(node: NvidiaNode, provider: NvidiaProvider) -> None:
    provider.snapshot()
    assert node.scenario.log is not None
    node.scenario.log.write_text("")
    provider.snapshot()
    assert calls(node) == {
        "nvmlEventSetWait_v2",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetMigMode",
        *PROCESS_LISTS_V3,
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetTemperature",
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetEnforcedPowerLimit",
        "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPages",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetGpuFabricInfoV",
    }


# ---- as the daemon does it ------------------------------------------------------------------------------------------


LOOK = """
import json
from hegmd.node.devices.base import PROVIDERS
provider = PROVIDERS["nvidia"]()
provider.open()
snapshot = provider.snapshot()
provider.close()
print(json.dumps([gpu.to_plain() for gpu in snapshot.gpus]))
"""


@pytest.mark.thorough
def test_the_library_is_found_by_its_name(node: NvidiaNode) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={"LD_LIBRARY_PATH": str(node.folder), "PYTHONPATH": str(REPOSITORY), **node.scenario.environment()},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert [gpu["name"] for gpu in json.loads(done.stdout)] == ["NVIDIA H200", "NVIDIA H200"]
    assert not done.stderr


@pytest.mark.thorough
def test_importing_the_provider_loads_no_binding() -> None:
    code = "import sys, hegmd.node.devices.nvidia as n; n.NvidiaProvider(); print('pynvml' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
