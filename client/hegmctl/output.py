"""Sinks for answers: text for a terminal or a pipe, or JSON. `cli` chooses the sink once.

Standard output carries answers only; notes and errors go to standard error. A command passes a record and its renderer,
and never asks which form is wanted.
"""

from __future__ import annotations

import os
import sys
from time import monotonic

from hegmctl.tables import PLAIN, Style, cut, fitted, printable, wrapped
from hegmd.errors import CANCELLED, UNAVAILABLE, USAGE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO, TypeVar

    from hegmd.protocol.record import Record

    R = TypeVar("R", bound=Record)

SCHEMA = 1
# How often progress is reported on output that cannot be overwritten. A shorter operation reports its result only.
TELL_EVERY_S = 5.0
WIDTH_WITHOUT_A_TERMINAL = 80


class Sink:
    """The destination of answers."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet

    def answer(self, answer: R, view: Callable[[R, Style], list[str]]) -> None:
        raise NotImplementedError

    def element(self, element: R, view: Callable[[R, Style], list[str]]) -> None:
        """Write one of several answers, and flush it."""
        raise NotImplementedError

    def note(self, text: str) -> None:
        raise NotImplementedError

    def error(self, error: HegmError) -> None:
        """Write why there is no answer, or why it is incomplete."""
        raise NotImplementedError

    def progress(self, progress: R, view: Callable[[R, Style], list[str]], *, at_once: bool = False) -> None:
        """Show progress, which the next one overwrites. `at_once`: a person has to act, so do not wait."""
        raise NotImplementedError

    def end_progress(self) -> None:
        """Remove the progress from the screen."""


class TextSink(Sink):
    """Writes lines for people and for simple programs."""

    def __init__(
        self, style: Style, error_style: Style, *, quiet: bool = False, clock: Callable[[], float] = monotonic
    ) -> None:
        super().__init__(quiet=quiet)
        self.style = style
        self._error_style = error_style
        self._clock = clock
        self._in_progress = False
        self._told_at: float | None = None

    def answer(self, answer: R, view: Callable[[R, Style], list[str]]) -> None:
        write_lines(fitted(view(answer, self.style), self.style.columns))

    def element(self, element: R, view: Callable[[R, Style], list[str]]) -> None:
        self.answer(element, view)
        flush()

    def note(self, text: str) -> None:
        if not self.quiet:
            flush()
            _write_error("\n".join(fitted([f"hegmctl: {printable(text)}"], self._error_style.columns)))

    def error(self, error: HegmError) -> None:
        _flush_if_possible()
        style = self._error_style
        several = _reasons(error)
        if len(several) > 1:
            for message, hint in several:  # so that each hint is next to its reason
                self._one_error(printable(message), printable(hint), style)
            return
        # A message can have several lines, such as one for each mistake in a configuration. Everything else is escaped.
        message = "\n".join(printable(line) for line in error.message.splitlines())
        self._one_error(message, printable(error.hint), style)

    @staticmethod
    def _one_error(message: str, hint: str, style: Style) -> None:
        if style.columns is None:
            _write_error(f"hegmctl: {message}; {hint}")
            return
        lines = f"{style.paint('hegmctl:', 'red')} {message}".split("\n")
        _write_error("\n".join(fitted(lines, style.columns)))
        _write_error("\n".join(wrapped(f"→ {hint}" if style.ellipsis == "…" else f"-> {hint}", style.columns, "  ")))

    def progress(self, progress: R, view: Callable[[R, Style], list[str]], *, at_once: bool = False) -> None:
        columns = self._error_style.columns
        if columns is None:
            self._report_periodically(progress, view, at_once=at_once)
        elif not self.quiet:  # only a terminal can overwrite it
            text = " ".join(view(progress, self._error_style))
            self._in_progress = True  # before the write: Ctrl-C can come at any moment
            _write_error(f"\r{cut(text, columns - 1)}\x1b[K", end="")

    def _report_periodically(self, progress: R, view: Callable[[R, Style], list[str]], *, at_once: bool) -> None:
        now = self._clock()
        if self._told_at is None:
            self._told_at = now
        if (at_once or now - self._told_at >= TELL_EVERY_S) and not self.quiet:
            self._told_at = now
            flush()
            _write_error(f"hegmctl: {' '.join(view(progress, self._error_style))}")

    def end_progress(self) -> None:
        self._told_at = None
        if self._in_progress:
            self._in_progress = False
            _write_error("\r\x1b[K", end="")


class JsonSink(Sink):
    """Writes one JSON document for each answer, and one line for each element of a stream."""

    def __init__(self, *, readable: bool = False, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._readable = readable

    def answer(self, answer: R, view: Callable[[R, Style], list[str]]) -> None:
        write_lines([_json(answer.to_plain(), indent=2 if self._readable else None)])

    def element(self, element: R, view: Callable[[R, Style], list[str]]) -> None:
        write_lines([_json(element.to_plain())])
        flush()

    def progress(self, progress: R, view: Callable[[R, Style], list[str]], *, at_once: bool = False) -> None:
        self.element(progress, view)

    def note(self, text: str) -> None:
        if not self.quiet:
            flush()
            _write_error(_json({"note": text}))

    def error(self, error: HegmError) -> None:
        _flush_if_possible()
        _write_error(_json({"error": error_plain(error)}))


def _reasons(error: HegmError) -> list[tuple[str, str]]:
    """Return message and hint of each reason of an error with several."""
    from hegmd.protocol.record import as_list, as_map

    reasons = [as_map(each) or {} for each in as_list(error.facts.get("reasons")) or ()]
    return list(dict.fromkeys((str(each.get("message", "")), str(each.get("hint", ""))) for each in reasons))


def error_plain(error: HegmError) -> dict[str, object]:
    """Return an error as a map, for JSON and other data."""
    return {"code": error.code.name, "message": error.message, "hint": error.hint, "facts": error.facts}


def escape_what_cannot_be_encoded() -> None:
    """Escape characters that the locale's encoding lacks, instead of failing in the middle of the output."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)  # a replacement of sys.stdout may lack it
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def sink_for(*, json: bool, quiet: bool, colour: bool | None) -> Sink:
    """Return the sink for standard output. `colour` is None without an option."""
    if json:
        return JsonSink(readable=_is_terminal(sys.stdout), quiet=quiet)
    return TextSink(style_of(sys.stdout, colour, quiet=quiet), style_of(sys.stderr, colour), quiet=quiet)


