"""Dumps and restores a process tree: runs CRIU outside of the daemon's sandbox, and reports its outcome.

Under a service manager CRIU is a transient unit, and a restored job is a unit of its own that `systemctl status` shows:
units have all rights of the node, which the sandbox lacks. Otherwise CRIU has a session of its own, and a restored job
has parent.py as its parent, which reaps it.

A dump is never interrupted: it is awaited, however long it takes and even if it was cancelled, because CRIU works
inside the job's processes, and killing it could leave them in a state in which they cannot run without it. A long dump
is logged repeatedly. After a failed dump the processes are checked, and those left stopped are resumed. A cancelled
restore is awaited too, because CRIU leaves files behind when killed; then its processes are killed.

With CriuPrivileges, CRIU has a user's rights instead of root's. The directories then belong to that user.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.lowlevel

from hegmd.errors import EXTERNAL, HegmError, Refused
from hegmd.images.criu.command_line import (
    DUMP_LOG,
    IMAGES_FD,
    LOGS_FD,
    RESTORE_LOG,
    dump_order,
    folder,
    opened,
    place_of,
    restore_order,
)
from hegmd.images.criu.error_messages import failure, had_left_overs, had_numbers_taken, not_there
from hegmd.images.criu.needs import Needs
from hegmd.images.criu.parent import JOB_ENDED
from hegmd.images.criu.privileges import CriuPrivileges
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import (
    ProcessSet,
    ask,
    continue_all,
    end_all,
    population_of,
    wait_for_thread_numbers,
    wait_until_free,
)
from hegmd.system.detached_programs import start_apart
from hegmd.system.programs import run
from hegmd.system.task_group import accompanied
from hegmd.system.threads import run_detached
from hegmd.system.transient_units import UnitNameTaken, start_unit, stop_unit, systemd_run
from hegmd.telemetry.step_timings import HELPER, note_step

logger = logging.getLogger(__name__)

# More than CRIU needs for a process whose GPU memory is offloaded, even on a slow disk. A longer dump is reported, and
# continues.
DUMP_IS_LONG_S = 300.0
RESTORE_DEADLINE_S = 900.0

_LOG_MAX_BYTES = 4 << 20
_LOG_LINES = 40
_PYTHON = (sys.executable, "-SE", str(Path(__file__).with_name("parent.py")))


class Dumped(NamedTuple):
    """A dump that CRIU calls finished."""

    duration_s: float
    version: str


class RestoredTree(NamedTuple):
    """A restored tree: its processes with their new start times, and what holds all its descendants: a unit of the
    service manager, or parent.py, by pid and start time.
    """

    pid: int
    start_ticks: Mapping[int, int]
    unit: str | None
    duration_s: float
    attendant: ProcessSet = ProcessSet({})


class ProcessesLeft(HegmError):
    """A restore failed because parent.py was killed: nothing has killed the processes that CRIU had created."""


async def dump(
    criu: Criu,
    root_pid: int,
    images_dir_fd: int,
    needs: Needs,
    *,
    leave_stopped: bool,
    in_unit: bool,
    guise: CriuPrivileges | None = None,
    is_long_s: float = DUMP_IS_LONG_S,
) -> Dumped:
    """Write the tree's images and CRIU's log into that directory, opened outside of the daemon's sandbox.

    A descriptor leads to the mount that it was opened in, and those of the sandbox are read-only.

    The tree then runs, or stays stopped with `leave_stopped`, until `population.continue_all` or `end_all`. Raises
    HegmError, and then the tree runs in any case. Cancellation takes effect only when CRIU has ended.
    """
    started = time.monotonic()
    before = await run_detached(lambda _: population_of(needs.pids), name="look at the job")
    order = dump_order(criu.path, root_pid, needs, leave_stopped=leave_stopped, as_user=guise is not None)
    wishes = ["--spare", *folder(IMAGES_FD, images_dir_fd), *_privilege_options(guise)]
    order = [*_PYTHON, "start", *wishes, "--", *order]
    with anyio.CancelScope(shield=True):
        try:
            done = await accompanied(
                lambda: (systemd_run if in_unit else run)(order, deadline_s=math.inf),
                lambda: _warn_of_long_dump(root_pid, is_long_s),
            )
            if done.status != 0:
                raise _failed("dump", _log(images_dir_fd, DUMP_LOG), done.output_tail, done.status)
        except HegmError:
            await run_detached(lambda _: continue_all(before), name="let the job go on")
            raise
    took_s = time.monotonic() - started
    note_step(HELPER, "criu dump", started)
    logger.debug("CRIU dumped process %d in %.1f ms", root_pid, took_s * 1e3)
    return Dumped(took_s, criu.version)


async def restore(  # noqa: PLR0913 - each parameter is named
    criu: Criu,
    images_dir_fd: int,
    needs: Needs,
    *,
    log_dir_fd: int,
    unit_name: str | None,
    description: str = "",
    outlets: Mapping[str, int] | None = None,
    ranks: Collection[int] = (),
    guise: CriuPrivileges | None = None,
) -> RestoredTree:
    """Restore the tree, running, in a unit of that name, or without a service manager if it is None.

    `ranks` are those of its processes that do not end by themselves: if one does, the restore fails.
    `outlets` maps keys of outlets to descriptors of this process; the others lead to /dev/null. The log goes to
    `log_dir_fd`. Raises HegmError, and then nothing of the tree remains; the same on cancellation.

    A killed CRIU leaves files in place of the job's deleted ones. The next CRIU fails because of them and removes them
    when it exits. So the restore is repeated once in that case, and if another process took a pid of the job just
    before CRIU needed it.
    """
    files = {key: place_of(fd) for key, fd in (outlets or {}).items()}
    words = [
        *folder(IMAGES_FD, images_dir_fd),
        *folder(LOGS_FD, log_dir_fd),
        *_privilege_options(guise),
        *opened(needs, files),
        *(["--ranks", ",".join(map(str, ranks))] if ranks else []),
    ]
    words += ["--", *restore_order(criu.path, needs, as_user=guise is not None)]
    thread_numbers = await run_detached(lambda _: _threads_in(images_dir_fd, needs.pids), name="look at the image")
    once = partial(_restore_once, words, needs, thread_numbers, log_dir_fd, unit_name, description)
    try:
        return await once()
    except HegmError as error:
        log = _log(log_dir_fd, RESTORE_LOG)
        if not had_left_overs(log) and not had_numbers_taken(log):
            raise
        logger.info("CRIU's restore failed for a cause that may be temporary; hegmd tries again: %s", error.message)
        return await once()


async def _restore_once(
    words: Sequence[str],
    needs: Needs,
    thread_numbers: Sequence[int],
    log_dir_fd: int,
    unit_name: str | None,
    description: str,
) -> RestoredTree:
    started = time.monotonic()
    await _take_numbers(needs, thread_numbers)
    root = str(needs.pids[0])
    attendant: int | None = None
    came = attended = ProcessSet({})
    if unit_name is not None:
        await _restore_in_unit([root, *words], needs.pids[0], unit_name, description, log_dir_fd)
    else:
        begun = await start_apart(
            lambda control: [*_PYTHON, "tend", str(control), root, *words],
            deadline_s=RESTORE_DEADLINE_S,
            end=lambda: end_all(population_of(needs.pids)),
        )
        if not begun.word:
            error = _not_restored(log_dir_fd, needs.pids[0], begun.status)
            is_killed = begun.status is None or begun.status < 0
            raise ProcessesLeft(error.code, error.message, error.hint, error.facts) if is_killed else error
        attendant = begun.pid
    with anyio.CancelScope(shield=True):  # they exist now, and only this code can find them
        try:
            came, attended = await run_detached(lambda _: _restored_sets(needs, attendant), name="look at the job")
            if needs.pids[0] not in came.start_ticks:
                raise _logged(not_there(needs.pids[0]), _log(log_dir_fd, RESTORE_LOG), "")
        except BaseException:
            await _end_unit_or_parent(unit_name, attendant)
            raise
    took_s = time.monotonic() - started
    note_step(HELPER, "criu restore", started)
    logger.debug("CRIU restored process %d in %.1f ms", needs.pids[0], took_s * 1e3)
    return RestoredTree(needs.pids[0], came.start_ticks, unit_name, took_s, attended)


def _restored_sets(needs: Needs, attendant: int | None) -> tuple[ProcessSet, ProcessSet]:
    """Return the job's processes, and the parent program."""
    return population_of(needs.pids), population_of([] if attendant is None else [attendant])


