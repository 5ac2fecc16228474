"""Finds processes below a command that train without hegmd's agent, although the command continues from a saved state.

Such a process would start over. It is detected from /proc: it has PyTorch mapped and can have no agent, because a
Python option or its environment excludes the agent. PyTorch is mapped at the start of its import, so the process is
ended before its first step. Processes without PyTorch and those that cannot be read are left alone. Only children of
this process and their descendants are checked.

If one of them may have the agent, has PyTorch itself, and holds the right to continue from the state, all are left
alone: it continues or ends, and processes that it starts before, such as a probe by `python -I`, are left alone. A
process without PyTorch is no training, but may have started one.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from time import monotonic

from hegmctl.isolation import PATHS, begins_with_python, leads_to_agent, option_that_leaves_out

LOOK_EVERY_S = 0.25
# A check below a launcher of many ranks takes longer. This is the largest share of a processor that it may use.
PAUSE = 20.0
_TORCH = b"/libtorch"
_MAX_WORDS = 200
# Position of the start time after the name, which may hold anything.
_START_TICKS = 19
HINT = "start it without -E, -I and -S, with the PYTHONPATH that it is given"


class AgentlessWatch:
    """Checks at intervals, and ends all processes below a command in which it has found one."""

    def __init__(self) -> None:
        self.look_at = 0.0

    def check(self, pid: int, now: float, right: int | None) -> str | None:
        """Return why the command with that pid was ended; None if nothing is wrong.

        `right` is the descriptor of the right to continue from the state; None if a launcher has it and no rank yet.
        """
        if now < self.look_at:
            return None
        began = monotonic()
        found = _below(pid)
        why = next(filter(None, map(_why_not_ours, found)), None)
        if why is not None and right is not None and any(_is_on_its_way(one, right) for one in found):
            why = None
        self.look_at = now + max(LOOK_EVERY_S, PAUSE * (monotonic() - began))
        if why is not None:
            _end_all(pid)
        return why


def _why_not_ours(pid: int) -> str | None:
    """Return why the process trains without an agent; None if it may have one, or does not train."""
    words = _entries(pid, "cmdline")
    option = option_that_leaves_out(words[1:]) if words is not None and _is_python(pid, words) else None
    if option is None and _is_led_to_agent(pid):
        return None
    if not words or _TORCH not in _read(pid, "maps"):
        return None
    why = f"the option {option}" if option is not None else f"its {PATHS}"
    shown = " ".join(words)[:_MAX_WORDS]
    return f"process {pid} ({shown}) has started over: {why} leaves hegmd's agent out; it was ended"


def _is_on_its_way(pid: int, right: int) -> bool:
    """Return True if the process may have an agent, trains itself, and holds the right to continue from the state."""
    words = _entries(pid, "cmdline")
    if not words or not _is_python(pid, words) or option_that_leaves_out(words[1:]) is not None:
        return False
    return _is_led_to_agent(pid) and _has_open(pid, right) and _TORCH in _read(pid, "maps")


def _is_led_to_agent(pid: int) -> bool:
    """Return True if its environment leads to the agent, or cannot be read."""
    environ = _environ(pid)
    return environ is None or leads_to_agent(environ)


def _has_open(pid: int, fd: int) -> bool:
    """Return True if it has that file of ours open. Other files are left alone: one on a lost server would hang."""
    shown = os.readlink(f"/proc/self/fd/{fd}")
    with suppress(OSError):
        for other in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{other}"
                if os.readlink(path) == shown and os.path.samestat(os.stat(path), os.fstat(fd)):
                    return True
    return False


def _is_python(pid: int, words: list[str]) -> bool:
    try:
        return begins_with_python([os.readlink(f"/proc/{pid}/exe")]) or begins_with_python(words)
    except OSError:
        return False


def _environ(pid: int) -> dict[str, str] | None:
    """Return its initial environment; None if it cannot be read, or if its title overwrites it."""
    entries = _entries(pid, "environ")
    if entries is None or not all("=" in entry for entry in entries):
        return None
    return dict(entry.split("=", 1) for entry in entries)


def _entries(pid: int, name: str) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            text = file.read()
    except OSError:
        return None
    return [os.fsdecode(entry) for entry in text[:-1].split(b"\0")] if text else []


def _below(pid: int) -> list[int]:
    """Return the process and its descendants, itself first; empty if it is no child of this one."""
    found = [pid] if pid in _children("self") else []
    for parent in found:
        found += [child for child in _children(str(parent)) if child not in found]
    return found


def _children(pid: str) -> list[int]:
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for task in tasks for child in _read(pid, f"task/{task}/children").split()]


def _end_all(pid: int) -> None:
    """Stop all of them first, so that none starts another one meanwhile; then kill them."""
    stopped: dict[int, int | None] = {}
    while left := {one: _start_ticks(one) for one in _below(pid) if one not in stopped}:
        for one, ticks in left.items():
            _send(one, ticks, signal.SIGSTOP)
        stopped.update(left)
    for one, ticks in stopped.items():
        _send(one, ticks, signal.SIGKILL)


def _send(pid: int, ticks: int | None, number: int) -> None:
    """Send the signal to that process only, if its start time still matches."""
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            if _start_ticks(pid) == ticks:
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def _start_ticks(pid: int) -> int | None:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[_START_TICKS]) if len(fields) > _START_TICKS else None


def _read(pid: int | str, name: str) -> bytes:
    """Return the file's content; empty if the process has exited or may not be read."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