def style_of(stream: TextIO | None, colour: bool | None, *, quiet: bool = False) -> Style:
    """Return the style of that stream. Without a terminal, lines have no limit."""
    terminal = _is_terminal(stream)
    if colour is None:
        colour = terminal and not _lacks_colours() and not os.environ.get("NO_COLOR")
    if stream is None or not terminal:
        return Style(colour=colour, remarks=not quiet)
    columns, lines = _terminal_size(stream, os.environ)
    unicode = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return Style(colour=colour, columns=columns, lines=lines, ellipsis="…" if unicode else "~", remarks=not quiet)


def is_dumb() -> bool:
    """Return True if TERM says that the terminal cannot handle control sequences."""
    return os.environ.get("TERM", "dumb") == "dumb"


def _lacks_colours() -> bool:
    """Return True if TERM names a terminal without colours: a dumb one, a VT100 and its like, or a monochrome entry."""
    name = os.environ.get("TERM", "dumb")
    return is_dumb() or name.startswith("vt") or name.endswith(("-m", "-mono"))


def _is_terminal(stream: TextIO | None) -> bool:
    return stream is not None and stream.isatty()


def _terminal_size(stream: TextIO, environ: Mapping[str, str]) -> tuple[int, int]:
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except OSError:
        columns, lines = 0, 0
    asked = environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit():
        columns = int(asked)
    return columns or WIDTH_WITHOUT_A_TERMINAL, lines or 24


def help_columns() -> int:
    style = style_of(sys.stdout, None) if sys.stdout else PLAIN
    return style.paragraph_columns


def write_lines(lines: list[str]) -> None:
    """Write lines to standard output. Raises BrokenPipeError if the reader has closed the pipe."""
    if not lines:
        return
    if sys.stdout is None:
        raise _unwritable("it is closed")
    try:
        sys.stdout.write("\n".join(lines) + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(error.strerror or str(error)) from error


def flush() -> None:
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _unwritable(error.strerror or str(error)) from error


def _flush_if_possible() -> None:
    """Flush the answer before an error is written. A failure of the flush itself is ignored."""
    try:
        flush()
    except HegmError:
        pass


def _unwritable(why: str) -> HegmError:
    message, hint = f"standard output cannot be written to: {why}", "check where it is redirected to"
    return HegmError(UNAVAILABLE, message, hint, {"final": True})


def ask(question: str) -> str | None:
    """Return the answer of the user at the terminal; None without a terminal."""
    if not (_is_terminal(sys.stderr) and _is_terminal(sys.stdin)):
        return None
    try:  # from the first character on: the user may interrupt at the question
        _write_error(question, end="")
        return sys.stdin.readline()
    except (OSError, KeyboardInterrupt):
        return None


def require_yes(question: str, what: str, hint: str) -> None:
    """Ask before something is lost. Raises USAGE without a terminal, and CANCELLED unless the answer is yes."""
    answer = ask(f"{question} [y/N] ")
    if answer is None:
        raise HegmError(
            USAGE, f"{what} would be lost permanently, and there is no terminal to confirm it", "confirm it with --yes"
        )
    if answer.strip().lower() not in ("y", "yes"):
        raise HegmError(CANCELLED, f"{what} stays", hint)


def _write_error(text: str, end: str = "\n") -> None:
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text + end)
        sys.stderr.flush()
    except OSError:
        pass  # the error cannot be reported elsewhere; the exit status shows it


def _json(value: Mapping[str, object], indent: int | None = None) -> str:
    import json  # the import takes 5 ms, which text output need not pay

    return json.dumps({"schema": SCHEMA, **value}, indent=indent, allow_nan=False)
