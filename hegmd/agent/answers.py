"""Reports about an order: it is done, it failed, or its progress.

Defines the form of reports, and sends them to the daemon, if there is one. `orders` decides what is reported.
"""

from __future__ import annotations

from ..errors import HegmError
from ..protocol.agents import AgentReport, LeftAlone, packed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..protocol.agents import Communicators, Order
    from . import departing, torch_state
    from .ipc_storages import IpcStorages, View
    from .quiesce import Gate


class ReportSender:
    """Sends reports to the daemon. `send` is None without a daemon; then nothing is sent."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.send: Callable[[AgentReport], None] | None = None

    def done(self, order: int, **values: Any) -> None:
        self._tell(order=order, result="done", **{"boundary": self._gate.count, **values})

    def failed(self, order: int, error: HegmError, parked_s: float | None = None) -> None:
        facts = {"message": error.message, "hint": error.hint, "lacks_bytes": error.facts.get("lacks_bytes")}
        facts.update({name: error.facts[name] for name in ("state_bytes", "refusals") if name in error.facts})
        self._tell(order=order, result="failed", boundary=self._gate.count, parked_s=parked_s, **facts)

    def progress_of(self, order: int) -> Callable[[int], None]:
        return lambda so_far_bytes: self._tell(order=order, result="progress", size_bytes=so_far_bytes)

    def view(self, order: Order, shown: IpcStorages, view: View) -> None:
        """Return storages as another process can reach them."""
        self.done(
            order.order,
            storages=len(shown),
            size_bytes=shown.size_bytes,
            handles=tuple(view.handles),
            places=packed(view.spots),
            gpus=tuple(view.gpus),
            devices=view.devices or None,
            first=view.first,
            at_bytes=view.at_bytes,
            left=view.left,
            short_bytes=shown.short_bytes,
            spent_ms=shown.laps.spent_ms,
        )

    def found(
        self, order: int, found: torch_state.FoundStorages, size_bytes: int, communicators: Communicators | None = None
    ) -> None:
        """Report a survey: storages that can be offloaded, those that are left alone, and the communicator groups."""
        self.done(
            order,
            parked=self._gate.parked,
            held_bytes=0,
            storages=len(found.storages),
            size_bytes=size_bytes,
            left_alone=counted(found),
            cuda=found.cuda,
            communicators=communicators,
            spent_ms=found.laps.spent_ms,
        )

    def weight(self, order: int, weighed: departing.RestartCost | HegmError) -> None:
        """Return what a restart would save, or why that is unknown."""
        if isinstance(weighed, HegmError):
            self.failed(order, weighed)
        else:
            self.done(
                order,
                state_bytes=weighed.size_bytes,
                refusals=weighed.refusals,
                begin_anew=weighed.begin_anew,
                imports=weighed.beforehand.modules,
                path=weighed.beforehand.path,
            )

    def _tell(self, **values: Any) -> None:
        if self.send is not None:
            self.send(AgentReport(**values))


def counted(found: torch_state.FoundStorages) -> tuple[LeftAlone, ...]:
    """Return the storages that are left alone, by reason."""
    return tuple(
        LeftAlone(why=why, storages=count, size_bytes=size_bytes)
        for why, (count, size_bytes) in sorted(found.left_alone.items())
    )
