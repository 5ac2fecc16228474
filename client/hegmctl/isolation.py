"""Finds what in a command keeps hegmd's agent out of its Python: such a process would train from its beginning.

The agent is loaded from a directory on PYTHONPATH through Python's `site`, so excluding either excludes the agent.
Judges words and environments only: what a script does with them is unknown before it runs, see `agentless`.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PATHS = "PYTHONPATH"
# The end of the first directory on PYTHONPATH, in any installation.
_FOLDER = "/agent/inject"
_PYTHON = re.compile(r"python[0-9.]*t?$")
# Letters of Python's options: those that exclude the agent, those with a value, and those before the program.
_LEAVE_OUT, _WITH_VALUE, _PROGRAM = "EIS", "WX", "cm"
_LONG_WITH_VALUE = "--check-hash-based-pycs"


def begins_with_python(command: Sequence[str]) -> bool:
    """Return True if its first word is a Python, which another interpreter can replace."""
    return bool(command) and _PYTHON.match(os.path.basename(command[0])) is not None


def leaves_out(command: Sequence[str]) -> str | None:
    """Return the word by which the command excludes the agent, by `env` and Python's options, or None."""
    if command and os.path.basename(command[0]) == "env":
        return _of_env(command)
    return option_that_leaves_out(command[1:]) if begins_with_python(command) else None


def option_that_leaves_out(words: Sequence[str]) -> str | None:
    """Return the option in Python's arguments that excludes the agent, or None."""
    left = iter(words)
    for word in left:
        if word == _LONG_WITH_VALUE:
            next(left, None)
        if word.startswith("--"):
            continue
        if not word.startswith("-") or word == "-":
            return None
        for at, letter in enumerate(word[1:], 1):
            if letter in _LEAVE_OUT:
                return f"-{letter}"
            if letter in _PROGRAM:
                return None
            if letter in _WITH_VALUE:
                if at == len(word) - 1:
                    next(left, None)
                break
    return None


def leads_to_agent(environ: Mapping[str, str]) -> bool:
    """Return True if a Python with that environment finds the agent, and no other `sitecustomize` before it."""
    for folder in environ.get(PATHS, "").split(os.pathsep):
        if folder.rstrip("/").endswith(_FOLDER):
            return True
        if os.path.isabs(folder) and os.path.exists(os.path.join(folder, "sitecustomize.py")):
            return False
    return False


def _of_env(command: Sequence[str]) -> str | None:
    left = list(command[1:])
    while left:
        word = left.pop(0)
        if word in ("-", "-i", "--ignore-environment"):
            return f"env {word}"
        if word in ("-u", "--unset", "-C", "--chdir"):
            word += f"={left.pop(0) if left else ''}"
        if word in (f"-u={PATHS}", f"-u{PATHS}", f"--unset={PATHS}"):
            return f"env {word.replace('-u=', '-u ')}"
        name, is_one, value = word.partition("=")
        if name == PATHS and not leads_to_agent({PATHS: value}):
            return f"env {word}"
        if not word.startswith("-") and not is_one:
            return leaves_out([word, *left])
    return None
