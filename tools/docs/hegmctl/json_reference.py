"""The generated half of docs/json.md: for each command the record it prints, and every field of every record.

The fields are those of the records that travel on the wire and of those in `answers`, so the reference cannot say
anything else than what the program prints; a test keeps the file fresh.
"""

from __future__ import annotations

import sys

from hegmctl.answers import DoctorAnswer, HegmAnswer, PingAnswer, VersionAnswer
from hegmd.protocol.images import ImageRemoved, ImagesSeen, ImageVerified, Manifest
from hegmd.protocol.messages import (
    ConfigReply,
    Drained,
    Dropped,
    ErrorInfo,
    FaultReply,
    GpusReply,
    HoldReply,
    MetricsReply,
    OperationReply,
    OperationsReply,
    OrphansReply,
    ProcessesReply,
    ReloadReply,
    StoryReply,
)
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.record import Field, Record
from hegmd.protocol.snapshots import Event

BEGIN = "<!-- Below this line: written by `python3 -m tools.docs.hegmctl json docs/json.md`. -->"

_ONE = "one document"
_LINES = "one document a line"
_AFTER_PROGRESS = "lines of [OperationProgress](#operationprogress), then one document"

# What each command prints, and how. `run` is not among them: it becomes its command, and prints nothing itself.
PRINTED: tuple[tuple[str, type[Record], str], ...] = (
    ("gpus", GpusReply, _ONE),
    ("ps", ProcessesReply, _ONE),
    ("ps --watch", ProcessesReply, _LINES),
    ("events", Event, _LINES),
    ("doctor", DoctorAnswer, _ONE),
    ("version", VersionAnswer, _ONE),
    ("config", ConfigReply, _ONE),
    ("config --reload", ReloadReply, _ONE),
    ("metrics", MetricsReply, _ONE),
    ("ping", PingAnswer, _ONE),
    ("hegm enable", HegmAnswer, _ONE),
    ("hegm disable", HegmAnswer, _ONE),
    ("hegm status", HegmAnswer, _ONE),
    ("simulate hold", HoldReply, _ONE),
    ("simulate fault", FaultReply, _ONE),
    ("migrate", OperationReply, _AFTER_PROGRESS),
    ("quiesce", OperationReply, _AFTER_PROGRESS),
    ("suspend", OperationReply, _AFTER_PROGRESS),
    ("offload", OperationReply, _AFTER_PROGRESS),
    ("checkpoint", OperationReply, _AFTER_PROGRESS),
    ("handoff", OperationReply, _AFTER_PROGRESS),
    ("restore", OperationReply, _AFTER_PROGRESS),
    ("resume", OperationReply, _AFTER_PROGRESS),
    ("drain", Drained, _AFTER_PROGRESS),
    ("swap", Drained, _AFTER_PROGRESS),
    ("ops", OperationsReply, _ONE),
    ("adopt", OrphansReply, _ONE),
    ("adopt --drop", Dropped, _ONE),
    ("op", StoryReply, _ONE),
    ("op --follow", StoryReply, _AFTER_PROGRESS),
    ("cancel", OperationReply, _ONE),
    ("images ls", ImagesSeen, _ONE),
    ("images show", Manifest, _ONE),
    ("images verify", ImageVerified, _ONE),
    ("images rm", ImageRemoved, _ONE),
)
_JSON_TYPES = {"int": "integer", "float": "number", "bool": "true or false", "str": "string", "object": "any"}


def refreshed(text: str) -> str:
    """The document with its generated half written anew."""
    written, mark, _old = text.partition(BEGIN)
    if not mark:
        raise ValueError(f"the line {BEGIN!r} is missing")
    return f"{written}{BEGIN}\n\n{reference()}"


def reference() -> str:
    """The generated half."""
    lines = ["## What each command prints", "", "| command | prints | how |", "| --- | --- | --- |"]
    for command, record, how in PRINTED:
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
    waiting = [record for _command, record, _how in PRINTED] + [OperationProgress, ErrorInfo]
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
