"""The daemon's log: where records go, in which form, and what each of them carries.

Built on the standard logging, so every part just has a logger of its own. Added here: the operation during which a
record was made (each request is one, and its id leads from the log to the audit and back), references for tracebacks,
a limit on what a hostile peer can make us write, and the ways out: the journal with its fields, JSON or text on stderr.

Logging must never hold up the loop, so a reader that does not keep up loses records; how many is counted, and said as
soon as it reads again. What the forms look like is in `log_formats`, the journal's protocol in `journald`.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hegmd.errors import BAD_CONFIG, UNAVAILABLE, HegmError
from hegmd.telemetry import journald, log_formats

if TYPE_CHECKING:
    from typing_extensions import Self

AUDIT_LOGGER = "hegmd.telemetry.audit"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
STDERR = 2

# A pipe that polls as writable takes this much without waiting.
_PIPE_BUF = 4096
# How long a reader of our stderr may hold up a record, unless it held up the one before as well.
_GRACE_MS = 20


@dataclass(frozen=True, slots=True)
class Operation:
    """What the daemon does for somebody: its id, what was asked, and who asked."""

    id: str
    op: str
    uid: int | None = None
    pid: int | None = None


_current: ContextVar[Operation | None] = ContextVar("hegmd_operation", default=None)
_run_id = secrets.token_hex(3)
_numbers = itertools.count(1)


@contextmanager
def operation(op: str, *, uid: int | None = None, pid: int | None = None) -> Generator[str]:
    """Mark every record made inside as part of one operation, whose id it gives. Tasks started inside inherit it."""
    entered = Operation(f"{_run_id}-{next(_numbers)}", op, uid, pid)
    token = _current.set(entered)
    try:
        yield entered.id
    finally:
        _current.reset(token)


def current_operation() -> Operation | None:
    """The operation that runs here, if any does."""
    return _current.get()


def error_ref() -> str:
    """A short name under which a traceback in the log can be found."""
    return secrets.token_hex(4)


class Limiter:
    """Lets a few records of each kind through in a window of time, and counts those that it holds back."""

    def __init__(
        self, *, burst: int = 5, window_s: float = 60.0, kinds: int = 1024, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._burst = burst
        self._window_s = window_s
        self._kinds = kinds
        self._clock = clock
        self._windows: OrderedDict[object, _Window] = OrderedDict()
        self._lock = threading.Lock()  # the vendors' threads log too
        #: How many records were held back since the start.
        self.held_back = 0

    def admit(self, kind: object) -> int | None:
        """How many of this kind were held back before this one; None if this one is to be held back too."""
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
    """Log what a peer can cause as often as it likes: a few records of each `key` a minute, the rest only counted."""
    if not logger.isEnabledFor(level):
        return
    held_back = limiter.admit((logger.name, key))
    if held_back is None:
        return
    if held_back:
        message, values = f"{message} (%d more like this were left out)", (*values, held_back)
    logger.log(level, message, *values, stacklevel=2)


class Sink(Protocol):
    """Where finished records go. `write` never waits for long, and says whether the record got there."""

    def write(self, record: bytes) -> bool: ...

    def close(self) -> None: ...


class StreamSink:
    """A descriptor that is not ours alone, such as stderr: it may not be made non-blocking, so it is asked first."""

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
        """The descriptor was there before us and stays."""

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
    """Gives each record its fields and its form, and keeps count of what did not get there."""

    def __init__(self, sink: Sink, form: Callable[[logging.LogRecord, Mapping[str, object]], bytes]) -> None:
        super().__init__()
        self._sink = sink
        self._form = form
        self._untold = 0
        self.dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = self._form(record, fields_of(record))
        except Exception:  # noqa: BLE001 - as the standard handlers do: a log call must not break what it tells of
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
    """Fields for one record: `logger.info("...", extra=fields(gpu="gpu0"))`. Those that are None are left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What goes with a record: the operation during which it was made, and its own fields."""
    found: dict[str, object] = {}
    running = _current.get()
    if running is not None:
        found = {"operation": running.id, "op": running.op, "uid": running.uid, "pid": running.pid}
        found = {name: value for name, value in found.items() if value is not None}
    found.update(getattr(record, "fields", {}))
    return found


class LogSetup:
    """The log of this process, from `set_up` until `close`, which leaves logging as it was before."""

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
        """How many records were lost since the start because nobody read them in time."""
        return self._dropped_before + (self._handler.dropped if self._handler else 0)

    @property
    def held_back(self) -> int:
        """How many records were left out since the start because there were too many of their kind."""
        return _limiter.held_back

    def configure(self, level: str, form: str) -> None:
        """Log at that level and in that form from now on. Raises HegmError, changing nothing, if it cannot be done."""
        handler, found = self._handler_for(form)
        self._take_down()
        self._handler = handler
        self.format = found
        self._root.handlers[:] = [handler]
        self._root.setLevel(logging.WARNING)  # for other people's packages; ours are below
        logging.getLogger("hegmd").setLevel(LEVELS[level])
        logging.getLogger(AUDIT_LOGGER).setLevel(logging.INFO)  # records of what was done are no matter of taste
        logging.captureWarnings(capture=True)

    def close(self) -> None:
        """Put logging back as it was. Twice is fine."""
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
        """Close the handler in force, also one that another set-up left."""
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
            except OSError as error:  # out of descriptors: then a reload is refused, and the daemon goes on
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
    """Start to log. `level` and `form` are those of the settings log.level and log.format."""
    made = LogSetup(descriptor, os.environ if environ is None else environ, journal_path)
    made.configure(level, form)
    return made
