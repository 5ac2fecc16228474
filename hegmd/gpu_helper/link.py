"""The daemon's side of the GPU helper: started on demand, called with a deadline, killed and restarted.

Every call has a deadline, even if its caller was cancelled. A call that exceeds it has a thread stuck in the driver,
which only the end of the process frees. So the helper is killed, and all calls in flight raise `HelperLost`, which
names them. The next call starts a new helper. No bytes are lost: the daemon holds descriptors of them, and the driver
finishes a checkpoint or restore in the target process (580.159). Callers inspect what became of their calls.

A helper that holds nothing and gets no calls ends after a while: it keeps the driver's device nodes open.

Belongs to the event loop, which it never blocks. `Link.run` has to be running.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hegmd.gpu_helper.calls import HelperLost, OnProgress, Stuck, Watch
from hegmd.gpu_helper.session import Session
from hegmd.gpu_helper.wire import DriverFailed, HelperReply
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.programs import SYSTEM_PATH

__all__ = ["HelperReply", "DriverFailed", "HelperLost", "Link", "Stuck", "Watch", "child_environment"]

PROGRAM = (sys.executable, "-m", "hegmd.gpu_helper.child")
# cuInit takes 0.9 s with four GPUs; up to 2.7 s were reported with eight.
START_WITHIN_S = 30.0
IDLE_AFTER_S = 60.0
# From this size on, copies of the C library write past the cache: bytes in the pool are not read again soon. With 16
# cores that is 48 instead of 38 GB/s out of an H200. Other libraries and processors do not know this variable.
_NON_TEMPORAL_BYTES = 8 << 20
_COPIES = {"GLIBC_TUNABLES": f"glibc.cpu.x86_non_temporal_threshold={_NON_TEMPORAL_BYTES}"}


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the helper's environment: paths of our code and of the driver's library, and all GPUs in bus order.

    CUDA_VISIBLE_DEVICES is left out: the map of a restore has to name every GPU that the driver sees.
    """
    kept = {name: value for name, value in environ.items() if name == "LD_LIBRARY_PATH" or name.startswith("HEGM_")}
    return {
        **kept,
        "PATH": SYSTEM_PATH,
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if os.path.isabs(path)),
        "PYTHONSAFEPATH": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MODULE_LOADING": "LAZY",
        "CUDA_CACHE_DISABLE": "1",
    }


class Link(BackgroundTasks):
    """A helper at a time for all callers. `program` gets the number of its socket as its last argument."""

    def __init__(
        self,
        *,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
        start_within_s: float = START_WITHIN_S,
        idle_after_s: float = IDLE_AFTER_S,
    ) -> None:
        self._program = tuple(program)
        environ = child_environment(os.environ) if environment is None else environment
        self._environment = {**_COPIES, **environ}
        self._start_within_s = start_within_s
        self._idle_after_s = idle_after_s
        super().__init__()
        self._session: Session | None = None
        self._starts = 0

    @property
    def pid(self) -> int | None:
        """Return the pid of the running helper; None if there is none."""
        session = self._session
        return None if session is None or session.lost is not None else session.pid

    async def start(self) -> Mapping[str, Any]:
        """Start a helper if none is ready, and return its hello. Raises HelperLost, or the helper's reason."""
        session = await self._ready()
        return session.hello

    async def call(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        deadline_s: float,
        fds: Sequence[int] = (),
        on_progress: OnProgress | None = None,
        helper: int | None = None,
        watch: Watch | None = None,
    ) -> HelperReply:
        """Send a request to the helper. The answer owns its descriptors; those sent stay the caller's.

        `helper` comes from an earlier answer: the call needs what that helper has. The deadline starts when the helper
        is ready. Raises DriverFailed, Refused or the request's error, and HelperLost if the helper ended first. If the
        caller is cancelled, the request and its deadline continue, and the answer is dropped.
        """
        if helper is not None and not self._is_there(helper):
            raise HelperLost("was replaced after this was started", [op], None, "")
        session = await self._ready()
        return await session.call(op, args or {}, deadline_s, fds, on_progress, watch)

    def kill(self, why: str) -> None:
        """Kill the helper with everything it has. Does nothing if there is none."""
        if self._session is not None:
            self._session.lose(f"was stopped: {why}")

    def _is_there(self, number: int) -> bool:
        session = self._session
        return session is not None and session.number == number and session.lost is None

    async def _ready(self) -> Session:
        while True:
            session = self._session
            if session is None or session.over.is_set():
                session = self._begin()
            elif session.lost is not None:  # it is ending: its GPU memory is free once it is reaped
                await session.over.wait()
                continue
            await session.settled.wait()
            session.require()
            return session

    def _begin(self) -> Session:
        tasks = self._open_tasks()
        self._starts += 1
        session = self._session = Session(self._starts, self._idle_after_s)
        tasks.start_soon(session.live, self._program, self._environment, self._start_within_s)
        return session
