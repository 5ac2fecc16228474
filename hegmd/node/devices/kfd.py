"""AMD GPUs from the kernel's files under /sys, for nodes without a usable AMD SMI.

Reads the files of amdgpu and of its compute part (KFD): GPUs, sensors, error counters, processes. AMD SMI reads most of
the same files. For processes these are the better source in any case: the kernel reports bytes for all pid namespaces
with a few reads, while the library searches all of /proc for each GPU. Writes, holds and keeps nothing.

A missing file is an unknown fact. The root is an argument, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hegmd.node.devices.amd_facts import PCI_VENDOR_ID, AmdFacts, AmdLink, BadPages, celsius, gfx_name, percent, watts
from hegmd.node.devices.base import ProcessUse
from hegmd.protocol.snapshots import GpuUse

# HSA_IOLINKTYPE_* of the kernel's topology.
_LINK_KINDS = {2: "pcie", 11: "xgmi"}
# HSA_MEM_HEAP_TYPE_FB_PUBLIC and _PRIVATE: the parts of video memory that the host can and cannot access.
_VIDEO_MEMORY = (1, 2)
_SENSORS = ("junction", "edge")
_NO_PROPERTIES: Mapping[str, int] = {}
_GONE = b"\xff\xff"


class KfdGpu(NamedTuple):
    """A GPU in the kernel's topology, with all that its `properties` say."""

    node: int
    gpu_id: int
    pci_address: str
    properties: Mapping[str, int]


