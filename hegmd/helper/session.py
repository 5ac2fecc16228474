"""One GPU helper as the daemon sees it: its process, its socket, and the calls in flight, from its start to its end.

However it ends (over a deadline, by a signal, by a traceback, by nonsense on the socket, for want of work), everybody
in flight is told the one reason, and the process is killed and reaped before the session is `over`. Starting the next
one is the link's.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.abc

from hegmd.errors import UNAVAILABLE, Bug, HegmError, PeerError
from hegmd.external import Companion, Rights
from hegmd.helper.wire import (
    LIMIT_BYTES,
    MAX_FDS,
    RUINOUS,
    Answer,
    DriverFailed,
    error_told,
    mapping,
    packed,
    senseless,
    whole,
)
from hegmd.log import fields
from hegmd.protocol.codec import decode
from hegmd.protocol.frames import FrameReader
from hegmd.stream import PeerStream

logger = logging.getLogger(__name__)

# A helper whose socket has ended is on its way out, and how it ended is the better reason.
_END_WITHIN_S = 1.0
_TAKE_WITHIN_S = 10.0

OnProgress = Callable[[Mapping[str, Any]], object]


class Role(NamedTuple):
    """What a helper is called, and what to do when one is lost."""

    name: str
    hint: str


GPU_ROLE = Role(
    "the GPU helper",
    "the next call starts a new one; if it happens again, look for an Xid in `dmesg` and at hegmd's log",
)


class HelperLost(HegmError):
    """The helper ended while calls were in flight, or could not start. Whether these calls took effect is unknown."""

    def __init__(
        self, why: str, in_flight: Sequence[str], pid: int | None, output_tail: str, role: Role = GPU_ROLE
    ) -> None:
        who = role.name if pid is None else f"{role.name} (pid {pid})"
        after = f"; in flight: {', '.join(in_flight)}" if in_flight else ""
        super().__init__(
            UNAVAILABLE,
            f"{who} {why}{after}",
            role.hint,
            {"in_flight": list(in_flight), "helper_pid": pid, "output_tail": output_tail},
        )
        self.in_flight = tuple(in_flight)


class Call:
    """One request in flight. `over` is set when it has an answer or an error."""

    def __init__(self, op: str, on_progress: OnProgress | None) -> None:
        self.op = op
        self.on_progress = on_progress
        self.over = anyio.Event()
        self.error: HegmError | None = None
        self.answer: Answer | None = None
        self.dropped = False

    def end(self, answer: Answer | None, error: HegmError | None) -> None:
        if self.dropped and answer is not None:
            answer.fds.close()
        self.answer, self.error = answer, error
        self.over.set()

    def drop(self) -> None:
        """Nobody waits any more."""
        self.dropped = True
        if self.answer is not None:
            self.answer.fds.close()

    def outcome(self) -> Answer:
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise Bug("a call to the helper ended with nothing", facts={"op": self.op})
        return self.answer


class Session:
    """One helper, from its start to its end."""

    def __init__(self, number: int, idle_after_s: float, role: Role = GPU_ROLE) -> None:
        self.number = number
        self._role = role
        self.pid: int | None = None
        self.hello: Mapping[str, Any] = {}
        self.lost: str | None = None  # why it is of no more use
        self._refused: Any = None  # why it could not get ready, in its own words
        self.settled = anyio.Event()  # it is ready, or will never be
        self.over = anyio.Event()  # it is reaped
        self._idle_after_s = idle_after_s
        self._calls: dict[int, Call] = {}
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
        """Start it and see it through. What goes wrong is told to whoever calls, never raised.

        Its socket is its standard input, which every way of starting a program passes on.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # of descriptors there may be none left for a while
            self.lose(f"cannot be started: {error.strerror}")
            self.over.set()
            return
        number = theirs.detach()
        self._stream = PeerStream(ours, MAX_FDS)
        self._companion = Companion([*program, "0"], env=environment, stdin=number, rights=rights)
        try:
            async with anyio.create_task_group() as self._tasks:
                self._tasks.start_soon(self._accompany, self._companion)
                self._tasks.start_soon(self._read, self._stream)
                self._tasks.start_soon(self._limit_start, start_within_s)
                self._tasks.start_soon(self._rest)
        finally:
            self.lose("was ended with hegmd")
            self._stream.close()
            self.over.set()

    def lose(self, why: str, *, quietly: bool = False) -> None:
        """It is of no more use: everybody in flight is told why, and it is killed. Only the first reason counts."""
        if self.lost is not None:
            return
        self.lost = why
        calls, self._calls = self._calls, {}
        in_flight = [call.op for call in calls.values()]
        loss = self._loss(in_flight)
        level = logging.INFO if quietly else logging.WARNING
        logger.log(level, "%s", loss.message, extra=fields(helper_pid=self.pid, output_tail=loss.facts["output_tail"]))
        for call in calls.values():
            call.end(None, self._loss(in_flight))  # each its own: an exception remembers where it was raised
        self.settled.set()
        if self._tasks is not None:
            self._tasks.cancel_scope.cancel()

    def require(self) -> None:
        """Raise why it cannot be called, if so."""
        if self._refused is not None:
            raise error_told(self._refused)
        if self.lost is not None:
            raise self._loss([])

    def _loss(self, in_flight: Sequence[str]) -> HelperLost:
        tail = "" if self._companion is None else self._companion.output_tail
        return HelperLost(self.lost or "is there", in_flight, self.pid, tail, self._role)

    async def _accompany(self, companion: Companion) -> None:
        try:
            status = await companion.live()
        except HegmError as error:
            self._ended.set()
            self.lose(f"cannot be started: {error.message}")
            return
        self._ended.set()
        last_line = companion.output_tail.rpartition("\n")[2]
        how = f"ended with status {status}" if status >= 0 else f"was killed by signal {-status}"
        self.lose(f"{how}: {last_line}" if last_line else how)

    async def _read(self, stream: PeerStream) -> None:
        reader = FrameReader(LIMIT_BYTES)
        try:
            while data := await stream.receive():
                reader.feed(data)
                while (payload := reader.next_payload()) is not None:
                    self._take(decode(payload), stream)
        except PeerError as error:
            self.lose(f"was ended: {error.message}")
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
        self.lose(f"was not ready after {within_s:g} s, and was ended")

    async def _rest(self) -> None:
        """End a helper that has had nothing to do for a while and holds nothing."""
        await self.settled.wait()
        while True:
            self._changed = anyio.Event()
            idle = not self._calls and not self._held
            with anyio.move_on_after(self._idle_after_s if idle else math.inf):
                await self._changed.wait()
                continue
            self.lose(f"had nothing to do for {self._idle_after_s:g} s", quietly=True)
            return

    # -- what it says --------------------------------------------------------------------------------------------------

    def _take(self, message: Mapping[str, Any], stream: PeerStream) -> None:
        """Take one message. Raises PeerError for what makes no sense."""
        if "hello" in message:
            self._take_hello(message["hello"])
            return
        if "id" not in message and "err" in message:
            refusal = error_told(message["err"])
            self._refused = message["err"]
            self.lose(f"cannot work: {refusal.message}")
            return
        number = whole(message.get("id"))
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

    def _take_hello(self, hello: Any) -> None:
        self.hello = mapping(hello)
        self.pid = whole(self.hello.get("pid"))
        self.settled.set()
        logger.info("%s is ready: pid %d", self._role.name, self.pid, extra=fields(helper_pid=self.pid))

    def _end(self, call: Call, message: Mapping[str, Any], stream: PeerStream) -> None:
        if "err" in message:
            error = error_told(message["err"])
            call.end(None, error)
            if isinstance(error, DriverFailed) and error.number in RUINOUS:
                self.lose(f"was ended: {error.message}, after which every call in that context fails")
            return
        values = mapping(message.get("ok"))
        fds = stream.claim(whole(message.get("fds", 0)))
        call.end(Answer(values, fds, self.number), None)

    # -- what it is asked ----------------------------------------------------------------------------------------------

    async def call(
        self, op: str, args: Mapping[str, object], deadline_s: float, fds: Sequence[int], on_progress: OnProgress | None
    ) -> Answer:
        """Ask, and wait for the answer."""
        if self._tasks is None or self._stream is None:
            raise Bug("a helper is asked that was not started")
        self.require()
        number = next(self._numbers)
        call = Call(op, on_progress)
        message = packed({"id": number, "op": op, "args": args, "fds": len(fds)})
        self._calls[number] = call
        self._changed.set()
        try:
            await self._send(message, fds, self._stream)
        except anyio.get_cancelled_exc_class():  # while it waited its turn: nothing was sent
            self._calls.pop(number, None)
            self._changed.set()
            raise
        if not call.over.is_set():
            self._tasks.start_soon(self._limit, call, deadline_s)
        began = anyio.current_time()
        try:
            await call.over.wait()
        except anyio.get_cancelled_exc_class():
            call.drop()
            raise
        logger.debug("helper: %s took %.1f ms", op, (anyio.current_time() - began) * 1e3)
        return call.outcome()

    async def _send(self, message: bytes, fds: Sequence[int], stream: PeerStream) -> None:
        try:
            await stream.send(message, _TAKE_WITHIN_S, fds)
        except (OSError, anyio.ClosedResourceError) as error:
            self.lose(f"cannot be reached: {error!r}")
        except HegmError as error:
            self.lose(f"was ended: it takes nothing in: {error.message}")

    async def _limit(self, call: Call, deadline_s: float) -> None:
        with anyio.move_on_after(deadline_s):
            await call.over.wait()
            return
        self.lose(f"was ended: `{call.op}` was not done after {deadline_s:g} s")
