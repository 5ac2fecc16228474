"""Every provider in the table keeps the contract: over its stub library here, and over its real one where there is one.

A vendor that is added to PROVIDERS is found by this module, which fails until the vendor has a stub in STUBS.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.base import PROVIDERS, DeviceAbsent, DeviceProvider
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from tests.kit.contracts import check_absent, check_provider
from tests.patience import HANG_S
from tests.stubs.amdsmi.scenario import Scenario
from tests.stubs.amdsmi.sysfs import FakeSys
from tests.stubs.nvml.node import MakeNode

REPO = Path(__file__).resolve().parents[2]
GPUS = 2

Factory = Callable[[], DeviceProvider]
# Puts a node with GPUS GPUs, one of them in use, behind the vendor's stub library.
Behind = Callable[[Path, pytest.FixtureRequest], Factory]


def nvidia(folder: Path, request: pytest.FixtureRequest) -> Factory:
    make_node: MakeNode = request.getfixturevalue("make_nvidia_node")
    node = make_node(folder)
    assert len(node.scenario.gpus) == GPUS
    node.scenario.processes = ["0 compute 4711 1073741824"]
    node.scenario.write()
    return node.provider


def amd(folder: Path, request: pytest.FixtureRequest) -> Factory:
    rocm: Path = request.getfixturevalue("rocm")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    scenario = Scenario.of_mi300x(folder / "scenario", GPUS)
    scenario.link_all()
    scenario.write()
    for name, value in scenario.environment().items():
        monkeypatch.setenv(name, value)
    kernel = FakeSys.of_mi300x(folder / "sys", GPUS)
    kernel.run(4711, {0: 1 << 30, 1: 0})
    return lambda: AmdProvider(kernel.root, rocm)


STUBS: dict[str, Behind] = {"nvidia": nvidia, "amd": amd}


def test_every_vendor_has_a_stub() -> None:
    assert set(STUBS) == set(PROVIDERS)


@pytest.mark.parametrize("vendor", PROVIDERS)
def test_the_table_makes_the_vendors_own_provider(vendor: str) -> None:
    first, second = PROVIDERS[vendor](), PROVIDERS[vendor]()
    assert first.vendor == second.vendor == vendor
    assert first is not second


def test_no_binding_is_loaded_before_a_provider_is_opened() -> None:
    code = """
import sys
from hegmd.node.devices.base import PROVIDERS
loaded = {name for name in sys.modules if name.startswith("hegmd.node.devices.")}
assert loaded == {"hegmd.node.devices.base"}
for make in PROVIDERS.values():
    make().close()
assert not {"pynvml", "amdsmi"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True, timeout=HANG_S)


@pytest.mark.contract
def test_the_simulation_keeps_the_contract() -> None:
    topology = parse_topology(f"{GPUS}x8GiB")
    check_provider(lambda: SimulatedProvider(topology), expect_gpus=GPUS)


@pytest.mark.contract
@pytest.mark.usefixtures("rocm")  # it is kept for the session, so it has to be there before the leak check takes stock
@pytest.mark.parametrize("vendor", PROVIDERS)
def test_the_binding_over_a_stub_keeps_the_contract(
    vendor: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    snapshot = check_provider(STUBS[vendor](tmp_path, request), expect_gpus=GPUS)
    assert [(use.pid, use.use.gpu) for use in snapshot.uses] == [(4711, snapshot.gpus[0].uuid)]
    assert snapshot.uses[0].use.vram_bytes == 1 << 30
    assert snapshot.library_version is not None
    assert all(gpu.state == "ok" and gpu.chip == snapshot.gpus[0].chip for gpu in snapshot.gpus)


@pytest.mark.contract
@pytest.mark.gpu
@pytest.mark.leaks_allowed("a real library keeps some descriptors for good; the contract counts what each opening adds")
@pytest.mark.parametrize("vendor", PROVIDERS)
def test_the_real_library_keeps_the_contract(vendor: str) -> None:
    make = PROVIDERS[vendor]
    gc.collect()  # a stub that only a cycle keeps loaded would be mistaken for the library, by its name
    try:
        make().open()
    except DeviceAbsent as absent:
        check_absent(make)
        pytest.skip(absent.message)
    check_provider(make)
