"""Reads the environment once: the variables of HeGM 0.3 with its defaults, and three of our own.

An invalid value is an error at the start that names the variable. No other module reads the environment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from hegmd.errors import USAGE, HegmError

STATE = "latest.pt"
LOCK = "lock"
REFUSED = "refused"
COMMAND = "command"
LOOPBACK = "127.0.0.1"
_MIN_TOKEN = 16
_MAX_S = 1e6
#: The shortest interval between checks of locks: with HEGM_POLL_INTERVAL=0, HeGM uses a whole CPU.
MIN_POLL_S = 0.01
#: All variables that are read here, and their meaning.
VARIABLES = {
    "HEGM_CHECKPOINT_DIR": "The folder of all launchers, each with one of its pid in it; `/checkpoint` if not set.",
    "HEGM_CHECKPOINT_PATH": "The file for the state; by default, its name has the launcher's pid. `lock` is beside it.",
    "HEGM_EXIT_CODE": "The exit status of a worker that has saved its state; 99 if not set.",
    "HEGM_POLL_INTERVAL": "How often locks are checked, in seconds; 1 if not set, at least 0.01.",
    "HEGM_CTRL_CHECKPOINT_TIMEOUT": "How long hegm-ctrl waits for locks, in seconds; 300 if not set, 0 for not at all.",
    "HEGM_CTRL_HOST": "The address of the REST interface; 127.0.0.1 if not set.",
    "HEGM_CTRL_PORT": "Its port; 8298 if not set.",
    "HEGM_CTRL_TOKEN": "What callers have to send as `Authorization: Bearer TOKEN`. Without one the interface "
    "listens on loopback only, and answers its own user and root.",
    "HEGM_LOG_LEVEL": "With `QUIET` nothing is printed about the REST interface.",
}


@dataclass(frozen=True, slots=True)
class LauncherSettings:
    folder: Path
    path: Path | None
    exit_code: int
    poll_interval_s: float
    checkpoint_limit_s: float
    host: str
    port: int
    token: str | None
    is_quiet: bool

    def state_of(self, launcher_pid: int) -> Path:
        """Return where that launcher's training is saved; all have the same path if one is named."""
        return self.path or self.folder / str(launcher_pid) / STATE

    def lock_of(self, launcher_pid: int) -> Path:
        """Return the file that exists while that launcher waits for a controller."""
        return self.state_of(launcher_pid).with_name(LOCK)


def read_surroundings(environ: Mapping[str, str]) -> LauncherSettings:
    """Return the settings. Raises HegmError USAGE that names the variable."""
    path = environ.get("HEGM_CHECKPOINT_PATH") or None
    return LauncherSettings(
        folder=_absolute("HEGM_CHECKPOINT_DIR", environ.get("HEGM_CHECKPOINT_DIR") or "/checkpoint"),
        path=None if path is None else _file(path),
        exit_code=_whole(environ, "HEGM_EXIT_CODE", 99, 1, 255),
        poll_interval_s=max(_seconds(environ, "HEGM_POLL_INTERVAL", 1.0), MIN_POLL_S),
        checkpoint_limit_s=_seconds(environ, "HEGM_CTRL_CHECKPOINT_TIMEOUT", 300.0),
        host=environ.get("HEGM_CTRL_HOST") or LOOPBACK,
        port=_whole(environ, "HEGM_CTRL_PORT", 8298, 0, 65535),
        token=environ.get("HEGM_CTRL_TOKEN") or None,
        is_quiet=environ.get("HEGM_LOG_LEVEL", "").upper() == "QUIET",
    )


def require_token_off_loopback(host: str, token: str | None) -> None:
    """Require a token unless the address is loopback. Raises HegmError USAGE."""
    if token is not None and (len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable()):
        raise HegmError(
            USAGE,
            f"HEGM_CTRL_TOKEN has {len(token)} characters, or some that are invalid in a header; "
            f"{_MIN_TOKEN} printable ones are needed",
            "make one: openssl rand -hex 32",
        )
    if token is None and not is_loopback(host):
        raise HegmError(
            USAGE,
            f"the control API should listen at {host or 'every address'}, but HEGM_CTRL_TOKEN is not set",
            "set HEGM_CTRL_TOKEN here and send it as `Authorization: Bearer TOKEN`, or listen at 127.0.0.1",
            {"host": host},
        )


def is_loopback(host: str) -> bool:
    """Return True if only this machine or container can reach that address. A name may resolve to anything."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _file(text: str) -> Path:
    path = _absolute("HEGM_CHECKPOINT_PATH", text)
    if path.name in ("", "..", LOCK, REFUSED, COMMAND):
        message = f"HEGM_CHECKPOINT_PATH is {text!r}, which cannot be a state file"
        raise HegmError(USAGE, message, "give it the full path of another one, or unset it")
    return path


def _absolute(name: str, text: str) -> Path:
    try:
        return Path(text).absolute()
    except OSError as error:
        hint = "change to a folder that exists, or give the absolute path"
        raise HegmError(USAGE, f"{name} is {text!r}, and the working folder was removed", hint) from error


def _whole(environ: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    text = environ.get(name) or str(default)
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if not least <= value <= most:
        raise HegmError(USAGE, f"{name} is {text!r}", f"give it a whole number from {least} to {most}, or unset it")
    return value


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name) or str(default)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _MAX_S:
        hint = f"give it a number of seconds from 0 to {_MAX_S:.0f}, or unset it"
        raise HegmError(USAGE, f"{name} is {text!r}", hint)
    return value
