"""The host pool: memory for the bytes of jobs in flight, each piece a memfd with one owner, within one budget.

Pages are there before anything relies on them: they are taken by several threads off the loop, in 2 MiB pages where
the node has enough free ones of those, and a piece that cannot be had whole is given back whole and refused with
numbers. Sizes are sealed, so that nobody who gets the descriptor can cut the memory under a copy or let it grow past
the budget. What survives a restart of the daemon is in the service manager's descriptor store under a name that tells
operation, worker and size; `adopt` takes it back from there.

Knows nothing of operations and workers but their names. Must not be asked to drop what somebody may still need: that
is the machine's to say.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from hegmd.errors import HegmError, Refused
from hegmd.log import fields
from hegmd.pieces import HUGE_PAGE_BYTES, MIB, whole_size

logger = logging.getLogger(__name__)

STORE_PREFIX = "hegm-pool"
# Without a budget in the configuration the pool may take this share of the memory that is available when it is asked.
SHARE_OF_AVAILABLE = 0.5

_HUGE_PAGES_FREE = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_MEMINFO = Path("/proc/meminfo")
_MADV_POPULATE_WRITE = 23  # Linux 5.14; mmap of Python knows no name for it
_THREADS = 4
_SLICE_BYTES = 64 * MIB
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def read_available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """The memory that the kernel takes for available; None when it does not say."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def read_huge_free_bytes(free: Path = _HUGE_PAGES_FREE) -> int:
    """Free 2 MiB pages, in bytes; 0 where there are none, or the kernel has no such pages."""
    try:
        return int(free.read_text()) * HUGE_PAGE_BYTES
    except (OSError, ValueError):
        return 0


