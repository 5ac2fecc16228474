"""The memory of each worker on each simulated GPU; updated by the methods and reported to the simulated driver.

On simulated GPUs nothing else holds memory for a worker, so these records are its reservations: its own share, as its
agent counts it, and what an operation reserves elsewhere. On real GPUs reservations are real allocations; this class
refuses to make any there.

Reservations belong to a process (pid and start time), not to a connection: an agent that reconnects keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hegmd.errors import HegmError, Refused
from hegmd.protocol.snapshots import Gpu
from hegmd.telemetry.log import limited

if TYPE_CHECKING:
    from hegmd.node.devices.simulated import SimulatedProvider

logger = logging.getLogger(__name__)

ProcessKey = tuple[int, int]  # pid and start ticks


class SimulatedMemory:
    """The records. `gpus` returns the GPUs of the last snapshot; `changed` is called when a new one would differ."""

    def __init__(
        self,
        simulator: SimulatedProvider | None,
        *,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
        changed: Callable[[], object] = lambda: None,
    ) -> None:
        self._simulator = simulator
        self._gpus = gpus
        self._changed = changed
        self._reserved: dict[ProcessKey, dict[str, int]] = {}

    @property
    def simulated(self) -> bool:
        return self._simulator is not None

    def of(self, who: ProcessKey) -> Mapping[str, int]:
        return dict(self._reserved.get(who, {}))

    def reserve(self, who: ProcessKey, gpu: str, size_bytes: int) -> None:
        """Reserve that much on that GPU for the process, in total. Raises HegmError; then nothing changed."""
        if self._simulator is None:
            raise Refused(f"GPU memory cannot be reserved on {gpu}: it is not a simulated GPU", "use the method driver")
        self._simulator.hold(who, who[0], gpu, size_bytes)
        self._reserved.setdefault(who, {})[gpu] = size_bytes
        self._changed()

    def hold_what_fits(self, who: ProcessKey, gpu: str, size_bytes: int) -> None:
        """Record what a process already uses. If the GPU cannot hold that, the former record stays."""
        if self._simulator is None or self._reserved.get(who, {}).get(gpu) == size_bytes:
            return
        try:
            self.reserve(who, gpu, size_bytes)
        except HegmError as error:
            limited(logger, f"room-{who[0]}", logging.WARNING, "process %d: %s", who[0], error.message)
            self._reserved.setdefault(who, {}).setdefault(gpu, 0)

    def release(self, who: ProcessKey, gpu: str) -> None:
        held = self._reserved.get(who, {})
        if held.pop(gpu, None) is None:
            return
        if not held:
            del self._reserved[who]
        if self._simulator is not None:
            self._simulator.hold(who, who[0], gpu, 0)
        self._changed()

    def drop(self, who: ProcessKey) -> None:
        """The process has ended, and its driver would have freed everything."""
        if self._reserved.pop(who, None) is not None and self._simulator is not None:
            self._simulator.release(who)
            self._changed()

    def place(self, wanted: str | None, rank: int | None = None) -> str | None:
        """Return the GPU for a new worker: the one with most free memory, of those that it was started for.

        A rank takes its own of several, in their order, as `cuda:LOCAL_RANK` does on real ones.

        Returns None if none of these is usable: a job is never put on a GPU that its user did not choose.
        """
        if self._simulator is None:
            return None
        gpus = [gpu for gpu in self._gpus() if gpu.state == "ok"]
        if wanted is not None:
            names = wanted.split(",")
            gpus = [gpu for gpu in gpus if gpu.id in names or gpu.uuid in names]
            if not gpus:
                limited(
                    logger,
                    f"place-{wanted[:80]}",
                    logging.WARNING,
                    "a job was started for %s, which cannot be used",
                    wanted,
                )
            if rank is not None and len(gpus) == len(set(names)) > 1:
                own = names[rank % len(names)]
                return next(gpu.id for gpu in gpus if own in (gpu.id, gpu.uuid))
        return max(gpus, key=lambda gpu: (self._free_bytes(gpu), -gpu.index)).id if gpus else None

    def _free_bytes(self, gpu: Gpu) -> int:
        """Return what is free there: the smaller of the last snapshot and these records."""
        booked_bytes = sum(held.get(gpu.id, 0) for held in self._reserved.values())
        return (gpu.memory_total_bytes or 0) - max(gpu.memory_used_bytes or 0, booked_bytes)
