"""The storages of this process that are being offloaded, offloaded, or being reloaded, by any carrier.

Owns that at most one set is offloaded at a time, and how: copied by this process into a descriptor (`transfer`), or
exported to the daemon, which copies (`ipc_storages`). `orders` decides when. Needs ctypes only for offloading: a Python
without it can train too.
"""

from __future__ import annotations

import os

from . import cuda_state, torch_state
from .notes import note
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..errors import HegmError
    from .ipc_storages import IpcStorages, View
    from .peers import Peers
    from .torch_state import FoundStorages
    from .transfer import Offloaded


class StorageTransfer:
    """The storages to offload, and how they are offloaded and reloaded."""

    def __init__(self) -> None:
        self._offloaded: Offloaded | None = None
        self._shown: IpcStorages | None = None
        self._showable = cuda_state.ExportableSegments()
        self._peers: Peers | None = None

    @property
    def out(self) -> Offloaded | IpcStorages | None:
        """Return the offloaded storages."""
        if self._offloaded is not None:
            return self._offloaded
        return self._shown if self._shown is not None and self._shown.out else None

    @property
    def held_bytes(self) -> int:
        return 0 if self.out is None else self.out.size_bytes

    @property
    def entrusted(self) -> bool:
        """Return True if only the daemon has these bytes, so that this process cannot reload them by itself."""
        if self._offloaded is not None:
            return self._offloaded.fd < 0
        return self.out is not None

    @property
    def mark(self) -> str:
        """Return the nonce of the memory that this process copied to; empty without one."""
        return "" if self._offloaded is None else self._offloaded.nonce.hex()

    def keeps(self, fd: int) -> bool:
        """Return True if that descriptor has the offloaded bytes."""
        return self._offloaded is not None and self._offloaded.fd == fd

    def find(self, also: tuple[type[object], ...] = ()) -> FoundStorages:
        return torch_state.find(self._showable, also)

    def forget(self) -> None:
        """Forget storages that have all their bytes, since the thread continues. Offloaded ones stay."""
        self._showable.forget()
        if self._shown is not None and not self._shown.out:
            self._shown = None

    def note_restored(self) -> None:
        """Record that the driver restored this process: its memory cannot be exported by CUDA IPC any longer."""
        torch = cuda_state.in_use()
        if torch is not None:
            segments = cuda_state.Segments(torch).all
            self._showable.note_restored([(segment.address, segment.size_bytes) for segment in segments])
        self._peers = None  # access between its GPUs is refused to it from now on

    def note_left(self) -> None:
        """Record what stays on the GPUs while storages are offloaded: the driver moves it; it is not exported later."""
        if self._offloaded is not None:
            self._showable.note_restored(self._offloaded.left)
        elif self._shown is not None and self._shown.out:
            self._shown.note_freed()
            self._showable.note_restored(self._shown.left)

    def part(self) -> int:
        """Disable access between its GPUs, as the driver requires; returns the number of pairs. Raises HegmError."""
        peers: Peers = self._peers or _parting().Peers()
        self._peers = peers
        return peers.part()

    def rejoin(self) -> None:
        """Enable that again before the thread continues, as far as the driver allows."""
        if self._peers is not None:
            self._peers.rejoin()
            self._peers = None

    def required_bytes(self, found: FoundStorages) -> int:
        """Return what has to be reserved for these storages, by the carrier that needs more."""
        wholes: tuple[int, int] = _transfer().required_bytes(found.sizes), _showing().flat_bytes(found.sizes)
        return max(wholes)

    # ---- copied by this process --------------------------------------------------------------------------------------

    def offload(self, fd: int | None, found: FoundStorages, progress: Callable[[int], None]) -> int:
        """Copy the storages into the descriptor and free them; returns how many. Raises HegmError; then nothing
        changes."""
        if fd is None:
            raise refusal("the order has no descriptor", "send the memory to copy to with it")
        self.forget()
        transfer = _transfer()
        found.keep_what_fits(os.fstat(fd).st_size, transfer.required_bytes)
        if not found.storages:  # nothing is offloaded, so nothing has to be reloaded
            return 0
        offloaded: Offloaded = transfer.offload(fd, found.storages, found.sizes, progress)
        self._offloaded = offloaded
        self.note_left()
        return len(offloaded)

    def entrust(self) -> None:
        """Close our descriptor of the offloaded bytes. Raises HegmError if nothing is offloaded."""
        if self.out is None:
            raise refusal("no bytes of this process are offloaded", "offload it first")
        if self._offloaded is not None:
            self._offloaded.close()

    def reload(self, fd: int | None, progress: Callable[[int], None]) -> Offloaded:
        """Reload what was offloaded. Raises HegmError; then it stays offloaded."""
        offloaded = self._offloaded
        if offloaded is None:
            raise refusal("no bytes of this process are offloaded", "offload it first")
        if fd is None and offloaded.fd < 0:
            raise refusal("only hegmd has its bytes, and the order did not include them", "run: hegmctl adopt")
        offloaded.bring_back(offloaded.fd if fd is None else fd, progress)
        offloaded.close()
        self._offloaded = None
        return offloaded

    # ---- copied by the daemon ----------------------------------------------------------------------------------------

    def show(self, found: FoundStorages, *, partly: bool) -> tuple[IpcStorages, View]:
        """Export the storages to the daemon; with `partly` also the others, without a handle. Raises HegmError."""
        if found.segments is None:
            raise refusal("it has no storages on a GPU to export", "use --carrier worker")
        shown: IpcStorages = _showing().IpcStorages(found.storages, found.sizes, found.segments, found.own)
        self._shown = shown
        return shown, shown.show(partly=partly)

    def shown(self, what: str) -> IpcStorages:
        """Return the exported storages. Raises HegmError if there are none."""
        if self._shown is None:
            raise refusal(f"{what} needs exported storages, and none were exported", "export them first")
        return self._shown


_MODULES = ("cache", "cuda_driver", "ipc_storages", "nccl_library", "peers", "staging", "transfer", "video_memory")


def load() -> None:
    """Import now what a transfer needs, because an upgrade replaces the files. Errors are reported once it is used."""
    try:
        for name in _MODULES:
            __import__(f"{__package__}.{name}")
    except ImportError as error:
        note(f"no carrier can be used: {error!r}")


def _transfer() -> Any:
    try:
        from . import transfer
    except ImportError as error:
        raise _no_ctypes(error) from None
    return transfer


def _showing() -> Any:
    try:
        from . import ipc_storages
    except ImportError as error:
        raise _no_ctypes(error) from None
    return ipc_storages


def _parting() -> Any:
    try:
        from . import peers
    except ImportError as error:
        raise _no_ctypes(error) from None
    return peers


def _no_ctypes(error: ImportError) -> HegmError:
    return refusal(f"its Python has no ctypes ({error})", "the carriers need it; use another Python")
