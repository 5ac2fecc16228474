"""NVIDIA's provider over the stub library and the true binding: the readings of a healthy node, and their records.

Faults are in test_nvidia_faults.py; other versions of driver and library are in test_nvidia_versions.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.devices.nvidia import NvidiaProvider
from hegmd.protocol.snapshots import Gpu, Health, PeerLink
from tests.kit.contracts import check_provider, check_snapshot
from tests.stubs.nvml.node import MakeNode, NvidiaNode
from tests.stubs.nvml.scenario import MIB, uuid

GIB = 1 << 30
CHANGING = (
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
)


@pytest.fixture
def node(tmp_path: Path, make_nvidia_node: MakeNode) -> NvidiaNode:
    return make_nvidia_node(tmp_path)


@pytest.fixture
def provider(node: NvidiaNode) -> Iterator[NvidiaProvider]:
    provider = node.provider()
    provider.open()
    yield provider
    provider.close()


def shares(provider: NvidiaProvider) -> dict[tuple[int, str], tuple[int | None, str]]:
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "nvidia")
    return {(use.pid, use.use.gpu): (use.use.vram_bytes, use.use.kind) for use in snapshot.uses}


@pytest.mark.contract
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_contract_is_kept(node: NvidiaNode, count: int) -> None:
    node.scenario.gpus = [{**node.scenario.gpus[0], "uuid": uuid(i), "pci": f"0:{i + 1:x}:0"} for i in range(count)]
    node.scenario.processes = ["0 compute 4711 1073741824", "0 graphics 4711 N/A"]
    node.scenario.link_all()
    node.scenario.write()
    check_provider(node.provider, expect_gpus=count)
    assert not node.is_driver_open()
    assert len(node.kept_descriptors()) == 1, "all the while it was loaded once"


def test_every_field_of_a_gpu(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch")
    node.scenario.gpus[1] |= {
        "memory_used": 1000 * MIB,
        "utilisation": 42,
        "temperature": 51,
        "power_mw": 612_345,
        "power_limit_mw": 650_000,
        "persistence": 0,
        "ecc_corrected": 3,
        "remapped_rows": "2 0 0 0",
    }
    node.scenario.write()
    snapshot = provider.snapshot()
    assert (snapshot.driver_version, snapshot.library_version, snapshot.compute_version) == (
        "580.159.04",
        "13.580.159.04",
        "13.0",
    )
    assert snapshot.gpus[1] == Gpu(
        id="1",
        index=1,
        uuid=uuid(1),
        pci_address="0000:29:00.0",
        name="NVIDIA H200",
        vendor="nvidia",
        chip="nvidia-2335-hopper-sm90",
        memory_total_bytes=143771 * MIB,
        memory_used_bytes=1000 * MIB,
        memory_free_bytes=(143771 - 606 - 1000) * MIB,
        utilisation_percent=42.0,
        temperature_celsius=51.0,
        power_watts=612.345,
        power_limit_watts=650.0,
        numa_node=1,
        links=(PeerLink(to_uuid=uuid(0), kind="nvlink", lanes=18, bytes_per_s=450_000_000_000),),
        mig=False,
        mps=False,
        persistence=False,
        driver_version="580.159.04",
        health=Health(state="ok", ecc_corrected=3, ecc_uncorrected=0, retired_pages=2),
    )


def test_values_that_change_are_read_each_time(node: NvidiaNode, provider: NvidiaProvider) -> None:
    provider.snapshot()
    changed = {
        "memory_total": 100 * MIB,
        "memory_used": 5 * MIB,
        "memory_reserved": 0,
        "utilisation": 99,
        "temperature": 80,
        "power_mw": 1000,
        "power_limit_mw": 2000,
        "persistence": 0,
        "mig": 1,
    }
    node.scenario.gpus[0] |= changed
    node.scenario.processes = ["0 mps 1 1"]
    node.scenario.write()
    gpu = provider.snapshot().gpus[0]
    assert {name: getattr(gpu, name) for name in CHANGING} == {
        "memory_total_bytes": 100 * MIB,
        "memory_used_bytes": 5 * MIB,
        "memory_free_bytes": 95 * MIB,
        "utilisation_percent": 99.0,
        "temperature_celsius": 80.0,
        "power_watts": 1.0,
        "power_limit_watts": 2.0,
        "mig": True,
        "mps": True,
        "persistence": False,
    }


def test_chips_are_equal_only_where_a_process_image_fits(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.gpus[1]["device_id"] = "0x233010DE"  # an H100: same generation, another chip
    node.scenario.write()
    chips = {gpu.chip for gpu in provider.snapshot().gpus}
    assert chips == {"nvidia-2335-hopper-sm90", "nvidia-2330-hopper-sm90"}


def test_a_partly_known_chip_equals_no_other(node: NvidiaNode, provider: NvidiaProvider) -> None:
    for facts in node.scenario.gpus:
        facts["compute_capability"] = None
    node.scenario.write()
    assert [gpu.chip for gpu in provider.snapshot().gpus] == [None, None]


@pytest.mark.parametrize(
    ("online", "node_of_card", "affinity", "expected"),
    [
        ("0-1", "1", 1, 1),  # the kernel's word comes first
        ("0", "-1", None, 0),  # firmware says nothing, but there is one node only
        ("0-1", "-1", 2, 1),  # NVML knows
        ("0-1", "-1", 3, None),  # near both is near none
        ("0-1", "-1", None, None),
    ],
)
def test_the_nearest_numa_node(
    node: NvidiaNode,
    provider: NvidiaProvider,
    online: str,
    node_of_card: str,
    affinity: int | None,
    expected: int | None,
) -> None:
    nodes = node.sys_root / "devices" / "system" / "node"
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(online + "\n")
    (node.sys_root / "bus/pci/devices/0000:19:00.0/numa_node").write_text(node_of_card + "\n")
    node.scenario.gpus[0]["memory_affinity"] = affinity
    node.scenario.write()
    assert provider.snapshot().gpus[0].numa_node == expected


# ---- links ----------------------------------------------------------------------------------------------------------


def links(provider: NvidiaProvider, index: int = 0) -> set[tuple[str, str, int | None, int | None]]:
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "nvidia")
    return {(link.to_uuid, link.kind, link.lanes, link.bytes_per_s) for link in snapshot.gpus[index].links}


def test_links_straight_to_other_gpus_are_counted_by_gpu(tmp_path: Path, make_nvidia_node: MakeNode) -> None:
    node = make_nvidia_node(tmp_path, gpus=4)
    node.scenario.link_all("gpu", lanes=12, version=5)
    node.scenario.write()
    provider = node.provider()
    provider.open()
    assert links(provider) == {(uuid(i), "nvlink", 4, 100_000_000_000) for i in (1, 2, 3)}
    provider.close()


def test_links_through_switches_go_to_every_gpu_behind_them(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch", lanes=18, version=6)
    node.scenario.write()
    assert links(provider) == {(uuid(1), "nvlink", 18, 450_000_000_000)}


def test_a_link_that_is_down_does_not_count(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch", lanes=18)
    node.scenario.orders = [
        order.replace(" active", " inactive") if order.startswith("nvlink 1 7 ") else order
        for order in node.scenario.orders
    ]
    node.scenario.write()
    assert links(provider) == {(uuid(1), "nvlink", 17, 425_000_000_000)}


def test_switches_that_do_not_connect_the_two_are_no_link(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch")
    node.scenario.orders = [order for order in node.scenario.orders if not order.startswith("p2p")]
    node.scenario.write()
    assert links(provider) == set()


def test_nvlink_of_an_unknown_version_has_no_made_up_speed(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch", lanes=2, version=99)
    node.scenario.write()
    assert links(provider) == {(uuid(1), "nvlink", 2, None)}


def test_peer_access_over_pcie_has_a_kind_and_no_made_up_speed(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("p2p 0 1 rw", "p2p 1 0 r")
    assert links(provider, 0) == {(uuid(1), "pcie", None, None)}
    assert links(provider, 1) == set()  # reading alone is not enough to bring something there


def test_a_driver_that_lists_no_links_but_reports_nvlink_is_believed(
    node: NvidiaNode, provider: NvidiaProvider
) -> None:
    node.scenario.order("p2p 0 1 rwn")
    assert links(provider) == {(uuid(1), "nvlink", None, None)}


def test_links_are_read_again_when_mig_removes_them(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.link_all("switch")
    node.scenario.write()
    assert links(provider)
    node.scenario.gpus[0]["mig"] = 1
    node.scenario.mend()
    assert not links(provider)


# ---- processes ------------------------------------------------------------------------------------------------------


def test_a_process_is_one_however_many_lists_it_is_in(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.processes = [
        f"0 compute 10 {2 * GIB}",
        f"0 graphics 10 {2 * GIB}",
        f"0 graphics 11 {GIB}",
        f"0 compute 12 {GIB}",
        f"0 mps 12 {GIB}",
        f"1 compute 10 {3 * GIB}",
    ]
    node.scenario.write()
    assert shares(provider) == {
        (10, uuid(0)): (2 * GIB, "compute"),
        (11, uuid(0)): (GIB, "graphics"),
        (12, uuid(0)): (GIB, "mps"),
        (10, uuid(1)): (3 * GIB, "compute"),
    }
    assert [gpu.mps for gpu in provider.snapshot().gpus] == [True, False]


def test_memory_that_the_driver_does_not_report_is_unknown_and_not_0(
    node: NvidiaNode, provider: NvidiaProvider
) -> None:
    node.scenario.processes = [
        "0 compute 10 N/A",
        "0 compute 11 N/A",
        f"0 graphics 11 {GIB}",
        "0 compute 12 0",
        "0 compute 0 4096",  # no pid: no process to report
    ]
    node.scenario.write()
    assert shares(provider) == {
        (10, uuid(0)): (None, "compute"),
        (11, uuid(0)): (GIB, "compute"),
        (12, uuid(0)): (0, "compute"),
    }


def test_more_processes_than_the_buffer_holds(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.processes = [f"{i % 2} compute {100 + i} {i}" for i in range(2000)]
    node.scenario.write()
    assert shares(provider) == {(100 + i, uuid(i % 2)): (i, "compute") for i in range(2000)}


def test_an_unchanged_snapshot_is_the_same_object(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.processes = ["0 compute 10 1", "0 compute 11 1", "1 compute 12 1"]
    node.scenario.write()
    before = provider.snapshot().uses
    node.scenario.processes[0] = "0 compute 10 2"
    node.scenario.write()
    after = provider.snapshot().uses
    assert [use.use.vram_bytes for use in after] == [2, 1, 1]
    assert [new is old for new, old in zip(after, before, strict=True)] == [False, True, True]


def test_instances_of_a_cut_up_card_are_put_down_to_the_card(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.gpus[0]["mig"] = 1
    node.scenario.processes = ["0 compute 10 5 1 0", "0 compute 10 6 2 0", "0 compute 11 7 2 0", "0 compute 12 N/A 1 0"]
    node.scenario.processes += ["0 graphics 10 4 1 0", "0 compute 12 8 2 0"]
    node.scenario.order("instance 0 0 1 0", "instance 0 3 2 0")
    expected = {
        (10, uuid(0)): (11, "compute"),
        (11, uuid(0)): (7, "compute"),
        (12, uuid(0)): (None, "compute"),  # one part unknown, the sum unknown
    }
    assert shares(provider) == expected
    for kind in ("Compute", "Graphics", "MPSCompute"):  # without privileges the card does not tell, its instances do
        node.scenario.orders.append(f"error nvmlDeviceGet{kind}RunningProcesses_v3@0 4")
    node.scenario.write()
    assert shares(provider) == expected
    gpu = provider.snapshot().gpus[0]
    assert (gpu.mig, gpu.health.state) == (True, "ok")


def test_a_gpu_that_does_not_list_its_processes_is_reported(node: NvidiaNode, provider: NvidiaProvider) -> None:
    node.scenario.order("error nvmlDeviceGetComputeRunningProcesses_v3@0 4")
    health = provider.snapshot().gpus[0].health
    assert health.state == "warn"
    assert health.notes == ("the driver does not report which processes use this GPU",)


@pytest.mark.parametrize("changed", [False, True])
def test_a_large_node_costs_little(node: NvidiaNode, provider: NvidiaProvider, changed: bool) -> None:
    """8 GPUs and 2,000 processes: a few ms here, of the 50 ms of CPU that the whole inventory may take."""
    node.scenario.gpus = [{**node.scenario.gpus[0], "uuid": uuid(i), "pci": f"0:{i + 1:x}:0"} for i in range(8)]
    node.scenario.processes = [f"{i % 8} compute {100 + i} {GIB}" for i in range(2000)]
    node.scenario.write()
    assert len(provider.snapshot().uses) == 2000
    costs: list[float] = []
    for attempt in range(3):
        if changed:
            node.scenario.processes = [f"{i % 8} compute {100 + i} {attempt}" for i in range(2000)]
            node.scenario.write()
        began = time.process_time()
        provider.snapshot()
        costs.append(time.process_time() - began)
    assert min(costs) < 0.025
