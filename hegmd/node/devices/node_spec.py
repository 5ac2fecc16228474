"""A simulated node as plain values: its GPUs, their links, and scheduled faults.

Owns these values, their defaults and the notation of memory sizes. `topology` reads files, and `simulated` has the
changing state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from hegmd import __version__

MAX_GPUS = 256
VENDOR = "vendor"
GPU_FAULTS = ("lost", "error", "hang", "unknown-memory", "ecc", "xid", "xid79")
VENDOR_FAULTS = ("lost", "error", "hang")
LINK_KINDS = ("simulated", "nvlink", "xgmi", "pcie")
PLAYED = ("nvidia", "amd")
USE_KINDS = ("compute", "graphics", "mps")

UNITS_BYTES = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)},
}
_UNIT_NAMES = {name.lower(): name for name in UNITS_BYTES}
_SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]{1,3})")


class ProcessSpec(NamedTuple):
    """A process that is on the GPU from the start; its pid need not exist on this machine."""

    pid: int
    vram_bytes: int | None
    kind: str = "compute"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A simulated GPU."""

    memory_bytes: int
    uuid: str
    pci_address: str
    name: str = "Simulated GPU"
    chip: str = "simulated"
    plays: str | None = None
    numa_node: int | None = None
    mig: bool | None = None
    mps: bool | None = None
    persistence: bool | None = None
    utilisation_percent: int | None = None
    temperature_celsius: int | None = None
    power_watts: int | None = None
    power_limit_watts: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    retired_pages: int | None = None
    last_xid: int | None = None
    processes: tuple[ProcessSpec, ...] = ()


class LinkSpec(NamedTuple):
    """A link between two GPUs, by index; it goes both ways."""

    ends: tuple[int, int]
    kind: str = "simulated"
    lanes: int | None = None
    bytes_per_s: int | None = None


class FaultSpec(NamedTuple):
    """A scheduled fault: after this many good snapshots, for this many, or permanently."""

    target: str
    fault: str
    after_snapshots: int
    for_snapshots: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A whole simulated node."""

    gpus: tuple[GpuSpec, ...]
    links: tuple[LinkSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    driver_version: str | None = __version__
    library_version: str | None = __version__
    compute_version: str | None = None


def gpu_id(index: int) -> str:
    return f"gpu{index}"


def parse_size(text: str) -> int | None:
    """Return the bytes of `8GiB`, `80GB` or `1.5 TiB`; None if the text is not a size."""
    match = _SIZE.fullmatch(text.strip())
    unit = _UNIT_NAMES.get(match[2].lower()) if match else None
    if match is None or unit is None:
        return None
    return int(float(match[1]) * UNITS_BYTES[unit]) if "." in match[1] else int(match[1]) * UNITS_BYTES[unit]


def write_size(size_bytes: int) -> str:
    """Return an exact, readable size, so that a refusal over one byte makes sense."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % UNITS_BYTES[unit] == 0:
            return f"{size_bytes // UNITS_BYTES[unit]} {unit}"
    return f"{size_bytes} B"


def default_gpu(index: int, memory_bytes: int) -> GpuSpec:
    """Return the default GPU of that index, the same in every run."""
    return GpuSpec(
        memory_bytes=memory_bytes,
        uuid=f"SIM-00000000-0000-4000-8000-{index:012x}",
        pci_address=f"{index >> 5:04x}:{(index & 31) * 4 + 1:02x}:00.0",
    )


def full_mesh(count: int) -> tuple[LinkSpec, ...]:
    """Every GPU linked to every other one."""
    return tuple(LinkSpec((a, b)) for a in range(count) for b in range(a + 1, count))
