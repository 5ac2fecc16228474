"""One GPU helper as the daemon sees it: its process, its socket, and the calls in flight, from start to end.

However it ends (deadline, signal, traceback, invalid message, idle), all calls in flight fail with the same reason. The
process is killed and reaped before the session is `over`. The link starts the next one.

A helper with work reports every second. A silent one is killed long before any deadline. A caller that knows that its
call is stuck abandons the call, and the helper lives on: the thread stays in the driver until the helper ends because
it has no work.
"""

from __future__ import annotations

import itertools
import logging
import math
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import anyio.abc

from hegmd.errors import Bug, HegmError, PeerError
from hegmd.gpu_helper.calls import GPU_ROLE, Call, HelperLost, OnProgress, Role, Watch
from hegmd.gpu_helper.wire import (
    LIMIT_BYTES,
    MAX_FDS,
    RUINOUS,
    DriverFailed,
    HelperReply,
    error_from_wire,
    mapping,
    packed,
    senseless,
    whole,
)
from hegmd.protocol.codec import decode
from hegmd.protocol.frames import FrameReader
from hegmd.system.programs import Companion, Rights
from hegmd.system.stream import PeerStream
from hegmd.telemetry.log import fields
from hegmd.telemetry.step_timings import DRIVER, HELPER, note_step

logger = logging.getLogger(__name__)

# Requests in which the helper has the driver act on a process.
DRIVER_CALLS = frozenset({"state", "lock", "checkpoint", "restore", "unlock"})
# A helper that closed its socket is ending; its exit status is the better reason.
_END_WITHIN_S = 1.0
_TAKE_WITHIN_S = 10.0

# Missed reports in a row before it is killed. A daemon that was stopped itself misses one.
_BEATS_MISSED = 10


