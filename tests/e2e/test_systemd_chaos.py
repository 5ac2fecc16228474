"""The service killed at states of its operations, under a real systemd that starts it again, while a job trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cells import DAEMON, MIGRATE, RESUME, SUSPEND, Cell
from tests.chaos.halts import BEGUN, RECORDED, UNRECORDED, Halts, Trap
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
from tests.e2e.systemd_service import SERVICE

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("packages"), pytest.mark.usefixtures("preloaded")]

CELLS = (
    Cell(MIGRATE, "offloading", BEGUN, DAEMON),
    Cell(MIGRATE, "reloading", UNRECORDED, DAEMON),
    Cell(SUSPEND, "leaving", RECORDED, DAEMON),
    Cell(SUSPEND, "suspended", RECORDED, DAEMON),
    Cell(RESUME, "verifying", RECORDED, DAEMON),
)
MORE_CELLS = (
    Cell(MIGRATE, "reserving", UNRECORDED, DAEMON),
    Cell(MIGRATE, "restoring", RECORDED, DAEMON),
    Cell(SUSPEND, "offloading", UNRECORDED, DAEMON),
    Cell(RESUME, "reloading", BEGUN, DAEMON),
    Cell(RESUME, "tidying", UNRECORDED, DAEMON),
)


def killed(node: SystemdNode, halts: Halts, cell: Cell) -> str:
    """Kill the service at a point where an operation ends."""
    pid, gpu = trains_at(node)
    other = "gpu1" if gpu == "gpu0" else "gpu0"
    if cell.command == RESUME:
        assert hegmctl_reply(node, "suspend", str(pid))["operation"]["phase"] == "suspended"
    where = [] if cell.command == SUSPEND else ["--to", other]
    halts.set(Trap(pid, cell.state, cell.moment))
    with node.start("hegmctl", "--json", cell.command, str(pid), *where):
        op = halts.wait(PATIENCE_S)
        if cell.moment == BEGUN:
            halts.go()
        node.run("systemctl", "kill", "--kill-who=main", "--signal=KILL", SERVICE)
        if cell.moment != BEGUN:
            halts.forget()
    phase = settled(node, op)
    if phase == "suspended":
        while hegmctl_reply(node, "resume", str(pid)).get("operation", {}).get("phase") != "done":
            assert settled(node, op) in {"suspended", "done"}
    return phase


@pytest.mark.parametrize("cells", [CELLS, pytest.param(MORE_CELLS, marks=pytest.mark.wide)], ids=["some", "more"])
def test_systemd_restarts_a_killed_service_and_it_finishes_its_operations(
    node: SystemdNode, tmp_path: Path, cells: tuple[Cell, ...]
) -> None:
    python, script = what_trains(node)
    with halted_service(node, tmp_path) as halts:
        node.run("systemctl", "start", SERVICE)
        with JobInMachine(node, python, script, 31) as job:
            for cell in cells:
                phase = killed(node, halts, cell)
                assert phase in cell.ends, (cell, hegmctl_reply(node, "op", "--story", "1"))
            trains_at(node)
            lines = job.end()
        assert int(node.show(SERVICE, "NRestarts")) >= len(cells)
        assert lines == undisturbed(script, 31, len(lines))
        left = list((node.root / "dev/shm").glob("hegmd-*/*"))
        assert left == []
        assert int(node.show(SERVICE, "NFileDescriptorStore")) == 0
