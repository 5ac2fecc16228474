"""The place and version of CRIU, and whether this daemon may use it.

A CRIU on the node's search path is preferred if it is new enough, then the one that contrib/criu/install.sh unpacks.
`hegmd.system.programs` starts it. Also knows which lines of CRIU's log are errors: the doctor reads the output of `criu
check`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from hegmd.errors import REFUSED, ExternalError
from hegmd.protocol.operations import Reason
from hegmd.system.programs import SYSTEM_PATH, Completed, find_program, run
from hegmd.system.threads import run_detached
from hegmd.system.transient_units import systemd_run

WANTED = (4, 1)
BESIDE = "/usr/local/lib/hegm-criu/bin/criu"
INSTALL_STEP = (
    "sudo contrib/criu/install.sh (packages have it as /usr/lib/hegm/share/get-criu), or apt-get install criu on "
    "Debian 13 and newer"
)

VERSION_DEADLINE_S = 5.0
# Ends of helper processes mean nothing; without CAP_SYS_RESOURCE it continues with fewer descriptors.
_BESIDE_THE_POINT = re.compile(r"exited, status=\d+$|Can't setup RLIMIT_NOFILE for self")


class Criu(NamedTuple):
    """A CRIU that is new enough."""

    path: str
    version: str


def candidates(configured: str | None = None, path: str = SYSTEM_PATH) -> tuple[str, ...]:
    """Return the CRIU programs of this node, the preferred one first. A configured one is the only one."""
    if configured is not None:
        return (configured,)
    found = (find_program("criu", path), BESIDE if path == SYSTEM_PATH and os.access(BESIDE, os.X_OK) else None)
    return tuple(each for each in found if each is not None)


def usable_path(configured: Path | None = None) -> str | None:
    """Return the preferred program that can be executed, or None."""
    found = candidates(None if configured is None else str(configured))
    return next((path for path in found if os.access(path, os.X_OK)), None)


class Candidate(NamedTuple):
    """A CRIU of this node: its version, or why it reports none."""

    path: str
    version: str | None
    error: ExternalError | None = None

    @property
    def is_new_enough(self) -> bool:
        """Return True if it works with today's kernels."""
        return self.version is not None and version_of(self.version) >= WANTED


async def survey(configured: str | None = None, path: str = SYSTEM_PATH) -> tuple[Candidate, ...]:
    """Return every CRIU of this node, the preferred one first. Starts each once."""
    paths = await run_detached(lambda _: candidates(configured, path), name="find criu")
    found: list[Candidate] = []
    for each in paths:
        try:
            found.append(Candidate(each, await version_named(each, deadline_s=VERSION_DEADLINE_S, path=path)))
        except ExternalError as error:
            found.append(Candidate(each, None, error))
    return tuple(found)


async def find(configured: str | None = None, path: str = SYSTEM_PATH) -> Criu | tuple[Reason, ...]:
    """Return the CRIU to use, or all reasons why there is none."""
    reasons: list[Reason] = []
    for each in await survey(configured, path):
        if each.version is not None and each.is_new_enough:
            return Criu(each.path, each.version)
        if each.error is not None:
            reasons.append(_reason(f"{each.path}: {each.error.message}", each.error.hint))
        else:
            reasons.append(_reason(f"{each.path} is CRIU {each.version}; {_wanted()} or newer is needed", INSTALL_STEP))
    if not reasons:
        reasons.append(_reason(f"CRIU is not installed; version {_wanted()} or newer is needed", INSTALL_STEP))
    return tuple(reasons)


def rights_missing(uid: int) -> Reason | None:
    """Return why a daemon of that user may not dump and restore processes, or None."""
    if uid == 0:
        return None
    return _reason(
        f"CRIU needs root's rights (CAP_CHECKPOINT_RESTORE and others) and hegmd runs as uid {uid}",
        "run: sudo systemctl start hegmd",
    )


def version_of(text: str) -> tuple[int, ...]:
    """For comparing: 4.2.1 gives (4, 2, 1)."""
    return tuple(int(number) for number in text.split(".") if number.isdigit())


def _wanted() -> str:
    return ".".join(str(number) for number in WANTED)


def _reason(message: str, hint: str) -> Reason:
    return Reason(code=REFUSED.name, message=message, hint=hint)


async def version_named(program: str, *, deadline_s: float, path: str = SYSTEM_PATH) -> str:
    """The version that `criu --version` names, such as 4.1 or 3.17.1. Raises ExternalError."""
    hint = "install CRIU again; `criu --version` should name its version"
    completed = (await run([program, "--version"], deadline_s=deadline_s, path=path)).require(hint)
    found = re.search(r"^Version:\s*v?(\d+(?:\.\d+)*)", completed.stdout, re.MULTILINE)
    if found is None:
        message = f"`{program} --version` does not name a version"
        raise ExternalError(
            message, hint, argv=completed.argv, status=completed.status, output_tail=completed.output_tail
        )
    return found[1]


async def check(program: str, *, deadline_s: float, in_unit: bool, path: str = SYSTEM_PATH) -> Completed:
    """Run CRIU's own check of the kernel; `in_unit` runs it outside the daemon's sandbox."""
    argv = [program, "check"]
    if in_unit:
        return await systemd_run(argv, deadline_s=deadline_s, path=path)
    return await run(argv, deadline_s=deadline_s, path=path)


def is_error(line: str) -> bool:
    """Return True for a line of CRIU's log that reports an error with a reason."""
    return "Error (" in line and _BESIDE_THE_POINT.search(line) is None


def bare_error(line: str) -> str:
    """Return an error without the time, the process and the place in CRIU's source."""
    return re.sub(r"^.*?Error \([^)]*\):\s*", "", line).strip()


def first_error(log: str) -> str | None:
    """Return the first error in CRIU's log, or None."""
    return next((bare_error(line) for line in log.splitlines() if is_error(line)), None)