class Session:
    """A helper, from its start to its end."""

    def __init__(self, number: int, idle_after_s: float, role: Role = GPU_ROLE) -> None:
        self.number = number
        self._role = role
        self.pid: int | None = None
        self.hello: Mapping[str, Any] = {}
        self.lost: str | None = None  # why it cannot be used
        self.status: int | None = None  # its exit status, once it has one
        self._refused: Any = None  # why it did not get ready, as it reported
        self.settled = anyio.Event()  # it is ready or failed to start
        self.over = anyio.Event()  # the process is reaped
        self._idle_after_s = idle_after_s
        self._calls: dict[int, Call] = {}
        self._left: set[int] = set()  # abandoned calls that may still get an answer
        self._spoke = anyio.Event()
        self._numbers = itertools.count(1)
        self._held = 0
        self._changed = anyio.Event()
        self._ended = anyio.Event()
        self._tasks: anyio.abc.TaskGroup | None = None
        self._stream: PeerStream | None = None
        self._companion: Companion | None = None

    # -- its life ------------------------------------------------------------------------------------------------------

    async def live(
        self,
        program: Sequence[str],
        environment: Mapping[str, str],
        start_within_s: float,
        rights: Rights | None = None,
    ) -> None:
        """Start the helper and run until it has ended. Raises nothing: callers get the errors.

        Its socket is its standard input, which every way of starting a program passes on.
        """
        if self.lost is not None:  # it was stopped before it began: nothing else would end it
            self.over.set()
            return
        try:
            own_end, helper_end = socket.socketpair()
        except OSError as error:  # the daemon may be out of descriptors
            self.lose(f"cannot be started: {error.strerror}")
            self.over.set()
            return
        number = helper_end.detach()
        self._stream = PeerStream(own_end, MAX_FDS)
        self._companion = Companion([*program, "0"], env=environment, stdin=number, rights=rights)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._watch_companion, self._companion)
                self._tasks.start_soon(self._read, self._stream)
                self._tasks.start_soon(self._limit_start, start_within_s)
                self._tasks.start_soon(self._end_when_idle)
                self._tasks.start_soon(self._listen)
        finally:
            self.lose("was stopped with hegmd")
            self._stream.close()
            self.over.set()

    def lose(self, why: str, *, quietly: bool = False) -> None:
        """Kill the helper and end all calls in flight with this reason. Only the first reason counts."""
        if self.lost is not None:
            return
        self.lost = why
        calls, self._calls = self._calls, {}
        in_flight = [call.op for call in calls.values()]
        loss = self._loss(in_flight)
        level = logging.INFO if quietly else logging.WARNING
        logger.log(level, "%s", loss.message, extra=fields(helper_pid=self.pid, output_tail=loss.facts["output_tail"]))
        for call in calls.values():
            call.end(None, self._loss(in_flight))  # one exception per call: each stores its own traceback
        self.settled.set()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def require(self) -> None:
        """Raise the reason if the helper cannot be called."""
        if self._refused is not None:
            raise error_from_wire(self._refused)
        if self.lost is not None:
            raise self._loss([])

    def _loss(self, in_flight: Sequence[str]) -> HelperLost:
        tail = "" if self._companion is None else self._companion.output_tail
        return HelperLost(self.lost or "is there", in_flight, self.pid, tail, self._role)

    async def _watch_companion(self, companion: Companion) -> None:
        try:
            status = await companion.live()
        except HegmError as error:
            self._ended.set()
            self.lose(f"cannot be started: {error.message}")
            return
        self.status = status
        self._ended.set()
        last_line = companion.output_tail.rpartition("\n")[2]
        how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        if status == -signal.SIGBUS:
            how = f"{how} (SIGBUS): a page of the pool is broken; the next resume compares every chunk and names it"
        self.lose(f"{how}: {last_line}" if last_line else how)

    async def _read(self, stream: PeerStream) -> None:
        reader = FrameReader(LIMIT_BYTES)
        try:
            while data := await stream.receive():
                self._spoke.set()
                reader.feed(data)
                while (payload := reader.next_payload()) is not None:
                    self._take(decode(payload), stream)
        except PeerError as error:
            self.lose(f"was stopped: {error.message}")
            return
        except (OSError, anyio.ClosedResourceError) as error:
            self.lose(f"cannot be reached: {error!r}")
            return
        with anyio.move_on_after(_END_WITHIN_S):
            await self._ended.wait()
        self.lose("closed its socket")

    async def _limit_start(self, within_s: float) -> None:
        with anyio.move_on_after(within_s):
            await self.settled.wait()
            return
        self.lose(f"was not ready within {within_s:g} s and was stopped")

    async def _end_when_idle(self) -> None:
        """End a helper that was idle for a while and holds nothing."""
        await self.settled.wait()
        while True:
            self._changed = anyio.Event()
            idle = not self._calls and not self._held
            with anyio.move_on_after(self._idle_after_s if idle else math.inf):
                await self._changed.wait()
                continue
            self.lose(f"was idle for {self._idle_after_s:g} s", quietly=True)
            return

    async def _listen(self) -> None:
        """Kill a helper that has work and stopped reporting: it does not run at all."""
        await self.settled.wait()
        beat_s = self.hello.get("beat_s")
        if beat_s is None:
            return
        missed = 0
        while missed < _BEATS_MISSED:
            if not self._calls:
                missed = 0
                await self._changed.wait()
            self._spoke = anyio.Event()
            with anyio.move_on_after(float(beat_s)):
                await self._spoke.wait()
            missed = 0 if self._spoke.is_set() or not self._calls else missed + 1
        self.lose(f"has work, reported nothing for {_BEATS_MISSED * beat_s:g} s, and was stopped")

    # -- messages from the helper --------------------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any], stream: PeerStream) -> None:
        """Handle one message. Raises PeerError for an invalid one."""
        if "hello" in message:
            self._take_hello(message["hello"])
            return
        if "beat" in message:
            return
        if "id" not in message and "err" in message:
            refusal = error_from_wire(message["err"])
            self._refused = message["err"]
            self.lose(f"cannot work: {refusal.message}")
            return
        number = whole(message.get("id"))
        if number in self._left:
            self._take_late(number, message, stream)
            return
        call = self._calls.get(number)
        if call is None:
            raise senseless(f"an answer to request {number!r}, which is not in flight")
        if "event" in message:
            if call.on_progress is not None and not call.dropped:
                call.on_progress(message["event"])
            return
        self._held = whole(message.get("held"))
        del self._calls[number]
        self._changed.set()
        self._end(call, message, stream)

    def _take_late(self, number: int, message: Mapping[str, Any], stream: PeerStream) -> None:
        """Handle the answer to an abandoned call."""
        if "event" in message:
            return
        self._left.discard(number)
        self._held = whole(message.get("held"))
        stream.claim(whole(message.get("fds", 0))).close()
        self._changed.set()
        logger.info("%s finished a call that was cancelled", self._role.name, extra=fields(helper_pid=self.pid))

    def _take_hello(self, hello: Any) -> None:
        self.hello = mapping(hello)
        self.pid = whole(self.hello.get("pid"))
        self.settled.set()
        logger.info("%s is ready: pid %d", self._role.name, self.pid, extra=fields(helper_pid=self.pid))

    def _end(self, call: Call, message: Mapping[str, Any], stream: PeerStream) -> None:
        if "err" in message:
            error = error_from_wire(message["err"])
            call.end(None, error)
            if isinstance(error, DriverFailed) and error.number in RUINOUS:
                self.lose(f"was stopped: after {error.message}, every call in that context fails")
            return
        values = mapping(message.get("ok"))
        fds = stream.claim(whole(message.get("fds", 0)))
        call.end(HelperReply(values, fds, self.number), None)

    # -- calls to the helper -------------------------------------------------------------------------------------------

    async def call(
        self,
        op: str,
        args: Mapping[str, object],
        deadline_s: float,
        fds: Sequence[int],
        on_progress: OnProgress | None,
        watch: Watch | None = None,
    ) -> HelperReply:
        """Send a request and wait for its answer, or until `watch` says that it is stuck."""
        if self._tasks is None or self._stream is None:
            raise Bug("a helper is called that was not started")
        self.require()
        number = next(self._numbers)
        call = Call(op, on_progress)
        message = packed({"id": number, "op": op, "args": args, "fds": len(fds)})
        self._calls[number] = call
        self._changed.set()
        try:
            await self._send(message, fds, self._stream)
        except anyio.get_cancelled_exc_class():  # cancelled before it was sent
            self._calls.pop(number, None)
            self._changed.set()
            raise
        if not call.over.is_set():
            self._tasks.start_soon(self._limit, call, deadline_s)
        began = time.monotonic()
        try:
            await self._until_over(number, call, watch)
        except anyio.get_cancelled_exc_class():
            call.drop()
            raise
        ended = time.monotonic()
        note_step(HELPER, op, began, ended)
        if op in DRIVER_CALLS:
            note_step(DRIVER, op, began, ended)
        logger.debug("helper: %s took %.1f ms", op, (ended - began) * 1e3)
        return call.outcome()

    async def _until_over(self, number: int, call: Call, watch: Watch | None) -> None:
        if watch is None:
            await call.over.wait()
            return

        async def look() -> None:
            stuck = await watch()
            if self._calls.pop(number, None) is not None:  # it has no answer yet
                logger.warning("%s", stuck.message, extra=fields(helper_pid=self.pid))
                self._left.add(number)
                call.end(None, stuck)
                self._changed.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await call.over.wait()
            tasks.cancel_scope.cancel()

    async def _send(self, message: bytes, fds: Sequence[int], stream: PeerStream) -> None:
        try:
            await stream.send(message, _TAKE_WITHIN_S, fds)
        except (OSError, anyio.ClosedResourceError) as error:
            self.lose(f"cannot be reached: {error!r}")
        except HegmError as error:
            self.lose(f"was stopped: it reads no requests: {error.message}")

    async def _limit(self, call: Call, deadline_s: float) -> None:
        with anyio.move_on_after(deadline_s):
            await call.over.wait()
            return
        self.lose(f"was ended: `{call.op}` was not done after {deadline_s:g} s")
