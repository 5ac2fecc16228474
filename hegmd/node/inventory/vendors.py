"""The life of one vendor's library: absent, well, failing, hanging, and back again.

Owns when a provider is opened, called, closed and called again, and the words for its state. Must not start a second
call while one hangs, and must not exceed its deadline. `register` interprets the answers.

A job calls the provider. The next update takes an answer that came too late, so a slow library is shown with the age of
its answer. After an error the library is closed and opened again, soon at first and then at growing intervals: that
finds a reloaded driver.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import anyio

from hegmd.node.devices.base import PROVIDERS, DeviceAbsent, DeviceError, DeviceProvider, VendorSnapshot
from hegmd.node.inventory.jobs import SHORTAGE_HINT, Job, shortage
from hegmd.protocol.snapshots import Vendor

if TYPE_CHECKING:
    from hegmd.node.devices.node_spec import Topology

log = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
ABSENT_RETRY_S = 30.0

_HANG_HINTS = {
    "nvidia": "run: dmesg | grep -e NVRM -e Xid; a hung driver may need a reboot",
    "amd": "run: dmesg | grep amdgpu; a hung driver may need a reboot",
    "simulated": "repair the fault of the simulated library",
}
_HANG_HINT = "run: dmesg; a hung driver may need a reboot"
_BUG_HINT = "report this with the traceback in hegmd's log; hegmd tries again"


class VendorView(NamedTuple):
    """The current state of one vendor's library.

    `snapshot` is its last one since it was opened. `reading` counts them, so that a new one that is equal is
    recognised.
    """

    vendor: Vendor
    snapshot: VendorSnapshot | None
    reading: int


class VendorWatch:
    """Manages one provider. Belongs to the event loop; only the provider's own methods run elsewhere."""

    def __init__(self, provider: DeviceProvider, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.name = provider.vendor
        self.provider = provider
        self._monotonic = monotonic
        self._job: Job[VendorSnapshot] | None = None
        self._overdue = False
        self._reopen = False
        self._snapshot: VendorSnapshot | None = None
        self._reading = 0
        self._read_at: float | None = None
        self._error: DeviceError | None = None
        self._retry_at = 0.0
        self._retry_s = FIRST_RETRY_S

    def begin(self) -> None:
        """Call the library before the event loop runs, because opening it takes a while. The first `update` takes the
        answer, even an earlier one."""
        if self._job is None:
            self._ask()

    async def update(self, limit_s: float) -> None:
        """Call the library and wait for its answer up to the deadline. Does not wait while it hangs.

        Cancellation leaves the call running; the next update waits for the same one.
        """
        has_begun = self._job is not None and not self._overdue and self._reading == 0
        if self._take_answer() and has_begun:
            return
        if self._job is None:
            if self._error is not None and not self._reopen and self._monotonic() < self._retry_at:
                return
            self._ask()
        if self._overdue or self._job is None:
            return
        with anyio.move_on_after(limit_s):
            await self._job.wait()
        if not self._take_answer():
            self._overdue = True
            log.warning("the %s library has not answered within %.2g s; showing its last answer", self.name, limit_s)

    def reopen(self) -> None:
        """Close and open the library before the next call, without an interval."""
        self._reopen = True

    def view(self) -> VendorView:
        return VendorView(vendor=self._vendor(self._monotonic()), snapshot=self._snapshot, reading=self._reading)

    async def close(self, limit_s: float) -> None:
        """Close the library. If it hangs, or closing takes too long, its thread is abandoned."""
        began = anyio.current_time()
        with anyio.CancelScope(deadline=began if self._overdue else began + limit_s):
            if self._job is not None:
                await self._job.wait()
        if not self._take_answer():
            if self._job is not None:
                self._job.abandon()
                self._job = None
            return
        job = Job(self.provider.close, name=f"hegmd-{self.name}-close", monotonic=self._monotonic)
        with anyio.CancelScope(deadline=began + limit_s):
            await job.wait()
        job.abandon()
        self._forget()

    def _ask(self) -> None:
        reopen, self._reopen = self._reopen, False
        self._overdue = False
        self._job = Job(lambda: self._turn(reopen), name=f"hegmd-{self.name}", monotonic=self._monotonic)

    def _turn(self, reopen: bool) -> VendorSnapshot:
        """One call of the library, in the job's thread. Opening an open library does nothing."""
        provider = self.provider
        if reopen:
            provider.close()
        try:
            provider.open()
            return provider.snapshot()
        except Exception:
            provider.close()
            raise

    def _take_answer(self) -> bool:
        """Take the answer of an ended call; True if there was one, or no call."""
        job = self._job
        if job is None:
            return True
        if not job.done:
            return False
        self._job = None
        self._overdue = False
        try:
            snapshot = job.result()
        except DeviceError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever a vendor's binding raises is this vendor's failure
            self._fail(self._as_failure(error))
        else:
            self._snapshot = snapshot
            self._reading += 1
            self._read_at = job.ended
            self._error = None
            self._retry_s = FIRST_RETRY_S
        return True

    def _as_failure(self, error: Exception) -> DeviceError:
        """Convert an error that is not the library's: the kernel has no more files or memory, or it is a bug."""
        missing = shortage(error)
        if missing is not None:
            return DeviceError(f"the {self.name} library cannot be called: {missing}", SHORTAGE_HINT)
        log.error("the %s provider failed in an unforeseen way", self.name, exc_info=error)
        text = f"asking the {self.name} library failed with {type(error).__name__}: {error}"
        return DeviceError(text, _BUG_HINT)

    def _fail(self, error: DeviceError) -> None:
        absent = isinstance(error, DeviceAbsent)
        if not absent and (self._error is None or self._error.message != error.message):
            log.warning("the %s library failed: %s", self.name, error)
        self._error = error
        self._snapshot = None
        self._retry_at = self._monotonic() + (ABSENT_RETRY_S if absent else self._retry_s)
        self._retry_s = FIRST_RETRY_S if absent else min(2 * self._retry_s, LAST_RETRY_S)

    def _forget(self) -> None:
        self._snapshot = None
        self._error = None
        self._retry_at = 0.0

    def _vendor(self, now: float) -> Vendor:
        age_s = None if self._read_at is None else max(0.0, now - self._read_at)
        if self._overdue or (self._snapshot is None and self._error is None):
            return self._vendor_as("stale", self._hang_text(now), _HANG_HINTS.get(self.name, _HANG_HINT), age_s)
        if isinstance(self._error, DeviceAbsent):
            return self._vendor_as("absent", self._error.message, self._error.hint, age_s)
        if self._error is not None:
            return self._vendor_as("failed", self._error.message, self._error.hint, age_s)
        return self._vendor_as("ok", "", "", age_s)

    def _hang_text(self, now: float) -> str:
        waited_s = now - (now if self._job is None else self._job.started)
        known = "the state of its GPUs is unknown" if self._snapshot is None else "its last answer is shown"
        return f"the {self.name} library has not answered for {waited_s:.1f} s; {known}"

    def _vendor_as(self, state: str, message: str, hint: str, age_s: float | None) -> Vendor:
        snapshot = self._snapshot
        return Vendor(
            vendor=self.name,
            state=state,
            message=message,
            hint=hint,
            driver_version=None if snapshot is None else snapshot.driver_version,
            library_version=None if snapshot is None else snapshot.library_version,
            compute_version=None if snapshot is None else snapshot.compute_version,
            age_s=age_s,
        )


def vendors_off(
    is_off: Callable[[str], bool], topology: Topology | None, vendors: Iterable[str] = PROVIDERS
) -> tuple[str, ...]:
    """Return the vendors that the configuration excludes."""
    return () if topology is not None else tuple(vendor for vendor in vendors if is_off(vendor))


def providers_for(
    is_off: Callable[[str], bool],
    topology: Topology | None,
    vendors: Mapping[str, Callable[[], DeviceProvider]] = PROVIDERS,
) -> tuple[DeviceProvider, ...]:
    """Return the providers: the simulated one only, or all real ones that are not switched off."""
    if topology is not None:
        from hegmd.node.devices.simulated import SimulatedProvider  # a node with GPUs needs none

        return (SimulatedProvider(topology),)
    off = vendors_off(is_off, topology, vendors)
    return tuple(make() for vendor, make in vendors.items() if vendor not in off)
