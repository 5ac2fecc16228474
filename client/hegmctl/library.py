"""The calls of both libraries, made from the requests in the table of commands.

A call takes the fields of its request. Those without a default, and those that name jobs or GPUs, can be given by
position, the others by name. It returns the request's reply. A call that starts an operation also takes `on_progress`,
which gets every step; the call waits until the operation has ended, unless `wait` is False. The daemon owns the
operation: it continues without its caller. A rolled back operation is a reply too, whose `failure` says why. A request
that is refused raises HegmError.

Type checkers and editors read library.pyi, which `make docs` writes from the same table.
"""

from __future__ import annotations

from hegmctl.grammar import COMMANDS
from hegmd.protocol.messages import REQUESTS, MakeRoom, WaitForJob
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import REQUIRED, as_map

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Any

    from hegmctl.grammar.rows import Command
    from hegmd.protocol.messages import Request

_BY_POSITION = ("pids", "gpus", "to")
# Fields whose calls are written by hand.
_LEFT_OUT = ("follow",)


class SyncCalls:
    """The calls of a Connection."""


class AsyncCalls:
    """The calls of an AsyncConnection, as coroutines. They await `on_progress` too."""


def calls_of(rows: Iterable[Command]) -> dict[str, type[Request]]:
    """Return the request of each call, by the call's name."""
    return {form.call: REQUESTS[form.request] for row in rows for form in row.forms if form.request and form.call}


def parameters(kind: type[Request]) -> tuple[list[str], list[str]]:
    """Return the parameters of a call: those by position, and those by name."""
    names = [field.name for field in kind.fields if field.name not in _LEFT_OUT]
    required = [field.name for field in kind.fields if field.default is REQUIRED]
    placed = required + [name for name in names if name in _BY_POSITION and name not in required]
    return placed, [name for name in names if name not in placed]


def is_operation(kind: type[Request]) -> bool:
    """Return True if the request starts operations, which report progress."""
    return kind.event is OperationProgress and kind.changes_state


def waits(kind: type[Request]) -> bool:
    """Return True if the reply can take as long as a job, so that the daemon reports progress meanwhile."""
    return is_operation(kind) or kind in (MakeRoom, WaitForJob)


def add_calls(sync: type, asynchronous: type, rows: Iterable[Command]) -> None:
    for name, kind in calls_of(rows).items():
        for face, made in ((sync, _sync(kind)), (asynchronous, _async(kind))):
            made.__name__, made.__qualname__, made.__doc__ = name, f"{face.__name__}.{name}", kind.__doc__
            setattr(face, name, made)


def _request(kind: type[Request], placed: list[str], given: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Return the request, and the descriptors that go with it."""
    if len(given) > len(placed):
        raise TypeError(f"{kind.__name__} takes {len(placed)} values by position; {len(given)} were given")
    values = {**dict(zip(placed, given, strict=False)), **named}
    if len(values) < len(given) + len(named):
        raise TypeError(f"{kind.__name__} was given a value by position and by name")
    outlets = as_map(values.get("outlets")) or {}
    for field in kind.fields:
        if field.type_text.startswith("tuple[") and field.name in values:
            value = values[field.name]
            values[field.name] = (value,) if isinstance(value, (int, str)) else tuple(value or ())
    return kind(**values), tuple(outlets.values())


def _sync(kind: type[Request]) -> Callable[..., Any]:
    placed, _by_name = parameters(kind)

    def call(self: Any, *values: Any, **named: Any) -> Any:
        request, fds = _request(kind, placed, values, named)
        return self.call(request, kind.reply, fds=fds)

    def begin(self: Any, *given: Any, on_progress: Callable[[Any], object] | None = None, **named: Any) -> Any:
        request, fds = _request(kind, placed, given, named)
        return self.converse(request, kind.event, kind.reply, on_progress, fds=fds, patient=True)

    return begin if waits(kind) else call


def _async(kind: type[Request]) -> Callable[..., Coroutine[Any, Any, Any]]:
    placed, _by_name = parameters(kind)

    async def call(self: Any, *values: Any, **named: Any) -> Any:
        request, fds = _request(kind, placed, values, named)
        return await self.call(request, kind.reply, fds=fds)

    async def begin(self: Any, *given: Any, on_progress: Any = None, **named: Any) -> Any:
        request, fds = _request(kind, placed, given, named)
        return await self.converse(request, kind.event, kind.reply, on_progress, fds=fds)

    return begin if waits(kind) else call


add_calls(SyncCalls, AsyncCalls, COMMANDS.values())
