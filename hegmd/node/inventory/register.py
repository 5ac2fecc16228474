"""The node's GPUs by name: which card is `gpu3`, also after it was lost and returned.

Owns the ids and the last good record of every card. A card is its UUID. It gets its id at first sight, in the order of
the vendor's index, and no other card gets that id while the daemon runs: a command for `gpu3` must not reach another
GPU because one fell off the bus. So entries are never removed, except a card that never reported its identity: it is
replaced by the one found in its place.

A card that is lost, or whose library failed, keeps its identity and loses its figures. Its processes stay without
figures: a driver that does not answer has not stopped their jobs. A library that hangs is shown with its last answer
and its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hegmd.node.devices.base import ProcessUse, VendorSnapshot
from hegmd.node.inventory.vendors import VendorView
from hegmd.protocol.snapshots import GONE, LOST, Gpu, Health

_UNANSWERED = ("failed", "absent")
_WORDS = "the driver no longer lists it"
_LOST = Health(state="failed", notes=(_WORDS,), condition=GONE, causes=(LOST,), reason=_WORDS)
_UNKNOWN = Health(state="unknown", notes=("the vendor's library does not report its state",))


@dataclass(slots=True, eq=False, repr=False)
class _RegisteredGpu:
    """One GPU: its name on this node, its vendor, and its record."""

    id: str
    vendor: str
    shown: Gpu


class GpuRegister:
    """Every GPU that the daemon has found so far, and its processes."""

    def __init__(self) -> None:
        self._cards: dict[str, _RegisteredGpu] = {}
        self._uses: dict[str, tuple[ProcessUse, ...]] = {}
        self._placed: dict[str, int] = {}

    def place(self, view: VendorView) -> None:
        """Update that vendor's GPUs from the view."""
        vendor = view.vendor.vendor
        if view.snapshot is not None and view.reading != self._placed.get(vendor):
            self._placed[vendor] = view.reading
            self._take(vendor, view.snapshot)
        if view.vendor.state in _UNANSWERED:
            for card in self._cards.values():
                if card.vendor == vendor and card.shown.state != "unknown":
                    card.shown = _without_figures(card.shown, "unknown", _UNKNOWN)
            self._uses[vendor] = tuple(_without_figure(use) for use in self._uses.get(vendor, ()))

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in the order of their ids."""
        return tuple(card.shown for card in self._cards.values())

    @property
    def uses(self) -> tuple[ProcessUse, ...]:
        """Return which process uses which GPU, as the vendors report it."""
        return tuple(use for uses in self._uses.values() for use in uses)

    @property
    def ids(self) -> Mapping[str, str]:
        return {uuid: card.id for uuid, card in self._cards.items()}

    def pids_of(self, vendors: frozenset[str]) -> frozenset[int]:
        return frozenset(use.pid for vendor in vendors for use in self._uses.get(vendor, ()))

    def forget(self, ended: frozenset[int]) -> None:
        """Forget the earlier uses, of GPUs that cannot be read now, of processes that have ended: their pids are free.

        A use of a GPU that can be read is what its driver says.
        """
        readable = {uuid for uuid, card in self._cards.items() if card.shown.state == "ok"}
        for vendor, uses in self._uses.items():
            if any(use.pid in ended and use.use.gpu not in readable for use in uses):
                self._uses[vendor] = tuple([use for use in uses if use.pid not in ended or use.use.gpu in readable])

    def _take(self, vendor: str, snapshot: VendorSnapshot) -> None:
        present: set[str] = set()
        for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.index):
            present.add(gpu.uuid)
            card = self._cards.get(gpu.uuid)
            if card is None:
                self._enter(vendor, gpu)
            else:
                shown = gpu.replace(id=card.id)
                card.shown = card.shown if card.shown == shown else shown
        doubtful: set[str] = set()
        for uuid, card in self._cards.items():
            if card.vendor != vendor:
                continue
            if uuid not in present and card.shown.state != "lost":
                card.shown = _without_figures(card.shown, "lost", _LOST)
            if card.shown.state != "ok":
                doubtful.add(uuid)
        self._uses[vendor] = (*snapshot.uses, *self._carried(vendor, snapshot, doubtful))

    def _enter(self, vendor: str, gpu: Gpu) -> None:
        """Name a new card. One that failed without an identity before may already have a name."""
        for uuid, card in self._cards.items():
            if card.vendor == vendor and card.shown.index == gpu.index and _is_nameless(card.shown):
                known = _RegisteredGpu(id=card.id, vendor=vendor, shown=gpu.replace(id=card.id))
                # In the same place, because the order of the cards is that of their ids.
                self._cards = {gpu.uuid if one == uuid else one: each for one, each in self._cards.items()}
                self._cards[gpu.uuid] = known
                return
        name = f"gpu{len(self._cards)}"
        self._cards[gpu.uuid] = _RegisteredGpu(id=name, vendor=vendor, shown=gpu.replace(id=name))

    def _carried(self, vendor: str, snapshot: VendorSnapshot, doubtful: set[str]) -> list[ProcessUse]:
        """Return the earlier uses of GPUs that cannot be read now and that the snapshot lacks."""
        if not doubtful:
            return []
        used = {(use.pid, use.use.gpu) for use in snapshot.uses}
        return [
            _without_figure(use)
            for use in self._uses.get(vendor, ())
            if use.use.gpu in doubtful and (use.pid, use.use.gpu) not in used
        ]


def _without_figures(gpu: Gpu, state: str, health: Health) -> Gpu:
    """Return the same card with only its permanent facts."""
    return Gpu(
        id=gpu.id,
        index=gpu.index,
        uuid=gpu.uuid,
        pci_address=gpu.pci_address,
        name=gpu.name,
        vendor=gpu.vendor,
        chip=gpu.chip,
        state=state,
        memory_total_bytes=gpu.memory_total_bytes,
        numa_node=gpu.numa_node,
        health=health,
    )


def _is_nameless(gpu: Gpu) -> bool:
    """Return True if the card never reported an identity."""
    return gpu.state != "ok" and gpu.pci_address is None and gpu.name is None


def _without_figure(use: ProcessUse) -> ProcessUse:
    return use if use.use.vram_bytes is None else ProcessUse(use.pid, use.use.replace(vram_bytes=None))
