"""Shared fixtures of the contract tests: nodes with GPUs behind the stubs of the vendors' libraries."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from hegmd.node.devices.amd import AmdProvider
from hegmd.node.devices.base import VendorSnapshot
from tests.contract.carried import Moving, moved
from tests.contract.driven import Parts, in_force
from tests.contract.helped import SIZES_MIB, Owner
from tests.kit.contracts import check_snapshot
from tests.stubs.amdsmi.scenario import ENVIRONMENT, Scenario
from tests.stubs.amdsmi.sysfs import FakeSys
from tests.stubs.build import build_stub
from tests.stubs.cuda.node import CudaNode
from tests.stubs.nvml.node import MakeNode, NvidiaNode


@pytest.fixture
def make_nvidia_node(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    """Makes a node with NVIDIA GPUs in a folder; its scenario is the one in force from then on."""
    with ExitStack() as stack:

        def make(folder: Path, *, gpus: int = 2, hide: Sequence[str] = ()) -> NvidiaNode:
            node = stack.enter_context(closing(NvidiaNode.make(folder, gpus=gpus, hide=hide)))
            for name, value in node.scenario.environment().items():
                monkeypatch.setenv(name, value)
            return node

        yield make


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A ROCm with the stub AMD SMI. The binding keeps the library that it finds first, so a process has one."""
    rocm = tmp_path_factory.mktemp("rocm")
    (rocm / "lib").mkdir()
    build_stub("amdsmi", rocm / "lib")
    (rocm / ".info").mkdir()
    (rocm / ".info" / "version").write_text("7.0.2-56\n")
    before = os.environ.get("ROCM_PATH")
    os.environ["ROCM_PATH"] = str(rocm)
    yield rocm
    os.environ.pop("ROCM_PATH")
    if before is not None:
        os.environ["ROCM_PATH"] = before


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scenario:
    """The stub's node: two MI300X with one XGMI link between them."""
    scenario = Scenario.of_mi300x(tmp_path / "scenario", 2)
    scenario.link_all()
    scenario.write()
    monkeypatch.setenv(ENVIRONMENT, str(scenario.path))
    return scenario


@pytest.fixture
def kernel(tmp_path: Path) -> FakeSys:
    """The same two GPUs as the kernel has them, without its list of processes."""
    kernel = FakeSys.of_mi300x(tmp_path / "sys", 2)
    kernel.proc.rmdir()
    return kernel


@pytest.fixture
def make_amd(rocm: Path, scenario: Scenario, kernel: FakeSys) -> Callable[[], AmdProvider]:
    return lambda: AmdProvider(kernel.root, rocm)


@pytest.fixture
def amd(make_amd: Callable[[], AmdProvider]) -> Iterator[AmdProvider]:
    """The provider, open."""
    amd = make_amd()
    amd.open()
    yield amd
    amd.close()


@pytest.fixture
def take_snapshot(amd: AmdProvider) -> Callable[[], VendorSnapshot]:
    """A snapshot that came from AMD SMI and keeps the contract, whatever was broken."""

    def snapshot() -> VendorSnapshot:
        snapshot = amd.snapshot()
        check_snapshot(snapshot, "amd")
        assert snapshot.library_version is not None, "this did not come from AMD SMI"
        return snapshot

    return snapshot


@pytest.fixture
def node(tmp_path: Path) -> CudaNode:
    """A node behind the stub of the CUDA driver."""
    return CudaNode.make(tmp_path)


@pytest.fixture
def owner(node: CudaNode) -> Iterator[Owner]:
    """A process that holds video memory on the first GPU."""
    made = Owner(node, 0, *SIZES_MIB)
    yield made
    made.close()


@pytest.fixture
def watcher(node: CudaNode) -> Iterator[Owner]:
    """A program on the other GPU, which reports how much is free there."""
    made = Owner(node, 1, 1)
    yield made
    made.close()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[tuple[CudaNode, Owner, Owner]]:
    node = CudaNode.make(tmp_path / "node")
    owners = Owner(node, 0, 12, 4), Owner(node, 1, 8)
    yield node, *owners
    for owner in owners:
        owner.close()


@pytest.fixture
def parts(owners: tuple[CudaNode, Owner, Owner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    node, moved, other = owners
    return Parts(node, in_force(node, tmp_path, monkeypatch), moved, other)


@pytest.fixture
def moving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Moving]:
    """Jobs of a node of their own, moved by the host carrier."""
    node = CudaNode.make(tmp_path / "node")
    made = Owner(node, 0, *SIZES_MIB)
    yield lambda: moved(tmp_path, (node, made), monkeypatch)
    made.close()
