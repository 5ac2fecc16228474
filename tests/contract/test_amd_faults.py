"""AMD GPUs by AMD SMI when it fails: one fact, one GPU, the library as a whole, for a while or permanently."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from tests.cells import in_one_test
from tests.kit.contracts import check_absent, check_snapshot
from tests.stubs.amdsmi.scenario import MIB, Scenario, pci, unique_id, uuid
from tests.stubs.amdsmi.sysfs import FakeSys

NOT_SUPPORTED, NO_PERMISSION, IO, NOT_INITIALISED, NO_DRIVER = 2, 10, 12, 32, 34

Look = Callable[[], VendorSnapshot]
Make = Callable[[], AmdProvider]


@pytest.mark.thorough
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 3])
def test_unsupported_or_forbidden_queries_are_not_failures(take_snapshot: Look, scenario: Scenario, code: int) -> None:
    scenario.order(f"error amdsmi_get_gpu_activity {code}", f"error amdsmi_get_gpu_ecc_count@0 {code}")
    gpu = take_snapshot().gpus[0]
    assert (gpu.state, gpu.utilisation_percent, gpu.health.notes) == ("ok", None, ())
    assert gpu.temperature_celsius == 41


@pytest.mark.thorough
def test_a_fact_that_cannot_be_read_is_noted_and_the_others_are_reported(
    take_snapshot: Look, scenario: Scenario
) -> None:
    scenario.order(f"error amdsmi_get_power_info@0 {IO}")
    first, second = take_snapshot().gpus
    assert (first.state, first.power_watts, first.power_limit_watts) == ("ok", None, 750)
    assert first.health.notes == ("the driver failed to report its power (IO - I/O Error)",)
    assert first.health.state == "warn"
    assert second.health.state == "ok"
    scenario.mend()
    assert take_snapshot().gpus[0].health.state == "ok"


FUNCTIONS = [
    "amdsmi_get_gpu_asic_info",
    "amdsmi_get_gpu_driver_info",
    "amdsmi_get_gpu_topo_numa_affinity",
    "amdsmi_get_link_metrics",
    "amdsmi_topo_get_link_type",
    "amdsmi_get_minmax_bandwidth_between_processors",
    "amdsmi_get_gpu_memory_total",
    "amdsmi_get_gpu_memory_usage",
    "amdsmi_get_gpu_activity",
    "amdsmi_get_temp_metric",
    "amdsmi_get_power_info",
    "amdsmi_get_power_cap_info",
    "amdsmi_get_gpu_ecc_count",
    "amdsmi_get_gpu_bad_page_info",
    "amdsmi_get_gpu_process_list",
]


@pytest.mark.thorough
@pytest.mark.parametrize("function", FUNCTIONS)
@in_one_test("code", [1, 7, 9, 13, 40, 4294967294])
def test_no_failure_of_one_call_fails_the_snapshot_or_the_other_gpu(
    make_amd: Make, scenario: Scenario, function: str, code: int
) -> None:
    scenario.mend()
    scenario.link_all()
    scenario.order(f"error {function}@0 {code}")
    provider = make_amd()
    provider.open()
    snapshot = provider.snapshot()
    provider.close()
    check_snapshot(snapshot, "amd")
    first, second = snapshot.gpus
    assert (first.uuid, first.state) == (uuid(0), "ok")
    assert (second.uuid, second.state, second.health.state) == (uuid(1), "ok", "ok")
    assert first.health.notes, "the failure is told"


@pytest.mark.thorough
def test_a_gpu_keeps_its_identity_when_the_library_does_not_report_it(
    make_amd: Make, scenario: Scenario, take_snapshot: Look
) -> None:
    sound = take_snapshot().gpus[0]
    scenario.order(f"error amdsmi_get_gpu_asic_info@0 {IO}")
    provider = make_amd()
    provider.open()
    gpu = provider.snapshot().gpus[0]
    assert (gpu.uuid, gpu.chip, gpu.name) == (sound.uuid, sound.chip, "AMD gfx942")
    scenario.mend()
    assert provider.snapshot().gpus[0].name == "AMD Instinct MI300X OAM"


@pytest.mark.thorough
def test_a_gpu_that_reports_nothing_is_unknown(take_snapshot: Look, scenario: Scenario) -> None:
    take_snapshot()
    scenario.order(f"error *@0 {IO}")
    first, second = take_snapshot().gpus
    assert (first.state, first.uuid, first.name) == ("unknown", uuid(0), "AMD Instinct MI300X OAM")
    assert (first.memory_total_bytes, first.temperature_celsius, first.links) == (None, None, ())
    assert first.health.state == "unknown"
    assert "memory (IO - I/O Error)" in first.health.notes[0]
    assert second.state == "ok"
    scenario.mend()
    assert take_snapshot().gpus[0].state == "ok"


@pytest.mark.thorough
@pytest.mark.parametrize("calls", range(10))
def test_a_gpu_lost_during_a_snapshot_is_reported_lost_by_the_next_one(
    amd: AmdProvider, take_snapshot: Look, scenario: Scenario, kernel: FakeSys, calls: int
) -> None:
    amd.snapshot()
    scenario.order(f"lost_after 0 {calls}")
    kernel.drop_off_the_bus(0)
    take_snapshot()  # the one in which it happens keeps the contract, whatever it could still read
    first, second = take_snapshot().gpus
    assert (first.state, first.uuid, first.name) == ("lost", uuid(0), "AMD Instinct MI300X OAM")
    assert (first.memory_used_bytes, first.utilisation_percent, first.health.state) == (None, None, "failed")
    assert (second.state, second.memory_used_bytes) == ("ok", 298 * MIB)


def test_unreported_memory_does_not_mean_a_lost_gpu_while_the_card_is_on_the_bus(
    take_snapshot: Look, scenario: Scenario
) -> None:
    scenario.gpus[0] |= {"memory_total": None, "memory_used": None}
    scenario.write()
    gpu = take_snapshot().gpus[0]
    assert (gpu.state, gpu.memory_total_bytes, gpu.temperature_celsius) == ("ok", None, 41)


def test_gpus_come_and_go_without_opening_again(take_snapshot: Look, scenario: Scenario, kernel: FakeSys) -> None:
    assert len(take_snapshot().gpus) == 2
    scenario.gpus.append({**scenario.gpus[0], "pci": pci(2), "serial": hex(unique_id(2))})
    scenario.write()
    assert len(take_snapshot().gpus) == 2  # the library knows those of its start
    kernel.plug(2)
    assert [gpu.uuid for gpu in take_snapshot().gpus] == [uuid(0), uuid(1), uuid(2)]
    del scenario.gpus[0]
    scenario.write()
    kernel.unplug(0)
    assert [(gpu.uuid, gpu.index) for gpu in take_snapshot().gpus] == [(uuid(1), 0), (uuid(2), 1)]


@pytest.mark.parametrize("code", [NOT_INITIALISED, NO_DRIVER])
def test_a_library_that_lost_its_driver_fails_as_a_whole_and_opens_again(
    amd: AmdProvider, scenario: Scenario, code: int
) -> None:
    scenario.order(f"error amdsmi_get_gpu_activity {code}")
    with pytest.raises(DeviceError) as caught:
        amd.snapshot()
    assert isinstance(caught.value, DeviceAbsent) is (code == NO_DRIVER)
    amd.close()
    scenario.mend()
    amd.open()
    assert [gpu.state for gpu in amd.snapshot().gpus] == ["ok", "ok"]


def test_a_library_that_does_not_start_is_reported_with_what_to_check(make_amd: Make, scenario: Scenario) -> None:
    scenario.order("error amdsmi_init 18")
    provider = make_amd()
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            provider.open()
        provider.close()
    assert not isinstance(caught.value, DeviceAbsent)
    assert caught.value.message == "AMD SMI fails: amdsmi_init says INIT_ERROR - Initialization error"
    assert "amd-smi list" in caught.value.hint


@pytest.mark.parametrize("code", [18, 43])
def test_a_library_that_cannot_list_its_gpus_fails_and_is_shut_down(
    make_amd: Make, scenario: Scenario, code: int
) -> None:
    scenario.log = scenario.path.with_name("log")
    scenario.order(f"error amdsmi_get_socket_handles {code}")
    with pytest.raises(DeviceError):
        make_amd().open()
    assert scenario.log.read_text().splitlines()[-1] == "amdsmi_shut_down"


def test_no_driver_and_no_gpu_is_absence(make_amd: Make, scenario: Scenario) -> None:
    scenario.order("no_driver")
    assert check_absent(make_amd).hint == "sudo modprobe amdgpu"
    scenario.mend()
    scenario.gpus.clear()
    scenario.write()
    assert check_absent(make_amd).message == "AMD SMI finds no GPU"


def test_a_failing_shut_down_does_not_keep_it_from_opening_again(amd: AmdProvider, scenario: Scenario) -> None:
    scenario.order("error amdsmi_shut_down 7")
    amd.close()
    amd.open()
    assert len(amd.snapshot().gpus) == 2


def test_a_reply_that_the_binding_cannot_parse_fails_that_fact_alone(
    make_amd: Make, scenario: Scenario, kernel: FakeSys
) -> None:
    scenario.gpus[0]["serial"] = "none of your business"  # the binding wants a number in hexadecimal
    scenario.gpus[1]["name"] = "Instinct \udcff"  # and text that is UTF-8
    scenario.write()
    provider = make_amd()
    provider.open()
    snapshot = provider.snapshot()
    provider.close()
    check_snapshot(snapshot, "amd")
    assert [(gpu.state, gpu.uuid, gpu.name) for gpu in snapshot.gpus] == [
        ("ok", uuid(0), "AMD gfx942"),
        ("ok", uuid(1), "AMD gfx942"),
    ]
    assert snapshot.gpus[0].health.notes == ("the driver failed to report its chip (the binding: ValueError)",)
    assert snapshot.gpus[1].health.notes == ("the driver failed to report its chip (the binding: UnicodeDecodeError)",)


def test_a_library_that_does_not_start_again_fails_as_a_whole(
    amd: AmdProvider, scenario: Scenario, kernel: FakeSys
) -> None:
    amd.snapshot()
    kernel.plug(2)
    scenario.order("error amdsmi_init 18")
    with pytest.raises(DeviceError, match="INIT_ERROR"):
        amd.snapshot()
    scenario.mend()
    scenario.version = "27 0 0"
    scenario.write()
    with pytest.raises(DeviceError, match=r"library of AMD SMI is 27\.0\.0"):
        amd.snapshot()
    scenario.version = "26 1 0"
    scenario.write()
    amd.close()
    amd.open()
    assert amd.snapshot().library_version == "26.1.0"


def test_a_call_that_hangs_holds_up_its_own_thread_alone(amd: AmdProvider, scenario: Scenario, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    scenario.order(f"hold amdsmi_get_gpu_activity@1 {tmp_path / 'fifo'}")
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(amd.snapshot)
        inside = os.open(tmp_path / "fifo", os.O_WRONLY)  # returns once the call is in the library
        try:
            assert not hanging.done()
            scenario.mend()
        finally:
            os.close(inside)
        assert [gpu.state for gpu in hanging.result(10).gpus] == ["ok", "ok"]
