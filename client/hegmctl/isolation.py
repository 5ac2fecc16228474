"""What in a command keeps hegmd's agent out of its Python: such a process would train from its beginning.

The agent comes by a folder on PYTHONPATH and Python's `site`, so what leaves out either leaves out the agent. Judges
words and environments alone: what a script does with them is not known before it runs, see `agentless`.
"""

from __future__ import annotations

import os
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PATHS = "PYTHONPATH"
# The end of the folder that is first on PYTHONPATH, of whichever installation.
_FOLDER = "/agent/inject"
_PYTHON = re.compile(r"python[0-9.]*t?$")
# Letters of Python's options: those that leave the agent out, and those that a value or the program comes after.
_LEAVE_OUT, _WITH_VALUE, _PROGRAM = "EIS", "WX", "cm"
_LONG_WITH_VALUE = "--check-hash-based-pycs"


def begins_with_python(command: Sequence[str]) -> bool:
    """Whether another interpreter can take the place of its first word."""
    return bool(command) and _PYTHON.match(os.path.basename(command[0])) is not None


def leaves_out(command: Sequence[str]) -> str | None:
    """The word by which that command leaves the agent out, as far as `env` and Python's own words tell; else None."""
    if command and os.path.basename(command[0]) == "env":
        return _of_env(command)
    return option_that_leaves_out(command[1:]) if begins_with_python(command) else None


def option_that_leaves_out(words: Sequence[str]) -> str | None:
    """Of Python's words after its name: the option that leaves the agent out."""
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
    """Whether a Python that is started with that environment finds the agent, and no `sitecustomize` before it."""
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
