"""The forms of a log record: a line of text, a line of JSON, or the journal's fields.

Pure: a record and its fields give bytes. In no form can text from a peer (a name, a message) start a new line or move a
terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import math
import re
import traceback
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import cast

from hegmd.telemetry import journald

# Characters that a terminal or a reader of lines would interpret: controls, line separators, changes of the
# writing direction, invisible marks, and halves of surrogate pairs, which cannot be encoded at all.
_UNSHOWABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_NEEDS_QUOTES = re.compile(r'[\s="]|^$')

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG_PRIORITY = 7

Fields = Mapping[str, object]


def escaped(text: str) -> str:
    r"""Return the text on one line that is safe to show: other characters become \xNN or \uNNNN."""
    return _UNSHOWABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def text(record: logging.LogRecord, fields: Fields) -> bytes:
    """Format `2026-11-21T10:30:00.123Z warning hegmd.server: message key=value`, and a traceback with indented
    lines."""
    pairs = "".join(f" {escaped(name)}={_shown(value)}" for name, value in fields.items())
    head = f"{_time(record)} {record.levelname.lower():<7} {record.name}: {escaped(record.getMessage())}{pairs}"
    lines = [head, *(f"    {line}" for line in _traceback(record))]
    return "".join(f"{line}\n" for line in lines).encode()


def json_line(record: logging.LogRecord, fields: Fields) -> bytes:
    """Format one JSON object. Common keys come first and cannot be replaced by a field."""
    whole: dict[str, object] = {
        "time": _time(record),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    whole = {**whole, **fields, **whole}
    if lines := _traceback(record):
        whole["traceback"] = lines
    return json.dumps(_plain(whole), separators=(",", ":")).encode() + b"\n"


def journal(record: logging.LogRecord, fields: Fields) -> bytes:
    """Return the journal's own fields, and ours with the prefix HEGM_."""
    priority = next((number for level, number in _PRIORITIES if record.levelno >= level), _DEBUG_PRIORITY)
    return journald.encode(
        [
            ("MESSAGE", "\n".join([escaped(record.getMessage()), *_traceback(record)])),
            ("PRIORITY", str(priority)),
            ("SYSLOG_IDENTIFIER", "hegmd"),
            ("LOGGER", record.name),
            ("CODE_FILE", record.pathname),
            ("CODE_LINE", str(record.lineno)),
            ("CODE_FUNC", record.funcName or ""),
            *((f"HEGM_{journald.field_name(name)}", _flat(value)) for name, value in fields.items()),
        ]
    )


def _time(record: logging.LogRecord) -> str:
    utc = datetime.fromtimestamp(record.created, timezone.utc)
    return f"{utc:%Y-%m-%dT%H:%M:%S}.{utc.microsecond // 1000:03d}Z"


def _traceback(record: logging.LogRecord) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    whole = "".join(traceback.format_exception(*record.exc_info))
    return [escaped(line) for line in whole.rstrip("\n").split("\n")]


def _shown(value: object) -> str:
    flat = escaped(_flat(value))
    return json.dumps(flat, ensure_ascii=False) if _NEEDS_QUOTES.search(flat) else flat


def _flat(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False)


def _plain(value: object) -> object:
    """Return a JSON value: NaN, infinities and other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in cast("Iterable[object]", value)]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
