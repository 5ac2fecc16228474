"""The node for tests of moves: a real hegmd with its keeper, the commands, and an account of all video memory by NVML.

Owns the daemon's process and folder. The account tells what every process has on every GPU, and what nobody has: that
is what descriptors hold, so it has to be the same before a move and after it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pynvml
from typing_extensions import Self

from hegmctl.connection import Connection, connect
from hegmd.errors import HegmError
from hegmd.gpu_helper.ready_helper import PINNED
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Metrics, MetricsReply, OperationReply, Request, Story, StoryReply
from hegmd.protocol.operations import PHASES_IN_ORDER, OperationProgress
from tests.gpu.keeper import HegmdKeeper, Keeper, KeeperRun
from tests.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
COMMAND_S = 120.0
READY_WITHIN_S = 180.0
# Until two lists of processes, one before and one after, are the same.
MAX_LOOKS = 50
POLL_INTERVAL_S = 0.02
# Some machines get their memory only on demand, so half of the free memory at the start would be too little.
POOL_BYTES = 160 << 30
# Besides the memory that NVML lists for it, a process costs its GPU a few MiB that NVML lists for no process.
PROCESS_MIB = 12.0
# Keeps the daemon's descriptors: a stub of systemd, or hegmd's own keeper.
MANAGER, KEEPER = "manager", "keeper"
SHARED_MEMORY = Path("/dev/shm")
# Variables that programs of a node must not inherit: those of a job around this run, and the one that disables compiled
# modules, without which each start of hegmd takes 0.8 s longer than an installed one.
NOT_INHERITED = ("HEGM_SOCKET", "HEGM_RUN", "HEGM_JOB", "HEGM_GPU", "PYTHONDONTWRITEBYTECODE")
OVER = ("suspended", "done", "rolled-back", "lost")
PHASES = (*PHASES_IN_ORDER, *OVER)


class WentWrongError(Exception):
    """The case did not see what it expected."""


@dataclass(frozen=True)
class Account:
    """Video memory at one moment, by GPU's number: in use, and by process."""

    used_mib: tuple[float, ...]
    by_process: tuple[dict[int, float], ...]

    def unowned_mib(self, gpu: int) -> float:
        """Return the memory in use that NVML lists for no process."""
        return self.used_mib[gpu] - sum(self.by_process[gpu].values())

    def places(self, pid: int) -> dict[int, float]:
        """Return a process's memory, by GPU."""
        return {gpu: shares[pid] for gpu, shares in enumerate(self.by_process) if pid in shares}


class Gpus:
    """The GPUs by NVML."""

    def __init__(self) -> None:
        require_nvml()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        self.driver = str(pynvml.nvmlSystemGetDriverVersion())

    def __len__(self) -> int:
        return len(self._handles)

    def account(self) -> Account:
        """Read one moment of all GPUs. A process that exits between two queries would leave memory without an owner."""
        shares = self._shares()
        for _ in range(MAX_LOOKS):
            before = shares
            used = [pynvml.nvmlDeviceGetMemoryInfo(handle).used / MIB for handle in self._handles]
            shares = self._shares()
            if shares == before:
                break
        return Account(tuple(used), tuple(shares))

    def _shares(self) -> list[dict[int, float]]:
        return [
            {process.pid: (process.usedGpuMemory or 0) / MIB for process in self._processes(handle)}
            for handle in self._handles
        ]

    def _processes(self, handle: object) -> Iterable[Any]:
        processes: Iterable[Any] = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return processes


