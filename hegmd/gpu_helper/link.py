"""The daemon's side of the GPU helper: started on demand, called with a deadline, killed and started anew.

Every call has a deadline, whoever waits for it or no longer does. One that is over its time means that a thread of the
helper is stuck in the driver, and nothing but the process's end gets it out: the helper is killed, and all calls that
were in flight fail as `HelperLost`, which says which. The next call starts a new helper. Nothing is lost with one: what
it fills belongs to descriptors that the daemon holds, and a process in the middle of a checkpoint or restore finishes
that step by itself (580.159). What became of the calls in flight is for their callers to look at.

A helper that holds nothing and is not called ends after a while: it keeps the driver's device nodes open.

Belongs to the event loop, which it never blocks. `Link.run` has to be running.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hegmd.errors import Bug
from hegmd.gpu_helper.calls import HelperLost, OnProgress, Stuck, Watch
from hegmd.gpu_helper.session import Session
from hegmd.gpu_helper.wire import Answer, DriverFailed
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.programs import SYSTEM_PATH

__all__ = ["Answer", "DriverFailed", "HelperLost", "Link", "Stuck", "Watch", "child_environment"]

PROGRAM = (sys.executable, "-m", "hegmd.gpu_helper.child")
# cuInit takes 0.9 s with four GPUs, and up to 2.7 s have been reported with eight.
START_WITHIN_S = 30.0
IDLE_AFTER_S = 60.0


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What the helper gets: where our code and the driver's library are, and every GPU in the order of the bus.

    CUDA_VISIBLE_DEVICES is left out on purpose: a map for restore has to name every GPU that the driver sees.
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
    """One helper at a time, for everybody. `program` gets the number of its socket as its last argument."""

    def __init__(
        self,
        *,
        program: Sequence[str] = PROGRAM,
        environment: Mapping[str, str] | None = None,
        start_within_s: float = START_WITHIN_S,
        idle_after_s: float = IDLE_AFTER_S,
    ) -> None:
        self._program = tuple(program)
        self._environment = child_environment(os.environ) if environment is None else dict(environment)
        self._start_within_s = start_within_s
        self._idle_after_s = idle_after_s
        super().__init__()
        self._session: Session | None = None
        self._starts = 0

    @property
    def pid(self) -> int | None:
        """The helper that can be called now; None when there is none."""
        session = self._session
        return None if session is None or session.lost is not None else session.pid

    async def start(self) -> Mapping[str, Any]:
        """Have a helper that is ready, and what it said of itself. Raises HelperLost, or why it cannot work."""
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
    ) -> Answer:
        """Have the helper do it. The answer owns the descriptors that came; those sent along stay the caller's.

        `helper` is of an earlier answer: what that helper has is needed, so no other will do. The deadline counts from
        when the helper is ready. Raises DriverFailed, Refused or whatever the request failed with; HelperLost when the
        helper ended first. Cancelled, the request goes on by itself, its deadline too, and its answer is dropped.
        """
        if helper is not None and not self._is_there(helper):
            raise HelperLost("was replaced after this was started", [op], None, "")
        session = await self._ready()
        return await session.call(op, args or {}, deadline_s, fds, on_progress, watch)

    def kill(self, why: str) -> None:
        """End the helper now, with everything it has. Fine when there is none."""
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
            elif session.lost is not None:  # on its way out: its memory on the GPUs is not free before it is reaped
                await session.over.wait()
                continue
            await session.settled.wait()
            session.require()
            return session

    def _begin(self) -> Session:
        if self._tasks is None:
            raise Bug("the GPU helper is called before its link runs")
        self._starts += 1
        session = self._session = Session(self._starts, self._idle_after_s)
        self._tasks.start_soon(session.live, self._program, self._environment, self._start_within_s)
        return session
