"""The processes that use an NVIDIA GPU, combined from the driver's lists.

The driver has three lists (graphics, compute, MPS clients) and, with MIG, entries for each instance. A process can be
in several. Here it is one process on one card: an MPS client if it is in that list, else a compute process if it is in
that one. Its memory is the sum over MIG instances of the largest value of the lists, and unknown if one part is
unknown.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from hegmd.node.devices.base import ProcessUse
from hegmd.node.devices.nvml import PROCESS_LISTS, ProcessEntries
from hegmd.node.devices.nvml_gpu import NvmlGpu
from hegmd.protocol.snapshots import GpuUse

_UNTOLD = 2**64 - 1
_WHOLE_CARD = (2**32 - 1, 2**32 - 1)
_ENTRY = {16: struct.Struct("=I4xQ"), 24: struct.Struct("=I4xQII"), 32: struct.Struct("=I4xQII8x")}

# A driver's entries of one process: bytes, or None, by MIG instance.
_Parts = dict[tuple[int, ...], "int | None"]


def read_entries(gpu: NvmlGpu, *, mig: bool | None) -> dict[str, ProcessEntries | None]:
    """Return each list; if the card has none, those of its MIG instances combined."""
    found = {kind: gpu.process_entries(kind) for kind in PROCESS_LISTS}
    if mig and found["compute"] is None and "processes" not in gpu.failures:
        instances = gpu.instances()  # without privileges, only these can be asked
        for kind in PROCESS_LISTS:
            told = [entries for entries in (one.process_entries(kind) for one in instances) if entries is not None]
            if told:
                entry_bytes = next((entries.entry_bytes for entries in told if entries.raw), told[0].entry_bytes)
                found[kind] = ProcessEntries(b"".join(entries.raw for entries in told), entry_bytes)
    return found


def merge(
    uuid: str, lists: Mapping[str, ProcessEntries | None], before: Iterable[ProcessUse] = ()
) -> tuple[ProcessUse, ...]:
    """Return one ProcessUse for each pid; an unchanged one is the object in `before`. `lists` is by PROCESS_LISTS."""
    kinds: dict[int, str] = {}
    parts: dict[int, _Parts] = {}
    for kind in PROCESS_LISTS:  # a later one says more than an earlier one
        for pid, used_bytes, instance in _entries(lists[kind]):
            kinds[pid] = kind
            of_pid = parts.setdefault(pid, {})
            of_pid[instance] = _larger(of_pid[instance], used_bytes) if instance in of_pid else used_bytes
    known = {use.pid: use for use in before}
    uses: list[ProcessUse] = []
    for pid in sorted(kinds):
        vram_bytes, kind, use = _sum(parts[pid]), kinds[pid], known.get(pid)
        if use is None or use.use.vram_bytes != vram_bytes or use.use.kind != kind:
            use = ProcessUse(pid, GpuUse(gpu=uuid, vram_bytes=vram_bytes, kind=kind))
        uses.append(use)
    return tuple(uses)


def _entries(entries: ProcessEntries | None) -> Iterator[tuple[int, int | None, tuple[int, ...]]]:
    if entries is None:
        return
    for pid, used_bytes, *instance in _ENTRY[entries.entry_bytes].iter_unpack(entries.raw):
        if pid:  # 0 means that the driver has no pid for it
            yield pid, None if used_bytes == _UNTOLD else used_bytes, tuple(instance) or _WHOLE_CARD


def _larger(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return one if other is None else other
    return max(one, other)


def _sum(parts: _Parts) -> int | None:
    total = 0
    for used_bytes in parts.values():
        if used_bytes is None:
            return None
        total += used_bytes
    return total
