"""Jobs that train in a machine with systemd, and the service there, halted where a test wants it.

Owns the jobs' processes. The test acts on them.
"""

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

from typing_extensions import Self

from tests.chaos.halts import Halts
from tests.chaos.jobs import BY_HAND, WITH_TORCH
from tests.e2e.agented import BRISK
from tests.e2e.systemd_node import SystemdNode
from tests.e2e.systemd_service import SERVICE, drop_in
from tests.looks import COMMAND_MS, pause
from tests.patience import HANG_S
from tests.stubs.build import build_stub

PATIENCE_S = HANG_S
AT_REST = frozenset({"suspended", "done", "rolled-back", "lost"})


def hegmctl_reply(node: SystemdNode, *words: str) -> dict[str, Any]:
    """The last thing that hegmctl says."""
    done = node.run("hegmctl", "--json", *words, check=False)
    reply: dict[str, Any] = json.loads((done.stdout or done.stderr).splitlines()[-1])
    return reply


class JobInMachine:
    """A job in the machine, read all the while."""

    def __init__(self, node: SystemdNode, python: str, script: Path, seed: int) -> None:
        for file in (script, script.with_name("bare_torch.py"), BRISK / "sitecustomize.py"):  # what it imports
            shutil.copy(file, node.root / "root")
        run = ("env", "PYTHONPATH=/root", "hegmctl", "run", "--gpu", "gpu0", "--")
        words = node.argv(*run, python, f"/root/{script.name}", str(seed))
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


def what_trains(node: SystemdNode) -> tuple[str, Path]:
    """A Python in the machine and a script for it: with PyTorch, if it can be had there."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    has_torch = node.run(sys.executable, "-c", look, check=False).returncode == 0
    return (sys.executable, WITH_TORCH) if has_torch else ("python3", BY_HAND)


def trains_at(node: SystemdNode, *, beside: int = 0) -> tuple[int, str]:
    """Pid and GPU of the job, or of the one beside that, as soon as its agent is there and counted."""
    while True:
        for found in hegmctl_reply(node, "ps").get("processes", []):
            if found["pid"] != beside and found["agent"] and found["gpus"]:
                return found["pid"], found["gpus"][0]["gpu"]
        pause(COMMAND_MS)


def settled(node: SystemdNode, op: str) -> str:
    """Return the operation once it has ended or waits, whichever daemon runs then.

    While it waits for an agent that has yet to connect, `op --follow` ends before that.
    """
    phase = ""
    while phase not in AT_REST:
        reply = hegmctl_reply(node, "op", op, "--follow")
        if "operation" in reply:
            phase = reply["operation"]["phase"]
        else:
            assert reply["error"]["code"] in {"no-daemon", "disconnected", "unavailable"}, reply
        if phase not in AT_REST:
            pause(COMMAND_MS)
    return phase
