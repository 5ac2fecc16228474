"""Finds processes that NVIDIA's driver has locked or checkpointed and that no operation owns.

A daemon that was killed and lost its journal leaves such processes, and so do other callers of the driver's checkpoint.
A locked process is listed as before and only its CUDA calls block; a checkpointed one is listed nowhere. So this asks
about processes with libcuda and no open device and, at the start or on a user's request, about those on GPUs.

A process stopped by a signal is never asked about: the driver call would block. One that does not answer may be in
another program's driver call. So a separate helper asks, and is killed if one of them does not answer; no operation
depends on it. If there is nothing to ask, no helper is started.

Changes nothing. `operations` adopts a process, from what `stands` returns.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import anyio
import anyio.abc

from hegmd.errors import NOT_FOUND, TIMEOUT, HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.migration.machine.adoption import DriverProcess, driver_bytes_bound
from hegmd.migration.methods.driver_calls import CHECKPOINTED, FAILED, LOCKED
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.node.gpu_sets import place_of
from hegmd.node.processes.cuda_users import CudaUser, find_cuda_users, read_cuda_user
from hegmd.node.processes.procfs import ProcessKey
from hegmd.protocol.operations import Orphan
from hegmd.protocol.snapshots import Gpu, GpuProcess
from hegmd.system.threads import run_detached

logger = logging.getLogger(__name__)

STOPPED = "stopped"
# The driver answers in under a millisecond, or after a running call. A caller waits no longer than this.
ANSWER_S = 3.0
PROC_S = 10.0
# Age of a search that still counts as current for casual callers: a search reads all of /proc.
PASSING_S = 5.0
# How long to skip a process that did not answer: each such process costs a helper.
LET_BE_S = 600.0
MIB = 1 << 20


class Node(Protocol):
    """A snapshot of the node."""

    @property
    def gpus(self) -> Sequence[Gpu]: ...
    @property
    def processes(self) -> Sequence[GpuProcess]: ...


class DriverOrphan(NamedTuple):
    """A such process: its state in the driver, and the GPUs that list it."""

    user: CudaUser
    state: str
    gpus: tuple[str, ...]


class DriverOrphans:
    """Inspects on request; `run` has to be running. `link` is used for these questions alone.

    `node` reads the GPUs now. `is_taken` returns whether an operation, or the list of other orphans, already has a
    process.
    """

    def __init__(
        self,
        link: Link,
        other_processes: OtherProcesses,
        node: Callable[[], Awaitable[Node]],
        *,
        is_taken: Callable[[int], bool],
        own_pids: Callable[[], Iterable[int | None]] = tuple,
        proc_root: str = "/proc",
    ) -> None:
        self._proc_root = proc_root
        self._link = link
        self._other_processes = other_processes
        self._node = node
        self._is_taken = is_taken
        self._own_pids = own_pids
        self._found: dict[ProcessKey, DriverOrphan] = {}
        self._silent: dict[ProcessKey, float] = {}
        self._wanted = anyio.Event()
        self._searched = anyio.Event()
        self._thorough = True
        self._ended: float | None = None
        self.changed: Callable[[], object] = lambda: None

    # -- results -------------------------------------------------------------------------------------------------------

    def orphans(self) -> Iterable[Orphan]:
        for found in self._found.values():
            if self._other_processes.may_be_there(found.user.who) and not self._is_taken(found.user.pid):
                yield _orphan_record(found)

    async def drop(self, name: str) -> int | None:
        raise Refused(f"{name} is a process, not saved bytes", f"run: hegmctl adopt {name}; or kill it")

    # -- searching -----------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Search at the start, and on request, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._link.run)
            task_status.started()
            self._wanted.set()
            while True:
                await self._wanted.wait()
                self._wanted = anyio.Event()
                searched, self._searched = self._searched, anyio.Event()
                thorough, self._thorough = self._thorough, False
                try:
                    await self._search(thorough=thorough)
                except HegmError as error:
                    logger.warning(
                        "hegmd cannot find out which processes the driver has locked or checkpointed: %s", error.message
                    )
                self._link.kill("hegmd is stopping")
                self._ended = anyio.current_time()
                searched.set()
                self.changed()

    async def search(self, *, thorough: bool, within_s: float) -> None:
        """Update the list, and wait for it at most `within_s`; the search itself continues."""
        if not thorough and self._ended is not None and anyio.current_time() - self._ended < PASSING_S:
            return
        self._thorough = self._thorough or thorough
        searched = self._searched  # the search that begins next
        self._wanted.set()
        with anyio.move_on_after(within_s):
            await searched.wait()

    async def _search(self, *, thorough: bool) -> None:
        users = await self._users()
        listed = await self._listed() if thorough or self._found else {}
        now = anyio.current_time()
        self._silent = {who: until for who, until in self._silent.items() if until > now}
        own = set(self._own_pids())
        found: dict[ProcessKey, DriverOrphan] = {}
        # Forked processes last: a call begun in their parent is not theirs, and no thread of theirs may answer.
        for user in sorted(users, key=lambda user: user.forked):
            is_one = not user.has_devices or user.who in self._found or (thorough and user.pid in listed)
            if not is_one or user.pid in own or user.who in self._silent or self._is_taken(user.pid):
                continue
            state = await self._state(user)
            if state is not None and not self._is_taken(user.pid):
                found[user.who] = DriverOrphan(user, state, listed.get(user.pid, ()))
        self._found = found

    async def _users(self) -> list[CudaUser]:
        """Return the CUDA users found in time: a process that keeps its memory map locked hides those after it."""
        found: dict[int, CudaUser] = {}
        with anyio.move_on_after(PROC_S):
            await run_detached(lambda _: find_cuda_users(found, self._proc_root), name="hegmd-cuda-users")
        return list(dict(found).values())  # the thread may still be running

    async def _user(self, pid: int) -> CudaUser | None:
        with anyio.move_on_after(PROC_S):
            return await run_detached(lambda _: read_cuda_user(pid, self._proc_root), name="hegmd-cuda-user")
        return None

    async def _listed(self) -> dict[int, tuple[str, ...]]:
        node = await self._node()
        return {
            process.pid: tuple(use.gpu for use in process.gpus if use.kind == "compute") for process in node.processes
        }

    async def _state(self, user: CudaUser) -> str | None:
        """Return the driver's state of the process if it is worth reporting. Raises HegmError if no helper can ask."""
        if user.stopped or is_stopped(user.pid):
            return None if user.has_devices else STOPPED
        try:
            state = await self._ask(user)
        except HelperLost as error:
            self._silent[user.who] = anyio.current_time() + LET_BE_S
            logger.warning("the driver did not report the state of process %d: %s", user.pid, error.message)
            return None
        except DriverFailed as error:
            if error.number is None:
                raise
            return None  # it has exited, belongs to another user, or has not initialised CUDA
        return state if state in {LOCKED, CHECKPOINTED, FAILED} else None

    async def _ask(self, user: CudaUser) -> str:
        async with self._other_processes.excluded(user.who):  # a lock of our own is no news
            answer = await self._link.call("state", {"pid": user.pid}, deadline_s=ANSWER_S)
        return str(answer.values["state"])

    # -- one of them ---------------------------------------------------------------------------------------------------

    async def inspect(self, pid: int) -> DriverProcess:
        """Return the driver's state of that process and what its restore needs. Raises HegmError if it cannot be
        adopted.

        A running process is returned too: whether its agent has parked it is not for the driver to say.
        """
        user = await self._user(pid)
        if user is None:
            raise HegmError(
                NOT_FOUND,
                f"hegmd sees no process {pid} that uses CUDA",
                "run: hegmctl adopt, and hegmctl ps",
                {"pid": pid},
            )
        if user.stopped or is_stopped(pid):
            raise Refused(
                f"process {pid} is stopped (SIGSTOP); the driver call would block until it continues",
                f"run: kill -CONT {pid}",
                {"pid": pid},
            )
        try:
            state = await self._ask(user)
        except HelperLost as error:
            raise HegmError(
                TIMEOUT,
                f"the driver did not report the state of process {pid} within {ANSWER_S:g} s",
                "retry in a minute: another program may be checkpointing or restoring it",
                {"pid": pid},
            ) from error
        if state == FAILED:
            raise Refused(
                f"a checkpoint or restore of process {pid} has failed permanently: the driver cannot restore it",
                f"kill it and start it again: kill {pid}",
                {"pid": pid},
            )
        return await self._driven(user, state)

    async def _driven(self, user: CudaUser, state: str) -> DriverProcess:
        node = await self._node()
        here = [process for process in node.processes if process.pid == user.pid]
        gpus = [use.gpu for process in here for use in process.gpus if use.kind == "compute"]
        off = state == CHECKPOINTED
        if not off and not gpus:
            raise Refused(
                f"the driver reports process {user.pid} as {state}, but not on which GPU",
                "retry in a few seconds; see hegmctl ps",
                {"pid": user.pid},
            )
        return DriverProcess(
            pid=user.pid,
            start_ticks=user.start_ticks,
            uid=user.uid,
            name=user.name,
            state=state,
            gpu=None if off else place_of(gpus),
            driver_bytes=driver_bytes_bound(user.own_bytes, [_whole_bytes(gpu) for gpu in node.gpus]) if off else 0,
        )


