"""The storages of this process that are on their way out, out, or on their way back, whichever way they go.

Owns that at most one set of them is out at a time, and by which of two ways: copied by this process into a descriptor
(`transfer`), or shown to the daemon, which copies by itself (`shown`). Whether the moment is right is `orders`'
business. Needs ctypes only when something is carried: a Python that was built without it trains as well.
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
    from .ipc_storages import Shown, View
    from .peers import Peers
    from .torch_state import Found
    from .transfer import Offloaded


class Carrying:
    """What is out, and the ways out and back."""

    def __init__(self) -> None:
        self._offloaded: Offloaded | None = None
        self._shown: Shown | None = None
        self._showable = cuda_state.Showable()
        self._peers: Peers | None = None

    @property
    def out(self) -> Offloaded | Shown | None:
        """The storages whose bytes are out of the process now."""
        if self._offloaded is not None:
            return self._offloaded
        return self._shown if self._shown is not None and self._shown.out else None

    @property
    def held_bytes(self) -> int:
        """Bytes that are out of the process now."""
        return 0 if self.out is None else self.out.size_bytes

    @property
    def entrusted(self) -> bool:
        """Whether those bytes are with the daemon alone, so that this process cannot bring them back by itself."""
        if self._offloaded is not None:
            return self._offloaded.fd < 0
        return self.out is not None

    @property
    def mark(self) -> str:
        """What was drawn for the memory that was copied to by this process; empty if none was."""
        return "" if self._offloaded is None else self._offloaded.nonce.hex()

    def keeps(self, fd: int) -> bool:
        """Whether that descriptor belongs to what is out."""
        return self._offloaded is not None and self._offloaded.fd == fd

    def find(self) -> Found:
        """The storages of this process as they are now."""
        return torch_state.find(self._showable)

    def forget(self) -> None:
        """Let go of storages that have all their bytes, since the thread goes on. Those that are out stay."""
        self._showable.forget()
        if self._shown is not None and not self._shown.out:
            self._shown = None

    def note_restored(self) -> None:
        """The driver has brought back what this process has now, and it cannot be shown to others any more."""
        torch = cuda_state.in_use()
        if torch is not None:
            segments = cuda_state.Segments(torch).all
            self._showable.note_restored([(segment.address, segment.size_bytes) for segment in segments])
        self._peers = None  # access between its GPUs is refused to it from now on

    def note_left(self) -> None:
        """What its GPUs have of it while storages are out goes with the driver, and cannot be shown from then on."""
        if self._offloaded is not None:
            self._showable.note_restored(self._offloaded.left)
        elif self._shown is not None and self._shown.out:
            self._shown.note_freed()
            self._showable.note_restored(self._shown.left)

    def part(self) -> int:
        """Have its GPUs reach no other's memory, as the driver wants it; for how many pairs. Raises HegmError."""
        peers: Peers = self._peers or _parting().Peers()
        self._peers = peers
        return peers.part()

    def rejoin(self) -> None:
        """Have that again before the thread goes on, as far as the driver lets it be had."""
        if self._peers is not None:
            self._peers.rejoin()
            self._peers = None

    def required_bytes(self, found: Found) -> int:
        """What has to be held for these storages, by the way that needs more."""
        wholes: tuple[int, int] = _transfer().required_bytes(found.sizes), _showing().flat_bytes(found.sizes)
        return max(wholes)

    # ---- copied by this process --------------------------------------------------------------------------------------

    def offload(self, fd: int | None, found: Found, progress: Callable[[int], None]) -> int:
        """Copy the storages into the descriptor and free them; how many. Raises HegmError, with nothing changed."""
        if fd is None:
            raise refusal("no descriptor came with the order", "send the memory to copy to with it")
        self.forget()
        transfer = _transfer()
        found.keep_what_fits(os.fstat(fd).st_size, transfer.required_bytes)
        if not found.storages:  # nothing is out then, so nothing has to come back before the process may go on
            return 0
        offloaded: Offloaded = transfer.offload(fd, found.storages, found.sizes, progress)
        self._offloaded = offloaded
        self.note_left()
        return len(offloaded)

    def entrust(self) -> None:
        """Close the own descriptor of what is out, if there is one. Raises HegmError when nothing is."""
        if self.out is None:
            raise refusal("no bytes of this process are offloaded", "offload it first")
        if self._offloaded is not None:
            self._offloaded.close()

    def reload(self, fd: int | None, progress: Callable[[int], None]) -> Offloaded:
        """Bring back what was offloaded. Raises HegmError, and leaves it out, when that cannot be."""
        offloaded = self._offloaded
        if offloaded is None:
            raise refusal("no bytes of this process are offloaded", "offload it first")
        if fd is None and offloaded.fd < 0:
            raise refusal("only hegmd has its bytes, and the order brought none", "run: hegmctl adopt")
        offloaded.bring_back(offloaded.fd if fd is None else fd, progress)
        offloaded.close()
        self._offloaded = None
        return offloaded

    # ---- copied by the daemon ----------------------------------------------------------------------------------------

    def show(self, found: Found, *, partly: bool) -> tuple[Shown, View]:
        """Show the storages to the daemon; those that cannot be are among them as such if it is `partly`.

        Raises HegmError.
        """
        if found.segments is None:
            raise refusal("it has no storages on a GPU to export", "use --carrier worker")
        shown: Shown = _showing().Shown(found.storages, found.sizes, found.segments, found.own)
        self._shown = shown
        return shown, shown.show(partly=partly)

    def shown(self, what: str) -> Shown:
        """The storages that were shown. Raises HegmError if there are none."""
        if self._shown is None:
            raise refusal(f"{what} needs exported storages, and none were exported", "export them first")
        return self._shown


def load() -> None:
    """Read in now what is needed when something is carried: an upgrade replaces the files under a running agent.

    What is missing for it is told when it is needed.
    """
    try:
        for name in ("cache", "cuda_driver", "ipc_storages", "nccl_library", "peers", "transfer", "video_memory"):
            __import__(f"{__package__}.{name}")
    except ImportError as error:
        note(f"nothing can be carried: {error!r}")


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
