"""The communicators of a rank on a stub node: files in the node's state, at which the stub driver looks.

A process that is checkpointed while it has such a file is lost, as with NCCL's communicators.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from tests.stubs.cuda.node import ENVIRONMENT


class Ranks:
    """The communicators of this rank with the others, which play NCCL's: files in the node's state."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._folder = Path(os.environ[ENVIRONMENT]) / "communicators"
        self._mine = self._folder / str(os.getpid())
        self._mine.touch()

    def disconnect(self) -> None:
        """Abort them, which waits for no other rank."""
        self._mine.unlink(missing_ok=True)

    def connect(self, generation: int, limit_s: float) -> None:
        """Make new ones together with the other ranks. Raises TimeoutError."""
        if self._mine.exists():
            return
        (self._folder / f"{generation}-{self.rank}").touch()
        until = time.monotonic() + limit_s
        while len(list(self._folder.glob(f"{generation}-*"))) < self.world_size:
            if time.monotonic() > until:
                raise TimeoutError(f"not all {self.world_size} ranks have come")
            threading.Event().wait(0.01)
        self._mine.touch()