def require_nvml() -> None:
    """Initialise NVML. Ends the program, with the reason, if there is none: no case could run."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise SystemExit(f"there is no NVIDIA GPU here ({error}); tests/e2e/rehearsal.py has a stub of one") from error


def until(fact: Callable[[], object], what: str, within_s: float = 20.0) -> None:
    """Look again until it is so. Raises WentWrongError when it does not come to be."""
    deadline, pause = time.monotonic() + within_s, threading.Event()
    while not fact():
        if time.monotonic() > deadline:
            raise WentWrongError(f"{what} did not come to be within {within_s:g} s")
        pause.wait(POLL_INTERVAL_S)  # NVML and other processes do not report changes


class Node:
    """The daemon and the GPUs. A context manager."""

    def __init__(self, folder: Path, log_level: str = "info", settings: str = "") -> None:
        self.folder = folder
        self._log_level = log_level
        self.gpus = Gpus()
        self.kept_by = MANAGER
        self._config = folder / "hegmd.toml"
        self.settings = f"[pool]\nbudget_bytes = {POOL_BYTES}\n{settings}"
        self._config.write_text(self.settings)
        self._log = (folder / "hegmd.log").open("ab")
        self._runs = 0
        self._new_state()

    def _new_state(self) -> None:
        self._runs += 1
        self.socket_path = self.folder / f"hegmd{self._runs}.sock"
        self._state = self.folder / f"state{self._runs}"
        self.keeper: KeeperRun = (
            Keeper(self.folder) if self.kept_by == MANAGER else HegmdKeeper(self.socket_path, self._state)
        )

    def wait_until_ready(self) -> None:
        """Wait until the memory that the settings name is ready, and pinned if they say so, by the daemon's metrics."""
        wanted = re.search(r"ready_bytes = (\d+)", self.settings)
        least_bytes = 0 if wanted is None else int(wanted[1])
        until(lambda: self._pool_bytes("ready") >= least_bytes, "that memory is ready", READY_WITHIN_S)
        if PINNED in self.settings:
            until(lambda: self._pool_bytes(PINNED) >= least_bytes, "that memory is pinned", READY_WITHIN_S)

    def _pool_bytes(self, what: str) -> int:
        with self.connect() as connection:
            text = connection.call(Metrics(), MetricsReply).text
        found = [line for line in text.splitlines() if line.startswith(f'hegmd_pool_bytes{{what="{what}"}}')]
        return int(float(found[0].split()[-1]))

    # -- the daemon ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()
        self.keeper.close()
        self._give_back_memory()
        self._log.close()

    def start(self) -> None:
        """Start the daemon; it takes up what an earlier one left."""
        paths = {
            "--socket": self.socket_path,
            "--state-dir": self._state,
            "--config": self._config,
            "--log-level": self._log_level,
        }
        command = [sys.executable, "-m", "hegmd", *(str(word) for pair in paths.items() for word in pair)]
        try:
            self.daemon = self.keeper.start(command, self.environ(), self._log.fileno())
        except RuntimeError as error:
            raise WentWrongError(f"{error}\n{self.log_tail()}") from error

    def end(self) -> None:
        """End the daemon kindly, and if need be otherwise."""
        self.daemon.terminate()
        try:
            self.daemon.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def renew(self, kept_by: str | None = None) -> None:
        """Start a fresh daemon: after memory without an owner, or to change the keeper of descriptors."""
        self.kill()
        self.keeper.close()
        self._give_back_memory()
        (self.folder / "notify.sock").unlink(missing_ok=True)
        self.kept_by = kept_by or self.kept_by
        self._new_state()
        self.start()

    def _give_back_memory(self) -> None:
        """Free named memory, which outlives its daemon on purpose: no next daemon will use this state directory."""
        with contextlib.suppress(FileNotFoundError):
            identity = (self._state / "identity").read_text()[:16]
            shutil.rmtree(SHARED_MEMORY / f"hegmd-{os.geteuid()}-{identity}")

    def helper_pid(self) -> int | None:
        """The GPU helper, if there is one now."""
        for child in psutil.Process(self.daemon.pid).children():
            with contextlib.suppress(psutil.Error):  # it may just be ending
                if "hegmd.gpu_helper.child" in child.cmdline():
                    return int(child.pid)
        return None

    def log_tail(self, lines: int = 15) -> str:
        self._log.flush()
        return "\n".join((self.folder / "hegmd.log").read_text(errors="replace").splitlines()[-lines:])

    def log_since(self, since_utc: float, until_utc: float) -> list[str]:
        """Return the daemon's log between these moments."""
        lines = (self.folder / "hegmd.log").read_text(errors="replace").splitlines()
        return [line for line in lines if since_utc <= _utc_of(line) < until_utc]

    def environ(self) -> dict[str, str]:
        """Return the environment of our programs."""
        plain = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        return {**plain, "HEGM_SOCKET": str(self.socket_path), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}

    # -- commands ------------------------------------------------------------------------------------------------------

    def hegmctl(self, *words: str) -> dict[str, Any]:
        """Return the last record of a command. Raises WentWrongError with its error."""
        ran = subprocess.run(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if ran.returncode:
            raise WentWrongError(f"hegmctl {' '.join(words)} ended with {ran.returncode}: {_why(ran)}")
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return answer

    def connect(self) -> Connection:
        return connect(str(self.socket_path), timeout_s=COMMAND_S)

    def ask(self, request: Request) -> OperationReply:
        """Request what no command can: this carrier, or without waiting."""
        with self.connect() as connection:
            return connection.call(request, OperationReply)

    def story(self, op_id: str, *, follow: bool = False) -> StoryReply:
        """Return an operation's record; with `follow`, once it has ended or waits."""
        with self.connect() as connection:
            stream = connection.stream(Story(id=op_id, follow=follow), OperationProgress, StoryReply, patient=True)
            while True:
                try:
                    next(stream)
                except StopIteration as end:
                    reply: StoryReply = end.value
                    return reply

    def rest(self, op_id: str) -> protocol.Operation:
        """The operation, once it is over or suspended; the daemon may be another one by then."""
        while True:
            try:
                return self.story(op_id, follow=True).operation
            except HegmError as error:
                if self.daemon.poll() is None:
                    raise WentWrongError(f"operation {op_id}: {error.message}") from error
                self.start()

    def reach(self, op_id: str, phase: str) -> str:
        """Wait until the operation is in that phase, or in one after it; in which it is."""
        wanted = PHASES.index(phase)
        with self.connect() as connection:
            stream = connection.stream(Story(id=op_id, follow=True), OperationProgress, StoryReply, patient=True)
            for progress in stream:
                # A resumed job was suspended before, and a suspended one ends the stream.
                if progress.phase != "suspended" and PHASES.index(progress.phase) >= wanted:
                    return progress.phase
        return "over"

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def wait_for_agent(self, pid: int) -> None:
        """Until the agent of that process attends."""

        def attends() -> bool:
            with self.connect() as connection:
                return any(there.pid == pid and there.agent for there in connection.processes().processes)

        until(attends, f"that the agent of process {pid} attends")

    def gpu_of(self, pid: int) -> int:
        """The GPU that it is on, by NVML. Raises WentWrongError where it is on none or on several."""
        places = list(self.gpus.account().places(pid))
        if len(places) != 1:
            raise WentWrongError(f"process {pid} is on the GPUs {places}")
        return places[0]

    # -- accounts ------------------------------------------------------------------------------------------------------

    def settle(self, before: Account) -> Account:
        """Wait until no reservations and no unowned memory beyond the former remain. Raises WentWrongError."""
        until(lambda: not self.keeper.stored(), f"that the keeper has nothing more of {self.keeper.stored()}")
        self.settle_gpus(before)
        return self.gpus.account()

    def settle_gpus(self, before: Account) -> None:
        """The same of the GPUs alone, where a suspended job's bytes may be kept elsewhere."""
        try:
            until(lambda: not self._more(before), "that all is given back")
        except WentWrongError as error:
            raise WentWrongError(f"{error}: {self._more(before)}") from None

    def _more(self, before: Account) -> str:
        """Return what GPUs hold now beyond the former account, in words; empty if nothing."""
        after, helper = self.gpus.account(), self.helper_pid()
        remarks = [f"the helper has {after.places(helper)} MiB"] if helper is not None and after.places(helper) else []
        return ", ".join([*remarks, *_more_unowned(before, after)])


def _more_unowned(before: Account, after: Account) -> Iterator[str]:
    """For each GPU on which there is more, or less, than before that no process has, how much."""
    for gpu, shares in enumerate(after.by_process):
        more_processes = len(shares) - len(before.by_process[gpu])
        more_mib = after.unowned_mib(gpu) - before.unowned_mib(gpu)
        if abs(more_mib) > PROCESS_MIB * max(1, abs(more_processes)):
            yield f"gpu{gpu} {more_mib:+.1f} MiB that no process has"


def _utc_of(line: str) -> float:
    """When a line was logged; 0 for one that does not tell."""
    try:
        return datetime.fromisoformat(line.split(" ", 1)[0]).timestamp()
    except ValueError:
        return 0.0


def _why(ran: subprocess.CompletedProcess[str]) -> str:
    """The message and the hint: of the error, or of the operation that did not get to what was asked."""
    for text, keys in ((ran.stderr, ("error",)), (ran.stdout, ("operation", "failure"))):
        try:
            reply = json.loads(text.splitlines()[-1])
            for key in keys:
                reply = reply[key]
            return f"{reply['code']}: {reply['message']} ({reply['hint']})"
        except (ValueError, IndexError, KeyError, TypeError):
            continue
    return (ran.stderr + ran.stdout)[-800:]
