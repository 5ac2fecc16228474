"""The library and the binding of AMD SMI that are used together, and what is done when they do not fit.

Each in a process of its own, since the binding keeps the library that it found first.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.patience import HANG_S
from tests.stubs.amdsmi.scenario import Scenario, uuid
from tests.stubs.amdsmi.sysfs import FakeSys
from tests.stubs.build import build_stub

REPO = Path(__file__).resolve().parents[2]

LOOK = """
import json, logging, sys
from pathlib import Path
from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.base import DeviceAbsent

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


def in_a_process(
    kernel: FakeSys, rocm: Path, scenario: Scenario, *, python_path: str = ""
) -> tuple[list[list[object]], str]:
    """Return what a fresh process reads, twice, and what it logs. It must write nothing to stdout, and issue no
    warning.
    """
    environment = {"ROCM_PATH": str(rocm), "PYTHONPATH": f"{python_path}:{REPO}", **scenario.environment()}
    command = [sys.executable, "-W", "error", "-c", LOOK, str(kernel.root), str(rocm)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    snapshot, warnings = json.loads(done.stderr)
    return snapshot, warnings


@pytest.fixture
def own_rocm(tmp_path: Path) -> Path:
    (tmp_path / "rocm" / "lib").mkdir(parents=True)
    return tmp_path / "rocm"


@pytest.mark.thorough
def test_a_missing_library_leaves_the_kernels_files(own_rocm: Path, scenario: Scenario, kernel: FakeSys) -> None:
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert snapshot == [[None, [uuid(0), uuid(1)], None]] * 2
    assert warnings.count("the library of AMD SMI, libamd_smi.so, is not installed") == 1


@pytest.mark.thorough
def test_an_installed_library_is_used(own_rocm: Path, scenario: Scenario, kernel: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert [each[:2] for each in snapshot] == [["26.0.2", [uuid(0), uuid(1)]]] * 2
    assert warnings == ""


def test_with_a_broken_library_the_kernels_files_are_read(own_rocm: Path, scenario: Scenario, kernel: FakeSys) -> None:
    (own_rocm / "lib" / "libamd_smi.so").write_text("not a library")
    assert in_a_process(kernel, own_rocm, scenario)[0] == [[None, [uuid(0), uuid(1)], None]] * 2


def test_a_missing_binding_leaves_the_kernels_files(own_rocm: Path, scenario: Scenario, kernel: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    shadow = own_rocm / "shadow" / "amdsmi"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'amdsmi'\", name='amdsmi')\n")
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario, python_path=str(shadow.parent))
    assert snapshot == [[None, [uuid(0), uuid(1)], None]] * 2
    assert "the Python package amdsmi is not installed" in warnings


@pytest.mark.thorough
def test_a_library_older_than_the_binding_leaves_the_kernels_files(
    own_rocm: Path, scenario: Scenario, kernel: FakeSys
) -> None:
    build_stub("amdsmi", own_rocm / "lib", hide=["amdsmi_get_gpu_ptl_state", "amdsmi_get_afids_from_cper"])
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert snapshot == [[None, [uuid(0), uuid(1)], None]] * 2
    assert "the library of AMD SMI lacks what its binding needs (" in warnings
    assert "amdsmi_get_afids_from_cper" in warnings


@pytest.mark.thorough
@pytest.mark.parametrize("version", ["24 6 3", "25 5 1", "27 0 0"])
def test_a_library_with_another_layout_is_not_called(
    own_rocm: Path, scenario: Scenario, kernel: FakeSys, version: str
) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    scenario.version = version
    scenario.log = scenario.path.with_name("log")
    scenario.write()
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert [each[:2] for each in snapshot] == [[None, [uuid(0), uuid(1)]]] * 2
    assert "its binding is made for" in warnings
    assert set(scenario.log.read_text().split()) == {"amdsmi_init", "amdsmi_get_lib_version", "amdsmi_shut_down"}


@pytest.mark.thorough
def test_the_binding_that_rocm_ships_goes_before_an_installed_one(
    own_rocm: Path, scenario: Scenario, kernel: FakeSys
) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    spec = find_spec("amdsmi")
    assert spec is not None
    assert spec.origin is not None
    shipped = own_rocm / "share" / "amd_smi" / "amdsmi"
    shutil.copytree(Path(spec.origin).parent, shipped)
    (shipped / "_version.py").write_text('__version__ = "26.0.2+39589fda"\n')
    snapshot, _ = in_a_process(kernel, own_rocm, scenario)
    assert snapshot == [["26.0.2", [uuid(0), uuid(1)], str(shipped / "__init__.py")]] * 2
    (shipped / "_version.py").write_text('__version__ = "25.5.1"\n')
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert snapshot[0][0] is None
    assert "but its binding is made for 25.5.1" in warnings


def test_a_node_without_the_driver_never_loads_the_library(own_rocm: Path, scenario: Scenario, kernel: FakeSys) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    scenario.log = scenario.path.with_name("log")
    scenario.write()
    kernel.unload_driver()
    snapshot, _ = in_a_process(kernel, own_rocm, scenario)
    assert "amdgpu is not loaded" in str(snapshot[0][0])
    assert not scenario.log.exists()


@pytest.mark.thorough
def test_a_library_that_does_not_report_its_version_is_not_used(
    own_rocm: Path, scenario: Scenario, kernel: FakeSys
) -> None:
    build_stub("amdsmi", own_rocm / "lib")
    scenario.order("error amdsmi_get_lib_version 7")
    snapshot, warnings = in_a_process(kernel, own_rocm, scenario)
    assert [each[0] for each in snapshot] == [None, None]
    assert "does not report its version (status 7)" in warnings


@pytest.mark.thorough
def test_without_a_library_and_without_kfd_there_is_nothing(
    own_rocm: Path, scenario: Scenario, kernel: FakeSys
) -> None:
    shutil.rmtree(kernel.kfd)
    snapshot, _ = in_a_process(kernel, own_rocm, scenario)
    assert "libamd_smi.so, is not installed, and the kernel lists no GPU" in str(snapshot[0][0])
    assert "ROCm 7" in str(snapshot[0][1])
