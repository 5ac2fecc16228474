"""The node's GPUs by name: which card is `gpu3`, now and when it is back, and what to show while nobody can say.

Owns the ids and the last good word on every card. A card is its UUID. Its id is given at first sight, in the order of
the vendor's own index, and never to another card while the daemon runs: a command that says `gpu3` must not reach
another GPU because one fell off the bus in between. So nothing is ever taken out of the register either, but for a card
that never told who it is: it gives its place to the one that turns out to be there.

Unknown is shown as unknown. A card that is lost, or whose library failed, keeps its identity and loses its figures;
the processes that were on it are kept without their figures, since a driver that stopped answering has not stopped
their jobs. A library that hangs is another matter: what it said last is shown with its age.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hegmd.node.devices.base import ProcessUse, VendorSnapshot
from hegmd.node.inventory.vendors import VendorView
from hegmd.protocol.snapshots import Gpu, Health

__all__ = ["GpuRegister"]

_UNANSWERED = ("failed", "absent")
_LOST = Health(state="failed", notes=("the driver no longer lists it",))
_UNKNOWN = Health(state="unknown", notes=("the vendor's library does not report its state",))


@dataclass(slots=True)
class _Card:
    """One GPU: its name on this node, whose it is, and how it is shown."""

    id: str
    vendor: str
    shown: Gpu


class GpuRegister:
    """Every GPU that was ever seen, and who is on it."""

    def __init__(self) -> None:
        self._cards: dict[str, _Card] = {}
        self._uses: dict[str, tuple[ProcessUse, ...]] = {}
        self._placed: dict[str, int] = {}

    def place(self, view: VendorView) -> None:
        """Bring what is shown of that vendor's GPUs up to date with the view."""
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
        """Who uses which GPU, by the vendors' words."""
        return tuple(use for uses in self._uses.values() for use in uses)

    @property
    def ids(self) -> Mapping[str, str]:
        """The id of each GPU by UUID."""
        return {uuid: card.id for uuid, card in self._cards.items()}

    def pids_of(self, vendors: frozenset[str]) -> frozenset[int]:
        """The pids that these vendors name."""
        return frozenset(use.pid for vendor in vendors for use in self._uses.get(vendor, ()))

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
        """Name a card that is seen for the first time; one that did not say who it is, while it failed, has a name."""
        for uuid, card in self._cards.items():
            if card.vendor == vendor and card.shown.index == gpu.index and _is_nameless(card.shown):
                known = _Card(id=card.id, vendor=vendor, shown=gpu.replace(id=card.id))
                # In the same place, because the order of the cards is that of their ids.
                self._cards = {gpu.uuid if one == uuid else one: each for one, each in self._cards.items()}
                self._cards[gpu.uuid] = known
                return
        name = f"gpu{len(self._cards)}"
        self._cards[gpu.uuid] = _Card(id=name, vendor=vendor, shown=gpu.replace(id=name))

    def _carried(self, vendor: str, snapshot: VendorSnapshot, doubtful: set[str]) -> list[ProcessUse]:
        """The uses of before of GPUs that cannot be asked now, as far as the snapshot does not tell them itself."""
        if not doubtful:
            return []
        told = {(use.pid, use.use.gpu) for use in snapshot.uses}
        return [
            _without_figure(use)
            for use in self._uses.get(vendor, ())
            if use.use.gpu in doubtful and (use.pid, use.use.gpu) not in told
        ]


def _without_figures(gpu: Gpu, state: str, health: Health) -> Gpu:
    """The same card with only what belongs to it for good."""
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
    """Whether the card has never told anything by which it could be known again."""
    return gpu.state != "ok" and gpu.pci_address is None and gpu.name is None


def _without_figure(use: ProcessUse) -> ProcessUse:
    return use if use.use.vram_bytes is None else ProcessUse(use.pid, use.use.replace(vram_bytes=None))
