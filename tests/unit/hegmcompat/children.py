"""Processes that take the place of workers and launchers, with SIGUSR1 as each test needs it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SAYS_READY = "print('ready', flush=True); input()"


@contextmanager
def child(action: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that has done the action and waits; it ends with the block."""
    words = [sys.executable, "-c", f"import os, signal, sys; {action}; {_SAYS_READY}" if action else _SAYS_READY]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
