"""Find the job of a pid: any process of a job names it, also its launcher, its supervisor and workers of its loaders.

A user has the pid of what they started: the launcher under `torchrun`, the supervisor with `--allow-restart`. Neither
is on a GPU. A process is matched by its agent, by its supervisor, or by the HEGM_RUN in its environment, and then only
for the same user.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence

import anyio

from hegmd.errors import HegmError
from hegmd.node.processes.surroundings import variables_of
from hegmd.protocol.names import MAX_NAME_CHARS, why_no_name
from hegmd.system.threads import run_detached
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import AgentConnection, Workers

RUN = "HEGM_RUN"
# Reading a process's environment takes the lock of its memory map.
LOOK_S = 1.0
MAX_COMMAND_CHARS, MAX_RUN_CHARS = 500, 64
_NAMELESS = "job"

# Programs that start a script and are not the job: interpreters, launchers of ranks, and commands that only change the
# environment.
_INTERPRETER = re.compile(r"(?:python|pypy)[0-9.]*|(?:ba|da|z|k)?sh")
_STARTERS = frozenset(
    ("accelerate", "composer", "deepspeed", "env", "hegmctl", "mpiexec", "mpirun", "nice", "nohup", "numactl", "poetry")
) | {"srun", "stdbuf", "taskset", "time", "timeout", "torchrun", "uv", "xvfb-run"}
_LAUNCHING_MODULES = frozenset(("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"))
_TAKE_A_VALUE = ("-W", "-X")
_SCRIPT = (".py", ".sh", ".pyc", ".pyz")

Job = tuple[int, str | None]


def script_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return the script of a command with its arguments, without what starts it; the whole command without one."""
    words = tuple(command)
    program = os.path.basename(words[0]) if words else ""
    if not (_INTERPRETER.fullmatch(program) or program in _STARTERS):
        return words
    for at, word in enumerate(words):
        if at and word == "-c":
            break
        if at and words[at - 1] == "-m" and word not in _LAUNCHING_MODULES:
            return words[at - 1 :]
        if at and word.endswith(_SCRIPT) and not word.startswith("-"):
            return words[at:]
    plain = [
        at for at, word in enumerate(words) if at and not word.startswith("-") and words[at - 1] not in _TAKE_A_VALUE
    ]
    if _INTERPRETER.fullmatch(program) and plain and "-c" not in words[: plain[0]]:
        return words[plain[0] :]
    return (program, *words[1:])


def shown_command(command: Sequence[str]) -> str:
    """Return the script and its arguments as one text of at most MAX_COMMAND_CHARS."""
    text = " ".join(word if word.isprintable() and word and " " not in word else shlex.quote(word) for word in command)
    return text if len(text) <= MAX_COMMAND_CHARS else text[: MAX_COMMAND_CHARS - 1] + "…"


def name_of(script: Sequence[str]) -> str:
    """Return the job's name from its script: the file without its suffix, or the module, in plain characters."""
    words = script[1:] if script[:1] == ("-m",) else script
    stem = os.path.basename(words[0] if words else "")
    for ending in _SCRIPT:
        stem = stem.removesuffix(ending)
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", stem).strip("-.")[: MAX_NAME_CHARS // 2]
    return name if name and why_no_name(name) is None else f"{_NAMELESS}-{name}".rstrip("-")


def run_of(worker: AgentConnection) -> str | None:
    """Return the run id that the processes of the job share; None if no `hegmctl run` started it: then the process is a
    job by itself.

    An agent of an earlier release knows only its job's name.
    """
    run = worker.about.run or worker.about.job
    return None if run is None else run[:MAX_RUN_CHARS]


def status_text(status: int) -> str:
    """Describe how a process ended, from its exit status or its negative signal number."""
    return f"with exit status {status}" if status >= 0 else f"by signal {-status}"


def ago(seconds: float) -> str:
    """Return that time in its largest unit."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def trains(worker: AgentConnection) -> bool:
    """True if the worker has reached a batch or has bytes of a training."""
    return bool(worker.boundary or worker.size_bytes)


class JobNames:
    """Finds the job of a pid that belongs to no operation and is on no GPU."""

    def __init__(self, workers: Workers, supervisors: Supervisors) -> None:
        self._workers = workers
        self._supervisors = supervisors

    async def processes_of(self, pid: int) -> Sequence[int]:
        """Return the training processes of the job of this pid. Empty if it trains itself or has no such job."""
        worker = self._workers.find(pid)
        if worker is not None and trains(worker):
            return ()
        job = await self.job_of(pid)
        if job is None or job[1] is None:
            return ()
        return [one.pid for one in self._workers if (one.identity.uid, one.about.run) == job and trains(one)]

    async def job_of(self, pid: int) -> Job | None:
        """Return the uid and the run of the job that this process belongs to; None if it belongs to none."""
        supervisor = self._supervisors.of_pid(pid)
        if supervisor is not None:
            return supervisor.uid, supervisor.run
        worker = self._workers.find(pid)
        return await _seen_from_outside(pid) if worker is None else (worker.identity.uid, worker.about.run)


async def _seen_from_outside(pid: int) -> Job | None:
    job: Job | None = None
    with anyio.move_on_after(LOOK_S):
        try:
            job = await run_detached(lambda _: _look_at(pid), name="hegmd-job-of")
        except (OSError, HegmError):
            return None  # it has ended or cannot be read now
    return job


def _look_at(pid: int) -> Job | None:
    """Read uid and run. Raises OSError if the process does not exist."""
    uid = os.stat(f"/proc/{pid}").st_uid
    run = variables_of(pid, (RUN,)).get(RUN)
    return None if not run else (uid, run)
