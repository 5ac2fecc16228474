"""The service killed at states of its operations, under a real systemd that starts it again, while a job trains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from tests.chaos.cells import DAEMON, MIGRATE, RESUME, SUSPEND, Cell
from tests.chaos.halts import BEGUN, RECORDED, UNRECORDED, Halts, Trap
from tests.chaos.jobs import BY_HAND, WITH_TORCH, undisturbed
from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import SERVICE, drop_in
from tests.stubs.build import build_stub

pytest_plugins = ["tests.e2e.systemd_packages"]
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

CELLS = (
    Cell(MIGRATE, "arming", UNRECORDED, DAEMON),
    Cell(MIGRATE, "evacuating", BEGUN, DAEMON),
    Cell(MIGRATE, "restoring", RECORDED, DAEMON),
    Cell(MIGRATE, "refilling", UNRECORDED, DAEMON),
    Cell(SUSPEND, "evacuating", UNRECORDED, DAEMON),
    Cell(SUSPEND, "leaving", RECORDED, DAEMON),
    Cell(SUSPEND, "suspended", RECORDED, DAEMON),
    Cell(RESUME, "refilling", BEGUN, DAEMON),
    Cell(RESUME, "verifying", RECORDED, DAEMON),
    Cell(RESUME, "tidying", UNRECORDED, DAEMON),
)
PATIENCE_S = 60.0


def asked(node: SystemdNode, *words: str) -> dict[str, Any]:
    """The last thing that hegmctl says."""
    done = node.run("hegmctl", "--json", *words, check=False)
    said: dict[str, Any] = json.loads((done.stdout or done.stderr).splitlines()[-1])
    return said


class Inside:
    """A job in the machine, read all the while."""

    def __init__(self, node: SystemdNode, python: str, script: Path, seed: int) -> None:
        shutil.copy(script, node.root / "root")
        words = node.argv("hegmctl", "run", "--gpu", "gpu0", "--", python, f"/root/{script.name}", str(seed))
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def end(self) -> list[str]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(PATIENCE_S) == 0
        self._reader.join()
        return self.lines

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def halted_service(node: SystemdNode, folder: Path) -> Iterator[Halts]:
    """The service with two simulated GPUs, halted where the test wants it, and started as often as it is killed."""
    shutil.copy(build_stub("halt", folder), node.root / "usr/lib/halt.so")
    with Halts(node.root / "run/halt.sock") as halts:
        drop_in(
            node,
            "ExecStart=",
            "ExecStart=/usr/bin/hegmd --simulate 2x8GiB",
            "Environment=LD_PRELOAD=/usr/lib/halt.so HEGM_TEST_HALT=/run/halt.sock",
            "RestartSec=0",
            "[Unit]",
            "StartLimitIntervalSec=0",
        )
        yield halts
        node.run("systemctl", "stop", SERVICE)


def trains_at(node: SystemdNode) -> tuple[int, str]:
    """Pid and GPU of the job, as soon as its agent is there and counted."""
    while True:
        found = asked(node, "ps").get("processes", [])
        if found and found[0]["agent"] and found[0]["gpus"]:
            return found[0]["pid"], found[0]["gpus"][0]["gpu"]


def settled(node: SystemdNode, op: str) -> str:
    """Where the operation has come to rest, under whatever daemon there is by then."""
    while "operation" not in (said := asked(node, "op", op, "--follow")):
        assert said["error"]["code"] in {"no-daemon", "disconnected", "unavailable"}, said
    phase: str = said["operation"]["phase"]
    return phase


def killed(node: SystemdNode, halts: Halts, cell: Cell) -> str:
    """Where an operation ends under which the service is killed there."""
    pid, gpu = trains_at(node)
    other = "gpu1" if gpu == "gpu0" else "gpu0"
    if cell.command == RESUME:
        assert asked(node, "suspend", str(pid))["operation"]["phase"] == "suspended"
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
        while asked(node, "resume", str(pid)).get("operation", {}).get("phase") != "done":
            assert settled(node, op) in {"suspended", "done"}
    return phase


def test_systemd_starts_a_killed_service_again_and_it_finishes_what_was_under_way(
    node: SystemdNode, tmp_path: Path
) -> None:
    has_torch = node.run(sys.executable, "-c", "import torch", check=False).returncode == 0
    python, script = (sys.executable, WITH_TORCH) if has_torch else ("python3", BY_HAND)
    with halted_service(node, tmp_path) as halts:
        node.run("systemctl", "start", SERVICE)
        with Inside(node, python, script, 31) as job:
            for cell in CELLS:
                phase = killed(node, halts, cell)
                assert phase in cell.ends, (cell, asked(node, "op", "--story", "1"))
            trains_at(node)
            lines = job.end()
        assert int(node.show(SERVICE, "NRestarts")) >= len(CELLS)
        assert lines == undisturbed(script, 31, len(lines))
        left = list((node.root / "dev/shm").glob("hegmd-*/*"))
        assert left == []
        assert int(node.show(SERVICE, "NFileDescriptorStore")) == 0