class Store(Protocol):
    """Where descriptors outlive the daemon: `service.ServiceManager`, or nothing."""

    def store(self, name: str, descriptors: Iterable[int]) -> bool: ...
    def unstore(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Key:
    """Whose a piece is: one worker in one operation."""

    operation: str
    worker: str


class Memory:
    """One piece of the pool. Owns its descriptor; closing twice is fine."""

    def __init__(self, fd: int, size_bytes: int, usable_bytes: int, *, huge: bool) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        #: How many bytes of storages it was made for; the rest is for the agent's table.
        self.usable_bytes = usable_bytes
        self.huge = huge

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Pool:
    """Every byte that the daemon holds for a job outside of it. Belongs to the event loop.

    `budget_bytes` 0 stands for half of the memory that is available when it is asked.
    """

    def __init__(
        self,
        budget_bytes: int = 0,
        *,
        store: Store | None = None,
        available_bytes: Callable[[], int | None] = read_available_bytes,
        huge_free_bytes: Callable[[], int] = read_huge_free_bytes,
    ) -> None:
        self._given_budget_bytes = budget_bytes
        self._store = store
        self._available_bytes = available_bytes
        self._huge_free_bytes = huge_free_bytes
        self._held: dict[Key, Memory] = {}
        self._coming: dict[Key, int] = {}  # taken from the budget, pages not there yet
        self._taking = anyio.Lock()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds, or is about to."""
        return sum(memory.size_bytes for memory in self._held.values()) + sum(self._coming.values())

    def budget_bytes(self) -> int:
        """How much it may hold in all now."""
        if self._given_budget_bytes:
            return self._given_budget_bytes
        available = self._available_bytes()
        return self.held_bytes + int((available or 0) * SHARE_OF_AVAILABLE)

    def free_bytes(self) -> int:
        """How much more it may hold."""
        return max(0, self.budget_bytes() - self.held_bytes)

    def held_for(self, key: Key) -> int:
        """Bytes of storages that the piece of that owner was made for; 0 when there is none."""
        memory = self._held.get(key)
        return 0 if memory is None else memory.usable_bytes

    def by_owner(self) -> Mapping[Key, Memory]:
        """Every piece."""
        return dict(self._held)

    def memory(self, key: Key) -> Memory:
        """The piece of that owner. Raises Refused when there is none."""
        memory = self._held.get(key)
        if memory is None:
            raise Refused(
                f"the pool holds nothing for {key.worker} in operation {key.operation}",
                "the daemon was restarted without a service manager that keeps descriptors; the worker keeps its own",
            )
        return memory

    # -- taking and giving ---------------------------------------------------------------------------------------------

    async def take(self, key: Key, size_bytes: int) -> Memory:
        """Hold so much for that owner from now on, pages present; what it held before is replaced, unless it is enough.

        Raises Refused over the budget or when the pages cannot be had; then what it held before stays. Cancelled, it
        ends first, and what it took is given back.
        """
        known = self._held.get(key)
        if known is not None and known.usable_bytes >= size_bytes:
            return known
        whole_bytes = whole_size(size_bytes)
        async with self._taking:
            self._refuse_over_budget(key, size_bytes, whole_bytes)
            self._coming[key] = whole_bytes
            try:
                huge = self._huge_free_bytes() >= whole_bytes
                memory = await anyio.to_thread.run_sync(_make, key, size_bytes, whole_bytes, huge)
            finally:
                del self._coming[key]
            self.give(key)
            self._held[key] = memory
            self._keep(key, memory)
        logger.info(
            "pool holds %d MiB for %s", whole_bytes // MIB, key.worker, extra=fields(size_bytes=whole_bytes, huge=huge)
        )
        return memory

    def give(self, key: Key) -> None:
        """Give the owner's bytes back to the node. Fine when it has none."""
        memory = self._held.pop(key, None)
        if memory is None:
            return
        memory.close()
        if self._store is not None:
            self._store.unstore(_store_name(key, memory.usable_bytes))

    def close(self) -> None:
        """Let go of everything here; what the service manager keeps, it keeps."""
        while self._held:
            self._held.popitem()[1].close()

    def adopt(self, name: str, fd: int) -> None:
        """Take back what an earlier run of the daemon stored under that name. Closes what it cannot make sense of."""
        key, usable_bytes = _parse_store_name(name)
        if key is None or key in self._held:
            os.close(fd)
            return
        self._held[key] = Memory(fd, os.fstat(fd).st_size, usable_bytes, huge=False)

    def _keep(self, key: Key, memory: Memory) -> None:
        if self._store is not None:
            self._store.store(_store_name(key, memory.usable_bytes), [memory.fd])

    def _refuse_over_budget(self, key: Key, size_bytes: int, whole_bytes: int) -> None:
        known = self._held.get(key)
        others_bytes = self.held_bytes - (0 if known is None else known.size_bytes)
        budget_bytes = self.budget_bytes()
        if others_bytes + whole_bytes <= budget_bytes:
            return
        configured = bool(self._given_budget_bytes)
        raise Refused(
            f"the pool may hold {budget_bytes // MIB} MiB, holds {others_bytes // MIB} MiB for others, and "
            f"{whole_bytes // MIB} MiB are needed for {key.worker}",
            "raise pool.budget_bytes, or resume a suspended job first"
            if configured
            else "free memory on the node, set pool.budget_bytes, or resume a suspended job first",
            {
                "budget_bytes": budget_bytes,
                "held_bytes": others_bytes,
                "asked_bytes": size_bytes,
                "needed_bytes": whole_bytes,
            },
        )


def _make(key: Key, size_bytes: int, whole_bytes: int, huge: bool) -> Memory:
    """A sealed memfd with its pages present. Blocks."""
    if huge:
        try:
            return _make_one(key, size_bytes, whole_bytes, os.MFD_HUGETLB)
        except HegmError as error:  # somebody else took the huge pages in between
            logger.info("no 2 MiB pages for %s: %s", key.worker, error.message)
    return _make_one(key, size_bytes, whole_bytes, 0)


def _make_one(key: Key, size_bytes: int, whole_bytes: int, huge_flag: int) -> Memory:
    try:
        fd = os.memfd_create(f"hegm-{key.worker}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | huge_flag)
    except OSError as error:
        raise _no_pages(key, whole_bytes, error) from error
    try:
        os.ftruncate(fd, whole_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        _populate(fd, whole_bytes)
    except OSError as error:
        os.close(fd)
        raise _no_pages(key, whole_bytes, error) from error
    except BaseException:
        os.close(fd)
        raise
    return Memory(fd, whole_bytes, size_bytes, huge=bool(huge_flag))


def _no_pages(key: Key, whole_bytes: int, error: OSError) -> Refused:
    return Refused(
        f"the node has no {whole_bytes // MIB} MiB for {key.worker}: {error.strerror or error}",
        "free memory, or look at the memory limit of hegmd's own control group (MemoryMax=)",
        {"needed_bytes": whole_bytes, "errno": error.errno},
    )


def _populate(fd: int, whole_bytes: int) -> None:
    """Have all pages present, zeroed by several threads. Raises OSError when they cannot be had."""
    starts = iter(range(0, whole_bytes, _SLICE_BYTES))
    guard = threading.Lock()
    failures: list[OSError] = []
    libc = ctypes.CDLL(None, use_errno=True)

    def work() -> None:
        while not failures:
            with guard:
                start = next(starts, None)
            if start is None:
                return
            try:
                _populate_slice(libc, fd, start, min(_SLICE_BYTES, whole_bytes - start))
            except OSError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, name="pool pages") for _ in range(_threads_for(whole_bytes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _threads_for(whole_bytes: int) -> int:
    slices = (whole_bytes + _SLICE_BYTES - 1) // _SLICE_BYTES
    return max(1, min(_THREADS, slices, len(os.sched_getaffinity(0))))


def _populate_slice(libc: ctypes.CDLL, fd: int, start: int, size_bytes: int) -> None:
    # First reserved, which fails with an errno where touching would kill; then touched, which zeroes the pages here and
    # not in the job's blackout.
    os.posix_fallocate(fd, start, size_bytes)
    with mmap.mmap(fd, size_bytes, offset=start) as mapped:
        anchor = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        libc.madvise(address, ctypes.c_size_t(size_bytes), _MADV_POPULATE_WRITE)  # an older kernel just leaves it
        del anchor


def _store_name(key: Key, usable_bytes: int) -> str:
    return f"{STORE_PREFIX}-{key.operation}-{key.worker}-{usable_bytes}"


def _parse_store_name(name: str) -> tuple[Key | None, int]:
    """Whose a stored piece is, and its size. Operations have no dash in their names, workers may."""
    rest = name.removeprefix(f"{STORE_PREFIX}-")
    operation, _, after = rest.partition("-")
    worker, _, size = after.rpartition("-")
    if rest == name or not operation or not worker or not size.isdigit():
        return None, 0
    return Key(operation, worker), int(size)
