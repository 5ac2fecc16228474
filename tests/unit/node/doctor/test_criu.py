"""Checks of CRIU, with a stub on the search path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.node.doctor import criu
from hegmd.node.doctor.facts import NodeFacts
from hegmd.system.programs import SYSTEM_PATH
from tests.unit.node.doctor.node import FileNode

SHIMS = Path(__file__).parents[3] / "stubs" / "bin"

# The output of 3.17.1 on Linux 6.18.
OLD_ON_NEW_KERNEL = """\
Error (criu/util.c:642): exited, status=1
Error (criu/vdso.c:381): vdso: Unexpected rt vDSO area bounds
Error (criu/vdso.c:613): vdso: Failed to fill self vdso symtable
Error (criu/crtools.c:260): Could not initialize kernel features detection.
"""


class Programs:
    """A directory of stubs of CRIU and systemd-run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def install(self, *names: str, version: str = "4.1.1", says: str = "Looks good.\n", status: int = 0) -> None:
        for name in names:
            (self.directory / name).symlink_to(SHIMS / name)
        (self.directory / "criu.version").write_text(f"Version: {version}\n")
        (self.directory / "criu.check").write_text(says)
        (self.directory / "criu.status").write_text(str(status))

    def facts(self, node: FileNode, **changes: object) -> NodeFacts:
        # Only here, in case there is a real CRIU on this machine; the shims' own shell needs nothing else.
        return node.facts(**{"program_path": f"{self.directory}:{SYSTEM_PATH}", **changes})


@pytest.fixture
def programs(socket_dir: Path) -> Programs:
    """Below a short path: a summary that names a program with a long one is cut (issue 14, row 20)."""
    return Programs(socket_dir / "bin")


async def test_a_good_version(node: FileNode, programs: Programs) -> None:
    programs.install("criu")
    found = await criu.program(programs.facts(node))
    assert (found.status, found.summary) == ("ok", f"CRIU 4.1.1 is installed: {programs.directory}/criu")


async def test_the_configured_criu_was_ignored_for_an_unused_one(
    node: FileNode, programs: Programs, socket_dir: Path
) -> None:
    """The doctor praised the distribution's, and every image was refused."""
    programs.install("criu")
    gone = programs.directory / "gone"
    found = await criu.program(programs.facts(node, criu=gone))
    assert found.status == "warn"
    assert found.fix is not None
    assert f"set images.criu (now {gone}) to another" in found.fix
    unasked = await criu.check(programs.facts(node, criu=gone))
    assert (unasked.status, unasked.summary) == ("skip", f"it does not report its version: {gone}")
    other = Programs(socket_dir / "other")
    other.install("criu", version="4.3")
    used = await criu.program(programs.facts(node, criu=other.directory / "criu"))
    assert used.status == "ok"
    assert used.summary == f"CRIU 4.3 is installed: {other.directory}/criu"


def test_root_may_and_others_may_not(node: FileNode) -> None:
    assert criu.rights(node.facts(uid=0)).status == "ok"
    found = criu.rights(node.facts(uid=1000))
    assert (found.status, found.fix) == ("warn", "run: sudo systemctl start hegmd")
    assert "uid 1000" in found.summary


@pytest.mark.parametrize(
    ("release", "step"),
    [
        ('NAME="Ubuntu"\nID=ubuntu\n', "ppa:criu/ppa"),
        ("ID=debian\n", "contrib/criu/install.sh"),
        ('ID="fedora"\n', "sudo dnf install criu"),
        ("ID=gentoo\n", "from your distribution"),
        ("", "from your distribution"),
    ],
)
async def test_an_old_version_and_where_a_new_one_comes_from(
    node: FileNode, programs: Programs, release: str, step: str
) -> None:
    programs.install("criu", version="3.17.1")
    node.write("etc/os-release", release)
    found = await criu.program(programs.facts(node))
    assert found.status == "warn"
    assert "CRIU 3.17.1 is installed: before 4.1" in found.summary
    assert found.fix is not None
    assert step in found.fix


