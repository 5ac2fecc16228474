"""Copies a segment to its file and back, off the loop: threads, progress, and an early end if it was cancelled.

Each thread has a descriptor of its own, so that none is closed while it is used. `spill_file` has the format; `pool`
the segments.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import anyio

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.memory.pool_memory import Fill, Memory
from hegmd.memory.spill_file import ResultUnwanted, SpillFolder
from hegmd.system.descriptors import is_readable
from hegmd.system.threads import run_detached
from hegmd.telemetry.step_timings import COPIES, note_step

logger = logging.getLogger(__name__)

# How long a cancelled copy may take to end. It checks between two chunks.
LINGER_S = 10.0
TELL_S = 0.2

Progress = Callable[[int], object]
T = TypeVar("T")


def ignore_progress(_so_far_bytes: int) -> None:
    """Progress that is not reported."""


async def write_out(
    folder: SpillFolder, name: str, fd: int, size_bytes: int, progress: Progress, known: Sequence[int] | None = None
) -> None:
    """Write that memory to its file. Raises HegmError. If cancelled, it ends at the next chunk."""

    async def copy(tell: Progress) -> None:
        await with_memory(
            fd,
            lambda own, is_over: folder.write(name, own, size_bytes, is_over, tell, known),
            name=name,
            unwanted="is not written to disk any further",
        )

    began = time.monotonic()
    await _with_errors_named(copy, progress)
    note_step(COPIES, "to disk", began, size_bytes=size_bytes)


async def with_memory(fd: int, work: Callable[[int, Callable[[], bool]], T], *, name: str, unwanted: str) -> T | None:
    """Return the result of `work`, off the loop, with a descriptor of its own and a check whether the result is still
    needed.

    None if the work was cancelled. Raises HegmError.
    """
    try:
        own = os.fdopen(os.dup(fd), "rb", buffering=0)  # the thread closes it, however late it ends
    except OSError as error:
        raise HegmError(
            UNAVAILABLE,
            f"the memory of {name} cannot be read: {error.strerror or error}",
            "raise LimitNOFILE= of hegmd.service",
            {"errno": error.errno},
        ) from error

    def run(waiting: socket.socket) -> T | None:
        try:
            return work(own.fileno(), partial(is_readable, waiting.fileno()))
        except ResultUnwanted:
            logger.info("%s is wanted in memory, and %s", name, unwanted)
            return None
        finally:
            own.close()

    try:
        return await run_detached(run, name="spill", linger_s=LINGER_S)
    except HegmError:  # the thread has ended, or there was none
        own.close()
        raise


async def read_into(
    make: Callable[[Fill], Awaitable[Memory]], folder: SpillFolder, name: str, size_bytes: int, progress: Progress
) -> Memory:
    """Return the memory of `make`, filled from the file, every chunk verified. Raises HegmError."""

    async def copy(tell: Progress) -> Memory:
        return await make(lambda memory: _fill(folder, name, size_bytes, memory, tell))

    began = time.monotonic()
    memory = await _with_errors_named(copy, progress)
    note_step(COPIES, "from disk", began, size_bytes=size_bytes)
    return memory


def _fill(folder: SpillFolder, name: str, size_bytes: int, memory: Memory, tell: Progress) -> None:
    """Fill new memory, of which no other process has a descriptor."""
    if not memory.huge:
        folder.read(name, size_bytes, lambda place, view: _write_whole(memory.fd, view, place), tell)
        return
    with mmap.mmap(memory.fd, memory.size_bytes) as mapped:  # huge pages cannot be written with write()

        def copy(place: int, view: memoryview) -> None:
            mapped[place : place + len(view)] = bytes(view)

        folder.read(name, size_bytes, copy, tell)


def _write_whole(fd: int, view: memoryview, place: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], place + done)


async def _with_errors_named(work: Callable[[Progress], Awaitable[T]], progress: Progress) -> T:
    """Return the result of `work`, whose progress a thread may report; `progress` is called in the loop."""
    latest_bytes = 0
    results: list[T] = []
    failure: HegmError | None = None

    def tell(so_far_bytes: int) -> None:
        nonlocal latest_bytes
        latest_bytes = so_far_bytes

    async def repeat() -> None:
        while True:
            await anyio.sleep(TELL_S)
            progress(latest_bytes)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(repeat)
        try:
            results.append(await work(tell))
        except HegmError as error:  # raised below, where the task group cannot wrap it
            failure = error
        tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return results[0]
