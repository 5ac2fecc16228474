"""The choice of a CRIU, and its command line, with substitutes on the search path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.node import criu_program
from hegmd.node.criu_program import Criu
from hegmd.system.programs import SYSTEM_PATH, ProgramMissing
from hegmd.system.transient_units import systemd_run

SHIMS = Path(__file__).parents[2] / "stubs" / "bin"


@pytest.fixture
def shims(tmp_path: Path) -> Path:
    for name in ("criu", "systemd-run"):
        (tmp_path / name).symlink_to(SHIMS / name)
    (tmp_path / "criu.version").write_text("Version: 4.1.1\nGitID: v4.1.1\n")
    (tmp_path / "criu.check").write_text("Looks good.\n")
    (tmp_path / "criu.status").write_text("0")
    return tmp_path


async def test_a_new_one_on_the_search_path_is_used(shims: Path) -> None:
    assert await criu_program.find(path=f"{shims}:{SYSTEM_PATH}") == Criu(str(shims / "criu"), "4.1.1")


async def test_the_configured_program_is_the_only_one(shims: Path, tmp_path: Path) -> None:
    missing = await criu_program.find(str(tmp_path / "none"), path=f"{shims}:{SYSTEM_PATH}")
    assert not isinstance(missing, Criu)
    assert [str(tmp_path / "none") in reason.message for reason in missing] == [True]


async def test_an_old_one_is_a_reason_with_the_step_to_a_new_one(shims: Path) -> None:
    (shims / "criu.version").write_text("Version: 3.17.1\n")
    reasons = await criu_program.find(path=f"{shims}:{SYSTEM_PATH}")
    assert not isinstance(reasons, Criu)
    assert reasons[0].message == f"{shims}/criu is CRIU 3.17.1; 4.1 or newer is needed"
    assert reasons[0].hint == criu_program.INSTALL_STEP


async def test_a_criu_that_names_no_version_is_not_used(shims: Path) -> None:
    (shims / "criu.version").write_text("hello\n")
    reasons = await criu_program.find(path=f"{shims}:{SYSTEM_PATH}")
    assert not isinstance(reasons, Criu)
    assert "does not name a version" in reasons[0].message


async def test_none_at_all(tmp_path: Path) -> None:
    reasons = await criu_program.find(path=str(tmp_path))
    assert not isinstance(reasons, Criu)
    assert [reason.message for reason in reasons] == ["CRIU is not installed; version 4.1 or newer is needed"]


@pytest.mark.parametrize(("older", "newer"), [("3.17.1", "4.1"), ("4.0", "4.1"), ("4.2.1", "4.10")])
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert criu_program.version_of(older) < criu_program.version_of(newer)


async def test_criu_is_checked_directly(shims: Path) -> None:
    completed = await criu_program.check("criu", deadline_s=10, path=f"{shims}:{SYSTEM_PATH}", in_unit=False)
    assert (completed.status, completed.output_tail) == (0, "Looks good.")
    assert not (shims / "systemd-run.log").exists()


async def test_criu_is_checked_in_a_unit_with_a_deadline(shims: Path) -> None:
    (shims / "criu.status").write_text("1")
    completed = await criu_program.check("criu", deadline_s=7, path=f"{shims}:{SYSTEM_PATH}", in_unit=True)
    assert completed.status == 1
    called = (shims / "systemd-run.log").read_text().split()
    assert {"--quiet", "--wait", "--pipe", "--collect"} <= set(called[: called.index("--")])
    assert "--property=RuntimeMaxSec=7" in called
    assert called[called.index("--") + 1 :] == [str(shims / "criu"), "check"]


async def test_a_unit_is_not_started_for_a_missing_program(tmp_path: Path) -> None:
    (tmp_path / "systemd-run").symlink_to(SHIMS / "systemd-run")
    with pytest.raises(ProgramMissing, match="criu is not installed"):
        await systemd_run(["criu"], deadline_s=10, path=str(tmp_path))
    assert not (tmp_path / "systemd-run.log").exists()
