"""Programs as transient units of systemd: with the rights of the node, outside the daemon's sandbox.

A unit is not our child, and ending `systemd-run` would leave it running. So the service manager enforces the deadline,
ends and reaps the unit, and shows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress

from hegmd.errors import ExternalError, Refused
from hegmd.system.programs import SYSTEM_PATH, Completed, find_program, missing, run
from hegmd.system.threads import run_detached

STOP_DEADLINE_S = 30.0
_TAKEN = re.compile(r"[Uu]nit \S+ (?:already exists|was already loaded)")
# For systemd's own work on a busy node.
_SLACK_S = 5.0


class UnitNameTaken(Refused):
    """A unit of that name exists; it was not changed."""


async def systemd_run(argv: Sequence[str], *, deadline_s: float, path: str = SYSTEM_PATH) -> Completed:
    """Run a program to its end as a transient unit and return its output and status. Raises ExternalError.

    A deadline of `math.inf` is for a program that must not be stopped.
    """
    program = await _program(argv[0], path)
    if program is None:
        raise missing(argv, path)
    fixed = ["--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"]
    longest = "infinity" if deadline_s == math.inf else f"{deadline_s:g}"
    properties = [f"--property=RuntimeMaxSec={longest}", "--property=TimeoutStopSec=2"]
    whole = ["systemd-run", *fixed, *properties, *_environment(path), "--", program, *argv[1:]]
    return await run(whole, deadline_s=deadline_s, path=path)


async def start_unit(
    argv: Sequence[str], name: str, *, pid_file: str, description: str, deadline_s: float
) -> Completed:
    """Start a service whose program leaves others behind and exits; `pid_file` names the main one. Returns its result.

    The service lasts until those have ended. Raises UnitTaken if the unit exists, and ExternalError.
    """
    program = await _program(argv[0], SYSTEM_PATH)
    if program is None:
        raise missing(argv, SYSTEM_PATH)
    given = {
        "PIDFile": pid_file,
        "TimeoutStartSec": f"{deadline_s:g}",
        # The processes keep their own limits, not those that the manager sets for services.
        "TasksMax": "infinity",
    }
    whole = ["systemd-run", "--quiet", "--collect", f"--unit={name}", "--service-type=forking"]
    whole += [f"--description={description or name}", *_environment(SYSTEM_PATH)]
    whole += [f"--property={key}={value}" for key, value in given.items()]
    done = await run([*whole, "--", program, *argv[1:]], deadline_s=deadline_s + _SLACK_S)
    if done.status != 0 and _TAKEN.search(done.stderr) is not None:
        raise UnitNameTaken(f"the unit {name} already exists", f"run: systemctl status {name}")
    return done


async def stop_unit(name: str) -> None:
    """End all processes of that unit. Does nothing if it does not exist or the manager cannot be reached."""
    with suppress(ExternalError):
        await run(["systemctl", "kill", "--signal=SIGKILL", name], deadline_s=STOP_DEADLINE_S)
        await run(["systemctl", "stop", name], deadline_s=STOP_DEADLINE_S)


async def _program(name: str, path: str) -> str | None:
    if name.startswith("/"):
        return name
    return await run_detached(lambda _: find_program(name, path), name=f"find {name}")


def _environment(path: str) -> list[str]:
    return [f"--setenv=PATH={path}", "--setenv=LC_ALL=C"]
