"""A terminal that is redrawn in place and restored at the end.

Draws in the terminal's alternate screen, so that the former content returns at the end, and the last picture is printed
below it. An interrupt, SIGTERM, SIGHUP or a stop by Ctrl-Z does the same. Writes with os.write:
one write for each picture, so that a signal leaves no half-filled buffer.
"""

from __future__ import annotations

import os
import select
import signal
from time import localtime, monotonic, strftime

from hegmctl.interruption import Interrupted
from hegmctl.output import flush, style_of
from hegmctl.tables import Style, printable, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, TextIO, TypeVar

    from typing_extensions import Self

    from hegmd.protocol.record import Record

    R = TypeVar("R", bound=Record)

# Alternate screen, hidden cursor, long lines cut instead of wrapped; and the reverse.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_HEAD_LINES = 2


class Screen:
    """The terminal while the context lasts."""

    def __init__(self, terminal: TextIO, style: Style, title: str) -> None:
        self._terminal = terminal
        self._style = style
        self._title = printable(title)
        self._message = ""
        self._redraw: Callable[[], list[str]] = list
        self._picture: list[str] = []
        self._resized = False
        self._stopped = False
        self._handlers: dict[int, Any] = {}
        self._wake_read = self._wake_write = -1

    def __enter__(self) -> Self:
        flush()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number, handler in (
            (signal.SIGWINCH, self._on_resize),
            (signal.SIGTSTP, self._on_stop),
            (signal.SIGTERM, _on_end),
            (signal.SIGHUP, _on_end),
        ):
            self._handlers[number] = signal.signal(number, handler)
        self._write(_ENTER)
        return self

    def __exit__(self, *_exc: object) -> None:
        try:
            self._write(_LEAVE + "".join(line + "\n" for line in self._picture))
        except OSError:
            pass  # the terminal was closed, so there is nothing to restore
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            os.close(self._wake_read)
            os.close(self._wake_write)

    def show(self, answer: R, view: Callable[[R, Style], list[str]]) -> None:
        """Draw the answer now, and again whenever the terminal changes."""
        self._message = ""
        self._redraw = lambda: view(answer, self._style)
        self._draw()

    def tell(self, text: str) -> None:
        """Show a message on the first line, above the last picture."""
        self._message = printable(text)
        self._draw()

    def wait(self, seconds: float) -> None:
        """Wait, redraw when the terminal is resized, and leave the screen while the process is stopped."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            if poll.poll(left * 1000):
                os.read(self._wake_read, 1024)
            self._attend()

    def _attend(self) -> None:
        if self._stopped:
            self._stopped = False
            self._suspend_to_shell()
            self._resized = True
        if self._resized:
            self._resized = False
            self._style = style_of(self._terminal, self._style.colour, quiet=not self._style.remarks)
            self._draw()

    def _suspend_to_shell(self) -> None:
        """Stop the process on the normal screen, as Ctrl-Z asks; SIGCONT continues it."""
        self._write(_LEAVE)
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, ours)
        self._write(_ENTER)

    def _draw(self) -> None:
        self._picture = self._redraw()
        columns, room = self._style.columns or 80, (self._style.lines or 24) - _HEAD_LINES
        lines = self._picture
        if len(lines) > room > 0:
            lines = [*lines[: room - 1], f"... and {len(lines) - room + 1} more lines"]
        head = f"{strftime('%H:%M:%S', localtime())}  {self._message or self._title}"
        head = self._style.paint(shortened(head, columns, self._style.ellipsis), "yellow" if self._message else "dim")
        text = f"{_CLEAR_LINE}\n".join([head, "", *lines])
        self._write(f"{_HOME}{text}{_CLEAR_LINE}{_CLEAR_BELOW}")

    def _write(self, text: str) -> None:
        data = memoryview(text.encode(self._terminal.encoding, "backslashreplace"))
        while data:
            data = data[os.write(self._terminal.fileno(), data) :]

    def _on_resize(self, _number: int, _frame: FrameType | None) -> None:
        self._resized = True

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True


def _on_end(number: int, _frame: FrameType | None) -> None:
    raise Interrupted(number)
