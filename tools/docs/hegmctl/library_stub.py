"""client/hegmctl/library.pyi: the calls of both library faces, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Iterable

from hegmctl.grammar import COMMANDS
from hegmctl.grammar.rows import Command
from hegmctl.library import calls_of, parameters, waits
from hegmd.protocol import messages
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import REQUIRED, Field

_HEAD = """\
# Written from the table of commands by `python3 -m tools.docs.hegmctl stub client/hegmctl/library.pyi`.

from collections.abc import Awaitable, Callable, Iterable, Mapping

from hegmctl.grammar.rows import Command
from hegmd.protocol import messages as m
from hegmd.protocol.operations import OperationProgress

def calls_of(rows: Iterable[Command]) -> dict[str, type[m.Request]]: ...
def parameters(kind: type[m.Request]) -> tuple[list[str], list[str]]: ...
def is_operation(kind: type[m.Request]) -> bool: ...
def waits(kind: type[m.Request]) -> bool: ...
def add_calls(sync: type, asynchronous: type, rows: Iterable[Command]) -> None: ...
"""


def stub(rows: Iterable[Command] = COMMANDS.values()) -> str:
    """The text of the file."""
    calls = calls_of(rows)
    lines = [_HEAD]
    for face, start, callback_result in (
        ("SyncCalls", "def", "object"),
        ("AsyncCalls", "async def", "Awaitable[object]"),
    ):
        lines.append(f"class {face}:")
        for name, kind in calls.items():
            lines += _call(name, kind, start, callback_result)
        lines.append("")
    return "\n".join(lines)


def _call(name: str, kind: type[messages.Request], start: str, callback_result: str) -> list[str]:
    fields = {field.name: field for field in kind.fields}
    placed, named = parameters(kind)
    given = [_parameter(fields[each]) for each in placed]
    by_name = [_parameter(fields[each]) for each in named]
    if waits(kind) and kind.event is not None:
        event = "OperationProgress" if kind.event is OperationProgress else f"m.{kind.event.__name__}"
        by_name.append(f"on_progress: Callable[[{event}], {callback_result}] | None = None")
    every = ["self", *given, *(["*", *by_name] if by_name else [])]
    reply = f"m.{kind.reply.__name__}"
    one_line = f"    {start} {name}({', '.join(every)}) -> {reply}: ..."
    if len(one_line) <= 120:
        return [one_line]
    inside = f"        {', '.join(every)}"
    return [
        f"    {start} {name}(",
        *([inside] if len(inside) <= 120 else [f"        {each}," for each in every]),
        f"    ) -> {reply}: ...",
    ]


def _parameter(field: Field) -> str:
    kind = field.type_text
    if field.name == "outlets":
        kind = "Mapping[str, int] | None"  # the descriptors, by the names that the request has
    elif kind.startswith("tuple["):
        inner = kind.removeprefix("tuple[").removesuffix(", ...]")
        kind = f"{inner} | Iterable[{inner}]" if inner.startswith("int") else f"Iterable[{inner}]"
    return f"{field.name}: {kind}" if field.default is REQUIRED else f"{field.name}: {kind} = ..."