async def test_no_criu(node: FileNode, programs: Programs) -> None:
    facts = node.facts(program_path=str(programs.directory))
    assert (await criu.program(facts)).summary == "CRIU is not installed: jobs cannot be written to images"
    assert (await criu.check(facts)).summary == "CRIU is not installed"


async def test_a_check_that_succeeds(node: FileNode, programs: Programs) -> None:
    programs.install("criu")
    assert (await criu.check(programs.facts(node))).status == "ok"


async def test_an_old_criu_on_a_new_kernel(node: FileNode, programs: Programs) -> None:
    programs.install("criu", says=OLD_ON_NEW_KERNEL, status=1)
    found = await criu.check(programs.facts(node))
    assert (found.status, found.summary) == ("fail", "`criu check`: vdso: Unexpected rt vDSO area bounds")
    assert found.fix is not None
    assert found.fix.startswith("install CRIU 4.1 or newer")


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("Error (criu/cr-check.c:12): Kernel is missing X\n", "Kernel is missing X"),
        ("Segmentation fault\n", "Segmentation fault"),
        ("Error (criu/util.c:642): exited, status=1\n", "status 1"),
        ("", "status 1"),
    ],
)
async def test_the_reason_comes_from_crius_output(node: FileNode, programs: Programs, says: str, reason: str) -> None:
    programs.install("criu", says=says, status=1)
    found = await criu.check(programs.facts(node))
    assert (found.status, found.summary, found.fix) == ("fail", f"`criu check`: {reason}", "sudo criu check")


async def test_an_ordinary_user_gets_no_answer(node: FileNode, programs: Programs) -> None:
    programs.install("criu")
    found = await criu.check(programs.facts(node, uid=1000))
    assert (found.status, found.summary) == ("skip", "only root can check CRIU: sudo criu check")
    assert not (programs.directory / "criu.log").exists()


async def test_under_systemd_it_leaves_the_sandbox(node: FileNode, programs: Programs) -> None:
    programs.install("criu", "systemd-run")
    assert (await criu.check(programs.facts(node, under_systemd=True))).status == "ok"
    assert (programs.directory / "systemd-run.log").exists()


async def test_a_failure_inside_the_unit_is_criu_s_own(node: FileNode, programs: Programs) -> None:
    programs.install("criu", "systemd-run", says="Error (criu/x.c:1): no luck\n", status=1)
    found = await criu.check(programs.facts(node, under_systemd=True))
    assert (found.status, found.summary) == ("fail", "`criu check`: no luck")


NOT_BOOTED = "System has not been booted with systemd as init system (PID 1). Can't operate.\n"


@pytest.mark.parametrize("before", ["", NOT_BOOTED], ids=["at once", "after a line about the node"])
async def test_a_systemd_that_refuses_is_not_blamed_on_criu(before: str, node: FileNode, programs: Programs) -> None:
    """Issue 14, row 18: systemd-run's second line was reported as a failure of `criu check`."""
    programs.install("criu", "systemd-run")
    message = f"{before}Failed to connect to bus: No such file or directory\n"
    (programs.directory / "systemd-run.refusal").write_text(message)
    found = await criu.check(programs.facts(node, under_systemd=True))
    assert (found.status, found.fix) == ("warn", "sudo criu check")
    assert "systemd did not run `criu check` (Failed to connect to bus" in found.summary


async def test_without_systemd_run_it_is_not_run_in_the_sandbox(node: FileNode, programs: Programs) -> None:
    programs.install("criu")
    facts = node.facts(program_path=str(programs.directory), under_systemd=True)
    found = await criu.check(facts)
    assert found.status == "skip"
    assert "systemd-run is missing" in found.summary
    assert not (programs.directory / "criu.log").exists()