class Kfd:
    """The kernel's files about AMD GPUs."""

    def __init__(self, sys_root: Path) -> None:
        self._sys = sys_root
        self._kfd = sys_root / "class" / "kfd" / "kfd"

    # ---- what is there ----------------------------------------------------------------------------------------------

    def driver_is_loaded(self) -> bool:
        return (self._sys / "module" / "amdgpu").is_dir()

    def is_there(self) -> bool:
        """Return True if the kernel has a topology to read at all."""
        return (self._kfd / "topology" / "nodes").is_dir()

    def cards(self) -> tuple[str, ...]:
        """Return the PCI addresses of all AMD GPUs on the bus, with any driver."""
        devices = self._sys / "bus" / "pci" / "devices"
        return tuple(
            name
            for name in _names(devices)
            if _number(devices / name / "vendor") == PCI_VENDOR_ID
            and (_number(devices / name / "class") or 0) >> 16 in (3, 18)
        )

    def driven_gpus(self) -> tuple[str, ...]:
        """Return the PCI addresses of the driver's GPUs; a different answer means that a GPU came or left."""
        return tuple(name for name in _names(self._sys / "bus" / "pci" / "drivers" / "amdgpu") if ":" in name)

    def is_lost(self, pci_address: str) -> bool:
        """Return True if the GPU left the bus: its files are gone, or its configuration space reads as all ones."""
        device = self._device(pci_address)
        if not device.is_dir():
            return True
        try:
            with (device / "config").open("rb") as config:
                return config.read(2) == _GONE
        except OSError:
            return False

    def driver_version(self) -> str:
        """The version of AMD's own driver package, or the kernel's, whose own driver has none besides."""
        return _text(self._sys / "module" / "amdgpu" / "version") or os.uname().release

    # ---- GPUs -------------------------------------------------------------------------------------------------------

    def gpus(self) -> tuple[KfdGpu, ...]:
        """The GPUs of the topology in the order of their PCI addresses, as AMD SMI counts them.

        A node whose files may not be read, as in a container that was given other GPUs only, is left out.
        """
        found: list[KfdGpu] = []
        nodes = self._kfd / "topology" / "nodes"
        for name in _names(nodes):
            properties = _properties(nodes / name / "properties")
            gpu_id = _number(nodes / name / "gpu_id")
            if name.isdigit() and gpu_id and properties.get("simd_count"):
                found.append(KfdGpu(int(name), gpu_id, _pci_address(properties), properties))
        return tuple(sorted(found, key=lambda gpu: gpu.pci_address))

    def properties_of(self, pci_address: str) -> Mapping[str, int]:
        """Return the properties of one GPU; empty if the topology does not have it."""
        return next((gpu.properties for gpu in self.gpus() if gpu.pci_address == pci_address), _NO_PROPERTIES)

    def facts(self, gpus: tuple[KfdGpu, ...]) -> list[AmdFacts]:
        """Return the facts that the files have of these GPUs."""
        address_of = {gpu.node: gpu.pci_address for gpu in gpus}
        return [self._facts(gpu, address_of) for gpu in gpus]

    def _facts(self, gpu: KfdGpu, address_of: Mapping[int, str]) -> AmdFacts:
        device = self._sys / "class" / "drm" / f"renderD{gpu.properties.get('drm_render_minor', 0)}" / "device"
        facts = AmdFacts(
            gpu.pci_address,
            unique_id=gpu.properties.get("unique_id"),
            device_id=gpu.properties.get("device_id"),
            gfx=gfx_name(gpu.properties.get("gfx_target_version", 0)),
            name=_text(device / "product_name"),
            numa_node=_not_negative(_number(self._device(gpu.pci_address) / "numa_node")),
            memory_total_bytes=_number(device / "mem_info_vram_total") or self._memory_bytes(gpu),
            memory_used_bytes=_number(device / "mem_info_vram_used"),
            utilisation_percent=percent(_number(device / "gpu_busy_percent")),
            links=self._links(gpu, address_of),
        )
        self._read_sensors(device, facts)
        self._read_errors(device / "ras", facts)
        if facts.memory_used_bytes is None:
            self._doubt(device / "mem_info_vram_used", facts)
        return facts

    def _doubt(self, used_memory: Path, facts: AmdFacts) -> None:
        """Record a problem if used memory cannot be read. Parts of a partitioned card have no such file."""
        if self.is_lost(facts.pci_address):
            facts.state = "lost"
        elif used_memory.exists():
            facts.state = "unknown"
            facts.failures["used memory"] = f"{used_memory} cannot be read"

    def _device(self, pci_address: str) -> Path:
        """The card's folder. Parts of a partitioned card differ from it in the function, which no device has."""
        devices = self._sys / "bus" / "pci" / "devices"
        own = devices / pci_address
        return own if own.is_dir() else devices / f"{pci_address[:-1]}0"

    def _memory_bytes(self, gpu: KfdGpu) -> int | None:
        """Return the video memory in the topology, the only source for a part of a partitioned card."""
        banks = self._kfd / "topology" / "nodes" / str(gpu.node) / "mem_banks"
        found = [_properties(banks / name / "properties") for name in _names(banks)]
        return sum(bank.get("size_in_bytes", 0) for bank in found if bank.get("heap_type") in _VIDEO_MEMORY) or None

    def _links(self, gpu: KfdGpu, address_of: Mapping[int, str]) -> tuple[AmdLink, ...]:
        links: dict[str, AmdLink] = {}
        for group in ("io_links", "p2p_links"):
            folder = self._kfd / "topology" / "nodes" / str(gpu.node) / group
            for name in _names(folder):
                properties = _properties(folder / name / "properties")
                kind = _LINK_KINDS.get(properties.get("type", 0))
                address = address_of.get(properties.get("node_to", -1))
                if kind is None or address is None or address == gpu.pci_address or address in links:
                    continue
                mb_per_s = properties.get("max_bandwidth", 0)
                links[address] = AmdLink(address, kind, bytes_per_s=mb_per_s * 1_000_000 or None)
        return tuple(links[address] for address in sorted(links))

    @staticmethod
    def _read_sensors(device: Path, facts: AmdFacts) -> None:
        """Read the hottest sensor if there is one, as amd-smi does; else the one at the edge."""
        for name in _names(device / "hwmon"):
            hwmon = device / "hwmon" / name
            labels = {_text(hwmon / each): each for each in _names(hwmon) if each.endswith("_label")}
            read = [
                _scaled(hwmon / labels[each].replace("_label", "_input"), 1000) for each in _SENSORS if each in labels
            ]
            facts.temperature_celsius = next((value for value in map(celsius, read) if value is not None), None)
            drawn = [_scaled(hwmon / name, 1_000_000) for name in ("power1_average", "power1_input")]
            facts.power_watts = next((value for value in map(watts, drawn) if value is not None), None)
            facts.power_limit_watts = watts(_scaled(hwmon / "power1_cap", 1_000_000))
            return

    @staticmethod
    def _read_errors(ras: Path, facts: AmdFacts) -> None:
        """Read the errors of the memory alone: for each block the driver asks the hardware again, which is slow."""
        counts = dict(line.split(":", 1) for line in (_text(ras / "umc_err_count") or "").splitlines() if ":" in line)
        facts.ecc_corrected = _not_negative(_decimal(counts.get("ce")))
        facts.ecc_uncorrected = _not_negative(_decimal(counts.get("ue")))
        facts.ecc_deferred = _not_negative(_decimal(counts.get("de")))
        if (ras / "gpu_vram_bad_pages").exists():
            flags = [line[-1:] for line in (_text(ras / "gpu_vram_bad_pages") or "").splitlines()]
            facts.bad_pages = BadPages(flags.count("R"), flags.count("P"), flags.count("F"))

    # ---- processes --------------------------------------------------------------------------------------------------

    def lists_processes(self) -> bool:
        """Return True if the kernel lists processes; it does since 5.9."""
        return (self._kfd / "proc").is_dir()

    def uses(self, uuid_of_gpu_id: Mapping[int, str]) -> tuple[ProcessUse, ...]:
        """Return which processes use these GPUs: those with memory or a queue there.

        A process that opened ROCm has a file for every GPU of the node, also unused ones. Each is read with three
        system calls; there are at most 512 such processes (KFD_MAX_NUM_OF_PROCESSES).
        """
        found: list[ProcessUse] = []
        files = [(gpu_id, f"vram_{gpu_id}", uuid) for gpu_id, uuid in uuid_of_gpu_id.items()]
        folder = f"{self._kfd}/proc"
        for name in _names(folder):
            if not name.isdigit():
                continue
            queues: set[int] | None = None
            for gpu_id, file, uuid in files:
                vram_bytes = _count(f"{folder}/{name}/{file}")
                if not vram_bytes:
                    queues = self._queues(f"{folder}/{name}/queues") if queues is None else queues
                    if gpu_id not in queues:
                        continue
                found.append(ProcessUse(int(name), GpuUse(gpu=uuid, vram_bytes=vram_bytes)))
        return tuple(found)

    @staticmethod
    def _queues(folder: str) -> set[int]:
        return {_count(f"{folder}/{name}/gpuid") or 0 for name in _names(folder)}


def _pci_address(properties: Mapping[str, int]) -> str:
    """Return the PCI address: 16 bits of bus, device and function, and the domain as a separate property."""
    location = properties.get("location_id", 0)
    domain = properties.get("domain", 0)
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _names(folder: Path | str) -> list[str]:
    """Return the names in the folder; names that are numbers in numerical order."""
    try:
        return sorted(os.listdir(folder), key=lambda name: (len(name), name) if name.isdigit() else (0, name))
    except OSError:
        return []


def _text(path: Path) -> str | None:
    """Return the content of the file without surrounding blanks; None if it is unreadable or empty."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _count(path: str) -> int | None:
    """Return the number in a file. Uses a descriptor: with thousands of files, pathlib would take most of the time."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return int(os.read(fd, 32))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def _decimal(text: str | None) -> int | None:
    try:
        return None if text is None else int(text, 0)
    except ValueError:
        return None


def _number(path: Path) -> int | None:
    return _decimal(_text(path))


def _scaled(path: Path, units_per_whole: int) -> float | None:
    value = _number(path)
    return None if value is None else value / units_per_whole


def _properties(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in (_text(path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _not_negative(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None
