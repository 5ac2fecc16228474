"""Programs as units of their own, under a real systemd: that they leave the daemon's sandbox, and that they end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.systemd_node import SystemdNode, why_not

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(60),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

ROOT = Path(__file__).parents[2]

# From the shipped unit: what could keep a program in the sandbox from asking for one outside.
CONFINING = (
    "CapabilityBoundingSet",
    "NoNewPrivileges",
    "MemoryDenyWriteExecute",
    "ProtectSystem",
    "RestrictAddressFamilies",
    "RestrictNamespaces",
    "SystemCallErrorNumber",
    "SystemCallFilter",
)

PROGRAM = """
import anyio, json, sys
from hegmd.errors import ExternalError
from hegmd.external import systemd_run

async def main():
    try:
        done = await systemd_run(sys.argv[2:], deadline_s=float(sys.argv[1]))
    except ExternalError as error:
        print(json.dumps({"error": error.message}))
    else:
        print(json.dumps({"status": done.status, "stdout": done.stdout, "stderr": done.stderr}))

with open("/proc/self/status") as status:
    print(*(line.split()[1] for line in status if line.startswith(("CapEff:", "Seccomp:"))))
anyio.run(main)
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdNode]:
    with SystemdNode(ROOT) as node:
        yield node


def confinement() -> list[str]:
    lines = (ROOT / "systemd/hegmd.service").read_text().splitlines()
    found = [line for line in lines if line.partition("=")[0] in CONFINING]
    assert len(found) >= len(CONFINING), "the shipped unit still has all of these"
    return [f"--property={line}" for line in found]


def run_confined(machine: SystemdNode, deadline_s: float, *argv: str) -> list[str]:
    """What PROGRAM prints in the daemon's sandbox: its own confinement, then what became of the other program."""
    options = ["--quiet", "--wait", "--pipe", "--collect", *confinement(), f"--setenv=PYTHONPATH={ROOT}"]
    done = machine.run("systemd-run", *options, sys.executable, "-c", PROGRAM, str(deadline_s), *argv)
    return done.stdout.splitlines()


def test_a_unit_of_its_own_is_outside_the_sandbox(machine: SystemdNode) -> None:
    look = "grep -E '^(CapEff|Seccomp):' /proc/self/status; echo said >&2; exit 3"
    confined, outcome = run_confined(machine, 20, "sh", "-c", look)
    capabilities, seccomp = confined.split()
    assert (int(capabilities, 16) >> 21 & 1, seccomp) == (0, "2"), "the asking program is confined: no CAP_SYS_ADMIN"
    assert '"status": 3' in outcome
    assert '"stderr": "said\\n"' in outcome
    assert r"Seccomp:\t0\n" in outcome
    assert f"{int(capabilities, 16):016x}" not in outcome


def test_a_unit_that_takes_too_long_is_ended_by_systemd(machine: SystemdNode) -> None:
    before = machine.journal_cursor()
    _, outcome = run_confined(machine, 1, "sleep", "600")
    assert "was not done after 1 s and was ended" in outcome
    machine.wait_for_journal("reached runtime time limit", after=before)


HOLD = """
import os, pathlib, sys
from hegmd.pool_memory import make_memory
from hegmd.pool_names import Key, PieceName
from hegmd.pool_places import find_places
from hegmd.spill_file import SpillFolder
name = PieceName(Key("7", "4711"), 4096, "ab")
places = find_places("0" * 32)
if sys.argv[1] == "make":
    memory = make_memory(name, 4 << 20, places=places, huge=False)
    assert memory.place is not None, "no place takes a file"
    os.pwrite(memory.fd, b"weights", 0)
    spill = SpillFolder(pathlib.Path(os.environ["STATE_DIRECTORY"]) / "spill", spare_bytes=0)
    spill.write(str(name), memory.fd, 4 << 20, lambda: False, lambda _: None)
    spill.remove(str(name))
else:
    (found,) = [file for place in places for file in place.find()]
    print(os.pread(found.fd, 7, 0), found.why_not)
    for place in places:
        place.remove(found.name)
"""


def test_bytes_with_a_name_outlive_the_units_end_in_the_daemons_sandbox(machine: SystemdNode) -> None:
    """Two runs of a unit that is as confined as the daemon's, one after the other: what `systemctl stop` leaves."""
    options = ["--quiet", "--wait", "--pipe", "--collect", *confinement(), f"--setenv=PYTHONPATH={ROOT}"]
    options += ["--property=StateDirectory=hegm-try", "--property=PrivateTmp=yes", "--property=UMask=0077"]
    # A tree or an environment that lies in /tmp would be hidden with it.
    options += [f"--property=BindReadOnlyPaths={path}" for path in (ROOT, sys.prefix)]
    machine.run("systemd-run", *options, sys.executable, "-c", HOLD, "make")
    found = machine.run("systemd-run", *options, sys.executable, "-c", HOLD, "find")
    assert found.stdout.split() == ["b'weights'"]
