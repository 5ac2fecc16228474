"""What both programs say, in the form of HeGM's own lines, and the one place that writes to the standard streams."""

from __future__ import annotations

import os
import sys

from hegmd.errors import HegmError


def say(text: str) -> None:
    """A line of the answer, seen at once also in a pipe. A reader that has gone is no reason to end."""
    _write(1, text)


def complain(text: str) -> None:
    """A line beside the answer."""
    _write(2, text)


def warn(text: str) -> None:
    """Something is not as it should be, and it goes on."""
    complain(f"[HeGM] WARNING -- {text}")


def explain(error: HegmError) -> None:
    """Why it does not go on, and the next step."""
    complain(f"[HeGM] ERROR -- {error.message}; {error.hint}")


def _write(fd: int, text: str) -> None:
    stream = sys.stdout if fd == 1 else sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"  # no stream at all where it was closed at the start
    try:
        os.write(fd, f"{text}\n".encode(encoding, "backslashreplace"))
    except OSError:
        return
