"""The daemon's log: where records go, their form, and their fields.

Built on the standard logging: every module has a logger. Adds the operation of a record (each request is one, and its
id links log and audit), references for tracebacks, a limit on records that a hostile peer can cause, and the sinks: the
journal with fields, JSON or text on stderr.

Logging must not delay the loop, so a slow reader loses records. They are counted and reported once it reads again.
`log_formats` has the forms, `journald` the journal's protocol.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import select
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hegmd.errors import BAD_CONFIG, UNAVAILABLE, HegmError
from hegmd.telemetry import journald, log_formats

if TYPE_CHECKING:
    from typing_extensions import Self

AUDIT_LOGGER = "hegmd.telemetry.audit"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
STDERR = 2

# A pipe that polls as writable takes this much without blocking.
_PIPE_BUF = 4096
# How long a reader of our stderr may delay a record, unless it delayed the one before.
_GRACE_MS = 20


class Operation(NamedTuple):
    """The daemon's work for a caller: its id, the request, and the caller."""

    id: str
    op: str
    uid: int | None = None
    pid: int | None = None


_current: ContextVar[Operation | None] = ContextVar("hegmd_operation", default=None)
_numbers = itertools.count(1)


@contextmanager
def operation(op: str, *, uid: int | None = None, pid: int | None = None) -> Generator[str]:
    """Mark every record inside as part of one operation, and return its id. Tasks started inside inherit it."""
    entered = Operation(f"{_run_id()}-{next(_numbers)}", op, uid, pid)
    token = _current.set(entered)
    try:
        yield entered.id
    finally:
        _current.reset(token)


@cache
def _run_id() -> str:
    """Return the prefix of this process's operation ids. Made on first use: the process may fork after the import."""
    return secrets.token_hex(3)


def current_operation() -> Operation | None:
    """Return the operation that runs here, if any."""
    return _current.get()


def error_ref() -> str:
    """Return a short reference to a traceback in the log."""
    return secrets.token_hex(4)


