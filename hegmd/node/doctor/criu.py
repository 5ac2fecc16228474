"""Checks of CRIU: which one is used, where it is, whether it is new enough, and whether it works with this kernel.

Only images need CRIU, so a missing one is a warning. Under systemd it runs as a unit of its own, because it cannot work
inside the daemon's sandbox.
"""

from __future__ import annotations

import re

from hegmd.errors import ExternalError
from hegmd.node.criu_program import WANTED, Candidate, first_error, rights_missing, survey
from hegmd.node.criu_program import check as ask_criu
from hegmd.node.doctor.facts import CheckResult, NodeFacts, clipped, fail, ok, skip, warn
from hegmd.system.programs import ProgramMissing

# `criu check` asks the kernel a few dozen questions, in about a second; the version is a line.
_CHECK_DEADLINE_S = 8.0

_LEAST = ".".join(str(number) for number in WANTED)
_BESIDE_STEP = "sudo contrib/criu/install.sh, which packages have as /usr/lib/hegm/share/get-criu"
_STEPS = {
    "ubuntu": "sudo add-apt-repository ppa:criu/ppa && sudo apt install criu",
    "debian": f"sudo apt install criu (Debian 13 or newer), or {_BESIDE_STEP}",
    "fedora": "sudo dnf install criu",
}


def _install_step(facts: NodeFacts) -> str:
    found = re.search(r'^ID="?(\w+)', facts.read("etc/os-release") or "", re.MULTILINE)
    how = _STEPS.get(found[1] if found is not None else "", "from your distribution or from criu.org")
    return f"install CRIU {_LEAST} or newer: {how}"


async def program(facts: NodeFacts) -> CheckResult:
    """This node has a CRIU that works with today's kernels; names it, and the ones that are not used."""
    found = await _survey(facts)
    if not found:
        return warn("CRIU is not installed: jobs cannot be written to images", _install_step(facts))
    used = next((each for each in found if each.is_new_enough), None)
    if used is not None:
        beside = "" if used is found[0] else f"; {found[0].path} is {found[0].version or 'broken'}"
        return ok(f"CRIU {used.version} is installed: {used.path}{beside}")
    oldest = next((each for each in found if each.version is not None), None)
    if oldest is None:
        return warn(f"{found[0].path} does not report its version", _mending_step(facts))
    return warn(
        f"CRIU {oldest.version} is installed: before {_LEAST}, it does not start on newer kernels (vDSO)",
        _mending_step(facts),
    )


async def _survey(facts: NodeFacts) -> tuple[Candidate, ...]:
    return await survey(None if facts.criu is None else str(facts.criu), path=facts.program_path)


def _mending_step(facts: NodeFacts) -> str:
    if facts.criu is None:
        return _install_step(facts)
    return f"set images.criu (now {facts.criu}) to another, or remove it and {_install_step(facts)}"


def rights(facts: NodeFacts) -> CheckResult:
    """The daemon may dump and restore processes."""
    missing = rights_missing(facts.uid)
    return ok("hegmd may dump and restore processes") if missing is None else warn(missing.message, missing.hint)


async def check(facts: NodeFacts) -> CheckResult:
    """CRIU's own check of the kernel succeeds."""
    if facts.uid != 0:
        return skip("only root can check CRIU: sudo criu check")
    found = await _survey(facts)
    if not found:
        return skip("CRIU is not installed")
    used = next((each for each in found if each.is_new_enough), found[0])
    if facts.criu is not None and used.version is None:
        return skip(f"it does not report its version: {used.path}")
    is_beside = facts.criu is not None or used.path.startswith("/usr/local/")
    step = f"sudo {used.path} check" if is_beside else "sudo criu check"
    try:
        done = await ask_criu(
            used.path, deadline_s=_CHECK_DEADLINE_S, path=facts.program_path, in_unit=facts.under_systemd
        )
    except ProgramMissing:
        return skip(f"CRIU does not work in the daemon's sandbox, and systemd-run is missing: {step}")
    except ExternalError as error:
        return fail(error.message, error.hint)
    if done.status == 0:
        return ok("`criu check` says: looks good")
    # A node that systemd has not booted gets a line about that first, and the failure on the next one.
    refused = re.search(r"(?m)^Failed to .*", done.output_tail)
    if facts.under_systemd and refused is not None:
        return warn(f"systemd did not run `criu check` ({clipped(refused[0], 50)})", step)
    reason = _first_reason(done.output_tail) or f"status {done.status}"
    return fail(f"`criu check`: {reason}", _install_step(facts) if "vdso" in reason.lower() else step)


def _first_reason(output: str) -> str | None:
    """Return CRIU's first error with a reason, without its place in the source; else the last line."""
    error = first_error(output)
    lines = output.splitlines()
    if error is not None or not lines or "Error (" in lines[-1]:
        return error
    return lines[-1]
