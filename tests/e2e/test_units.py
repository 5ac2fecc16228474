"""Programs as units of their own, under a real systemd: that they leave the daemon's sandbox, and that they end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.real_criu import criu_or_skip
from tests.e2e.systemd_node import SystemdNode, why_not

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

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
from hegmd.system.transient_units import systemd_run

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
    """Return what PROGRAM prints in the daemon's sandbox: its own confinement, then the result of the other program."""
    options = ["--quiet", "--wait", "--pipe", "--collect", *confinement(), f"--setenv=PYTHONPATH={ROOT}"]
    done = machine.run("systemd-run", *options, sys.executable, "-c", PROGRAM, str(deadline_s), *argv)
    return done.stdout.splitlines()


def test_a_transient_unit_is_outside_the_sandbox(machine: SystemdNode) -> None:
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
from hegmd.memory.pool_memory import make_memory
from hegmd.memory.pool_names import Key, PieceName
from hegmd.memory.pool_places import find_places
from hegmd.memory.spill_file import SpillFolder
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
    options += [f'--property=BindReadOnlyPaths="{path}"' for path in (ROOT, sys.prefix)]
    machine.run("systemd-run", *options, sys.executable, "-c", HOLD, "make")
    found = machine.run("systemd-run", *options, sys.executable, "-c", HOLD, "find")
    assert found.stdout.split() == ["b'weights'"]


HAND_OFF = """
import anyio, json, os, sys
from hegmd.images.criu import run as runs
from hegmd.images.criu.credentials import credentials_in
from hegmd.images.criu.privileges import rights_missing, to_dump, to_restore
from hegmd.images.criu.needs import needs_of
from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_tree import read_tree

async def main():
    program, version, unit, pid, folder, output, uid = sys.argv[1:]
    criu, pid, uid = Criu(program, version), int(pid), int(uid)
    tree = read_tree(pid)
    needs = needs_of(tree)
    assert not needs.reasons, needs.reasons
    lacking = rights_missing(frozenset({uid}), as_user=uid != 0, in_unit=True)
    assert lacking is None, lacking.message
    images = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    guise = to_dump(tree, ()) if uid else None
    await runs.dump(criu, pid, images, needs, leave_stopped=True, in_unit=True, guise=guise)
    end_all(population_of(needs.pids))
    to = os.open(output, os.O_WRONLY | os.O_APPEND)
    outlets = {outlet.key: to for outlet in needs.outlets}
    more = {"description": "training, restored", "outlets": outlets}
    guise = to_restore(credentials_in(images), uid) if uid else None
    await runs.restore(criu, images, needs, log_dir_fd=images, unit_name=unit, guise=guise, **more)
    print(json.dumps([outlet.key.split(":")[0] for outlet in needs.outlets]))

anyio.run(main)
"""

# Ends on a signal, with a word and a status.
WAITING = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
signal.sigwait([signal.SIGUSR1])
print("ended", flush=True)
raise SystemExit(7)
"""


@pytest.mark.parametrize("uid", [0, 1], ids=["root's", "a user's"])
def test_a_job_of_a_unit_is_dumped_from_the_sandbox_and_restored_as_a_unit_that_systemctl_shows(
    machine: SystemdNode, uid: int
) -> None:
    """Its output was a socket of the journal's, which is led into a file; nothing of the sandbox sticks to it."""
    criu = criu_or_skip()
    begun = machine.journal_cursor()
    folder, name = f"/run/image-{uid}", f"waiting-{uid}"
    python = os.path.realpath(sys.executable)  # that of a clone below /root is not for other users
    as_whom = [f"--uid={uid}", f"--gid={uid}"] if uid else []
    machine.run("systemd-run", "--quiet", f"--unit={name}", *as_whom, "--collect", python, "-c", WAITING)
    machine.wait_for_journal("ready", after=begun)
    pid = machine.show(f"{name}.service", "MainPID")
    (machine.root / folder[1:]).mkdir(mode=0o700)
    (machine.root / folder[1:] / "said").touch()
    options = ["--quiet", "--wait", "--pipe", "--collect", *confinement(), f"--setenv=PYTHONPATH={ROOT}"]
    # A descriptor leads to the mount that it was opened in, and the sandbox's are read-only.
    options += [f"--property=ReadWritePaths={folder}"]
    unit = f"hegm-job-{name}.service"
    done = machine.run(
        *("systemd-run", *options, sys.executable, "-c", HAND_OFF, criu.path, criu.version),
        *(unit, pid, folder, f"{folder}/said", str(uid)),
    )
    assert done.stdout == '["socket"]\n'
    assert machine.show(unit, "MainPID") == pid
    assert machine.show(unit, "ActiveState") == "active"
    assert "training, restored" in machine.run("systemctl", "status", unit).stdout
    status = (machine.root / "proc" / pid / "status").read_text()
    assert "Seccomp:\t0\n" in status
    assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n" in status
    assert unit in (machine.root / "proc" / pid / "cgroup").read_text()
    ended = machine.journal_cursor()
    machine.run("kill", "-USR1", pid)
    machine.wait_for_journal(unit, "status=7", after=ended)
    assert (machine.root / folder[1:] / "said").read_text() == "ended\n"
    # systemd logs the end of a process before it waits for it. It answers a question after both.
    machine.show(unit, "MainPID")
    assert not (machine.root / "proc" / pid).exists()
