"""The contract between the daemon and a vendor's management library.

A provider is blocking and knows nothing of the event loop: the inventory calls it in a thread of its own, gives it a
deadline, and leaves it alone while it hangs. It must not cache: a snapshot is read in one pass and is true or raises.
What a library does not tell is None. One GPU that fails does not fail the others: it is in the snapshot with state
`lost` or `unknown`. What makes the whole library unusable raises DeviceError, after which the inventory closes the
provider and opens it again later: so a driver that is reloaded, or a GPU that is plugged in, is found without a
restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.snapshots import Gpu, GpuUse


class DeviceError(HegmError):
    """The vendor's library answers with an error, or went away; try `open` again later."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(UNAVAILABLE, message, hint)


class DeviceAbsent(DeviceError):
    """There is nothing of this vendor here: no library, no driver, or no card. Quiet, but looked for again."""


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """The driver's word that a pid uses a GPU. The pid is in the driver's namespace; nothing else is known of it."""

    pid: int
    use: GpuUse


@dataclass(frozen=True, slots=True)
class VendorSnapshot:
    """All that one vendor's library tells, read in one pass.

    In `gpus`, `id` is the provider's own (its index as text) until the inventory gives the node's ids; `uses` speak of
    GPUs by UUID in `GpuUse.gpu` for the same reason.
    """

    gpus: tuple[Gpu, ...]
    uses: tuple[ProcessUse, ...]
    driver_version: str | None
    library_version: str | None
    compute_version: str | None


class DeviceProvider(Protocol):
    """One vendor's library. Methods block; they are called from one thread at a time, not always the same."""

    vendor: str

    def open(self) -> None:
        """Load and initialise the library. Raises DeviceAbsent or DeviceError; opening twice is fine."""
        ...

    def snapshot(self) -> VendorSnapshot:
        """Read everything. Raises DeviceError when the library as a whole does not work (any more)."""
        ...

    def close(self) -> None:
        """Give the library back, as far as it lets itself be. Closing twice, or after an error, is fine."""
        ...


def _at(module: str, name: str) -> Callable[[], DeviceProvider]:
    """A factory that imports the provider only when it is called; a binding that is not used is never loaded."""
    return lambda: cast("DeviceProvider", getattr(import_module(module), name)())


# The vendors whose GPUs the daemon looks for. The simulated provider is not one of them: it needs a topology.
PROVIDERS: Mapping[str, Callable[[], DeviceProvider]] = {
    "nvidia": _at("hegmd.node.devices.nvidia", "NvidiaProvider"),
    "amd": _at("hegmd.node.devices.amd", "AmdProvider"),
}
