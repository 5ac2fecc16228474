"""Checks of CRIU: which version is installed, and whether it works on this kernel.

CRIU is needed for keeping a whole process in a directory, and for nothing else; so its absence is a warning. Under
systemd it never runs inside the daemon's sandbox, where it could not work, but as a unit of its own.
"""

from __future__ import annotations

import re

from hegmd.doctor.facts import Finding, NodeFacts, clipped, fail, ok, skip, version_numbers, warn
from hegmd.errors import ExternalError
from hegmd.external import ProgramMissing, criu_check, criu_version

WANTED = (4, 1)

# `criu check` asks the kernel a few dozen questions, in about a second; the version is a line.
_CHECK_DEADLINE_S = 8.0
_VERSION_DEADLINE_S = 3.0

_STEPS = {
    "ubuntu": "sudo add-apt-repository ppa:criu/ppa && sudo apt install criu",
    "debian": "sudo apt install criu (Debian 13 or newer)",
    "fedora": "sudo dnf install criu",
}


def _install_step(facts: NodeFacts) -> str:
    found = re.search(r'^ID="?(\w+)', facts.read("etc/os-release") or "", re.MULTILINE)
    how = _STEPS.get(found[1] if found is not None else "", "from your distribution or from criu.org")
    return f"install CRIU {WANTED[0]}.{WANTED[1]} or newer: {how}"


async def program(facts: NodeFacts) -> Finding:
    """CRIU is installed, in a version that starts on today's kernels."""
    try:
        version = await criu_version(deadline_s=_VERSION_DEADLINE_S, path=facts.program_path)
    except ProgramMissing:
        return warn("CRIU is not installed: processes cannot be kept in a directory", _install_step(facts))
    if version_numbers(version) < WANTED:
        return warn(
            f"CRIU {version} is installed: before {WANTED[0]}.{WANTED[1]}, it does not start on newer kernels (vDSO)",
            _install_step(facts),
        )
    return ok(f"CRIU {version} is installed")


async def check(facts: NodeFacts) -> Finding:
    """CRIU's own check of the kernel succeeds."""
    if facts.uid != 0:
        return skip("only root can ask CRIU: sudo criu check")
    try:
        done = await criu_check(deadline_s=_CHECK_DEADLINE_S, path=facts.program_path, in_unit=facts.under_systemd)
    except ProgramMissing as missing:
        if missing.argv[0] == "criu":
            return skip("CRIU is not installed")
        return skip("CRIU does not work in the daemon's sandbox, and systemd-run is missing: sudo criu check")
    except ExternalError as error:
        return fail(error.message, error.hint)
    if done.status == 0:
        return ok("`criu check` says: looks good")
    refused = re.match(r"Failed to .*", done.output_tail)
    if facts.under_systemd and refused is not None:
        reason = clipped(refused[0], 50)
        return warn(f"systemd did not run `criu check` ({reason})", "sudo criu check")
    reason = _first_reason(done.output_tail) or f"status {done.status}"
    return fail(f"`criu check`: {reason}", _install_step(facts) if "vdso" in reason.lower() else "sudo criu check")


def _first_reason(output: str) -> str | None:
    """The first of CRIU's errors that gives a reason, without its place in the source; else the last line."""
    reasons = re.findall(r"Error \([^)]*\):\s*(.+)", output) or output.splitlines()[-1:]
    # Its helper process's exit is logged before the error that made it exit.
    return next((str(reason) for reason in reasons if not re.match(r"exited, status=\d+$", reason)), None)
