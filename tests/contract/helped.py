"""A helper on the stub libcuda's node, a process whose video memory it carries, and the calls of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from hegmd.gpu_helper.link import Link, child_environment
from hegmd.system.descriptors import Descriptors
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode

MIB = 1 << 20
GIB = 1 << 30
SOON_S = HANG_S
PROGRAM = Path(__file__).resolve().parents[1] / "stubs" / "cuda" / "program.py"
SIZES_MIB = (3, 4, 1)
SIZE_BYTES = sum(SIZES_MIB) * MIB


class Owner:
    """A process that holds video memory with a pattern in it."""

    def __init__(self, node: CudaNode, gpu: int | str, *sizes_mib: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(gpu), *map(str, sizes_mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **node.environment()},
        )
        self.pid = int(self._answer().split()[1])
        self.digest = self.ask("digest")

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def handles(self) -> list[bytes]:
        return [bytes.fromhex(text) for text in self.ask("handles").split()[1:]]

    def free_bytes(self) -> int:
        return int(self.ask("info").split()[1])

    def come_back(self) -> None:
        """Free its memory and allocate it again, empty."""
        assert self.ask("free") == "freed"
        assert self.ask("make") == "made"
        assert self.ask("digest") != self.digest, "the bytes never left"

    def pause(self) -> None:
        """Stop it by a signal; it has stopped when this returns."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        with self._process:
            pass


@asynccontextmanager
async def linked(node: CudaNode) -> AsyncIterator[Link]:
    link = Link(environment={**child_environment({}), **node.environment()})
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        yield link
        tasks.cancel_scope.cancel()


async def ask(link: Link, op: str, /, *, fds: Sequence[int] = (), **args: object) -> Mapping[str, Any]:
    answer = await link.call(op, args, deadline_s=SOON_S, fds=fds)
    assert not answer.fds
    return answer.values


async def hold(link: Link, gpu: str, sizes: Sequence[int]) -> tuple[Descriptors, list[int]]:
    answer = await link.call("hold", {"gpu": gpu, "sizes": list(sizes)}, deadline_s=SOON_S)
    return answer.fds, answer.values["sizes"]


def places(sizes_mib: Sequence[int] = SIZES_MIB, start: int = 0) -> list[list[int]]:
    """Every piece of an owner, one after the other."""
    found: list[list[int]] = []
    for handle, size_mib in enumerate(sizes_mib):
        found.append([handle, 0, size_mib * MIB, start])
        start += size_mib * MIB
    return found


async def carry(link: Link, gpu: str, direction: str, owner: Owner, where: list[list[int]]) -> Mapping[str, Any]:
    return await ask(link, "copy", lane="7", gpu=gpu, direction=direction, handles=owner.handles(), places=where)


async def move(link: Link, owner: Owner, here: str, there: str) -> None:
    """Have the driver restore it on the other GPU, where it allocates its storages again."""
    await ask(link, "lock", pid=owner.pid, timeout_s=1.0)
    await ask(link, "checkpoint", pid=owner.pid)
    await ask(link, "restore", pid=owner.pid, pairs=[[here, there], [there, here]])
    await ask(link, "unlock", pid=owner.pid)
    assert [owner.ask(word) for word in ("free", "make", "fill")][:2] == ["freed", "made"]
