"""A terminal for the tests: a real pty with hegmctl on it, and just enough of an emulator to see what a person sees."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from typing_extensions import Self

from tests.patience import HANG_S
from tests.unit.hegmctl.running import ROOT, command, environment

WAIT_S = HANG_S
# A group of its own in our session, as a shell gives it: what is a session of its own cannot be stopped.
_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
_SEQUENCE = re.compile(r"\x1b\[(\??)([0-9;]*)([A-Za-z])")


class Picture:
    """Two buffers of lines, a cursor, and the modes that hegmctl sets. Fails on a sequence that it does not know."""

    def __init__(self) -> None:
        self.raw = ""
        self.modes: set[str] = {"25", "7"}  # a visible cursor, and long lines that wrap
        self.painted = False
        self._buffers: dict[bool, list[str]] = {False: [""], True: [""]}
        self._row = 0
        self._rows = {False: 0, True: 0}
        self._rest = ""

    @property
    def second(self) -> bool:
        """Whether the second buffer is shown."""
        return "1049" in self.modes

    @property
    def lines(self) -> list[str]:
        """Return the current lines of the screen."""
        return self._buffers[self.second]

    def feed(self, text: str) -> None:
        self.raw += text
        text, self._rest = self._rest + text, ""
        place = 0
        while place < len(text):
            if text[place] == "\x1b":
                found = _SEQUENCE.match(text, place)
                if found is None:
                    self._rest = text[place:]
                    return
                self._obey(*found.groups())
                place = found.end()
            else:
                self._write(text[place])
                place += 1

    def _write(self, character: str) -> None:
        if character == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")
        elif character == "\r":
            self._column = 0
        else:
            line = self.lines[self._row]
            self.lines[self._row] = line[: self._column] + character + line[self._column + 1 :]
            self._column += 1

    _column = 0

    def _obey(self, private: str, number: str, letter: str) -> None:
        if private and letter == "h":
            self._rows[self.second] = self._row
            self.modes.add(number)
            if number == "1049":
                self._buffers[True], self._row, self._column = [""], 0, 0
        elif private and letter == "l":
            self.modes.discard(number)
            if number == "1049":
                self._row, self._column = self._rows[False], 0
        elif letter == "H":
            self._row = self._column = 0
        elif letter == "K":
            self.lines[self._row] = self.lines[self._row][: self._column]
        elif letter == "J":
            del self.lines[self._row + 1 :]
        elif letter == "m":
            self.painted = True
        else:
            raise AssertionError(f"a terminal was sent {private}{number}{letter}")


class Terminal:
    """hegmctl under way on a terminal of that size."""

    def __init__(
        self,
        *words: str,
        socket: Path,
        columns: int = 80,
        lines: int = 24,
        environ: dict[str, str] | None = None,
        stdin: int | None = None,
    ) -> None:
        self.picture = Picture()
        self._master, slave = os.openpty()
        self.resize(columns, lines, tell=False)
        self.process = subprocess.Popen(
            command(*words),
            env=environment(socket, **{"TERM": "xterm-256color", "LANG": "C.UTF-8", **(environ or {})}),
            stdin=slave if stdin is None else stdin,
            stdout=slave,
            stderr=slave,
            cwd=ROOT,
            **_GROUP,
        )
        os.close(slave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)

    def resize(self, columns: int, lines: int, *, tell: bool = True) -> None:
        """Change the size; the kernel tells the foreground group of a session's own terminal, and so do we."""
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        if tell:
            os.kill(self.process.pid, 28)

    def type(self, text: str) -> None:
        """Type text as a person does. The reader gets it, and the terminal echoes it."""
        os.write(self._master, text.encode())

    def until(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until that can be seen on the screen; the lines then."""
        deadline = monotonic() + WAIT_S
        while not condition(self.picture.lines):
            ready = select.select([self._master], [], [], max(deadline - monotonic(), 0))[0]
            if not ready or not self._take():
                raise AssertionError(
                    f"never seen; on the screen: {self.picture.lines}, sent: {self.picture.raw[-500:]!r}"
                )
        return list(self.picture.lines)

    def end(self, number: int | None = None) -> int:
        """The exit status, after a signal if one is given; everything written is on the screen then."""
        if number is not None:
            self.process.send_signal(number)
        while self._take():
            pass
        return self.process.wait(WAIT_S)

    def _take(self) -> bool:
        try:
            data = os.read(self._master, 65_536)
        except OSError:  # a read error reports the end of a pty
            return False
        self.picture.feed(data.decode())
        return bool(data)
