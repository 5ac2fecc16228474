"""AMD GPUs by the true Python binding of AMD SMI over a stub library: the readings of a healthy node, and their
records.

Faults are in test_amd_faults.py; other versions of library and binding are in test_amd_versions.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.amd_facts import records_of
from hegmd.node.devices.base import VendorSnapshot
from hegmd.node.devices.kfd import Kfd
from hegmd.protocol.snapshots import Gpu
from tests.kit.contracts import check_provider
from tests.stubs.amdsmi.scenario import MI300X_BYTES, MIB, Scenario, pci, unique_id, uuid
from tests.stubs.amdsmi.sysfs import FakeSys, gpu_id, write

GIB = 1 << 30
NO_PERMISSION = 10

Look = Callable[[], VendorSnapshot]
Make = Callable[[], AmdProvider]


def shares(snapshot: VendorSnapshot) -> dict[tuple[int, int], int | None]:
    index_of = {gpu.uuid: gpu.index for gpu in snapshot.gpus}
    return {(use.pid, index_of[use.use.gpu]): use.use.vram_bytes for use in snapshot.uses}


@pytest.mark.contract
def test_the_contract_is_kept(make_amd: Make, scenario: Scenario) -> None:
    scenario.processes = ["0 4711 3221225472 python3", "1 4712 0 python3"]
    scenario.write()
    snapshot = check_provider(make_amd, expect_gpus=2)
    assert snapshot.library_version == "26.0.2"


def test_everything_that_the_library_reports_is_shown(take_snapshot: Look) -> None:
    snapshot = take_snapshot()
    first = snapshot.gpus[0]
    assert first == Gpu(
        id="0",
        index=0,
        uuid=uuid(0),
        pci_address=pci(0),
        name="AMD Instinct MI300X OAM",
        vendor="amd",
        chip="1002:74a1 gfx942",
        memory_total_bytes=MI300X_BYTES,
        memory_used_bytes=298 * MIB,
        memory_free_bytes=MI300X_BYTES - 298 * MIB,
        utilisation_percent=0.0,
        temperature_celsius=41.0,
        power_watts=133.0,
        power_limit_watts=750.0,
        numa_node=0,
        links=first.links,
        driver_version="6.14.14",
        health=first.health,
    )
    link = first.links[0]
    assert (len(first.links), link.to_uuid, link.kind, link.lanes) == (1, uuid(1), "xgmi", 1)
    assert link.bytes_per_s == 64_000_000_000
    assert (first.health.state, first.health.ecc_corrected, first.health.retired_pages) == ("ok", 0, 0)
    assert (snapshot.driver_version, snapshot.library_version) == ("6.14.14", "26.0.2")
    assert snapshot.compute_version == "7.0.2-56"


def test_both_sources_report_the_same_about_the_same_gpus(take_snapshot: Look, kernel: FakeSys) -> None:
    """Otherwise a failing library would turn the old GPUs into new ones."""
    files = Kfd(kernel.root)
    by_kernel = records_of(files.facts(files.gpus()), "6.14.14")
    for ours, theirs in zip(take_snapshot().gpus, by_kernel, strict=True):
        assert ours.replace(links=()) == theirs.replace(links=())
        assert [(link.to_uuid, link.kind, link.bytes_per_s) for link in ours.links] == [
            (link.to_uuid, link.kind, link.bytes_per_s) for link in theirs.links
        ]


def test_unreported_facts_are_unknown_and_not_zero(take_snapshot: Look, scenario: Scenario) -> None:
    for key in scenario.gpus[0]:
        if key not in {"pci", "serial", "memory_total"}:
            scenario.gpus[0][key] = None
    scenario.orders.clear()
    scenario.write()
    first, second = take_snapshot().gpus
    assert (first.state, first.uuid, first.memory_total_bytes) == ("ok", uuid(0), MI300X_BYTES)
    measured = (first.memory_used_bytes, first.utilisation_percent, first.temperature_celsius, first.power_watts)
    assert measured == (None,) * 4
    assert (first.power_limit_watts, first.numa_node, first.links) == (None, None, ())
    assert (first.health.state, first.health.notes, first.health.ecc_uncorrected) == ("unknown", (), None)
    assert (second.temperature_celsius, second.numa_node) == (41, 0)


@pytest.mark.parametrize("value", [0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF])
def test_all_ones_are_unknown(take_snapshot: Look, scenario: Scenario, value: int) -> None:
    for key in ("activity", "hotspot", "power", "power_cap", "gfx", "memory_used"):
        scenario.gpus[0][key] = value
    scenario.gpus[0] |= {"numa": -1, "ecc": f"{value} {value} {value}"}
    scenario.write()
    gpu = take_snapshot().gpus[0]
    assert (gpu.utilisation_percent, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
    assert (gpu.power_limit_watts, gpu.memory_used_bytes) == (None, None)
    assert (gpu.health.ecc_corrected, gpu.health.ecc_uncorrected, gpu.health.notes) == (None, None, ())
    assert gpu.memory_total_bytes == MI300X_BYTES


def test_constant_facts_are_queried_once(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.log = scenario.path.with_name("log")
    scenario.write()
    first, second = take_snapshot(), take_snapshot()
    called = scenario.log.read_text().split()
    assert called.count("amdsmi_get_gpu_asic_info") == 2  # once for each GPU
    assert called.count("amdsmi_get_gpu_memory_usage") == 4
    assert first == second


def test_older_cards_report_average_power_and_edge_temperature(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.gpus[0] |= {"hotspot": None, "edge": 33, "power": None, "average_power": 41}
    scenario.write()
    gpu = take_snapshot().gpus[0]
    assert (gpu.temperature_celsius, gpu.power_watts) == (33, 41)


def test_memory_errors_and_bad_pages_raise_doubt(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.gpus[0] |= {"ecc": "118 1 2", "pages": "7 1 0"}
    scenario.gpus[1]["pages"] = "2 0 1"
    scenario.write()
    first, second = take_snapshot().gpus
    assert (first.health.state, first.health.ecc_corrected, first.health.ecc_uncorrected) == ("warn", 118, 1)
    assert (first.health.retired_pages, len(first.health.notes)) == (7, 3)
    assert (second.health.state, second.health.retired_pages) == ("failed", 2)


def test_links_by_pcie_count_only_with_peer_access(make_amd: Make, scenario: Scenario) -> None:
    scenario.gpus += [{**scenario.gpus[0], "pci": pci(index), "serial": hex(unique_id(index))} for index in (2, 3)]
    scenario.orders = ["link 0 1 pcie 0 0", "link 0 2 nop2p 0 0", "link 0 3 xgmi 50000 4"]
    scenario.write()
    provider = make_amd()
    provider.open()
    links = [(link.to_uuid, link.kind, link.lanes, link.bytes_per_s) for link in provider.snapshot().gpus[0].links]
    provider.close()
    assert links == [(uuid(1), "pcie", None, None), (uuid(3), "xgmi", 4, 50_000_000_000)]


def test_processes_of_the_library_are_reported_with_their_memory(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.processes = ["0 4711 3221225472 python3", "1 4711 0 python3", "1 4712 18446744073709551615 a"]
    scenario.write()
    assert shares(take_snapshot()) == {(4711, 0): 3 * GIB, (4711, 1): 0, (4712, 1): None}


def test_more_processes_than_the_binding_takes_and_names_that_are_not_text(
    take_snapshot: Look, scenario: Scenario
) -> None:
    scenario.processes = [f"0 {pid} {MIB} \udcff\udcfe{pid}" for pid in range(1, 2001)]
    scenario.write()
    assert shares(take_snapshot()) == {(pid, 0): MIB for pid in range(1, 2001)}


def test_unreadable_memory_is_unknown_and_not_zero(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.processes = ["0 4711 0 python3", f"0 4712 {GIB} python3"]
    scenario.gpus[0]["process_status"] = NO_PERMISSION
    scenario.write()
    assert shares(take_snapshot()) == {(4711, 0): None, (4712, 0): GIB}


def test_unreported_processes_are_detected(take_snapshot: Look, scenario: Scenario) -> None:
    scenario.processes = ["0 4711 1 python3", "1 4712 1 python3"]
    scenario.order("error amdsmi_get_gpu_process_list@0 7")
    snapshot = take_snapshot()
    assert shares(snapshot) == {(4712, 1): 1}
    assert snapshot.gpus[0].health.notes == ("the driver failed to report its processes (status 7)",)


def test_the_kernels_list_of_processes_goes_before_the_librarys(
    take_snapshot: Look, scenario: Scenario, kernel: FakeSys
) -> None:
    scenario.processes = ["0 4711 3221000000 python3"]  # the library rounds
    scenario.log = scenario.path.with_name("log")
    scenario.write()
    kernel.proc.mkdir()
    kernel.run(4711, {0: 3 * GIB, 1: 0}, queues=(0,))
    kernel.run(4712, {0: 0, 1: GIB})
    write(kernel.proc / "4713" / f"vram_{gpu_id(9)}", GIB)  # on a GPU that AMD SMI was not given
    assert shares(take_snapshot()) == {(4711, 0): 3 * GIB, (4712, 1): GIB}
    assert "amdsmi_get_gpu_process_list" not in scenario.log.read_text()