class Limiter:
    """Admits a few records of each kind in a window of time, and counts the others."""

    def __init__(
        self, *, burst: int = 5, window_s: float = 60.0, kinds: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._window_s = window_s
        self._kinds = kinds
        self._clock = clock
        self._windows: OrderedDict[object, _Window] = OrderedDict()
        self._lock = threading.Lock()  # threads of vendors log too
        #: Number of records left out since the start.
        self.held_back = 0

    def admit(self, kind: object) -> int | None:
        """Return how many of this kind were left out before this record; None if this one is left out too."""
        now = self._clock()
        with self._lock:
            window = self._window(kind, now)
            if now - window.began >= self._window_s:
                window.began, window.let_through = now, 0
            if window.let_through >= self._burst:
                window.held_back += 1
                self.held_back += 1
                return None
            window.let_through += 1
            held_back, window.held_back = window.held_back, 0
            return held_back

    def _window(self, kind: object, now: float) -> _Window:
        if kind not in self._windows:
            self._windows[kind] = _Window(now)
            if len(self._windows) > self._kinds:
                self._windows.popitem(last=False)
        self._windows.move_to_end(kind)
        return self._windows[kind]


class _Window:
    __slots__ = ("began", "held_back", "let_through")

    def __init__(self, began: float) -> None:
        self.began = began
        self.let_through = 0
        self.held_back = 0


_limiter = Limiter()


def limited(
    logger: logging.Logger, key: str, level: int, message: str, *values: object, limiter: Limiter = _limiter
) -> None:
    """Log an event that a peer can cause at will: a few records of each `key` a minute; the rest is counted."""
    if not logger.isEnabledFor(level):
        return
    held_back = limiter.admit((logger.name, key))
    if held_back is None:
        return
    if held_back:
        message, values = f"{message} (%d more like this were left out)", (*values, held_back)
    logger.log(level, message, *values, stacklevel=2)


class Sink(Protocol):
    """The target of finished records. `write` never waits long, and returns False if the record was lost."""

    def write(self, record: bytes) -> bool: ...

    def close(self) -> None: ...


class StreamSink:
    """A descriptor that others share, such as stderr: it cannot be made non-blocking, so it is polled first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._clogged = False
        self._torn = False

    def write(self, record: bytes) -> bool:
        if self._torn:
            record = b"\n" + record
        for start in range(0, len(record), _PIPE_BUF):
            if not self._write_piece(record[start : start + _PIPE_BUF]):
                self._torn = self._torn or start > 0
                return False
        self._torn = False
        return True

    def close(self) -> None:
        """Keep the descriptor open: it existed before."""

    def _write_piece(self, piece: bytes) -> bool:
        ready = self._poll.poll(0 if self._clogged else _GRACE_MS)
        self._clogged = not ready
        if not ready or ready[0][1] & select.POLLNVAL:
            return False
        try:
            while piece:
                piece = piece[os.write(self._descriptor, piece) :]
        except OSError:
            return False
        return True


class SinkHandler(logging.Handler):
    """Adds fields to each record, formats it, and counts lost ones."""

    def __init__(self, sink: Sink, form: Callable[[logging.LogRecord, Mapping[str, object]], bytes]) -> None:
        super().__init__()
        self._sink = sink
        self._form = form
        self._untold = 0
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self._form(record, fields_of(record))
        except Exception:  # noqa: BLE001 - as the standard handlers do: a log call must not break the code that logs
            self.handleError(record)
            return
        if not self._sink.write(data):
            self.dropped += 1
            self._untold += 1
        elif self._untold:
            self._tell()

    def close(self) -> None:
        self._sink.close()
        super().close()

    def _tell(self) -> None:
        notice = logging.LogRecord(
            __name__, logging.WARNING, __file__, 0, "%d log records were lost: they were not read in time", (), None
        )
        notice.args = (self._untold,)
        if self._sink.write(self._form(notice, {})):
            self._untold = 0


def fields(**values: object) -> dict[str, object]:
    """Return fields for one record: `logger.info("...", extra=fields(gpu="gpu0"))`. None values are left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """Return a record's fields: the operation during which it was made, and its own."""
    found: dict[str, object] = {}
    running = _current.get()
    if running is not None:
        found = {"operation": running.id, "op": running.op, "uid": running.uid, "pid": running.pid}
        found = {name: value for name, value in found.items() if value is not None}
    found.update(getattr(record, "fields", {}))
    return found


class LogSetup:
    """The log of this process, from `set_up` until `close`, which restores logging."""

    def __init__(self, descriptor: int, environ: Mapping[str, str], journal_path: str) -> None:
        self._descriptor = descriptor
        self._environ = environ
        self._journal_path = journal_path
        self._root = logging.getLogger()
        others = [handler for handler in self._root.handlers if not isinstance(handler, SinkHandler)]
        self._before = (others, self._root.level)
        self._handler: SinkHandler | None = None
        self._dropped_before = 0
        self.format = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def dropped(self) -> int:
        """Return how many records were lost since the start because the reader was too slow."""
        return self._dropped_before + (self._handler.dropped if self._handler else 0)

    @property
    def held_back(self) -> int:
        """Return how many records were left out since the start because there were too many of their kind."""
        return _limiter.held_back

    def configure(self, level: str, form: str) -> None:
        """Log at that level and in that form from now on. Raises HegmError; then nothing changes."""
        handler, found = self._handler_for(form)
        self._take_down()
        self._handler = handler
        self.format = found
        self._root.handlers[:] = [handler]
        self._root.setLevel(logging.WARNING)  # for packages of others; ours are below
        logging.getLogger("hegmd").setLevel(LEVELS[level])
        logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)  # audit records do not depend on the level
        logging.captureWarnings(capture=True)

    def close(self) -> None:
        """Restore logging. Twice is fine."""
        if self._handler is None:
            return
        self._take_down()
        self._handler = None
        self._root.handlers[:], level = self._before
        self._root.setLevel(level)
        logging.getLogger("hegmd").setLevel(logging.NOTSET)
        logging.getLogger(AUDIT_LOGGER).setLevel(logging.NOTSET)
        logging.captureWarnings(capture=False)

    def _take_down(self) -> None:
        """Close the current handler, also one of another set-up."""
        if self._handler is not None:
            self._dropped_before += self._handler.dropped
        for handler in self._root.handlers:
            if isinstance(handler, SinkHandler):
                handler.close()

    def _handler_for(self, form: str) -> tuple[SinkHandler, str]:
        if form == "auto":
            form = "journal" if journald.is_behind(self._descriptor, self._environ) else "text"
        if form == "journal":
            if not Path(self._journal_path).is_socket():
                raise HegmError(
                    BAD_CONFIG,
                    f"the log cannot go to the journal: there is no socket at {self._journal_path}",
                    'set log.format to "text" or "json" where systemd-journald does not run',
                )
            try:
                socket_to_it = journald.JournalSocket(self._journal_path)
            except OSError as error:  # out of descriptors: the reload is refused and the daemon continues
                raise HegmError(
                    UNAVAILABLE,
                    f"the log cannot go to the journal: {error.strerror}",
                    "raise LimitNOFILE= of hegmd.service, or find what uses the daemon's descriptors",
                ) from error
            return SinkHandler(socket_to_it, log_formats.journal), form
        line_form = log_formats.json_line if form == "json" else log_formats.text
        return SinkHandler(StreamSink(self._descriptor), line_form), form


def set_up(
    level: str,
    form: str,
    *,
    descriptor: int = STDERR,
    environ: Mapping[str, str] | None = None,
    journal_path: str = journald.SOCKET_PATH,
) -> LogSetup:
    """Start to log. `level` and `form` are the settings log.level and log.format."""
    made = LogSetup(descriptor, os.environ if environ is None else environ, journal_path)
    made.configure(level, form)
    return made
