"""The parts for a run of the helper on real GPUs: the GPUs by NVML, a process to carry, host memory, a helper."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pynvml

from hegmd.gpu_helper.copy_client import Place
from hegmd.gpu_helper.link import PROGRAM, Link

MIB = 1 << 20
OWNER = Path(__file__).with_name("vram_owner.py")


class Node:
    """The GPUs by NVML, and how much each step is to move."""

    def __init__(self, size_bytes: int) -> None:
        pynvml.nvmlInit()
        self.size_bytes = size_bytes
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        self.uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in self._handles]

    def used_bytes(self, gpu: int) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._handles[gpu]).used)


class Owner:
    """A process that holds video memory on the first GPU."""

    def __init__(self, count: int, size_bytes: int, gpu: int = 0, user: int | None = None) -> None:
        self.count, self.size_bytes = count, size_bytes
        argv = [sys.executable, str(OWNER), str(gpu), str(count), str(size_bytes)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, user=user)
        self.pid = int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the owner ended with {self._process.wait()}")
        return line

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def handles(self) -> list[bytes]:
        return [bytes.fromhex(text) for text in self.ask("handles").split()]

    def places(self) -> list[Place]:
        return [(index, 0, self.size_bytes, index * self.size_bytes) for index in range(self.count)]

    def come_back_empty(self) -> None:
        self.ask("free")
        self.ask("make")

    def whole(self) -> bool:
        """Whether every piece is what it was."""
        return int(self.ask("check")) == self.count

    def close(self) -> None:
        self._process.kill()
        with self._process:
            pass


@asynccontextmanager
async def linked(program: Sequence[str] = PROGRAM) -> AsyncIterator[Link]:
    link = Link(program=program)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        yield link
        tasks.cancel_scope.cancel()


class Pool:
    """Host memory as the daemon's pool has it: huge pages where they can be had."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // (2 * MIB)) * 2 * MIB
        flags = os.MFD_CLOEXEC | (os.MFD_HUGETLB if _reserve_huge(self.size_bytes) else 0)
        self.fd = os.memfd_create("pool", flags)
        os.ftruncate(self.fd, self.size_bytes)
        os.posix_fallocate(self.fd, 0, self.size_bytes)  # pages present, as in the daemon's pool
        self.huge = bool(flags & os.MFD_HUGETLB)

    def close(self) -> None:
        os.close(self.fd)
        if self.huge:
            _let_huge_go()


def _reserve_huge(size_bytes: int) -> bool:
    pages = Path("/proc/sys/vm/nr_hugepages")
    free = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    try:
        wanted = int(pages.read_text()) + max(0, size_bytes // (2 * MIB) - int(free.read_text()))
        pages.write_text(str(wanted))
        return int(free.read_text()) * 2 * MIB >= size_bytes
    except OSError:
        return False


def _let_huge_go() -> None:
    Path("/proc/sys/vm/nr_hugepages").write_text("0")  # those in use go when they are free
