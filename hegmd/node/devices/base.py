"""The contract between the daemon and a vendor's management library.

A provider blocks and uses no event loop: the inventory calls it in a thread with a deadline, and leaves it alone while
it hangs. It must not cache: a snapshot is read in one pass, and is true or raises. Unknown values are None. A GPU that
fails does not affect the others: the snapshot has it with state `lost` or `unknown`. If the whole library is unusable,
it raises DeviceError; the inventory then closes the provider and opens it again later. So a reloaded driver or an added
GPU is found without a restart.

A new vendor needs a provider in PROVIDERS and its setting (CONTRIBUTING has the list). The daemon then shows its GPUs;
to move jobs on them also takes a method (`hegmd/migration/contracts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.snapshots import Gpu, GpuUse


class DeviceError(HegmError):
    """The vendor's library reports an error or disappeared; call `open` again later."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(UNAVAILABLE, message, hint)


class DeviceAbsent(DeviceError):
    """This node has no library, driver or card of this vendor. Not an error, but checked again."""


class ProcessUse(NamedTuple):
    """A pid that uses a GPU, as the driver reports it, in the driver's pid namespace."""

    pid: int
    use: GpuUse


class VendorSnapshot(NamedTuple):
    """All that one vendor's library reports, read in one pass.

    In `gpus`, `id` is the provider's own (its index as text) until the inventory assigns the node's ids. So
    `GpuUse.gpu` in `uses` has UUIDs.
    """

    gpus: tuple[Gpu, ...]
    uses: tuple[ProcessUse, ...]
    driver_version: str | None
    library_version: str | None
    compute_version: str | None


class DeviceProvider(Protocol):
    """A vendor's library. Its methods block. One thread at a time calls them, not always the same."""

    vendor: str

    def open(self) -> None:
        """Load and initialise the library. Raises DeviceAbsent or DeviceError; opening twice is fine."""
        ...

    def snapshot(self) -> VendorSnapshot:
        """Read everything. Raises DeviceError if the library as a whole does not work."""
        ...

    def close(self) -> None:
        """Release the library as far as possible. Closing twice, or after an error, is fine."""
        ...


def _at(module: str, name: str) -> Callable[[], DeviceProvider]:
    """Return a factory that imports the provider when called, so that an unused binding is never loaded."""
    return lambda: cast("DeviceProvider", getattr(import_module(module), name)())


# The vendors whose GPUs the daemon looks for. The simulated provider is not one of them: it needs a topology.
PROVIDERS: Mapping[str, Callable[[], DeviceProvider]] = {
    "nvidia": _at("hegmd.node.devices.nvidia", "NvidiaProvider"),
    "amd": _at("hegmd.node.devices.amd", "AmdProvider"),
}