async def _end_unit_or_parent(unit: str | None, attendant: int | None) -> None:
    """End all restored processes through the unit or the parent program, which is our child. Reads nothing of them."""
    if unit is not None:
        await stop_unit(unit)
    if attendant is not None:
        with suppress(ProcessLookupError):
            os.kill(attendant, signal.SIGUSR1)


async def end(back: RestoredTree) -> None:
    """Kill all restored processes and their descendants. Raises nothing; cannot be cancelled."""
    with anyio.CancelScope(shield=True):
        if back.unit is not None:
            await stop_unit(back.unit)
        for pid, ticks in back.attendant.start_ticks.items():
            await run_detached(partial(_ask_to_end, pid, ticks), name="end the job")
        await run_detached(lambda _: end_all(ProcessSet(back.start_ticks)), name="end the job")


def _ask_to_end(pid: int, start_ticks: int, _: object) -> None:
    ask(pid, start_ticks, signal.SIGUSR1)


def _privilege_options(guise: CriuPrivileges | None) -> list[str]:
    return [] if guise is None else ["--as", guise.word]


async def _warn_of_long_dump(root_pid: int, is_long_s: float) -> None:
    """Log how long a dump takes, repeatedly."""
    began = anyio.current_time()
    while True:
        await anyio.sleep(is_long_s)
        logger.warning(
            "CRIU has been dumping process %d for %d s: it is not stopped, because that could end the job; "
            "check the disk of the image, and whether a signal has stopped CRIU: ps -C criu",
            root_pid,
            anyio.current_time() - began,
        )


