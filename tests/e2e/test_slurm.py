"""The real Slurm: a job of a higher partition gets the memory of a GPU before its first line, and no loss changes."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import SCRIPTS, environment, steps_alone
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]
need_torch()

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build/slurm"
SHIPPED = ROOT / "contrib/slurm"
LIBRARIES = UNPACKED / "usr/lib/x86_64-linux-gnu"
SCRIPT = [sys.executable, str(SCRIPTS / "until.py")]
# More than is free beside the training on a simulated GPU of 8 GiB.
WANTED = "8185MiB"
CONFIGURATION = """
ClusterName=hegm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
PluginDir={libraries}/slurm-wlm
StateSaveLocation={folder}/slurm-state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
SchedulerParameters=suspend_grace_time=30
Prolog={folder}/prolog
Epilog={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 OverSubscribe=FORCE:1
PartitionName=high Nodes={host} PriorityTier=10 OverSubscribe=FORCE:1
"""


class Slurm:
    """A cluster of this node."""

    def __init__(self, folder: Path, socket_path: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname().partition(".")[0]
        self._socket_path = socket_path
        search = f"{UNPACKED}/usr/bin:{os.environ['PATH']}"
        self._environ = {"PATH": search, "SLURM_CONF": str(folder / "slurm.conf")}
        self._environ["LD_LIBRARY_PATH"] = f"{LIBRARIES}:{LIBRARIES}/slurm-wlm"

    def write(self) -> None:
        for name in ("slurm-state", "spool"):
            (self.folder / name).mkdir()
        given = {"host": self.host, "ports": free_ports(), "libraries": LIBRARIES, "folder": self.folder}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
        (self.folder / "partitions").write_text(f"high gpu0 {WANTED} production\n")
        variables = {name: value for name, value in environment(self._socket_path).items() if name != "PATH"}
        exported = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        ours = f"exec env -u LD_LIBRARY_PATH {exported} {sys.executable} -m hegmctl"
        self.script("hegmctl", f'{ours} "$@"')
        given_to_hooks = f"HEGMCTL={self.folder}/hegmctl HEGM_SLURM_PARTITIONS={self.folder}/partitions"
        for hook in ("prolog", "epilog"):
            self.script(hook, f"exec env {given_to_hooks} {SHIPPED}/{hook} >> {self.folder}/hooks.log 2>&1")

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def daemon(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        argv = [str(UNPACKED / f"usr/sbin/{name}-wlm"), "-D", "-f", str(self.folder / "slurm.conf"), *words]
        with (self.folder / f"{name}.err").open("wb") as errors:
            return subprocess.Popen(argv, env=self._environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self._environ, capture_output=True, text=True, check=False, timeout=HANG_S)
        return done.stdout

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < until, self.text("hooks.log") + self.text("slurmd.log") + self.text("low")
            pause()


def free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for one in (first, second):
            one.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]


@contextmanager
def cluster(folder: Path, socket_path: Path) -> Iterator[Slurm]:
    """Slurm's two daemons, until the block ends, with every job of theirs."""
    slurm = Slurm(folder, socket_path)
    slurm.write()
    controller = slurm.daemon("slurmctld")
    node = slurm.daemon("slurmd", "-N", slurm.host, "-d", str(UNPACKED / "usr/sbin/slurmstepd-wlm"))
    try:
        yield slurm
    finally:
        slurm.call("scancel", "-s", "KILL", "-p", "low")
        slurm.call("scancel", "-p", "low")
        slurm.wait_until(lambda: not slurm.call("squeue", "-h"))
        for process in (node, controller):
            process.kill()
            process.wait()


def test_a_job_has_the_memory_before_its_first_line_and_the_training_goes_on_after_it(tmp_path: Path) -> None:
    if not (UNPACKED / "usr/sbin/slurmctld-wlm").exists():
        pytest.skip("there is no Slurm in build/slurm; tools/slurm.sh fetches it, which takes a network")
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as their users, which takes root")
    stop = tmp_path / "stop"
    with RunningDaemon(tmp_path) as daemon, cluster(tmp_path, daemon.socket_path) as slurm:
        slurm.wait_until(lambda: "idle" in slurm.call("sinfo", "-h", "-o", "%T"))
        words = (f"{SHIPPED}/gang.sh", *SCRIPT, str(stop))
        exports = f"ALL,HEGMCTL={tmp_path}/hegmctl"
        slurm.call("sbatch", "--export", exports, "-p", "low", "-o", f"{tmp_path}/low", *words)
        slurm.wait_until(lambda: slurm.text("low").count("step") > 20)
        first_line = slurm.script("high.sh", f"{tmp_path}/hegmctl gpus --json; touch {tmp_path}/high-is-over")
        slurm.call("sbatch", "-p", "high", "-o", f"{tmp_path}/high", first_line)
        slurm.wait_until((tmp_path / "high-is-over").exists)
        gpus = json.loads(slurm.text("high").splitlines()[-1])["gpus"]
        assert gpus[0]["memory_used_bytes"] == 0, slurm.text("hooks.log")
        before = slurm.text("low").count("step")
        slurm.wait_until(lambda: slurm.text("low").count("step") > before + 20)
        stop.touch()
        slurm.wait_until(lambda: "\nend" in slurm.text("low"))
        steps = [line for line in slurm.text("low").splitlines() if line.startswith("step")]
    assert steps == steps_alone([*SCRIPT, str(stop), str(len(steps))])