def _whole_bytes(gpu: Gpu) -> int | None:
    """Return what processes can have of the GPU at most: the figures exclude the driver's own reserve."""
    if gpu.memory_free_bytes is None or gpu.memory_used_bytes is None:
        return None
    return gpu.memory_free_bytes + gpu.memory_used_bytes


def _orphan_record(found: DriverOrphan) -> Orphan:
    user, pid = found.user, found.user.pid
    adopt = f"hegmctl adopt {pid}"
    where, why, then = {
        LOCKED: (
            f"on {', '.join(found.gpus) or 'its GPU'}",
            "the CUDA driver has locked it, so its CUDA calls block, and it belongs to no operation",
            adopt,
        ),
        CHECKPOINTED: (
            "in its own memory",
            "the CUDA driver has checkpointed it, and it belongs to no operation",
            adopt,
        ),
        FAILED: (
            "lost",
            "a checkpoint or restore by the CUDA driver has failed permanently",
            f"kill it and start it again: kill {pid}",
        ),
        STOPPED: (
            "perhaps in its own memory",
            "it uses CUDA but has no GPU open; it is stopped (SIGSTOP), so hegmd cannot ask the driver about it",
            f"run: kill -CONT {pid}; then: hegmctl adopt",
        ),
    }[found.state]
    size_bytes = user.own_bytes if found.state == CHECKPOINTED else None
    return Orphan(name=str(pid), kind="process", pid=pid, size_bytes=size_bytes, where=where, why=why, next=then)