async def _restore_in_unit(words: Sequence[str], root: int, name: str, description: str, log_dir_fd: int) -> None:
    """Restore in a unit of that name. After a failure the unit and all its processes are ended."""
    pid_file = f"/run/{name}.pid"
    argv = [*_PYTHON, "unit", pid_file, *words]
    try:
        with anyio.CancelScope(shield=True):
            done = await start_unit(
                argv, name, pid_file=pid_file, description=description, deadline_s=RESTORE_DEADLINE_S
            )
            if done.status != 0:
                raise _not_restored(log_dir_fd, root, done.status)
        await anyio.lowlevel.checkpoint()  # a cancellation takes effect here
    except UnitNameTaken:
        raise  # belongs to another operation
    except BaseException:
        with anyio.CancelScope(shield=True):
            await stop_unit(name)
        raise


def _threads_in(images_dir_fd: int, pids: Collection[int]) -> tuple[int, ...]:
    """Return the thread ids in the image except the first of each process: CRIU recreates each thread with its id."""
    try:
        cores = [re.fullmatch(r"core-(\d+)\.img", name) for name in os.listdir(images_dir_fd)]
    except OSError:  # CRIU reports the problem
        return ()
    return tuple(sorted({int(core[1]) for core in cores if core} - {*pids}))


async def _take_numbers(needs: Needs, thread_numbers: Sequence[int]) -> None:
    """Wait until no zombie uses the job's pids, and no process its thread ids. Raises Refused if they stay in use."""
    held = await run_detached(lambda _: wait_until_free(needs.pids), name="wait for free numbers")
    if held:
        first = held[0]
        whom = f"a zombie, {first.pid}, that its parent does not reap" if first.is_zombie else f"process {first.pid}"
        raise Refused(
            f"the job needs the number {first.number}, which is the {first.what} of {whom}",
            "end that process (ps -eo pid,pgid,sid,stat,args), or restore in a new pid namespace: "
            "unshare --pid --fork --mount-proc",
        )
    taken = await run_detached(lambda _: wait_for_thread_numbers(thread_numbers), name="wait for free numbers")
    if taken is not None:
        raise Refused(
            f"a thread of the job needs the number {taken[0]}, which is a thread of process {taken[1]}",
            "end that process (ps -eLo pid,tid,args), or restore in a new pid namespace: "
            "unshare --pid --fork --mount-proc",
        )


def _not_restored(log_dir_fd: int, root: int, status: int | None) -> HegmError:
    log = _log(log_dir_fd, RESTORE_LOG)
    if status != JOB_ENDED:
        return _failed("restore", log, "", status)
    hint = "restore the image again, which is whole; dmesg says whether the kernel lacked memory and killed a process"
    message = f"process {root} or a rank of it was killed while CRIU restored the job"
    return _logged(HegmError(EXTERNAL, message, hint), log, "")


def _failed(step: str, log: str, output: str, status: int | None) -> HegmError:
    """Return the error, and log the end of CRIU's log: its file is removed with the image or the attempt."""
    return _logged(failure(step, log, output, status), log, output)


def _logged(error: HegmError, log: str, output: str) -> HegmError:
    logger.warning(
        "%s; the end of CRIU's log:\n%s", error.message, "\n".join([*log.splitlines()[-_LOG_LINES:], output])
    )
    return error


def _log(dir_fd: int, name: str) -> str:
    """Return the end of CRIU's log; empty if there is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError:
        return ""
    with open(fd, "rb") as file:
        size_bytes = os.fstat(fd).st_size
        file.seek(max(0, size_bytes - _LOG_MAX_BYTES))
        return file.read(_LOG_MAX_BYTES).decode("utf-8", "replace")
