"""A store of descriptors for tests: holds copies of its own, as a service manager or a keeper would."""

from __future__ import annotations

import os
from collections.abc import Sequence

import anyio

from hegmd.errors import UNAVAILABLE, HegmError


class DescriptorStore:
    """The descriptors that another process would hold. `fails`: it accepts none; `room`: how many it accepts."""

    def __init__(self, room: int = 1000) -> None:
        self.kept: dict[str, int] = {}
        self.fails = False
        self.room = room

    async def put(self, name: str, fd: int) -> None:
        if self.fails or len(self.kept) >= self.room:
            raise HegmError(UNAVAILABLE, f"the store does not take {name}", "ask the test")
        self.kept[name] = os.dup(fd)

    async def drop(self, *names: str) -> None:
        for name in names:
            if name in self.kept:
                os.close(self.kept.pop(name))

    async def found(self) -> Sequence[tuple[str, int]]:
        return [(name, os.dup(fd)) for name, fd in self.kept.items()]

    async def run(self) -> None:
        await anyio.sleep_forever()
