"""The GPUs that reach each other without host memory, and their links.

In order of preference: NVLinks that end at the other GPU; NVLinks of both that end elsewhere (at switches, also at ones
that a virtual machine does not show), if the driver reports that the two reach each other over NVLink; and PCIe, if it
allows reading and writing. The speed of PCIe depends on bridges that NVML does not describe, so it is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hegmd.node.devices.nvml_gpu import NvmlGpu
from hegmd.protocol.snapshots import PeerLink

_MAX_LINKS = 36
_READ, _WRITE, _OVER_NVLINK = 0, 1, 2

# The bandwidth of one link in one direction, from NVIDIA's data sheets, by NVML's number for the NVLink version.
_LINK_BYTES_PER_S = {
    1: 20_000_000_000,  # 1.0
    2: 25_000_000_000,  # 2.0
    3: 25_000_000_000,  # 2.2
    4: 25_000_000_000,  # 3.0
    5: 25_000_000_000,  # 3.1
    6: 25_000_000_000,  # 4.0
    7: 50_000_000_000,  # 5.0
}


@dataclass(slots=True, eq=False, repr=False)
class _LinkEnds:
    """The devices at the other ends of a GPU's active links."""

    at_gpus: Counter[str] = field(default_factory=Counter[str])  # by PCI address
    elsewhere: int = 0
    version: int | None = None


def read_links(gpus: Mapping[str, NvmlGpu], addresses: Mapping[str, str | None]) -> dict[str, tuple[PeerLink, ...]]:
    """Return the links from each GPU to the others, by UUID. Raises GpuLost if one falls off the bus meanwhile."""
    known = set(addresses.values())
    ends = {uuid: _ends_of(gpu, known) for uuid, gpu in gpus.items()}
    links: dict[str, tuple[PeerLink, ...]] = {}
    for uuid, gpu in gpus.items():
        ways = (
            _way(gpu, other, ends[uuid], ends[other_uuid], other_uuid, addresses[other_uuid])
            for other_uuid, other in gpus.items()
            if other_uuid != uuid
        )
        links[uuid] = tuple(way for way in ways if way is not None)
    return links


def _ends_of(gpu: NvmlGpu, known: set[str | None]) -> _LinkEnds:
    ends = _LinkEnds()
    for number in range(_MAX_LINKS):
        link = gpu.nvlink(number)
        if link is None:
            continue
        ends.version = link.version
        if link.remote_pci is not None and link.remote_pci in known:
            ends.at_gpus[link.remote_pci] += 1
        else:
            ends.elsewhere += 1
    return ends


def _way(
    gpu: NvmlGpu, other: NvmlGpu, ends: _LinkEnds, other_ends: _LinkEnds, other_uuid: str, other_address: str | None
) -> PeerLink | None:
    lanes = ends.at_gpus[other_address] if other_address is not None else 0
    if not lanes and gpu.reaches(other, _OVER_NVLINK):
        lanes = min(ends.elsewhere, other_ends.elsewhere)
        if not lanes:
            return PeerLink(to_uuid=other_uuid, kind="nvlink")  # the driver reports NVLink, but no link
    if lanes:
        speed = _LINK_BYTES_PER_S.get(ends.version or 0)
        carried = None if speed is None else speed * lanes
        return PeerLink(to_uuid=other_uuid, kind="nvlink", lanes=lanes, bytes_per_s=carried)
    if gpu.reaches(other, _READ) and gpu.reaches(other, _WRITE):
        return PeerLink(to_uuid=other_uuid, kind="pcie")
    return None
