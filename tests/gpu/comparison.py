"""hegmd's records beside what nvidia-smi shows, field by field.

A Row is one line of the comparison. What cannot change between the two looks has to be the same to the digit; what can
(temperature, power, utilisation) may differ by what a second does to an idle GPU. Unknown is equal to unknown only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hegmd.protocol.snapshots import Gpu
from tests.gpu import nvidia_smi

MIB = 1 << 20
Plain = float | int | str | bool | None


@dataclass(frozen=True)
class Row:
    """One value that both report. `equal` is None if the two may differ and a person has to judge."""

    what: str
    ours: Plain
    theirs: Plain
    equal: bool | None


@dataclass(frozen=True)
class Field:
    """A field of nvidia-smi, what it is in our record, and how far apart the two may be."""

    query: str
    ours: Callable[[Gpu], Plain]
    read: Callable[[str], Plain]
    apart: float = 0.0
    apart_share: float = 0.0


def _address(text: str) -> str:
    domain, rest = text.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def _mib(value: int | None) -> Plain:
    return None if value is None else value // MIB


def _capability(gpu: Gpu) -> Plain:
    found = re.search(r"-sm(\d+)(\d)$", gpu.chip or "")
    return found and f"{found[1]}.{found[2]}"


def _device_id(gpu: Gpu) -> Plain:
    return None if gpu.chip is None else gpu.chip.split("-")[1]


FIELDS = (
    Field("index", lambda gpu: gpu.index, int),
    Field("pci.bus_id", lambda gpu: gpu.pci_address, _address),
    Field("name", lambda gpu: gpu.name, str),
    Field("pci.device_id", _device_id, lambda text: text[2:6].lower()),
    Field("compute_cap", _capability, str),
    Field("driver_version", lambda gpu: gpu.driver_version, str),
    Field("memory.total", lambda gpu: _mib(gpu.memory_total_bytes), int),
    Field("memory.used", lambda gpu: _mib(gpu.memory_used_bytes), int, apart=1),
    Field("memory.free", lambda gpu: _mib(gpu.memory_free_bytes), int, apart=1),
    Field("utilization.gpu", lambda gpu: gpu.utilisation_percent, float, apart=10),
    Field("temperature.gpu", lambda gpu: gpu.temperature_celsius, float, apart=3),
    Field("power.draw", lambda gpu: gpu.power_watts, float, apart=15, apart_share=0.15),
    Field("enforced.power.limit", lambda gpu: gpu.power_limit_watts, float, apart=0.01),
    Field("mig.mode.current", lambda gpu: gpu.mig, lambda text: text == "Enabled"),
    Field("persistence_mode", lambda gpu: gpu.persistence, lambda text: text == "Enabled"),
    Field("ecc.errors.corrected.volatile.total", lambda gpu: gpu.health.ecc_corrected, int),
    Field("ecc.errors.uncorrected.volatile.total", lambda gpu: gpu.health.ecc_uncorrected, int),
)


def compare_gpus(gpus: Iterable[Gpu]) -> list[Row]:
    """Every field of every GPU that either of the two knows."""
    theirs = {row["uuid"]: row for row in nvidia_smi.query("gpu", ["uuid", *(field.query for field in FIELDS)])}
    ours = {gpu.uuid: gpu for gpu in gpus}
    rows: list[Row] = []
    for uuid in sorted({*ours, *map(str, theirs)}):
        here, there = (uuid if uuid in found else "not listed" for found in (ours, theirs))
        rows.append(Row("UUID", here, there, here == there))
    for uuid, gpu in ours.items():
        for field in FIELDS if uuid in theirs else ():
            text = theirs[uuid][field.query]
            value = None if text is None else field.read(text)
            rows.append(Row(f"GPU {gpu.index} {field.query}", field.ours(gpu), value, _near(field, gpu, value)))
    return rows


def _near(field: Field, gpu: Gpu, value: Plain) -> bool:
    mine = field.ours(gpu)
    if isinstance(mine, int | float) and isinstance(value, int | float):
        return abs(mine - value) <= max(field.apart, field.apart_share * abs(value))
    return mine == value


def compare_rows(gpus: Iterable[Gpu]) -> list[Row]:
    """Remapped memory rows, which chips before Ampere don't have."""
    fields = ["gpu_uuid", "remapped_rows.correctable", "remapped_rows.uncorrectable"]
    theirs = {row["gpu_uuid"]: row for row in nvidia_smi.query("remapped-rows", fields)}
    rows: list[Row] = []
    for gpu in gpus:
        row = theirs.get(gpu.uuid)
        if row is not None and row[fields[1]] is not None:
            value = int(row[fields[1]] or 0) + int(row[fields[2]] or 0)
            rows.append(
                Row(
                    f"GPU {gpu.index} remapped rows", gpu.health.retired_pages, value, gpu.health.retired_pages == value
                )
            )
    return rows


def compare_topology(gpus: Iterable[Gpu]) -> list[Row]:
    """Links and NUMA nodes against `nvidia-smi topo -m`."""
    pairs, affinity = nvidia_smi.topology()
    found = {gpu.index: gpu for gpu in gpus}
    rows: list[Row] = []
    for (a, b), connection in sorted(pairs.items()):
        if a not in found or b not in found:
            continue
        link = next((link for link in found[a].links if link.to_uuid == found[b].uuid), None)
        mine = None if link is None else f"NV{link.lanes}" if link.kind == "nvlink" else link.kind
        over_nvlink = connection.startswith("NV")
        # For PCIe the two speak of different things: of the path, and of whether the driver lets peers use it.
        equal = mine == connection if over_nvlink else (None if link is None or link.kind == "pcie" else False)
        rows.append(Row(f"GPU {a} to GPU {b}", mine, connection, equal))
    for index, expected in affinity.items():
        node = found[index].numa_node if index in found else None
        rows.append(Row(f"GPU {index} NUMA node", node, expected, True if str(node) == expected else None))
    return rows


def compare_processes(ours: Mapping[tuple[int, str], int | None]) -> list[Row]:
    """VRAM by pid and UUID against nvidia-smi's compute processes."""
    theirs = nvidia_smi.compute_apps()
    rows: list[Row] = []
    for key in sorted({*ours, *theirs}):
        mine = _mib(ours[key]) if key in ours else "not listed"
        value: Plain = theirs.get(key) if key in theirs else "not listed"
        near = isinstance(mine, int) and isinstance(value, int) and abs(mine - value) <= 1
        rows.append(Row(f"pid {key[0]} on {key[1]}, MiB", mine, value, near or (mine is None and value is None)))
    return rows


def table(rows: Iterable[Row]) -> str:
    """The rows as text, aligned."""
    cells = [["field", "hegmd", "nvidia-smi", "equal"]]
    for row in rows:
        figure = ["unknown" if value is None else str(value) for value in (row.ours, row.theirs)]
        cells.append([row.what, *figure, {True: "yes", False: "NO", None: "look"}[row.equal]])
    widths = [max(len(line[column]) for line in cells) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )
