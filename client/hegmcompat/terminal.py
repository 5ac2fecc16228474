"""The output of both programs, in the form of HeGM's own lines, and the one place that writes to the standard
streams.
"""

from __future__ import annotations

import os
import sys

from hegmd.errors import HegmError


def say(text: str) -> None:
    """Write a line of the answer, and flush it. Ignores a closed pipe."""
    _write(1, text)


def complain(text: str) -> None:
    _write(2, text)


def warn(text: str) -> None:
    complain(f"[HeGM] WARNING -- {text}")


def explain(error: HegmError) -> None:
    complain(f"[HeGM] ERROR -- {error.message}; {error.hint}")


def _write(fd: int, text: str) -> None:
    stream = sys.stdout if fd == 1 else sys.stderr
    encoding = getattr(stream, "encoding", None) or "utf-8"  # None if it was closed at the start
    try:
        os.write(fd, f"{text}\n".encode(encoding, "backslashreplace"))
    except OSError:
        return
