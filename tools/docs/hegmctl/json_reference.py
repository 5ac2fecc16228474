"""The generated half of docs/json.md: what each command prints, and the records that are not in docs/protocol.md.

A record of the protocol is printed as it travels, so the page links to its description. The other records are those in
`answers` and in the manifests of images. A test keeps the file fresh.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmctl.grammar import COMMANDS
from hegmctl.grammar.rows import AFTER_PROGRESS, ONE, Command, CommandForm, load
from hegmctl.library import is_operation
from hegmd.protocol.messages import REQUESTS, ErrorInfo, RoomProgress
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Record
from tools.docs.reference import fields, inside, linked, public_records

BEGIN = "<!-- Below this line: written by `python3 -m tools.docs.hegmctl json docs/json.md`. -->"


def printed(rows: Iterable[Command] = COMMANDS.values()) -> list[tuple[str, type[Record], str]]:
    """Return what each command prints, and how. `run` is not among them: it becomes its command, and prints nothing
    itself.
    """
    return [(f"{row.name} {form.words}".rstrip(), *_printed(form)) for row in rows for form in row.forms]


def _printed(form: CommandForm) -> tuple[type[Record], str]:
    request = REQUESTS.get(form.request)
    how = form.prints or (AFTER_PROGRESS if request is not None and is_operation(request) else ONE)
    if how == AFTER_PROGRESS and request is not None and request.event is not None:
        how = f"after lines of {_linked(request.event)}"
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
    commands: dict[type[Record], dict[str, list[str]]] = {}
    for command, record, how in printed():
        commands.setdefault(record, {}).setdefault(how, []).append(f"`{command}`")
    lines = ["## What each command prints", "", "| commands | prints |", "|---|---|"]
    for record, forms in commands.items():
        texts = [f"{', '.join(names)}{'' if how == ONE else f', {how}'}" for how, names in forms.items()]
        lines.append(f"| {'; '.join(texts)} | {_linked(record)} |")
    lines += ["", "## Records that are not in the protocol", ""]
    for record in _reachable():
        if record not in public_records():
            described = (record.__doc__ or "").strip()
            lines += [f"### {record.__name__}", ""]
            if not described.startswith("The answer of") or ":" in described:  # the table above names the command
                lines += [described, ""]
            lines += [*fields(record, linked=_linked), ""]
    return "\n".join(lines)


def _linked(record: type[Record]) -> str:
    return linked(record, "protocol.md") if record in public_records() else linked(record)


def _reachable() -> list[type[Record]]:
    """Every record that can be printed, in the order in which a reader meets them."""
    found: list[type[Record]] = []
    waiting = [record for _command, record, _how in printed()] + [OperationProgress, RoomProgress, ErrorInfo]
    while waiting:
        record = waiting.pop(0)
        if record in found:
            continue
        found.append(record)
        waiting[:0] = inside(record)
    return found
