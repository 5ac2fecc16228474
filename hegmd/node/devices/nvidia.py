"""NVIDIA GPUs through NVML, as a provider of the inventory.

Interprets NVML's answers: whether an error concerns one GPU or the whole library, what the operator can do, and that a
process in three lists is one process. Each snapshot reads the number and state of the GPUs again. Between snapshots
only these are kept: the fixed facts of an open library (name, chip, links), each GPU's XID events since the daemon
watches, and its processes, so that a GPU that fell off the bus keeps its name.

`memory_used_bytes` and `memory_free_bytes` are those of nvidia-smi: neither includes the driver's own reserve of some
hundred MiB.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from hegmd.node.devices.base import DeviceAbsent, DeviceError, ProcessUse, VendorSnapshot
from hegmd.node.devices.nvidia_health import ErrorHistory, HealthFacts, judge, without_answer
from hegmd.node.devices.nvidia_host import NvidiaHost
from hegmd.node.devices.nvidia_links import read_links
from hegmd.node.devices.nvidia_processes import merge, read_entries
from hegmd.node.devices.nvml import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    GpuFailed,
    GpuLost,
    LibraryFailed,
    LibraryMissing,
    Nvml,
    ProcessEntries,
    handle_key,
)
from hegmd.node.devices.nvml_gpu import NvmlGpu
from hegmd.node.devices.shared_library import SharedLibrary, return_free_memory
from hegmd.protocol.snapshots import Gpu, Health, PeerLink

VENDOR = "nvidia"
LIBRARY = "libnvidia-ml.so.1"

_ARCHITECTURES = {
    2: "kepler",
    3: "maxwell",
    4: "pascal",
    5: "volta",
    6: "turing",
    7: "ampere",
    8: "ada",
    9: "hopper",
    10: "blackwell",
    13: "rubin",
}


class _GpuProperties(NamedTuple):
    """The properties of a GPU that do not change while the library is open."""

    uuid: str
    pci_address: str | None = None
    name: str | None = None
    chip: str | None = None
    numa_node: int | None = None


@dataclass(slots=True, eq=False, repr=False)
class _Reading:
    """The readings of one GPU in one snapshot."""

    gpu: Gpu
    asked: NvmlGpu
    uses: tuple[ProcessUse, ...]


class NvidiaProvider:
    """The provider. `library` is a name for the dynamic loader, or a path."""

    vendor = VENDOR

    def __init__(
        self, library: str = LIBRARY, host: NvidiaHost | None = None, clock_utc: Callable[[], float] = time.time
    ) -> None:
        self._library = SharedLibrary(library)
        self._host = host or NvidiaHost()
        self._clock_utc = clock_utc
        self._inside = threading.Lock()
        self._histories: dict[str, ErrorHistory] = {}
        self._last_at: dict[int, _GpuProperties] = {}
        self._nvml: Nvml | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop everything that belongs to an opened library."""
        self._versions: tuple[str | None, str | None, str | None] = (None, None, None)
        self._driven: tuple[str, ...] = ()
        self._cards: dict[str, _GpuProperties] = {}
        self._watched: dict[int, str] = {}
        self._links: dict[str, tuple[PeerLink, ...]] = {}
        self._linked: frozenset[tuple[str, bool | None]] | None = None
        self._listed: dict[str, tuple[dict[str, ProcessEntries | None], tuple[ProcessUse, ...]]] = {}

    # ---- the contract ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        with self._alone():
            self._open()

    def snapshot(self) -> VendorSnapshot:
        with self._alone():
            if self._nvml is None:
                raise DeviceError("the NVIDIA library is not open", "wait: hegmd opens it again")
            if self._host.driven_gpus() != self._driven:
                self._close()
                self._open()  # NVML knows only the GPUs that were there when it was initialised
            try:
                return self._read(self._nvml)
            except LibraryFailed as failure:
                raise self._refusal(failure) from None

    def close(self) -> None:
        """Close the library. Does nothing while a call hangs in it: unloading code that runs would end the daemon."""
        if self._inside.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._inside.release()

    @contextmanager
    def _alone(self) -> Generator[None]:
        if not self._inside.acquire(blocking=False):
            raise DeviceError(
                "an earlier call of the NVIDIA library has not returned",
                "check whether nvidia-smi hangs too, and read the kernel log: dmesg | grep -i nvrm",
            )
        try:
            yield
        finally:
            self._inside.release()

    def _open(self) -> None:
        if self._nvml is not None:
            return
        self._driven = self._host.driven_gpus()
        try:
            self._nvml = Nvml(self._library)
            self._versions = self._nvml.versions()
            count = self._nvml.device_count()
        except LibraryMissing:
            raise self._missing() from None
        except LibraryFailed as failure:
            self._close()
            raise self._refusal(failure) from None
        if not count:
            self._close()
            raise DeviceAbsent("the NVIDIA driver has no GPU", "check the PCI bus: lspci -d 10de:")
        return_free_memory()

    def _close(self) -> None:
        nvml, self._nvml = self._nvml, None
        self._forget()
        if nvml is not None:
            nvml.close()

    # ---- what a failure of the whole library means -------------------------------------------------------------------

    def _missing(self) -> DeviceAbsent:
        cards = self._host.cards()
        if not cards:
            return DeviceAbsent(
                "this node has no NVIDIA GPU and no NVIDIA driver",
                "check the PCI bus if a GPU should be here: lspci -d 10de:",
            )
        return DeviceAbsent(
            f"there are NVIDIA GPUs on the PCI bus ({', '.join(cards)}) but no {self._library.name}",
            "install the driver's libraries (on Debian and Ubuntu libnvidia-ml1, of the driver's version); "
            "in a container, have them mounted by the NVIDIA container toolkit",
        )

    def _refusal(self, failure: LibraryFailed) -> DeviceError:
        if failure.code == DRIVER_NOT_LOADED:
            if not self._host.cards():
                return DeviceAbsent(
                    "this node has no NVIDIA GPU", "check the PCI bus if a GPU should be here: lspci -d 10de:"
                )
            return DeviceError(
                "the NVIDIA kernel driver is not loaded",
                "sudo modprobe nvidia; if that fails: sudo dmesg | grep -i nvrm",
            )
        if failure.code == LIB_RM_VERSION_MISMATCH:
            module = self._host.module_version() or "another version"
            return DeviceError(
                f"{self._library.name} does not match the version of the loaded kernel driver ({module}): "
                "the driver's package was replaced while the old driver stayed loaded",
                "reboot, or with all GPU programs stopped: "
                "sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
            )
        return DeviceError(
            f"the NVIDIA library does not work ({failure})",
            "compare with nvidia-smi, and read the kernel log: sudo dmesg | grep -i nvrm",
        )

    # ---- a snapshot --------------------------------------------------------------------------------------------------

    def _read(self, nvml: Nvml) -> VendorSnapshot:
        self._read_events(nvml)
        readings: list[_Reading] = []
        silent: list[tuple[int, str, str]] = []
        for index in range(nvml.device_count()):
            try:
                readings.append(self._read_gpu(nvml, index))
            except GpuLost as failure:
                silent.append((index, "lost", str(failure)))
            except GpuFailed as failure:
                silent.append((index, "unknown", str(failure)))
        asked = {reading.gpu.uuid: reading.asked for reading in readings}
        self._watch(nvml, asked)
        self._link(asked, {reading.gpu.uuid: reading.gpu for reading in readings})
        gpus = [reading.gpu.replace(links=self._links.get(reading.gpu.uuid, ())) for reading in readings]
        gpus += self._without_answer(silent, {gpu.uuid for gpu in gpus})
        return VendorSnapshot(
            gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
            uses=tuple(use for reading in readings for use in reading.uses),
            driver_version=self._versions[0],
            library_version=self._versions[1],
            compute_version=self._versions[2],
        )

    def _read_gpu(self, nvml: Nvml, index: int) -> _Reading:
        """Read one GPU. Raises GpuLost or GpuFailed if identity or memory is unreadable: then nothing is reliable."""
        asked = NvmlGpu(nvml, nvml.handle(index))
        uuid = asked.uuid()
        if uuid is None:
            raise GpuFailed(asked.failures.get("UUID", "it has no UUID"))
        card = self._cards.get(uuid)
        if card is None:
            card = self._meet(asked, uuid)
            if not asked.failures:  # values that the driver failed to report are read again next time
                self._cards[uuid] = card
        self._last_at[index] = card
        memory = asked.memory()
        if "memory" in asked.failures:
            raise GpuFailed(asked.failures["memory"])
        mig = asked.mig()
        lists = read_entries(asked, mig=mig)
        gpu = Gpu(
            id=str(index),
            index=index,
            uuid=uuid,
            pci_address=card.pci_address,
            name=card.name,
            vendor=VENDOR,
            chip=card.chip,
            memory_total_bytes=None if memory is None else memory.total_bytes,
            memory_used_bytes=None if memory is None else memory.used_bytes,
            memory_free_bytes=None if memory is None else memory.free_bytes,
            utilisation_percent=asked.utilisation_percent(),
            temperature_celsius=asked.temperature_celsius(),
            power_watts=asked.power_watts(),
            power_limit_watts=asked.power_limit_watts(),
            numa_node=card.numa_node,
            mig=mig,
            mps=None if (clients := lists["mps"]) is None else bool(clients.raw),
            persistence=asked.persistence(),
            driver_version=self._versions[0],
            health=self._health(asked, index, uuid, processes_untold=lists["compute"] is None),
        )
        return _Reading(gpu, asked, self._uses(uuid, lists))

    def _meet(self, gpu: NvmlGpu, uuid: str) -> _GpuProperties:
        pci = gpu.pci()
        architecture = gpu.architecture()
        capability = gpu.compute_capability()
        chip = None  # two unknown chips must not compare as equal
        if pci is not None and architecture is not None and capability is not None:
            generation = _ARCHITECTURES.get(architecture, f"architecture{architecture}")
            chip = f"nvidia-{pci[1]:04x}-{generation}-sm{capability[0]}{capability[1]}"
        numa_node = None if pci is None else self._host.numa_node(pci[0])
        if numa_node is None:
            nearest = gpu.nearest_numa_nodes()
            numa_node = nearest[0] if len(nearest) == 1 else None
        return _GpuProperties(uuid, None if pci is None else pci[0], gpu.name(), chip, numa_node)

    def _health(self, gpu: NvmlGpu, index: int, uuid: str, *, processes_untold: bool) -> Health:
        corrected, uncorrected = gpu.ecc_errors(corrected=True), gpu.ecc_errors(corrected=False)
        history = self._history_of(uuid)
        facts = HealthFacts(
            index=index,
            ecc_corrected=corrected,
            risen_corrected=history.answers(corrected, uncorrected, self._clock_utc()),
            ecc_uncorrected=uncorrected,
            retired_pages=gpu.retired_pages(),
            retired_pending=gpu.retired_pending(),
            rows=gpu.remapped_rows(),
            recovery_action=gpu.recovery_action(),
            clocks_event_reasons=gpu.clocks_event_reasons(),
            fabric=gpu.fabric(),
            failures=gpu.failures,
            processes_untold=processes_untold,
        )
        return judge(facts, history)

    def _without_answer(self, silent: list[tuple[int, str, str]], present: set[str]) -> list[Gpu]:
        gpus: list[Gpu] = []
        for index, state, words in silent:
            card = self._last_at.get(index)
            if card is None or card.uuid in present:
                card = _GpuProperties(f"GPU-unknown-at-index-{index}")  # it never reported its UUID
            present.add(card.uuid)
            history = self._history_of(card.uuid)
            history.is_lost = history.is_lost or state == "lost"
            gpus.append(
                Gpu(
                    id=str(index),
                    index=index,
                    uuid=card.uuid,
                    pci_address=card.pci_address,
                    name=card.name,
                    vendor=VENDOR,
                    chip=card.chip,
                    state=state,
                    numa_node=card.numa_node,
                    driver_version=self._versions[0],
                    health=without_answer(state, words, history),
                )
            )
        return gpus

    # ---- XID events and links ----------------------------------------------------------------------------------------

    def _history_of(self, uuid: str) -> ErrorHistory:
        return self._histories.setdefault(uuid, ErrorHistory())

    def _read_events(self, nvml: Nvml) -> None:
        try:
            for key, number in nvml.xids():
                uuid = self._watched.get(key)
                if uuid is not None:
                    self._history_of(uuid).add(number, self._clock_utc())
                    self._linked = None  # it may have been a link
        except GpuLost:
            self._watched = {}  # watch the remaining GPUs

    def _watch(self, nvml: Nvml, asked: dict[str, NvmlGpu]) -> None:
        wanted = {handle_key(gpu.handle): uuid for uuid, gpu in asked.items()}
        if wanted != self._watched:
            nvml.watch([gpu.handle for gpu in asked.values()])
            self._watched = wanted

    def _link(self, asked: dict[str, NvmlGpu], gpus: dict[str, Gpu]) -> None:
        present = frozenset((uuid, gpu.mig) for uuid, gpu in gpus.items())  # MIG takes a card's links away
        if present == self._linked:
            return
        try:
            self._links = read_links(asked, {uuid: gpu.pci_address for uuid, gpu in gpus.items()})
        except GpuLost:
            self._linked = None  # the next snapshot marks it lost, and updates the links of the others
        else:
            self._linked = present

    # ---- processes ---------------------------------------------------------------------------------------------------

    def _uses(self, uuid: str, lists: dict[str, ProcessEntries | None]) -> tuple[ProcessUse, ...]:
        """Return the processes on one card. Unchanged ones are the same objects as before."""
        lists_before, uses_before = self._listed.get(uuid, (None, ()))
        if lists == lists_before:
            return uses_before
        uses = merge(uuid, lists, uses_before)
        self._listed[uuid] = (lists, uses)
        return uses
