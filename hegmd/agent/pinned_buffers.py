"""Host memory for the slots of a ring, allocated before it is needed: touching it takes half as long as the copies.

Owns at most one such block. `prepare` lets a thread touch it while the training thread is busy, `take` passes it to the
copier, and `drop` frees an unused one. On a node that allocates memory when it is touched, 128 MiB take 40 to 80 ms, in
which half of the bytes of a 12 GiB state can be copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os

from . import copying
from .copying import PIECE_BYTES
from .crew import EarlyWork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Smaller ones cost more calls than they save, larger ones leave the caches, and so do more of them.
SLOT_BYTES = PIECE_BYTES
SLOTS = 16
SIZE_BYTES = SLOTS * SLOT_BYTES


class PopulatedMemory:
    """Memory with all of its pages, until it is closed."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._memory = mmap.mmap(-1, SIZE_BYTES)
        self._anchor: Any = ctypes.c_char.from_buffer(self._memory)
        self.address = ctypes.addressof(self._anchor)
        copying.prefer_huge_pages([(self.address, 0, SIZE_BYTES)])
        copying.have_pages(self.address, SIZE_BYTES)

    def close(self) -> None:
        """Free the memory. No copy may be under way in it."""
        self._anchor = None
        self._memory.close()

    def keep(self) -> None:
        """Keep the memory as long as the process lives, because the GPU might still write to it."""
        _kept.append(self)


_kept: list[PopulatedMemory] = []


_ahead: EarlyWork | None = None
_forks_are_seen = False


def prepare() -> None:
    """Start a thread that allocates one. Raises nothing."""
    global _ahead, _forks_are_seen  # noqa: PLW0603 - one a process
    if _ahead is not None:
        return
    if not _forks_are_seen:
        _forks_are_seen = True
        os.register_at_fork(after_in_child=_leave_in_child)
    ahead = EarlyWork(PopulatedMemory, "no memory was taken ahead of the copies")
    if ahead.start():
        _ahead = ahead


def wait() -> None:
    if _ahead is not None:
        _ahead.wait()


def take() -> PopulatedMemory:
    """Return the prepared block or a new one; the caller closes it. Raises OSError."""
    return _prepared() or PopulatedMemory()


def drop() -> None:
    ground = _prepared()
    if ground is not None:
        ground.close()


def _leave_in_child() -> None:
    """Free the block in a forked child, which has neither the thread that would unlock it nor a use for it."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None and ahead.result is not None:
        ahead.result.close()


def _prepared() -> PopulatedMemory | None:
    global _ahead
    wait()
    ahead, _ahead = _ahead, None
    return None if ahead is None else ahead.result
