"""The package upgraded under a real systemd, with one job suspended and another on its way to the other GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hegmd.migration.journal import records
from tests.chaos.halts import UNRECORDED, Halts, Trap
from tests.chaos.jobs import undisturbed
from tests.e2e.systemd_jobs import (
    PATIENCE_S,
    JobInMachine,
    halted_service,
    hegmctl_reply,
    settled,
    trains_at,
    what_trains,
)
from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import SERVICE, install, main_pid

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages"), pytest.mark.usefixtures("preloaded")]

JOURNAL = "var/lib/hegm/operations.journal"


def named_pieces(node: SystemdNode) -> dict[str, int]:
    """Return the names of the pool's segments, each with its inode."""
    return {path.name: path.stat().st_ino for path in (node.root / "dev/shm").glob("hegmd-*/*")}


def upgrade_within(node: SystemdNode, package: Path, halts: Halts) -> None:
    """Install the package while the daemon is halted, until it has the signal to end.

    The old daemon can neither finish its operation before it is replaced, nor is it killed: it stops in the middle.
    """
    before = node.journal_cursor()
    with node.start("dpkg", "--install", f"/root/{package.name}") as installing:
        node.wait_for_journal("stopping on SIGTERM", after=before, unit=SERVICE)
        halts.go()
        output, _ = installing.communicate(timeout=PATIENCE_S)
    assert installing.returncode == 0, output


def test_a_newer_daemon_finishes_what_the_older_one_began(
    fresh_node: SystemdNode, deb: Path, newer_deb: Path, tmp_path: Path
) -> None:
    node = fresh_node
    install(node, deb)
    shutil.copy(newer_deb, node.root / "root")
    newer = newer_deb.name.split("_")[1]
    python, script = what_trains(node)
    with halted_service(node, tmp_path) as halts, JobInMachine(node, python, script, 41) as suspended:
        waits, _ = trains_at(node)
        assert hegmctl_reply(node, "suspend", str(waits))["operation"]["phase"] == "suspended"
        pieces = named_pieces(node)
        with JobInMachine(node, python, script, 42) as migrated:
            moves, _ = trains_at(node, beside=waits)
            older = main_pid(node)
            halts.set(Trap(moves, "offloading", UNRECORDED))
            with node.start("hegmctl", "--json", "migrate", str(moves), "--to", "gpu1"):
                op = halts.wait(PATIENCE_S)
                upgrade_within(node, newer_deb, halts)
            assert main_pid(node) not in (0, older)
            assert node.run("hegmctl", "version", "--json").stdout.count(newer) == 2  # of client and daemon
            assert settled(node, op) in {"done", "rolled-back"}
            assert "recovered" in [line["event"] for line in hegmctl_reply(node, "op", op, "--story")["story"]]
            assert named_pieces(node) == pieces, "what was suspended lies where it lay"
            assert hegmctl_reply(node, "resume", str(waits), "--to", "gpu1")["operation"]["phase"] == "done"
            trains_at(node, beside=waits)
            printed = {42: migrated.end(), 41: suspended.end()}
    for seed, lines in printed.items():
        assert lines == undisturbed(script, seed, len(lines))
    assert named_pieces(node) == {}


def test_a_journal_of_a_newer_version_is_refused_with_a_hint_and_left_unchanged(node: SystemdNode) -> None:
    path = node.root / JOURNAL
    node.run("systemctl", "start", SERVICE)
    node.run("systemctl", "stop", SERVICE)
    before = path.read_bytes()
    newer = before.replace(records.MAGIC, records.MAGIC[:-1] + bytes([records.VERSION + 1]), 1)
    assert newer != before
    path.write_bytes(newer)
    try:
        cursor = node.journal_cursor()
        assert node.run("systemctl", "start", SERVICE, check=False).returncode != 0
        refused = node.wait_for_journal(f"the journal of operations /{JOURNAL} has version", after=cursor, unit=SERVICE)
        assert f"version {records.VERSION + 1}; this hegmd reads versions up to {records.VERSION}" in refused["MESSAGE"]
        node.wait_for_journal("install the newer hegmd that wrote it again", after=cursor, unit=SERVICE)
        assert path.read_bytes() == newer
    finally:
        node.run("systemctl", "stop", SERVICE)
        path.write_bytes(before)
    node.run("systemctl", "start", SERVICE)
