"""AMD GPUs by the kernel's files alone: a whole /sys in a folder, with all that can be missing or broken in it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.amd_binding import AmdSmiUnusable
from hegmd.node.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from hegmd.protocol.snapshots import Gpu
from tests.kit.contracts import check_absent, check_provider, check_snapshot
from tests.stubs.amdsmi.scenario import MI300X_BYTES, MIB, pci, unique_id, uuid
from tests.stubs.amdsmi.sysfs import PCIE, XGMI, FakeSys, gpu_id, listing, write

GIB = 1 << 30


@pytest.fixture
def sys(tmp_path: Path) -> FakeSys:
    return FakeSys.of_mi300x(tmp_path / "sys", 2)


@pytest.fixture
def rocm(tmp_path: Path) -> Path:
    """A ROCm without AMD SMI."""
    write(tmp_path / "rocm" / ".info" / "version", "7.0.2-56")
    return tmp_path / "rocm"


def no_library(rocm: Path) -> ModuleType:
    raise AmdSmiUnusable(f"there is no AMD SMI in {rocm.name}")


def provider_of(sys: FakeSys, rocm: Path) -> AmdProvider:
    return AmdProvider(sys.root, rocm, no_library)


@pytest.fixture
def make(sys: FakeSys, rocm: Path) -> Callable[[], AmdProvider]:
    return lambda: provider_of(sys, rocm)


@pytest.fixture
def take_snapshot(make: Callable[[], AmdProvider]) -> Callable[[], VendorSnapshot]:
    """A snapshot that keeps the contract, whatever was broken."""
    provider = make()
    provider.open()

    def snapshot() -> VendorSnapshot:
        snapshot = provider.snapshot()
        check_snapshot(snapshot, "amd")
        return snapshot

    return snapshot


Look = Callable[[], VendorSnapshot]


def shares(snapshot: VendorSnapshot) -> dict[tuple[int, int], int | None]:
    index_of = {gpu.uuid: gpu.index for gpu in snapshot.gpus}
    return {(use.pid, index_of[use.use.gpu]): use.use.vram_bytes for use in snapshot.uses}


@pytest.mark.thorough
@pytest.mark.contract
@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_contract_is_kept(tmp_path: Path, rocm: Path, count: int) -> None:
    sys = FakeSys.of_mi300x(tmp_path / "other", count)
    sys.run(4711, {0: 3 * GIB})
    check_provider(lambda: provider_of(sys, rocm), expect_gpus=count)


def test_everything_that_the_kernel_reports_is_shown(take_snapshot: Look) -> None:
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
        driver_version=os.uname().release,
        health=first.health,
    )
    assert [(link.to_uuid, link.kind, link.bytes_per_s) for link in first.links] == [(uuid(1), "xgmi", 64_000_000_000)]
    assert (first.health.state, first.health.ecc_corrected, first.health.retired_pages) == ("ok", 0, 0)
    assert (snapshot.library_version, snapshot.compute_version) == (None, "7.0.2-56")


def test_gpus_are_counted_by_their_pci_addresses_as_amd_smi_does(tmp_path: Path, rocm: Path) -> None:
    sys = FakeSys.of_mi300x(tmp_path / "other", 0)
    for node, index in ((2, 1), (10, 0), (3, 2)):
        sys.plug(index)
        sys.node(index).rename(sys.nodes / f"new-{node}")
    for folder in sys.nodes.glob("new-*"):
        folder.rename(sys.nodes / folder.name.removeprefix("new-"))
    provider = provider_of(sys, rocm)
    provider.open()
    assert [gpu.pci_address for gpu in provider.snapshot().gpus] == [pci(0), pci(1), pci(2)]


def test_the_version_of_amds_own_driver_goes_before_the_kernels(sys: FakeSys, take_snapshot: Look) -> None:
    write(sys.root / "module" / "amdgpu" / "version", "6.14.14")
    snapshot = take_snapshot()
    assert (snapshot.driver_version, snapshot.gpus[1].driver_version) == ("6.14.14", "6.14.14")


@pytest.mark.parametrize(
    ("target", "chip"),
    [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (110000, "gfx1100"), (100302, "gfx1032")],
)
def test_the_chip_is_named_as_compilers_name_it(sys: FakeSys, take_snapshot: Look, target: int, chip: str) -> None:
    write(sys.node(0) / "properties", listing(simd_count=4, gfx_target_version=target, device_id=0x74A1, unique_id=7))
    assert f"1002:74a1 {chip}" in {gpu.chip for gpu in take_snapshot().gpus}


def test_unreported_facts_are_unknown_and_not_zero(sys: FakeSys, take_snapshot: Look) -> None:
    for name in ("product_name", "gpu_busy_percent", "numa_node", "mem_info_vram_used", "ras/umc_err_count"):
        (sys.card(0) / name).unlink()
    for file in (sys.card(0) / "hwmon" / "hwmon7").iterdir():
        file.unlink()
    (sys.card(0) / "ras" / "gpu_vram_bad_pages").unlink()
    gpu, other = take_snapshot().gpus
    assert (gpu.state, gpu.name, gpu.numa_node) == ("ok", "AMD gfx942", None)
    assert (gpu.memory_used_bytes, gpu.utilisation_percent, gpu.temperature_celsius) == (None, None, None)
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.health.ecc_corrected) == (None, None, None)
    assert (gpu.health.state, gpu.health.retired_pages) == ("unknown", None)
    assert other.temperature_celsius == 41


@pytest.mark.parametrize("text", ["", "N/A", "-1", "65535", "4294967295", "\x00"])
def test_nonsense_is_unknown(sys: FakeSys, take_snapshot: Look, text: str) -> None:
    for name in ("gpu_busy_percent", "numa_node"):
        write(sys.card(0) / name, text)
    for name in ("temp2_input", "power1_input", "power1_cap"):
        write(sys.card(0) / "hwmon" / "hwmon7" / name, f"{text}000000000" if text else "")
    write(sys.card(0) / "ras" / "umc_err_count", f"ue: {text}\nce")
    gpu = take_snapshot().gpus[0]
    assert gpu.utilisation_percent is None
    assert gpu.health.ecc_corrected is None
    assert (gpu.temperature_celsius, gpu.power_watts, gpu.power_limit_watts) == (None, None, None)
    assert gpu.state == "ok"


def test_a_chip_without_a_junction_sensor_reports_its_edge_temperature(sys: FakeSys, take_snapshot: Look) -> None:
    hwmon = sys.card(0) / "hwmon" / "hwmon7"
    write(hwmon / "temp2_label", "edge")
    write(hwmon / "power1_average", 95_500_000)
    gpu = take_snapshot().gpus[0]
    assert (gpu.temperature_celsius, gpu.power_watts) == (41.0, 95.5)


def test_a_gpu_that_runs_does_not_draw_zero_watts(sys: FakeSys, take_snapshot: Look) -> None:
    write(sys.card(0) / "hwmon" / "hwmon7" / "power1_input", 0)
    assert [gpu.power_watts for gpu in take_snapshot().gpus] == [None, 133]


def test_memory_errors_and_bad_pages_raise_doubt(sys: FakeSys, take_snapshot: Look) -> None:
    write(sys.card(0) / "ras" / "umc_err_count", "ue: 1\nce: 118\nde: 2")
    write(sys.card(1) / "ras" / "gpu_vram_bad_pages", "0x1 : 0x1000 : R\n0x2 : 0x1000 : R\n0x3 : 0x1000 : F")
    first, second = take_snapshot().gpus
    assert (first.health.state, first.health.ecc_corrected, first.health.ecc_uncorrected) == ("warn", 118, 1)
    assert len(first.health.notes) == 2
    assert (second.health.state, second.health.retired_pages) == ("failed", 2)


def test_links_of_every_kind_are_reported_once_for_each_pair(sys: FakeSys, take_snapshot: Look) -> None:
    sys.unlink_all()
    sys.link(0, 1, PCIE, 32_000, group="p2p_links")
    sys.link(1, 0, XGMI, 0)
    sys.link(1, 0, PCIE, 32_000, group="p2p_links")
    write(sys.node(0) / "io_links" / "9" / "properties", listing(type=PCIE, node_to=0, max_bandwidth=1))  # a processor
    write(sys.node(0) / "io_links" / "8" / "properties", listing(type=99, node_to=3, max_bandwidth=1))
    first, second = take_snapshot().gpus
    assert [(link.to_uuid, link.kind, link.bytes_per_s) for link in first.links] == [(uuid(1), "pcie", 32_000_000_000)]
    assert [(link.to_uuid, link.kind, link.bytes_per_s) for link in second.links] == [(uuid(0), "xgmi", None)]


def test_a_gpu_off_the_bus_is_lost_and_the_other_one_is_not(sys: FakeSys, take_snapshot: Look) -> None:
    sys.drop_off_the_bus(0)
    first, second = take_snapshot().gpus
    assert (first.state, first.uuid, first.health.state) == ("lost", uuid(0), "failed")
    assert (first.memory_total_bytes, first.memory_used_bytes, first.temperature_celsius) == (None, None, None)
    assert first.memory_free_bytes is None
    assert second.state == "ok"


def test_gpus_come_and_go_without_opening_again(sys: FakeSys, take_snapshot: Look) -> None:
    sys.plug(2)
    assert [gpu.uuid for gpu in take_snapshot().gpus] == [uuid(0), uuid(1), uuid(2)]
    sys.unplug(0)
    snapshot = take_snapshot()
    assert [(gpu.uuid, gpu.index) for gpu in snapshot.gpus] == [(uuid(1), 0), (uuid(2), 1)]


def test_parts_of_one_card_are_distinguished(tmp_path: Path, rocm: Path) -> None:
    sys = FakeSys.of_mi300x(tmp_path / "other", 1)
    for part in (1, 2):
        properties = listing(
            simd_count=152,
            gfx_target_version=90402,
            device_id=0x74A1,
            location_id=0x0500 | part,
            domain=0,
            drm_render_minor=140 + part,
            unique_id=unique_id(0),
        )
        write(sys.nodes / str(10 + part) / "properties", properties)
        write(sys.nodes / str(10 + part) / "gpu_id", 777 + part)
        write(sys.nodes / str(10 + part) / "mem_banks/0/properties", listing(heap_type=2, size_in_bytes=24 * GIB))
    provider = provider_of(sys, rocm)
    provider.open()
    snapshot = provider.snapshot()
    check_snapshot(snapshot, "amd")
    assert [gpu.uuid for gpu in snapshot.gpus] == [f"{uuid(0)}@0000:05:00.{part}" for part in range(3)]
    assert [gpu.memory_total_bytes for gpu in snapshot.gpus] == [MI300X_BYTES, 24 * GIB, 24 * GIB]
    assert [gpu.memory_used_bytes for gpu in snapshot.gpus] == [298 * MIB, None, None]
    assert {gpu.state for gpu in snapshot.gpus} == {"ok"}


def test_cards_without_an_id_are_known_by_their_address(sys: FakeSys, take_snapshot: Look) -> None:
    for index in (0, 1):
        text = (sys.node(index) / "properties").read_text()
        write(sys.node(index) / "properties", text.replace(f"unique_id {unique_id(index)}", "unique_id 0"))
    assert [gpu.uuid for gpu in take_snapshot().gpus] == [f"PCI-{pci(0)}", f"PCI-{pci(1)}"]


def test_processes_are_those_with_memory_or_a_queue(sys: FakeSys, take_snapshot: Look) -> None:
    sys.run(4711, {0: 3 * GIB, 1: 0})  # ROCm opens every GPU; it uses one
    sys.run(4712, {0: 0, 1: 0}, queues=(1,))
    sys.run(4713, {0: 0, 1: 0})
    sys.run(4714, {0: 1, 1: 2 * GIB}, queues=(0, 0, 1))
    write(sys.proc / "notes", "not a process")
    assert shares(take_snapshot()) == {(4711, 0): 3 * GIB, (4712, 1): 0, (4714, 0): 1, (4714, 1): 2 * GIB}
    sys.end(4714)
    assert (4714, 0) not in shares(take_snapshot())


def test_memory_that_the_kernel_does_not_report_is_unknown(sys: FakeSys, take_snapshot: Look) -> None:
    sys.run(4711, {0: None}, queues=(0,))
    write(sys.proc / "4712" / f"vram_{gpu_id(1)}", "N/A")
    write(sys.proc / "4712" / "queues" / "0" / "gpuid", gpu_id(1))
    assert shares(take_snapshot()) == {(4711, 0): None, (4712, 1): None}


def test_a_kernel_that_lists_no_processes_is_reported(sys: FakeSys, take_snapshot: Look) -> None:
    sys.proc.rmdir()
    snapshot = take_snapshot()
    assert snapshot.uses == ()
    assert all("processes" in gpu.health.notes[0] for gpu in snapshot.gpus)
    assert snapshot.gpus[0].health.state == "warn"


def test_a_file_that_fails_when_read_makes_a_gpu_unknown(sys: FakeSys, take_snapshot: Look) -> None:
    used = sys.card(0) / "mem_info_vram_used"
    used.unlink()
    used.mkdir()  # opens, and then cannot be read, for root as well
    first, second = take_snapshot().gpus
    assert (first.state, first.memory_used_bytes, first.temperature_celsius) == ("unknown", None, None)
    assert "mem_info_vram_used cannot be read" in first.health.notes[0]
    assert second.state == "ok"


def test_without_the_driver_there_is_nothing(tmp_path: Path, rocm: Path) -> None:
    absent = check_absent(lambda: AmdProvider(tmp_path / "empty", rocm, no_library))
    assert "no AMD GPU" in absent.message


def test_a_card_without_its_driver_is_named_with_the_remedy(sys: FakeSys, rocm: Path) -> None:
    sys.unload_driver()
    absent = check_absent(lambda: provider_of(sys, rocm))
    assert pci(0) in absent.message
    assert absent.hint == "sudo modprobe amdgpu"


def test_a_driver_without_gpus_is_absence(tmp_path: Path, rocm: Path) -> None:
    sys = FakeSys.of_mi300x(tmp_path / "other", 0)
    absent = check_absent(lambda: provider_of(sys, rocm))
    assert "lists no GPU" in absent.message


def test_a_reload_of_the_driver_is_lived_through(sys: FakeSys, make: Callable[[], AmdProvider], tmp_path: Path) -> None:
    provider = make()
    provider.open()
    sys.unload_driver()
    with pytest.raises(DeviceAbsent):
        provider.snapshot()
    provider.close()
    with pytest.raises(DeviceAbsent):
        provider.open()
    (sys.root / "bus").rename(tmp_path / "old")
    FakeSys.of_mi300x(sys.root, 2)
    provider.open()
    assert [gpu.state for gpu in provider.snapshot().gpus] == ["ok", "ok"]


def test_a_topology_that_goes_away_is_an_error(sys: FakeSys, make: Callable[[], AmdProvider], tmp_path: Path) -> None:
    provider = make()
    provider.open()
    sys.kfd.rename(tmp_path / "gone")
    with pytest.raises(DeviceError, match="no longer exists"):
        provider.snapshot()


def test_why_the_kernel_is_read_is_logged_once(
    make: Callable[[], AmdProvider], caplog: pytest.LogCaptureFixture
) -> None:
    provider = make()
    with caplog.at_level("INFO", logger="hegmd.node.devices.amd"):
        for _ in range(3):
            provider.open()
            provider.close()
    assert len(caplog.records) == 1
    assert "because there is no AMD SMI in rocm" in caplog.records[0].getMessage()
