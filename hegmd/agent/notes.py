"""The agent's debug log: lines in the file of HEGM_AGENT_DEBUG, `-` for standard error.

Without that variable nothing is written. Never raises: a full disk must not affect the job.
"""

from __future__ import annotations

import os
from time import time

DEBUG = "HEGM_AGENT_DEBUG"
_STANDARD_ERROR = 2


def note(text: str) -> None:
    """Write a line if the variable is set."""
    setting = os.environ.get(DEBUG)
    if not setting:
        return
    line = f"hegm agent {os.getpid()} {time():.3f}: {text}\n".encode(errors="replace")
    try:
        if setting == "-":
            os.write(_STANDARD_ERROR, line)
            return
        fd = os.open(setting, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno is None:  # another thread raised it here, and the script has to get it
            raise
