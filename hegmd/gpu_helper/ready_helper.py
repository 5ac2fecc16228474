"""Keeps the GPU helper ready for the next copy, in addition to ready host memory (`pool.ready_helper`).

A helper that is started for a suspend needs at least 0.5 s before it can copy: its start, the driver's `cuInit`, a
context on the GPU and pinned memory. `started` keeps a helper that has called `cuInit`, which takes no GPU memory.
`contexts` also keeps a context on each GPU with a job (about 0.5 GiB there) and the pages of the pinned ring. While a
helper runs, the driver's device files are open, so the driver cannot be unloaded and no GPU can be reset.

Uses its own copy session, which belongs to no operation. A lost helper is started again at the next check.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence

import anyio

from hegmd.errors import HegmError
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.gpu_helper.link import Link
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

OFF, STARTED, CONTEXTS = "off", "started", "contexts"
LOOK_S = 2.0
RETRY_S = 30.0
#: Sessions of operations have the operation's number in their names.
_LANE, _RING_LANE = "ready", "ready-ring"
# A session creates a ring only for a pool segment.
_RING_PIECE_BYTES = 2 << 20


class ReadyHelper:
    """Looks again and again. `gpus` returns the UUIDs of the GPUs with jobs; it is only called for `contexts`."""

    def __init__(self, link: Link, how: str, gpus: Callable[[], Sequence[str]]) -> None:
        self._link = link
        self._how = how
        self._gpus = gpus
        self._held: tuple[int | None, tuple[str, ...]] | None = None

    @property
    def keeps_contexts(self) -> bool:
        """True if the helper has contexts on GPUs also while it copies nothing."""
        return self._how == CONTEXTS

    async def run(self) -> None:
        """Keep it ready until cancelled; ends at once if it is not to be."""
        while self._how != OFF:
            try:
                await self.check()
                pause_s = LOOK_S
            except (HegmError, OSError) as error:
                limited(logger, "ready-helper", logging.WARNING, "no GPU helper is ready: %s", error)
                pause_s = RETRY_S
            await anyio.sleep(pause_s)

    async def check(self) -> None:
        """Have a helper, and with `contexts` its contexts, unless it has them. Raises HegmError, OSError."""
        gpus = tuple(sorted(self._gpus())) if self._how == CONTEXTS else ()
        if self._held is not None and self._held == (self._link.pid, gpus):
            return
        self._held = None
        await CopyClient.open(self._link, _LANE, gpus)
        if gpus:
            await self._make_ring(gpus)
        self._held = (self._link.pid, gpus)

    async def _make_ring(self, gpus: Sequence[str]) -> None:
        """Have the helper make the memory of a ring, which it keeps for the next session."""
        fd = os.memfd_create("hegm-ready-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _RING_PIECE_BYTES)
            session = await CopyClient.open(self._link, _RING_LANE, gpus[:1], fd, _RING_PIECE_BYTES)
            await session.close()
        finally:
            os.close(fd)
