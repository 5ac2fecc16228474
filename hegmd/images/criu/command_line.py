"""CRIU's command lines. Pure.

Uses the command line and not CRIU's RPC (`criu swrk`); both can do what is needed. Commands in the log can be run by
hand, no code has to speak protobuf, and a transient unit can get arguments but no connected socket, so the RPC would
need another process. The RPC also has notifications, but nothing needs them: the job is parked and off its GPU before a
dump starts, and the rest of a restore follows after CRIU has ended.

CRIU opens directories through the daemon's descriptors (/proc/PID/fd/N): they lead to the directory that was checked,
whatever is at its path now, and out of any mount namespace.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from hegmd.images.criu.needs import Needs, Outlet

DUMP_LOG = "dump.log"
RESTORE_LOG = "restore.log"
# CRIU's directories, which parent.py opens for it: with a user's rights CRIU can reach none by path.
IMAGES_FD, LOGS_FD = 8, 9
IMAGES, LOGS = f"/proc/self/fd/{IMAGES_FD}", f"/proc/self/fd/{LOGS_FD}"
FIRST_OUTLET_FD = 10

# The service manager owns control groups. A configuration file of the node must not change the plan. Informational
# messages name what an error is about.
_ALWAYS = ("--manage-cgroups=ignore", "--no-default-config", "-v3")


def place_of(fd: int, pid: int | None = None) -> str:
    """Return the path by which other programs of root reach this process's open directory."""
    return f"/proc/{os.getpid() if pid is None else pid}/fd/{fd}"


def dump_order(program: str, root: int, needs: Needs, *, leave_stopped: bool, as_user: bool = False) -> list[str]:
    """Return the command that dumps the tree. CRIU must not end the tree: the image is not verified by then."""
    after = "--leave-stopped" if leave_stopped else "--leave-running"
    order = [program, "dump", "--tree", str(root), "--images-dir", IMAGES, after, *_always(as_user=as_user)]
    return [*order, *needs.dump_options, "--log-file", DUMP_LOG]


def restore_order(program: str, needs: Needs, *, as_user: bool = False) -> list[str]:
    """Restore the tree; the directories and the outlets are expected under their numbers, see `opened`."""
    order = [program, "restore", "--images-dir", IMAGES, "--work-dir", LOGS, *_always(as_user=as_user)]
    order += needs.restore_options
    for number, outlet in enumerate(needs.outlets, FIRST_OUTLET_FD):
        order += ["--inherit-fd", f"fd[{number}]:{outlet.key}"]
    return [*order, "--log-file", RESTORE_LOG, "--restore-detached"]


def _always(*, as_user: bool) -> tuple[str, ...]:
    return (*_ALWAYS, "--unprivileged") if as_user else _ALWAYS


def opened(needs: Needs, outlets: Mapping[str, str]) -> list[str]:
    """Return the arguments by which parent.py opens the outlets: the file for each outlet's key, or /dev/null."""
    words: list[str] = []
    for number, outlet in enumerate(needs.outlets, FIRST_OUTLET_FD):
        path = outlets.get(outlet.key)
        words += ["--open", f"{number}:{_mode(outlet, is_led=path is not None)}:{path or '/dev/null'}"]
    return words


def folder(number: int, fd: int) -> list[str]:
    """Return the arguments by which parent.py opens a directory that this process has open as `fd`."""
    return ["--open", f"{number}:d:{place_of(fd)}"]


def _mode(outlet: Outlet, *, is_led: bool) -> str:
    if outlet.key.startswith("tty["):
        return "t"
    if outlet.is_read and outlet.is_written:
        return "s" if is_led else "u"
    if outlet.is_read:
        return "r"
    return "p" if is_led else "a"


def unit_name_for(words: Sequence[str]) -> str:
    """Return a name for the unit of a restored job from those words: hegm-job-4711-train.service."""
    kept = [re.sub(r"[^A-Za-z0-9_.]+", "_", word).strip("_.")[:40] for word in words]
    return f"hegm-job-{'-'.join(filter(None, kept)) or 'restored'}.service"
