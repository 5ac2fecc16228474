"""The NVIDIA inventory on real GPUs: the contract, and every field beside nvidia-smi with real torch jobs.

`python3 -m tests.gpu.inventory_run` does the same and more as one command with a table, for a machine that has no
pytest with our plugins.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from hegmd.node.devices.nvidia import NvidiaProvider
from tests.gpu import nvidia_smi
from tests.gpu.comparison import MIB, Row, compare_gpus, compare_processes, compare_rows, compare_topology, table
from tests.gpu.jobs import VramJob
from tests.kit.contracts import check_provider

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(180),  # torch from a cold disk
    pytest.mark.skipif(not nvidia_smi.is_there(), reason="no nvidia-smi here"),
]
HELD_BYTES = 3 << 30


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> Iterator[None]:
    """Keeps the library loaded: each load leaks a descriptor, and the leak check would fail each test."""
    provider = NvidiaProvider()
    provider.open()
    provider.snapshot()
    provider.close()
    yield
    provider.close()


@pytest.fixture(scope="module")
def jobs() -> Iterator[list[VramJob]]:
    """Start one job on each GPU, each with another amount of memory."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("no torch here")
    count = len(nvidia_smi.query("gpu", ["uuid"]))
    with ExitStack() as stack:
        started = [stack.enter_context(VramJob(index, HELD_BYTES + index * 256 * MIB)) for index in range(count)]
        for job in started:
            job.held_at()
        yield started


@pytest.fixture
def provider() -> Iterator[NvidiaProvider]:
    provider = NvidiaProvider()
    provider.open()
    yield provider
    provider.close()


def agree(rows: list[Row]) -> None:
    assert rows, "nothing was compared"
    assert all(row.equal is not False for row in rows), "\n" + table(rows)


@pytest.mark.contract
def test_the_contract_is_kept_by_the_real_library() -> None:
    check_provider(NvidiaProvider, expect_gpus=len(nvidia_smi.query("gpu", ["uuid"])))


def test_every_field_equals_nvidia_smis(jobs: list[VramJob], provider: NvidiaProvider) -> None:
    assert jobs
    gpus = provider.snapshot().gpus
    agree(compare_gpus(gpus) + compare_rows(gpus))


def test_links_and_numa_nodes_equal_nvidia_smis(provider: NvidiaProvider) -> None:
    agree(compare_topology(provider.snapshot().gpus))


def test_versions_equal_nvidia_smis(provider: NvidiaProvider) -> None:
    assert provider.snapshot().compute_version == nvidia_smi.cuda_version()


def test_processes_equal_nvidia_smis(jobs: list[VramJob], provider: NvidiaProvider) -> None:
    snapshot = provider.snapshot()
    shares = {(use.pid, use.use.gpu): use.use.vram_bytes for use in snapshot.uses}
    agree(compare_processes(shares))
    for job in jobs:
        held_bytes = shares[job.pid, snapshot.gpus[job.gpu].uuid]
        assert held_bytes is not None
        assert job.held_bytes <= held_bytes < job.held_bytes + 2 * 1024 * MIB  # and the context


def opened_devices() -> list[str]:
    opened = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    links = [os.readlink(path) for path in opened if os.path.lexists(path)]
    return [link for link in links if link.startswith("/dev/nvidia")]


def test_closing_releases_the_driver(provider: NvidiaProvider) -> None:
    provider.snapshot()
    assert opened_devices()
    provider.close()
    assert not opened_devices()


def test_opening_again_and_again_leaves_nothing_behind(provider: NvidiaProvider) -> None:
    """Unloading the library each time left an eventfd each time (driver 580.159.04)."""
    counts: list[int] = []
    for _ in range(5):
        provider.close()
        provider.open()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert len(set(counts)) == 1
