"""The contract of every implementation of an interface, as plain functions for any test framework.

Owns the checks of `DeviceProvider`: the same for GPUs in memory, for a real binding over a stub library and for real
hardware, so that the first two can be trusted as far as the last one agrees with them. It must not import a test
framework, nor know any one provider. Run this first over a new provider for another vendor.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from typing import Any

from hegmd.node.devices.base import DeviceAbsent, DeviceError, DeviceProvider, ProcessUse, VendorSnapshot
from hegmd.protocol.record import BadValue, Record
from hegmd.protocol.snapshots import Gpu, GpuUse, Health, PeerLink

LINK_KINDS = frozenset({"nvlink", "xgmi", "pcie", "simulated"})
USE_KINDS = frozenset({"compute", "graphics", "mps"})
GPU_STATES = frozenset({"ok", "lost", "unknown"})
HEALTH_STATES = frozenset({"ok", "warn", "failed", "unknown"})
# The range for a card: wide, but narrow enough to find a unit that is wrong by a factor of 1,000.
MEMORY_BYTES = (1 << 20, 1 << 45)
SLOWEST_LINK_BYTES_PER_S = 50_000_000
MAX_BYTES_PER_S = 10**14
MAX_WATTS = 5000.0
CELSIUS = (-50.0, 150.0)
CYCLES = 4

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]")
# Words that libraries use for "unknown", which is None here.
_NOT_KNOWN = frozenset({"", "n/a", "na", "none", "null", "unknown", "not available", "[n/a]", "[unknown error]"})
_MEASURED = ("memory_used_bytes", "memory_free_bytes", "utilisation_percent", "temperature_celsius", "power_watts")
_COUNTERS = ("ecc_corrected", "ecc_uncorrected", "retired_pages", "last_xid", "xid_count")


class ContractBroken(AssertionError):
    """An implementation does not keep the contract; the message says in which point."""


def check_provider(make: Callable[[], DeviceProvider], *, expect_gpus: int | None = None) -> VendorSnapshot:
    """Check a provider against its contract, and return its last snapshot for further checks.

    `make` returns a new provider at each call; its library has to work. `expect_gpus` is the number of GPUs, if known.
    Raises ContractBroken, or the error that the provider raises against its contract. Processes may start and end
    meanwhile; GPUs must not.
    """
    provider = make()
    _must(_is_name(provider.vendor), f"vendor is a lower-case word, not {provider.vendor!r}")
    provider.close()
    _check_shut(provider, "before it was opened")
    provider.open()
    provider.open()
    first = provider.snapshot()
    check_snapshot(first, provider.vendor)
    if expect_gpus is not None:
        _must(len(first.gpus) == expect_gpus, f"it finds {len(first.gpus)} GPUs where there are {expect_gpus}")
    _check_stable(first, provider.snapshot(), "in the next snapshot")
    _check_stable(first, _in_another_thread(provider), "in a snapshot from another thread")
    provider.close()
    provider.close()
    _check_shut(provider, "after it was closed")
    _check_cycles(provider, first)
    other = make()
    other.open()
    last = other.snapshot()
    other.close()
    check_snapshot(last, provider.vendor)
    _check_stable(first, last, "in a second provider")
    return last


def check_absent(make: Callable[[], DeviceProvider]) -> DeviceAbsent:
    """Hold a provider to what it has to do where its library, driver or card is missing; returns what it raised."""
    provider = make()
    raised: list[DeviceAbsent] = []
    for _ in range(2):
        try:
            provider.open()
        except DeviceAbsent as absent:
            raised.append(absent)
        else:
            raise ContractBroken("it opens although there is nothing of this vendor here")
        provider.close()
    _check_shut(provider, "when there is nothing of its vendor")
    return raised[-1]


def check_snapshot(snapshot: VendorSnapshot, vendor: str) -> None:
    """Hold one snapshot, of any provider, to what every snapshot has to be. Raises ContractBroken."""
    _must(type(snapshot.gpus) is tuple and type(snapshot.uses) is tuple, "gpus and uses are tuples")
    for name in ("driver_version", "library_version", "compute_version"):
        _check_text(getattr(snapshot, name), name)
    uuids = [gpu.uuid for gpu in snapshot.gpus]
    _check_unique(uuids, "the UUID")
    _check_unique([gpu.index for gpu in snapshot.gpus], "the index")
    _check_unique([gpu.pci_address for gpu in snapshot.gpus if gpu.pci_address is not None], "the PCI address")
    for gpu in snapshot.gpus:
        _check_record(gpu, Gpu)
        _must(gpu.vendor == vendor, f"{gpu.uuid} is of the vendor {gpu.vendor}, and the provider of {vendor}")
        _check_identity(gpu)
        _check_state(gpu)
        _check_measures(gpu)
        _check_health(gpu)
        for link in gpu.links:
            _check_link(gpu, link, uuids)
        _check_unique([(link.to_uuid, link.kind) for link in gpu.links], f"{gpu.uuid}: the link")
    for use in snapshot.uses:
        _check_use(use, snapshot)
    _check_unique([(use.pid, use.use.gpu) for use in snapshot.uses], "the process and GPU")


def _must(holds: bool, sentence: str) -> None:
    if not holds:
        raise ContractBroken(sentence)


def _check_shut(provider: DeviceProvider, when: str) -> None:
    try:
        provider.snapshot()
    except DeviceError as error:
        _must(bool(error.message and error.hint), "a DeviceError has a message and a hint")
    else:
        raise ContractBroken(f"a snapshot {when} raises no DeviceError")


def _check_stable(before: VendorSnapshot, after: VendorSnapshot, where: str) -> None:
    """Check that the identity of a GPU does not change between two snapshots."""
    for name in ("uuid", "index", "id", "pci_address", "name", "chip", "numa_node", "memory_total_bytes"):
        was, now = [[getattr(gpu, name) for gpu in each.gpus] for each in (before, after)]
        _must(was == now, f"{name} is {now} {where} and was {was}")
    for name in ("driver_version", "library_version", "compute_version"):
        _must(getattr(before, name) == getattr(after, name), f"{name} is not the same {where}")


def _in_another_thread(provider: DeviceProvider) -> VendorSnapshot:
    got: list[VendorSnapshot | Exception] = []

    def look() -> None:
        try:
            got.append(provider.snapshot())
        except Exception as error:  # noqa: BLE001 - raised again below, in the thread of the caller
            got.append(error)

    thread = threading.Thread(target=look, name="contract")
    thread.start()
    thread.join()
    if isinstance(got[0], Exception):
        raise got[0]
    return got[0]


def _check_cycles(provider: DeviceProvider, first: VendorSnapshot) -> None:
    """Opening again works as opening did, and leaves no descriptor and no thread behind each time."""
    open_before = threads_before = 0
    for cycle in range(CYCLES):
        provider.open()
        _check_stable(first, provider.snapshot(), "after it was closed and opened again")
        provider.close()
        if cycle == 0:  # a library has created its permanent objects now
            open_before, threads_before = len(os.listdir("/proc/self/fd")), threading.active_count()
    left = len(os.listdir("/proc/self/fd")) - open_before
    _must(left < CYCLES - 1, f"{CYCLES - 1} times open and close left {left} descriptors behind")
    threads = threading.active_count() - threads_before
    _must(threads < CYCLES - 1, f"{CYCLES - 1} times open and close left {threads} threads behind")


def _check_record(record: Record, kind: type[Record]) -> None:
    """It is of the frozen type and survives the wire: right types, tuples, finite numbers, 64 bits."""
    _must(type(record) is kind, f"{record!r} is a {kind.__name__}")
    try:
        back = kind.from_plain(record.to_plain(), kind.__name__)
    except BadValue as bad:
        raise ContractBroken(f"{record!r} does not fit its own form: {bad.message}") from bad
    _must(back == record, f"{record!r} comes back from its plain form as {back!r}")


def _check_identity(gpu: Gpu) -> None:
    _must(_is_token(gpu.uuid), f"{gpu.uuid!r} is a UUID without blanks")
    _must(gpu.index >= 0 and gpu.id == str(gpu.index), f"{gpu.uuid}: id {gpu.id!r} is the index {gpu.index} as text")
    if gpu.pci_address is not None:
        fits = _PCI_ADDRESS.fullmatch(gpu.pci_address) is not None
        _must(fits, f"{gpu.uuid}: {gpu.pci_address!r} is a PCI address like 0000:01:00.0")
    for name in ("name", "chip", "driver_version"):
        _check_text(getattr(gpu, name), f"{gpu.uuid}: {name}")
    _must(gpu.numa_node is None or gpu.numa_node >= 0, f"{gpu.uuid}: NUMA node {gpu.numa_node} is not one")


def _check_state(gpu: Gpu) -> None:
    _must(gpu.state in GPU_STATES, f"{gpu.uuid}: state {gpu.state!r} is one of {sorted(GPU_STATES)}")
    if gpu.state == "ok":
        _must(gpu.name is not None, f"{gpu.uuid}: a GPU that answers tells its name")
        return
    for name in _MEASURED:
        _must(getattr(gpu, name) is None, f"{gpu.uuid} is {gpu.state}, and {name} is {getattr(gpu, name)} and not None")


def _check_measures(gpu: Gpu) -> None:
    total, used = gpu.memory_total_bytes, gpu.memory_used_bytes
    _check_range(total, *MEMORY_BYTES, f"{gpu.uuid}: memory_total_bytes")
    most = MEMORY_BYTES[1] if total is None else total
    _check_range(used, 0, most, f"{gpu.uuid}: memory_used_bytes")
    _check_range(gpu.memory_free_bytes, 0, most - (used or 0), f"{gpu.uuid}: memory_free_bytes")
    _check_range(gpu.utilisation_percent, 0.0, 100.0, f"{gpu.uuid}: utilisation_percent")
    _check_range(gpu.temperature_celsius, *CELSIUS, f"{gpu.uuid}: temperature_celsius")
    _check_range(gpu.power_watts, 0.0, MAX_WATTS, f"{gpu.uuid}: power_watts")
    _check_range(gpu.power_limit_watts, 1.0, MAX_WATTS, f"{gpu.uuid}: power_limit_watts")


def _check_health(gpu: Gpu) -> None:
    health = gpu.health
    _check_record(health, Health)
    _must(health.state in HEALTH_STATES, f"{gpu.uuid}: health {health.state!r} is one of {sorted(HEALTH_STATES)}")
    if health.state in {"warn", "failed"}:
        _must(bool(health.notes), f"{gpu.uuid}: health {health.state} comes with a note that says why")
    for note in health.notes:
        _check_text(note, f"{gpu.uuid}: a note")
    for name in _COUNTERS:
        _check_range(getattr(health, name), 0, 1 << 63, f"{gpu.uuid}: {name}")


def _check_link(gpu: Gpu, link: PeerLink, uuids: list[str]) -> None:
    _check_record(link, PeerLink)
    where = f"{gpu.uuid}: the link to {link.to_uuid}"
    _must(link.to_uuid in uuids and link.to_uuid != gpu.uuid, f"{where} leads to another GPU of the snapshot")
    _must(link.kind in LINK_KINDS, f"{where} is of the kind {link.kind!r}, not one of {sorted(LINK_KINDS)}")
    _check_range(link.lanes, 1, 1024, f"{where}: lanes")
    _check_range(link.bytes_per_s, SLOWEST_LINK_BYTES_PER_S, MAX_BYTES_PER_S, f"{where}: bytes_per_s")


def _check_use(use: ProcessUse, snapshot: VendorSnapshot) -> None:
    _must(type(use) is ProcessUse and type(use.pid) is int and use.pid > 0, f"{use!r} has a pid")
    _check_record(use.use, GpuUse)
    gpus = {gpu.uuid: gpu for gpu in snapshot.gpus}
    _must(use.use.gpu in gpus, f"pid {use.pid} uses {use.use.gpu!r}, which is not the UUID of a GPU in the snapshot")
    _must(use.use.kind in USE_KINDS, f"pid {use.pid}: kind {use.use.kind!r} is one of {sorted(USE_KINDS)}")
    total = gpus[use.use.gpu].memory_total_bytes
    _check_range(use.use.vram_bytes, 0, MEMORY_BYTES[1] if total is None else total, f"pid {use.pid}: vram_bytes")


def _check_range(value: float | None, low: float, high: float, what: str) -> None:
    _must(value is None or low <= value <= high, f"{what} is {value}, which is not from {low} to {high}")


def _check_text(value: str | None, what: str) -> None:
    if value is not None:
        _must(value.strip().lower() not in _NOT_KNOWN, f"{what} is {value!r}, and what is not known is None")
        _must(value == value.strip() and value.isprintable(), f"{what} is {value!r}, with blanks or control characters")


def _check_unique(values: list[Any], what: str) -> None:
    observed: set[Any] = set()
    for value in values:
        _must(value not in observed, f"{what} {value} is there more than once")
        observed.add(value)


def _is_token(text: str) -> bool:
    return bool(text) and text.isprintable() and not re.search(r"\s", text) and text.lower() not in _NOT_KNOWN


def _is_name(text: str) -> bool:
    return re.fullmatch(r"[a-z][a-z0-9_]*", text) is not None
