"""A real Slurm on this node: slurmctld and slurmd of the distribution, with what is in contrib/slurm."""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.moved_job import environment
from tests.looks import pause
from tests.patience import HANG_S
from tests.stubs.build import build_stub

ROOT = Path(__file__).parents[2]


def _without_a_space(folder: Path) -> Path:
    """Slurm's configuration knows no paths with a space: such a folder by a link, for this run."""
    if " " not in str(folder):
        return folder
    place = Path(tempfile.mkdtemp(prefix="hegm-slurm-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    link = place / folder.name
    link.symlink_to(folder, target_is_directory=True)
    return link


UNPACKED = _without_a_space(ROOT / "build/slurm")
SHIPPED = _without_a_space(ROOT / "contrib/slurm")
LIBRARIES = UNPACKED / "usr/lib/x86_64-linux-gnu"
# More than is free beside the training on a simulated GPU of 8 GiB.
WANTED = "8185MiB"
CONFIGURATION = """
ClusterName=hegm
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
KillWait=120
AuthType=auth/none
AuthInfo=cred_expire=5
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
GresTypes=gpu,shard
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PlugStackConfig={folder}/plugstack.conf
Prolog={folder}/prolog
Epilog={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES PriorityTier=1 OverSubscribe=FORCE:1
PartitionName=low-requeue Nodes={host} PriorityTier=1 OverSubscribe=NO PreemptMode=REQUEUE
PartitionName=high Nodes={host} PriorityTier=10 OverSubscribe=FORCE:1
"""
# The requests to hegmd: longer than a test waits. A test ends the time itself, by a file (tests/stubs/grace).
GRACE_S = int(HANG_S)


class Slurm:
    """A cluster of this node."""

    def __init__(self, folder: Path, socket_path: Path) -> None:
        self.folder = folder
        self._grace = folder / "grace.so"
        self.host = socket.gethostname().partition(".")[0]
        self._socket_path = socket_path
        search = f"{UNPACKED}/usr/bin:{os.environ['PATH']}"
        self._environ = {"PATH": search, "SLURM_CONF": str(folder / "slurm.conf")}
        self._environ["LD_LIBRARY_PATH"] = f"{LIBRARIES}:{LIBRARIES}/slurm-wlm"
        #: Slurm stops suspended jobs once this file is there.
        self.grace_over = folder / "grace.over"

    def write(self) -> None:
        for name in ("slurm-state", "spool"):
            (self.folder / name).mkdir()
        given = {"host": self.host, "ports": free_ports(), "libraries": LIBRARIES, "folder": self.folder}
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(**given))
        self._write_plugin()
        build_stub("grace", self.folder)
        (self.folder / "partitions").write_text(f"high gpu0 {WANTED} production\n")
        variables = {name: value for name, value in environment(self._socket_path).items() if name != "PATH"}
        exported = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        ours = f"exec env -u LD_LIBRARY_PATH {exported} {shlex.quote(sys.executable)} -m hegmctl"
        self.script("hegmctl", f'{ours} "$@"')
        given_to_hooks = f"HEGMCTL={self.folder}/hegmctl HEGM_SLURM_PARTITIONS={self.folder}/partitions"
        given_to_hooks += f" HEGM_SLURM_WAIT={HANG_S:.0f}"
        for hook in ("prolog", "epilog"):
            self.script(
                hook, f"exec env {given_to_hooks} {shlex.quote(str(SHIPPED))}/{hook} >> {self.folder}/hooks.log 2>&1"
            )

    def _write_plugin(self) -> None:
        plugin = self.folder / "hegm_spank.so"
        words = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{UNPACKED}/usr/include", "-o", str(plugin)]
        subprocess.run(["gcc", *words, str(SHIPPED / "hegm_spank.c")], check=True, timeout=HANG_S)
        line = f"required {plugin} task={SHIPPED}/hegm-task grace={GRACE_S}\n"
        (self.folder / "plugstack.conf").write_text(line)

    def script(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    def daemon(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        argv = [str(UNPACKED / f"usr/sbin/{name}-wlm"), "-D", "-f", str(self.folder / "slurm.conf"), *words]
        environ = {**self._environ, "LD_PRELOAD": str(self._grace), "HEGM_TEST_GRACE_OVER": str(self.grace_over)}
        with (self.folder / f"{name}.err").open("wb") as errors:
            return subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)

    def call(self, *words: str) -> str:
        done = subprocess.run(words, env=self._environ, capture_output=True, text=True, check=False, timeout=HANG_S)
        return done.stdout

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.is_file() and path.suffix != ".so" else ""

    def wait_until(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + HANG_S
        while not condition():
            assert time.monotonic() < until, "\n".join(self.text(name) for name in sorted(os.listdir(self.folder)))
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
        slurm.grace_over.touch()
        try:
            for words in (("--full", "-s", "KILL"), ()):
                slurm.call("scancel", *words, "-u", "root")
            slurm.wait_until(lambda: not slurm.call("squeue", "-h"))
        finally:
            for process in (node, controller):
                process.kill()
                process.wait()
