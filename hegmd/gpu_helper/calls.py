"""A request to a helper while it is in flight, and how it can end without an answer.

The helper is lost, or the call is stuck and abandoned. In both cases it is unknown whether the request took effect, and
callers handle both alike.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import anyio

from hegmd.errors import UNAVAILABLE, Bug, HegmError
from hegmd.gpu_helper.wire import HelperReply

OnProgress = Callable[[Mapping[str, Any]], object]


class Role(NamedTuple):
    """The name of a helper in messages, and the hint if one is lost."""

    name: str
    hint: str


GPU_ROLE = Role(
    "the GPU helper",
    "repeat the command, which starts a new helper; if it fails again, look for an Xid in `dmesg` and read hegmd's log",
)


class HelperLost(HegmError):
    """The helper ended during calls, or could not start. It is unknown whether these calls took effect."""

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


class Stuck(HelperLost):
    """A call that makes no progress was abandoned; the helper still runs. It is unknown whether the call takes
    effect."""

    def __init__(self, message: str, hint: str, op: str, facts: Mapping[str, object] | None = None) -> None:
        HegmError.__init__(self, UNAVAILABLE, message, hint, {**(facts or {}), "in_flight": [op]})
        self.in_flight = (op,)


#: Returns the reason when a call is to be abandoned. Cancelled when the answer comes.
Watch = Callable[[], Awaitable[Stuck]]


class Call:
    """A request in flight. `over` is set when it has an answer or an error."""

    def __init__(self, op: str, on_progress: OnProgress | None) -> None:
        self.op = op
        self.on_progress = on_progress
        self.over = anyio.Event()
        self.error: HegmError | None = None
        self.answer: HelperReply | None = None
        self.dropped = False

    def end(self, answer: HelperReply | None, error: HegmError | None) -> None:
        if self.dropped and answer is not None:
            answer.fds.close()
        self.answer, self.error = answer, error
        self.over.set()

    def drop(self) -> None:
        """Drop the answer: the caller was cancelled."""
        self.dropped = True
        if self.answer is not None:
            self.answer.fds.close()

    def outcome(self) -> HelperReply:
        if self.error is not None:
            raise self.error
        if self.answer is None:
            raise Bug("a call to the helper returned neither a result nor an error", facts={"op": self.op})
        return self.answer
