"""A value as a restarted process gets it: written to a state file, and read back."""

from __future__ import annotations

import os
from typing import Any

from hegmd.agent.state.storage import state_file


def through_a_file(value: Any) -> Any:
    fd = os.memfd_create("state", os.MFD_CLOEXEC)
    try:
        state_file.write(fd, value)
        return state_file.read(fd)
    finally:
        os.close(fd)
