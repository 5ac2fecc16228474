"""Options and arguments of a command from the fields of its request.

A field without a default is an argument, any other field an option: by its name, its type and its text, unless `_WORDS`
or the row says otherwise. Common options come last.
Loads the protocol, which every command that has a request needs anyway.
"""

from __future__ import annotations

from hegmctl.grammar.words import COUNT, FILES, FLAG, GPUS, JOB, JOBS, SECONDS, TEXT, Argument, Option, RequestField
from hegmd.protocol.messages import REQUESTS
from hegmd.protocol.operations import CARRIER_NAMES
from hegmd.protocol.record import REQUIRED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hegmd.protocol.record import Field

_JOB = {"name": "JOB", "kind": JOB, "complete": JOBS, "doc": "the job: its id, its name, or a pid of it"}
# The option of each field, in every command that has it. These texts are for people; the fields' own texts are for
# programs.
_WORDS: dict[str, dict[str, Any]] = {
    "job": _JOB,
    "jobs": _JOB,
    "pid": _JOB,
    "pids": _JOB,
    "path": {"name": "DIR", "complete": FILES},
    "id": {"name": "ID", "doc": "the operation"},
    "gpu": {"name": "GPU", "complete": GPUS},
    "to": {"metavar": "GPU", "complete": GPUS},
    "dry_run": {
        "names": ("-n", "--dry-run"),
        "doc": "show the plan, or every reason why it is refused, and change nothing",
    },
    "carrier": {
        "choices": CARRIER_NAMES,
        "doc": "how the bytes are copied: peer (GPU to GPU), host (through the pool, by hegmd), worker (through the "
        "pool, by the job) or driver; default: the fastest possible. An impossible one is refused with the reason",
    },
    "wait": {"names": ("--no-wait",), "doc": "do not wait for the end; `hegmctl op` shows it"},
}
_WAIT = Option("--wait", doc="wait for the end (default)")
# Options of many commands, after those of one.
_COMMON = ("carrier", "dry_run", "wait")
# The limit is the option --timeout of every command.
TIMEOUT = "limit_s"
_KINDS = {"bool": FLAG, "int": COUNT, "float": SECONDS, "str": TEXT}


def words_of(
    arguments: Sequence[Argument | RequestField], options: Sequence[Option | RequestField], op: str
) -> tuple[tuple[Argument, ...], tuple[Option, ...]]:
    """Return the arguments and the options of a row whose request has that tag."""
    fields = {field.name: field for field in REQUESTS[op].fields} if op else {}
    stated = {each.field: each for each in (*arguments, *options) if each.field}
    required = [
        RequestField(name) for name, field in fields.items() if field.default is REQUIRED and name not in stated
    ]
    taken = tuple(_argument(each, fields) for each in (*arguments, *required))
    rest = [name for name in fields if name not in stated and _is_option(fields[name])]
    own = [each for each in options if each.field not in _COMMON]
    common = [stated.get(name, RequestField(name)) for name in _COMMON if name in fields]
    listed: list[Option] = []
    for each in (*own, *(RequestField(name) for name in rest if name not in _COMMON), *common):
        if isinstance(each, Option):
            listed.append(each)
        elif isinstance(each, RequestField):
            listed += [_WAIT] if each.field == "wait" else []
            listed.append(_option(each, fields))
    return taken, tuple(listed)


def _is_option(field: Field) -> bool:
    return field.default is not REQUIRED and field.name != TIMEOUT and not field.type_text.startswith("Mapping")


def _argument(each: Argument | RequestField, fields: dict[str, Field]) -> Argument:
    if isinstance(each, Argument):
        return each
    many, stated = _said_of(each, fields, name=each.field.upper())
    stated.pop("metavar", None)
    return Argument(stated.pop("name"), many=many, **stated)


def _option(each: RequestField, fields: dict[str, Field]) -> Option:
    name = each.field.removesuffix("_s").replace("_", "-")
    repeats, stated = _said_of(each, fields, names=(f"--{name}",))
    stated.pop("name", None)
    if stated["kind"] != FLAG:
        stated.setdefault("metavar", "SECONDS" if stated["kind"] == SECONDS else name.upper())
    return Option(*stated.pop("names"), repeats=repeats, **stated)


def _said_of(each: RequestField, fields: dict[str, Field], **named: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether the field has several values, and what its option or argument is made of."""
    field = fields[each.field]
    has_several, kind = _kind_of(field)
    return has_several, {
        **named,
        "doc": field.doc,
        "kind": kind,
        "field": field.name,
        **_WORDS.get(field.name, {}),
        **each.options,
    }


def _kind_of(field: Field) -> tuple[bool, str]:
    """Return whether the field has several values, and the kind of each."""
    text = field.type_text.removesuffix(" | None")
    many = text.startswith("tuple[")
    return many, _KINDS.get(text.removeprefix("tuple[").removesuffix(", ...]"), TEXT)
