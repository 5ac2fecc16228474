"""The audit record: every request that changes something, who made it, and its result.

Each record goes to the log with its fields and, if configured, to a file with one JSON object a line. If the file
cannot be written, the request does not fail, because it has already happened. The log then has one error, and later the
number of missing records. A file that cannot be opened at the start stops the daemon.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol, cast

from hegmd.errors import HegmError
from hegmd.protocol.messages import Request
from hegmd.telemetry.audit_file import AuditFile
from hegmd.telemetry.log import Limiter, fields

logger = logging.getLogger(__name__)

# How much of a request is kept: a peer must not choose the size of its record.
TEXT_LENGTH = 256
ITEMS = 16
DEPTH = 4
RECORD_BYTES = 8192

# A success is always recorded. A failure is recorded so often for each user, request and reason, then counted: a peer
# can fail as often as it likes.
FAILURES_A_MINUTE = 10


class Requester(Protocol):
    """The peer that made the request, as the kernel identifies it."""

    @property
    def pid(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...


class Audit:
    """Writes the records. `user_name` returns the name of a uid if it is known without a directory service."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
        limiter_clock: Callable[[], float] = time.monotonic,
        user_name: Callable[[int], str | None] = lambda uid: None,
    ) -> None:
        self._clock = clock
        self._user_name = user_name
        self._failures = Limiter(burst=FAILURES_A_MINUTE, clock=limiter_clock)
        self._file = None if file is None else AuditFile(file)

    @property
    def lost(self) -> int:
        """Return how many records are only in the log, because the file could not be written."""
        return 0 if self._file is None else self._file.lost

    def record(
        self, who: Requester, request: Request, result: str, error: HegmError | None, took_s: float, operation: str
    ) -> None:
        """Record the result of a request: ok, cancelled, or an error code. Never waits, never raises."""
        left_out = 0
        if error is not None:
            admitted = self._failures.admit((who.uid, request.op, result))
            if admitted is None:
                return
            left_out = admitted
        entry: dict[str, object] = {
            "operation": operation,
            "op": request.op,
            "uid": who.uid,
            "gid": who.gid,
            "pid": who.pid,
            "user": self._user_name(who.uid),
            "args": bounded(request.audited()),
            "result": result,
            "error": None if error is None else bounded(error.message),
            "duration_s": round(took_s, 6),
            "left_out": left_out or None,
        }
        level = logging.INFO if error is None else logging.WARNING
        key = (request.op, who.uid, who.pid, result)
        logger.log(level, "%s, asked by uid %d (pid %d): %s", *key, extra=fields(**entry))
        if self._file is not None:
            utc = datetime.fromtimestamp(self._clock(), timezone.utc)
            self._file.append(_line({"time": f"{utc:%Y-%m-%dT%H:%M:%S.%f}Z", **entry}))

    def reopen(self, file: Path | None) -> None:
        """Continue in that file, at a reload or after logrotate. If it cannot be opened, the former one is kept."""
        if self._file is not None:
            self._file.reopen(file)
        elif file is not None:
            self._file = AuditFile(None)
            self._file.reopen(file)

    def close(self) -> None:
        """Write what is queued. Can be called twice."""
        if self._file is not None:
            self._file.close()


def bounded(value: object, depth: int = DEPTH) -> object:
    """Return the value with long texts and lists cut, and with JSON values only."""
    if isinstance(value, str):
        return value if len(value) <= TEXT_LENGTH else f"{value[:TEXT_LENGTH]}... ({len(value)} characters)"
    if isinstance(value, (bytes, bytearray)):
        return f"({len(value)} bytes)"
    if isinstance(value, (Mapping, list, tuple)) and depth == 0:
        return "..."
    if isinstance(value, Mapping):
        pairs = list(cast("Mapping[object, object]", value).items())
        kept = {str(bounded(str(key))): bounded(inner, depth - 1) for key, inner in pairs[:ITEMS]}
        return kept if len(pairs) <= ITEMS else {**kept, "...": f"({len(pairs)} entries)"}
    if isinstance(value, (list, tuple)):
        items = list(cast("Iterable[object]", value))
        kept_items = [bounded(inner, depth - 1) for inner in items[:ITEMS]]
        return kept_items if len(items) <= ITEMS else [*kept_items, f"... ({len(items)} items)"]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _line(entry: Mapping[str, object]) -> bytes:
    line = _json(entry)
    if len(line) > RECORD_BYTES:
        line = _json({**entry, "args": f"({len(line)} bytes)"})
    return line + b"\n"


def _json(entry: Mapping[str, object]) -> bytes:
    return json.dumps(
        {name: value for name, value in entry.items() if value is not None}, separators=(",", ":")
    ).encode()
