"""AMD GPUs by the true Python binding of AMD SMI over a stub library: every case that hardware would rarely show."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys as python
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from hegmd.devices.amd import AmdProvider
from hegmd.devices.amd_facts import records_of
from hegmd.devices.base import DeviceAbsent, DeviceError, VendorSnapshot
from hegmd.devices.kfd import Kfd
from hegmd.protocol.snapshots import Gpu
from hegmd.testing.contracts import check_absent, check_provider, check_snapshot
from tests.stubs.amdsmi.scenario import ENVIRONMENT, MI300X_BYTES, MIB, Scenario, pci, unique_id, uuid
from tests.stubs.amdsmi.sysfs import FakeSys, gpu_id, write
from tests.stubs.build import build_stub

GIB = 1 << 30
REPO = Path(__file__).resolve().parents[2]
NOT_SUPPORTED, NO_PERMISSION, IO, NOT_FOUND, NOT_INITIALISED, NO_DRIVER = 2, 10, 12, 31, 32, 34

Look = Callable[[], VendorSnapshot]
Make = Callable[[], AmdProvider]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """What the stub answers: two MI300X with one XGMI link between them."""
    scenario = Scenario.of_mi300x(tmp_path / "scenario", 2)
    scenario.link_all()
    scenario.write()
    monkeypatch.setenv(ENVIRONMENT, str(scenario.path))
    return scenario


@pytest.fixture
def sys(tmp_path: Path) -> FakeSys:
    """The same two GPUs as the kernel has them, without its list of processes."""
    sys = FakeSys.of_mi300x(tmp_path / "sys", 2)
    sys.proc.rmdir()
    return sys


@pytest.fixture
def make(rocm: Path, node: Scenario, sys: FakeSys) -> Make:
    return lambda: AmdProvider(sys.root, rocm)


@pytest.fixture
def provider(make: Make) -> Iterator[AmdProvider]:
    provider = make()
    provider.open()
    yield provider
    provider.close()


@pytest.fixture
def look(provider: AmdProvider) -> Look:
    """A snapshot that keeps the contract, whatever was broken."""

    def snapshot() -> VendorSnapshot:
        snapshot = provider.snapshot()
        check_snapshot(snapshot, "amd")
        assert snapshot.library_version is not None, "this did not come from AMD SMI"
        return snapshot

    return snapshot


def shares(snapshot: VendorSnapshot) -> dict[tuple[int, int], int | None]:
    index_of = {gpu.uuid: gpu.index for gpu in snapshot.gpus}
    return {(use.pid, index_of[use.use.gpu]): use.use.vram_bytes for use in snapshot.uses}


@pytest.mark.contract
def test_the_contract_is_kept(make: Make, node: Scenario) -> None:
    node.processes = ["0 4711 3221225472 python3", "1 4712 0 python3"]
    node.write()
    snapshot = check_provider(make, expect_gpus=2)
    assert snapshot.library_version == "26.0.2"


def test_everything_that_the_library_tells_is_there(look: Look) -> None:
    snapshot = look()
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


def test_both_sources_tell_the_same_of_the_same_gpus(look: Look, sys: FakeSys) -> None:
    """So that a library which breaks does not make new GPUs of the old ones."""
    kernel = Kfd(sys.root)
    by_kernel = records_of(kernel.facts(kernel.gpus()), "6.14.14")
    for ours, theirs in zip(look().gpus, by_kernel, strict=True):
        assert ours.replace(links=()) == theirs.replace(links=())
        assert [(link.to_uuid, link.kind, link.bytes_per_s) for link in ours.links] == [
            (link.to_uuid, link.kind, link.bytes_per_s) for link in theirs.links
        ]


def test_facts_that_are_not_told_are_unknown_and_not_zero(look: Look, node: Scenario) -> None:
    for key in node.gpus[0]:
        if key not in {"pci", "serial", "memory_total"}:
            node.gpus[0][key] = None
    node.orders.clear()
    node.write()
    first, second = look().gpus
    assert (first.state, first.uuid, first.memory_total_bytes) == ("ok", uuid(0), MI300X_BYTES)
    measured = (first.memory_used_bytes, first.utilisation_percent, first.temperature_celsius, first.power_watts)
    assert measured == (None,) * 4
    assert (first.power_limit_watts, first.numa_node, first.links) == (None, None, ())
    assert (first.health.state, first.health.notes, first.health.ecc_uncorrected) == ("unknown", (), None)
    assert (second.temperature_celsius, second.numa_node) == (41, 0)


@pytest.mark.parametrize("value", [0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF])
def test_all_ones_are_unknown(look: Look, node: Scenario, value: int) -> None:
    for key in ("activity", "hotspot", "power", "power_cap", "gfx", "memory_used"):
        node.gpus[0][key] = value
    node.gpus[0] |= {"numa": -1, "ecc": f"{value} {value} {value}"}
    node.write()
    gpu = look().gpus[0]
    assert (gpu.utilisation_percent, gpu.temperature_celsius, gpu.power_watts) == (None, None, None)
    assert (gpu.power_limit_watts, gpu.memory_used_bytes) == (None, None)
    assert (gpu.health.ecc_corrected, gpu.health.ecc_uncorrected, gpu.health.notes) == (None, None, ())
    assert gpu.memory_total_bytes == MI300X_BYTES


def test_what_does_not_change_is_asked_for_once(look: Look, node: Scenario) -> None:
    node.log = node.path.with_name("log")
    node.write()
    first, second = look(), look()
    called = node.log.read_text().split()
    assert called.count("amdsmi_get_gpu_asic_info") == 2  # once for each GPU
    assert called.count("amdsmi_get_gpu_memory_usage") == 4
    assert first == second


def test_older_cards_tell_average_power_and_edge_temperature(look: Look, node: Scenario) -> None:
    node.gpus[0] |= {"hotspot": None, "edge": 33, "power": None, "average_power": 41}
    node.write()
    gpu = look().gpus[0]
    assert (gpu.temperature_celsius, gpu.power_watts) == (33, 41)


def test_memory_errors_and_bad_pages_raise_doubt(look: Look, node: Scenario) -> None:
    node.gpus[0] |= {"ecc": "118 1 2", "pages": "7 1 0"}
    node.gpus[1]["pages"] = "2 0 1"
    node.write()
    first, second = look().gpus
    assert (first.health.state, first.health.ecc_corrected, first.health.ecc_uncorrected) == ("warn", 118, 1)
    assert (first.health.retired_pages, len(first.health.notes)) == (7, 3)
    assert (second.health.state, second.health.retired_pages) == ("failed", 2)


def test_links_by_pcie_count_only_with_peer_access(make: Make, node: Scenario) -> None:
    node.gpus += [{**node.gpus[0], "pci": pci(index), "serial": hex(unique_id(index))} for index in (2, 3)]
    node.orders = ["link 0 1 pcie 0 0", "link 0 2 nop2p 0 0", "link 0 3 xgmi 50000 4"]
    node.write()
    provider = make()
    provider.open()
    links = [(link.to_uuid, link.kind, link.lanes, link.bytes_per_s) for link in provider.snapshot().gpus[0].links]
    provider.close()
    assert links == [(uuid(1), "pcie", None, None), (uuid(3), "xgmi", 4, 50_000_000_000)]


# ---- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 3])
def test_what_is_not_supported_or_not_permitted_is_nobodys_fault(look: Look, node: Scenario, code: int) -> None:
    node.order(f"error amdsmi_get_gpu_activity {code}", f"error amdsmi_get_gpu_ecc_count@0 {code}")
    gpu = look().gpus[0]
    assert (gpu.state, gpu.utilisation_percent, gpu.health.notes) == ("ok", None, ())
    assert gpu.temperature_celsius == 41


def test_a_fact_that_fails_is_noted_and_the_others_are_told(look: Look, node: Scenario) -> None:
    node.order(f"error amdsmi_get_power_info@0 {IO}")
    first, second = look().gpus
    assert (first.state, first.power_watts, first.power_limit_watts) == ("ok", None, 750)
    assert first.health.notes == ("the driver failed to tell its power (IO - I/O Error)",)
    assert first.health.state == "warn"
    assert second.health.state == "ok"
    node.mend()
    assert look().gpus[0].health.state == "ok"


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


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("code", [1, 7, 9, 13, 40, 4294967294])
def test_no_failure_of_one_call_fails_the_snapshot_or_the_other_gpu(
    make: Make, node: Scenario, function: str, code: int
) -> None:
    node.order(f"error {function}@0 {code}")
    provider = make()
    provider.open()
    snapshot = provider.snapshot()
    provider.close()
    check_snapshot(snapshot, "amd")
    first, second = snapshot.gpus
    assert (first.uuid, first.state) == (uuid(0), "ok")
    assert (second.uuid, second.state, second.health.state) == (uuid(1), "ok", "ok")
    assert first.health.notes, "the failure is told"


def test_a_gpu_keeps_its_identity_when_the_library_does_not_tell_it(make: Make, node: Scenario, look: Look) -> None:
    sound = look().gpus[0]
    node.order(f"error amdsmi_get_gpu_asic_info@0 {IO}")
    provider = make()
    provider.open()
    gpu = provider.snapshot().gpus[0]
    assert (gpu.uuid, gpu.chip, gpu.name) == (sound.uuid, sound.chip, "AMD gfx942")
    node.mend()
    assert provider.snapshot().gpus[0].name == "AMD Instinct MI300X OAM"


def test_a_gpu_that_tells_nothing_is_unknown(look: Look, node: Scenario) -> None:
    look()
    node.order(f"error *@0 {IO}")
    first, second = look().gpus
    assert (first.state, first.uuid, first.name) == ("unknown", uuid(0), "AMD Instinct MI300X OAM")
    assert (first.memory_total_bytes, first.temperature_celsius, first.links) == (None, None, ())
    assert first.health.state == "unknown"
    assert "memory (IO - I/O Error)" in first.health.notes[0]
    assert second.state == "ok"
    node.mend()
    assert look().gpus[0].state == "ok"


@pytest.mark.parametrize("calls", range(10))
def test_a_gpu_lost_in_the_middle_of_a_snapshot_is_told_lost_by_the_next(
    provider: AmdProvider, look: Look, node: Scenario, sys: FakeSys, calls: int
) -> None:
    provider.snapshot()
    node.order(f"lost_after 0 {calls}")
    sys.drop_off_the_bus(0)
    look()  # the one in which it happens keeps the contract, whatever it could still read
    first, second = look().gpus
    assert (first.state, first.uuid, first.name) == ("lost", uuid(0), "AMD Instinct MI300X OAM")
    assert (first.memory_used_bytes, first.utilisation_percent, first.health.state) == (None, None, "failed")
    assert (second.state, second.memory_used_bytes) == ("ok", 298 * MIB)


def test_memory_that_is_not_told_is_no_loss_while_the_card_is_on_the_bus(look: Look, node: Scenario) -> None:
    node.gpus[0] |= {"memory_total": None, "memory_used": None}
    node.write()
    gpu = look().gpus[0]
    assert (gpu.state, gpu.memory_total_bytes, gpu.temperature_celsius) == ("ok", None, 41)


def test_gpus_come_and_go_without_opening_again(look: Look, node: Scenario, sys: FakeSys) -> None:
    assert len(look().gpus) == 2
    node.gpus.append({**node.gpus[0], "pci": pci(2), "serial": hex(unique_id(2))})
    node.write()
    assert len(look().gpus) == 2  # the library knows those of its start
    sys.plug(2)
    assert [gpu.uuid for gpu in look().gpus] == [uuid(0), uuid(1), uuid(2)]
    del node.gpus[0]
    node.write()
    sys.unplug(0)
    assert [(gpu.uuid, gpu.index) for gpu in look().gpus] == [(uuid(1), 0), (uuid(2), 1)]


@pytest.mark.parametrize("code", [NOT_INITIALISED, NO_DRIVER])
def test_a_library_that_lost_its_driver_fails_as_a_whole_and_opens_again(
    provider: AmdProvider, node: Scenario, code: int
) -> None:
    node.order(f"error amdsmi_get_gpu_activity {code}")
    with pytest.raises(DeviceError) as caught:
        provider.snapshot()
    assert isinstance(caught.value, DeviceAbsent) is (code == NO_DRIVER)
    provider.close()
    node.mend()
    provider.open()
    assert [gpu.state for gpu in provider.snapshot().gpus] == ["ok", "ok"]


def test_a_library_that_does_not_start_says_what_to_look_at(make: Make, node: Scenario) -> None:
    node.order("error amdsmi_init 18")
    provider = make()
    for _ in range(2):
        with pytest.raises(DeviceError) as caught:
            provider.open()
        provider.close()
    assert not isinstance(caught.value, DeviceAbsent)
    assert caught.value.message == "AMD SMI fails: amdsmi_init says INIT_ERROR - Initialization error"
    assert "amd-smi list" in caught.value.hint


@pytest.mark.parametrize("code", [18, 43])
def test_a_library_that_cannot_list_its_gpus_fails_and_is_shut_down(make: Make, node: Scenario, code: int) -> None:
    node.log = node.path.with_name("log")
    node.order(f"error amdsmi_get_socket_handles {code}")
    with pytest.raises(DeviceError):
        make().open()
    assert node.log.read_text().splitlines()[-1] == "amdsmi_shut_down"


def test_no_driver_and_no_gpu_is_absence(make: Make, node: Scenario) -> None:
    node.order("no_driver")
    assert check_absent(make).hint == "sudo modprobe amdgpu"
    node.mend()
    node.gpus.clear()
    node.write()
    assert check_absent(make).message == "AMD SMI finds no GPU"


def test_a_failing_shut_down_does_not_keep_it_from_opening_again(provider: AmdProvider, node: Scenario) -> None:
    node.order("error amdsmi_shut_down 7")
    provider.close()
    provider.open()
    assert len(provider.snapshot().gpus) == 2


# ---- processes --------------------------------------------------------------------------------------------------


def test_processes_of_the_library_are_told_with_their_memory(look: Look, node: Scenario) -> None:
    node.processes = ["0 4711 3221225472 python3", "1 4711 0 python3", "1 4712 18446744073709551615 a"]
    node.write()
    assert shares(look()) == {(4711, 0): 3 * GIB, (4711, 1): 0, (4712, 1): None}


def test_more_processes_than_the_binding_takes_and_names_that_are_not_text(look: Look, node: Scenario) -> None:
    node.processes = [f"0 {pid} {MIB} \udcff\udcfe{pid}" for pid in range(1, 2001)]
    node.write()
    assert shares(look()) == {(pid, 0): MIB for pid in range(1, 2001)}


def test_memory_that_may_not_be_seen_is_unknown_and_not_zero(look: Look, node: Scenario) -> None:
    node.processes = ["0 4711 0 python3", f"0 4712 {GIB} python3"]
    node.gpus[0]["process_status"] = NO_PERMISSION
    node.write()
    assert shares(look()) == {(4711, 0): None, (4712, 0): GIB}


def test_processes_that_are_not_told_are_missed(look: Look, node: Scenario) -> None:
    node.processes = ["0 4711 1 python3", "1 4712 1 python3"]
    node.order("error amdsmi_get_gpu_process_list@0 7")
    snapshot = look()
    assert shares(snapshot) == {(4712, 1): 1}
    assert snapshot.gpus[0].health.notes == ("the driver failed to tell its processes (status 7)",)


def test_the_kernels_list_of_processes_goes_before_the_librarys(look: Look, node: Scenario, sys: FakeSys) -> None:
    node.processes = ["0 4711 3221000000 python3"]  # the library rounds
    node.log = node.path.with_name("log")
    node.write()
    sys.proc.mkdir()
    sys.run(4711, {0: 3 * GIB, 1: 0}, queues=(0,))
    sys.run(4712, {0: 0, 1: GIB})
    write(sys.proc / "4713" / f"vram_{gpu_id(9)}", GIB)  # on a GPU that AMD SMI was not given
    assert shares(look()) == {(4711, 0): 3 * GIB, (4712, 1): GIB}
    assert "amdsmi_get_gpu_process_list" not in node.log.read_text()


# ---- hanging ----------------------------------------------------------------------------------------------------


def test_a_call_that_hangs_holds_up_its_own_thread_alone(provider: AmdProvider, node: Scenario, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    node.order(f"hold amdsmi_get_gpu_activity@1 {tmp_path / 'fifo'}")
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(provider.snapshot)
        inside = os.open(tmp_path / "fifo", os.O_WRONLY)  # returns once the call is in the library
        try:
            assert not hanging.done()
            node.mend()
        finally:
            os.close(inside)
        assert [gpu.state for gpu in hanging.result(10).gpus] == ["ok", "ok"]


# ---- versions: each in a process of its own, since the binding keeps the library that it found first -----------------

LOOK = """
import json, logging, sys
from pathlib import Path
from hegmd.devices.amd import AmdProvider
from hegmd.devices.base import DeviceAbsent

