"""The generated half of docs/json.md: for each command the record it prints, and every field of every record.

The fields are those of the records that travel on the wire and of those in `answers`, so the reference cannot say
anything else than what the program prints; a test keeps the file fresh.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from hegmctl.grammar import COMMANDS
from hegmctl.grammar.rows import AFTER_PROGRESS, ONE, Command, Form, load
from hegmctl.library import is_operation
from hegmd.protocol.messages import REQUESTS, ErrorInfo
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Field, Record

BEGIN = "<!-- Below this line: written by `python3 -m tools.docs.hegmctl json docs/json.md`. -->"

_JSON_TYPES = {"int": "integer", "float": "number", "bool": "true or false", "str": "string", "object": "any"}


def printed(rows: Iterable[Command] = COMMANDS.values()) -> list[tuple[str, type[Record], str]]:
    """What each command prints, and how. `run` is not among them: it becomes its command, and prints nothing itself."""
    return [(f"{row.name} {form.words}".rstrip(), *_printed(form)) for row in rows for form in row.forms]


def _printed(form: Form) -> tuple[type[Record], str]:
    request = REQUESTS.get(form.request)
    how = form.prints or (AFTER_PROGRESS if request is not None and is_operation(request) else ONE)
    if form.record or request is None:
        module, _, name = form.record.rpartition(":")
        package, _, last = module.rpartition(".")
        return load(f"{last}:{name}", package), how
    return request.reply, how


def refreshed(text: str) -> str:
    """The document with its generated half written anew."""
    written, mark, _old = text.partition(BEGIN)
    if not mark:
        raise ValueError(f"the line {BEGIN!r} is missing")
    return f"{written}{BEGIN}\n\n{reference()}"


def reference() -> str:
    """The generated half."""
    lines = ["## What each command prints", "", "| command | prints | how |", "| --- | --- | --- |"]
    for command, record, how in printed():
        lines.append(f"| `hegmctl {command} --json` | {_linked(record)} | {how} |")
    lines += ["", "## Records", ""]
    for record in _reachable():
        lines += [f"### {record.__name__}", "", (record.__doc__ or "").strip(), "", "| field | type | meaning |"]
        lines += ["| --- | --- | --- |", *[_row(field, record) for field in record.fields], ""]
    return "\n".join(lines)


def _row(field: Field, record: type[Record]) -> str:
    return f"| `{field.name}` | {_type(field.type_text, record)} | {field.doc} |"


def _linked(record: type[Record]) -> str:
    return f"[{record.__name__}](#{record.__name__.lower()})"


def _type(text: str, owner: type[Record]) -> str:
    if text.endswith(" | None"):
        return f"{_type(text.removesuffix(' | None'), owner)}, or null"
    if text.startswith("tuple["):
        return f"list of {_type(text.removeprefix('tuple[').removesuffix(', ...]'), owner)}"
    if text.startswith("Mapping[str, "):
        return f"object of {_type(text.removeprefix('Mapping[str, ').removesuffix(']'), owner)}"
    return _JSON_TYPES.get(text) or _linked(_named(text, owner))


def _named(text: str, owner: type[Record]) -> type[Record]:
    found: type[Record] = vars(sys.modules[owner.__module__])[text]
    return found


def _reachable() -> list[type[Record]]:
    """Every record that can be printed, in the order in which a reader meets them."""
    found: list[type[Record]] = []
    waiting = [record for _command, record, _how in printed()] + [OperationProgress, ErrorInfo]
    while waiting:
        record = waiting.pop(0)
        if record in found:
            continue
        found.append(record)
        waiting[:0] = [named for field in record.fields for named in _inside(field.type_text, record)]
    return found


def _inside(text: str, owner: type[Record]) -> list[type[Record]]:
    bare = text.removesuffix(" | None")
    for opening, closing in (("tuple[", ", ...]"), ("Mapping[str, ", "]")):
        if bare.startswith(opening):
            return _inside(bare.removeprefix(opening).removesuffix(closing), owner)
    return [] if bare in _JSON_TYPES else [_named(bare, owner)]
