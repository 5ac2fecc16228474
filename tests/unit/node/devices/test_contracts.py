"""The contract of the providers can be broken, and then says where: a check that passes everything checks nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hegmd.node.devices.base import DeviceAbsent, DeviceError, ProcessUse, VendorSnapshot
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.protocol.snapshots import GpuUse, Health, PeerLink
from tests.cells import in_one_test
from tests.kit.contracts import ContractBroken, check_absent, check_provider, check_snapshot

UUID = "SIM-00000000-0000-4000-8000-000000000000"


def good_snapshot() -> VendorSnapshot:
    provider = SimulatedProvider(parse_topology("2x8GiB"))
    provider.open()
    provider.hold("c", 71, "gpu0", 1 << 30)
    return provider.snapshot()


def with_gpu(**changes: Any) -> VendorSnapshot:
    snapshot = good_snapshot()
    return snapshot._replace(gpus=(snapshot.gpus[0].replace(**changes), snapshot.gpus[1]))


def with_link(**changes: Any) -> VendorSnapshot:
    link = good_snapshot().gpus[0].links[0]
    return with_gpu(links=(link.replace(**changes),))


def with_use(pid: int = 71, **changes: Any) -> VendorSnapshot:
    use = GpuUse(gpu=UUID, vram_bytes=5, kind="compute").replace(**changes)
    return good_snapshot()._replace(uses=(ProcessUse(pid, use),))


def test_a_good_snapshot_passes() -> None:
    check_snapshot(good_snapshot(), "simulated")
    check_snapshot(with_use(), "simulated")
    check_snapshot(with_use(vram_bytes=None), "simulated")
    check_snapshot(with_gpu(state="lost", memory_used_bytes=None, memory_free_bytes=None, name=None), "simulated")
    check_snapshot(with_gpu(memory_free_bytes=(7 << 30) - 606), "simulated")  # nor is the driver's reserve


@in_one_test(
    ("snapshot", "message"),
    [
        (with_gpu(memory_used_bytes=9 << 30), "memory_used_bytes"),
        (with_gpu(memory_used_bytes=-1), "memory_used_bytes"),
        (with_gpu(memory_free_bytes=-1), "memory_free_bytes"),
        (with_gpu(memory_free_bytes=(7 << 30) + 1), "memory_free_bytes"),
        (with_gpu(memory_total_bytes=8192), "memory_total_bytes"),
        (with_gpu(memory_total_bytes=0, memory_used_bytes=0), "memory_total_bytes"),
        (with_gpu(memory_total_bytes=8.0e9), "memory_total_bytes"),
        (with_gpu(utilisation_percent=65535.0), "utilisation_percent"),
        (with_gpu(temperature_celsius=45000.0), "temperature_celsius"),
        (with_gpu(power_watts=120000.0), "power_watts"),
        (with_gpu(power_limit_watts=0.0), "power_limit_watts"),
        (with_gpu(numa_node=-1), "NUMA node -1"),
        (with_gpu(uuid="N/A"), "'N/A' is a UUID"),
        (with_gpu(uuid=good_snapshot().gpus[1].uuid), "the UUID"),
        (with_gpu(index=1, id="1"), "the index"),
        (with_gpu(id="gpu0"), "id 'gpu0'"),
        (with_gpu(pci_address="00000000:01:00.0 "), "PCI address"),
        (with_gpu(pci_address="0000:1B:00.0"), "PCI address"),
        (with_gpu(pci_address="0000:05:00.0"), "the PCI address"),
        (with_gpu(name="N/A"), "what is not known is None"),
        (with_gpu(name="A100 "), "with blanks"),
        (with_gpu(name=None), "tells its name"),
        (with_gpu(driver_version=""), "what is not known is None"),
        (with_gpu(vendor="nvidia"), "of the vendor nvidia"),
        (with_gpu(state="gone"), "state 'gone'"),
        (with_gpu(state="lost"), "memory_used_bytes"),
        (with_gpu(state="lost", memory_used_bytes=None), "memory_free_bytes"),
        (with_gpu(health=Health(state="fine")), "health 'fine'"),
        (with_gpu(health=Health(state="warn")), "says why"),
        (with_gpu(health=Health(state="ok", ecc_corrected=-1)), "ecc_corrected"),
        (with_gpu(health=Health(state="ok", notes=["a list"])), "comes back"),  # type: ignore[arg-type] # on purpose
        (with_gpu(links=list(good_snapshot().gpus[0].links)), "comes back"),
        (with_link(to_uuid=UUID), "another GPU"),
        (with_link(to_uuid="SIM-elsewhere"), "another GPU"),
        (with_link(kind="string"), "kind 'string'"),
        (with_link(lanes=0), "lanes"),
        (with_link(bytes_per_s=450), "bytes_per_s"),
        (with_gpu(links=good_snapshot().gpus[0].links * 2), "the link"),
        (with_use(pid=0), "has a pid"),
        (with_use(gpu="gpu0"), "not the UUID"),
        (with_use(kind="c"), "kind 'c'"),
        (with_use(vram_bytes=2**64 - 1), "vram_bytes"),
        (good_snapshot()._replace(uses=good_snapshot().uses * 2), "the process and GPU"),
        (good_snapshot()._replace(library_version="unknown"), "library_version"),
        (good_snapshot()._replace(gpus=list(good_snapshot().gpus)), "tuples"),  # type: ignore[arg-type] # on purpose
    ],
)
def test_a_snapshot_that_breaks_the_contract_is_found(snapshot: VendorSnapshot, message: str) -> None:
    with pytest.raises(ContractBroken) as caught:
        check_snapshot(snapshot, "simulated")
    assert message in str(caught.value)


def test_a_link_of_a_wrong_type_is_found() -> None:
    with pytest.raises(ContractBroken):
        check_snapshot(with_gpu(links=(Health(state="ok"),)), "simulated")
    link = PeerLink(to_uuid=good_snapshot().gpus[1].uuid, kind="pcie")
    check_snapshot(with_gpu(links=(link,)), "simulated")


class Broken:
    """A provider that keeps the contract except for one point, which `break_` violates."""

    vendor = "simulated"

    def __init__(self, break_: Callable[[Broken], None]) -> None:
        self.inner = SimulatedProvider(parse_topology("2x8GiB"))
        self.on_open: Callable[[], object] = self.inner.open
        self.on_close: Callable[[], object] = self.inner.close
        self.on_snapshot: Callable[[], VendorSnapshot] = self.inner.snapshot
        break_(self)

    def open(self) -> None:
        self.on_open()

    def close(self) -> None:
        self.on_close()

    def snapshot(self) -> VendorSnapshot:
        return self.on_snapshot()


def never_shuts(provider: Broken) -> None:
    provider.on_close = lambda: None
    provider.inner.open()


def shuts_with_another_error(provider: Broken) -> None:
    def snapshot() -> VendorSnapshot:
        try:
            return provider.inner.snapshot()
        except DeviceError:
            raise KeyError("handle") from None

    provider.on_snapshot = snapshot


def opens_once(provider: Broken) -> None:
    closed: list[None] = []
    provider.on_close = lambda: (closed.append(None), provider.inner.close())

    def open_() -> None:
        if len(closed) > 2:
            raise DeviceError("it is not initialised any more", "start the daemon again")
        provider.inner.open()

    provider.on_open = open_


def changes_its_mind(provider: Broken) -> None:
    calls: list[None] = []

    def snapshot() -> VendorSnapshot:
        snapshot = provider.inner.snapshot()
        calls.append(None)
        first = snapshot.gpus[0].replace(uuid=f"SIM-{len(calls)}")
        return snapshot._replace(gpus=(first, snapshot.gpus[1].replace(links=())))

    provider.on_snapshot = snapshot


def belongs_to_a_thread(provider: Broken) -> None:
    opener: list[int] = []
    provider.on_open = lambda: (opener.append(threading.get_ident()), provider.inner.open())

    def snapshot() -> VendorSnapshot:
        if opener and threading.get_ident() != opener[0]:
            raise DeviceError("no context in this thread", "open it in this thread")
        return provider.inner.snapshot()

    provider.on_snapshot = snapshot


@in_one_test(
    ("break_", "error", "message"),
    [
        (never_shuts, ContractBroken, "before it was opened"),
        (shuts_with_another_error, KeyError, "handle"),
        (opens_once, DeviceError, "not initialised"),
        (changes_its_mind, ContractBroken, "uuid is"),
        (belongs_to_a_thread, DeviceError, "no context"),
    ],
)
def test_a_life_cycle_that_breaks_the_contract_is_found(
    break_: Callable[[Broken], None], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_provider(lambda: Broken(break_))


@pytest.mark.leaks_allowed("it leaks on purpose, and closes what it opened at the end")
def test_a_descriptor_that_each_opening_leaves_behind_is_found(tmp_path: Path) -> None:
    (tmp_path / "device").touch()
    leaked: list[Any] = []

    def leaks(provider: Broken) -> None:
        provider.on_open = lambda: (leaked.append((tmp_path / "device").open()), provider.inner.open())

    try:
        with pytest.raises(ContractBroken, match="descriptors behind"):
            check_provider(lambda: Broken(leaks))
    finally:
        for file in leaked:
            file.close()


def test_a_thread_that_each_opening_leaves_behind_is_found() -> None:
    over = threading.Event()
    threads: list[threading.Thread] = []

    def open_() -> None:
        threads.append(threading.Thread(target=over.wait))
        threads[-1].start()

    def leaks(provider: Broken) -> None:
        provider.on_open = lambda: (open_(), provider.inner.open())

    try:
        with pytest.raises(ContractBroken, match="threads behind"):
            check_provider(lambda: Broken(leaks))
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_the_wrong_number_of_gpus_is_found() -> None:
    with pytest.raises(ContractBroken, match="2 GPUs where there are 8"):
        check_provider(lambda: SimulatedProvider(parse_topology("2x8GiB")), expect_gpus=8)


def test_absence_has_a_contract_too() -> None:
    def absent(provider: Broken) -> None:
        def open_() -> None:
            raise DeviceAbsent("there is no library", "install it")

        provider.on_open = open_

    assert check_absent(lambda: Broken(absent)).hint == "install it"
    with pytest.raises(ContractBroken, match="it opens although"):
        check_absent(lambda: SimulatedProvider(parse_topology("2x8GiB")))
