"""A link to the helper with injected faults, and the checks of its tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from hegmd.gpu_helper.link import Link
from tests.patience import HANG_S

TRICKS = (sys.executable, str(Path(__file__).with_name("tricks.py")))
SOON_S = HANG_S


@asynccontextmanager
async def linked(*how: str, start_within_s: float = SOON_S, idle_after_s: float = 600.0) -> AsyncIterator[Link]:
    link = Link(program=[*TRICKS, *how], start_within_s=start_within_s, idle_after_s=idle_after_s)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        yield link
        tasks.cancel_scope.cancel()


async def ask(link: Link, op: str, /, *, on_progress: ProgressLog | None = None, **args: object) -> dict[str, Any]:
    answer = await link.call(op, args, deadline_s=SOON_S, on_progress=on_progress)
    answer.fds.close()
    return answer.values


def has_ended(pid: int) -> bool:
    """Whether it is gone, and reaped."""
    return not Path(f"/proc/{pid}").exists()


class ProgressLog:
    """The progress of a request, to wait for."""

    def __init__(self) -> None:
        self.events: list[Mapping[str, Any]] = []
        self.first = anyio.Event()

    def __call__(self, event: Mapping[str, Any]) -> None:
        self.events.append(event)
        self.first.set()