class Kept(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())

said, told = [], []
logging.basicConfig(level="INFO", handlers=[Kept()])
provider = AmdProvider(Path(sys.argv[1]), Path(sys.argv[2]))
for _ in range(2):
    try:
        provider.open()
        snapshot = provider.snapshot()
        binding = getattr(sys.modules.get("amdsmi"), "__file__", None)
        told.append([snapshot.library_version, [gpu.uuid for gpu in snapshot.gpus], binding])
    except DeviceAbsent as absent:
        told.append([absent.message, absent.hint, None])
    provider.close()
json.dump([told, " ".join(said)], sys.stderr)
"""


def in_a_process(sys: FakeSys, rocm: Path, node: Scenario, *, python_path: str = "") -> tuple[list[list[object]], str]:
    """What a fresh process is told, twice, and what it logs; it must write nothing to stdout, and warn of nothing."""
    environment = {"ROCM_PATH": str(rocm), "PYTHONPATH": f"{python_path}:{REPO}", **node.environment()}
    command = [python.executable, "-W", "error", "-c", LOOK, str(sys.root), str(rocm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=15)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    told, said = json.loads(done.stderr)
    return told, said


@pytest.fixture
def own_rocm(tmp_path: Path) -> Path:
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    return tmp_path / "rocm"


def test_a_library_that_is_missing_leaves_the_kernels_files(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    told, said = in_a_process(sys, own_rocm, node)
    assert told == [[None, [uuid(0), uuid(1)], None]] * 2
    assert said.count("the library of AMD SMI, libamd_smi.so, is not here") == 1


def test_a_library_that_is_there_is_used(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    told, said = in_a_process(sys, own_rocm, node)
    assert [each[:2] for each in told] == [["26.0.2", [uuid(0), uuid(1)]]] * 2
    assert said == ""


def test_a_library_that_is_no_library_leaves_the_kernels_files(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    (own_rocm / "lib" / "libamd_smi.so").write_text("not a library")
    assert in_a_process(sys, own_rocm, node)[0] == [[None, [uuid(0), uuid(1)], None]] * 2


def test_a_missing_binding_leaves_the_kernels_files(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    shadow = own_rocm / "shadow" / "amdsmi"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'amdsmi'\", name='amdsmi')\n")
    told, said = in_a_process(sys, own_rocm, node, python_path=str(shadow.parent))
    assert told == [[None, [uuid(0), uuid(1)], None]] * 2
    assert "the Python package amdsmi is not here" in said


def test_a_library_older_than_the_binding_leaves_the_kernels_files(
    own_rocm: Path, node: Scenario, sys: FakeSys
) -> None:
    build_stub("amdsmi", own_rocm / "lib", hide=["amdsmi_get_gpu_ptl_state", "amdsmi_get_afids_from_cper"])
    told, said = in_a_process(sys, own_rocm, node)
    assert told == [[None, [uuid(0), uuid(1)], None]] * 2
    assert "does not have all that its binding needs" in said
    assert "amdsmi_get_afids_from_cper" in said


@pytest.mark.parametrize("version", ["24 6 3", "25 5 1", "27 0 0"])
def test_a_library_of_another_layout_is_not_asked_for_anything(
    own_rocm: Path, node: Scenario, sys: FakeSys, version: str
) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    node.version = version
    node.log = node.path.with_name("log")
    node.write()
    told, said = in_a_process(sys, own_rocm, node)
    assert [each[:2] for each in told] == [[None, [uuid(0), uuid(1)]]] * 2
    assert "is not made for it" in said
    assert set(node.log.read_text().split()) == {"amdsmi_init", "amdsmi_get_lib_version", "amdsmi_shut_down"}


def test_the_binding_that_rocm_ships_goes_before_an_installed_one(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    spec = find_spec("amdsmi")
    assert spec is not None
    assert spec.origin is not None
    shipped = own_rocm / "share" / "amd_smi" / "amdsmi"
    shutil.copytree(Path(spec.origin).parent, shipped)
    (shipped / "_version.py").write_text('__version__ = "26.0.2+39589fda"\n')
    told, _ = in_a_process(sys, own_rocm, node)
    assert told == [["26.0.2", [uuid(0), uuid(1)], str(shipped / "__init__.py")]] * 2
    (shipped / "_version.py").write_text('__version__ = "25.5.1"\n')
    told, said = in_a_process(sys, own_rocm, node)
    assert told[0][0] is None
    assert "25.5.1, is not made for it" in said


def test_a_node_without_the_driver_never_loads_the_library(own_rocm: Path, node: Scenario, sys: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    node.log = node.path.with_name("log")
    node.write()
    sys.unload_driver()
    told, _ = in_a_process(sys, own_rocm, node)
    assert "amdgpu is not loaded" in str(told[0][0])
    assert not node.log.exists()
