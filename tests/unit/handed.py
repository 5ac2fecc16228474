"""Jobs that are handed to images, without any: the doubles of the tests of that."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import anyio

from hegmd.errors import NOT_FOUND, HegmError
from hegmd.images.dump_job import JobDumper
from hegmd.images.dump_records import DumpRecords
from hegmd.images.hegm_lock_files import LockFiles
from hegmd.images.rendezvous import Rendezvous
from hegmd.memory.pool import Pool
from hegmd.migration.machine.operation import CHECKPOINT, Operation
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import population_of
from hegmd.protocol.images import Manifest
from hegmd.protocol.messages import Order
from hegmd.system.programs import Rights
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import operation, worker
from tests.unit.model_agent import ModelAgent


async def none() -> NoReturn:
    raise AssertionError


async def some_criu() -> Criu:
    return Criu("/usr/sbin/criu", "4.2")


def attended(pid: int, **values: Any) -> Operation:
    """A checkpoint of that process, whose agent is a model one."""
    op = wished(pid)
    return op.replace(workers=(op.workers[0].replace(token="a" * 32, **values),))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class ImageCatalogue:
    """Images of which there is one, or none that is whole; it has room for so much."""

    def __init__(self, found: Manifest | None = None, why: HegmError | None = None) -> None:
        self.found, self.why = found, why
        self.swept: list[str] = []

    async def open(self, path: str, _rights: Rights) -> ImageCatalogue:
        if self.found is None:
            raise HegmError(NOT_FOUND, f"{path} is no image", "see what is there")
        return self

    @property
    def manifest(self) -> Manifest:
        assert self.found is not None
        return self.found

    async def end(self) -> None:
        """Release it."""

    async def sweep(self, path: str, _rights: Rights) -> list[str]:
        self.swept.append(path)
        return []

    async def require_space(self, _path: str, _rights: Rights, **_how: object) -> None:
        if self.why is not None:
            raise self.why


def handoff_with(
    shelf: object,
    folder: Path,
    criu: Callable[[], Awaitable[Criu]] = none,
    *,
    workers: Workers | None = None,
    pool: Pool | None = None,
) -> JobDumper:
    """With as little patience as there can be."""
    images: Any = shelf
    places = Rendezvous(folder / "hegmd.sock")
    parts = (lambda: images, places, workers or Workers(), pool or Pool(1 << 20))
    return JobDumper(
        *parts,
        criu=criu,
        take_snapshot=none,
        in_unit=False,
        locks=LockFiles(None),
        notes=DumpRecords(folder),
        hangs_up_within_s=0.01,
    )


def wished(pid: int, **values: Any) -> Operation:
    """A checkpoint of that process, which has got so far."""
    ticks = population_of([pid]).start_ticks.get(pid, 0)
    plain = {"path": "/images/one", "uid": os.geteuid(), "gid": os.getegid(), "root_pid": pid, "root_ticks": ticks}
    return operation(worker(pid=pid), kind=CHECKPOINT, image=Wish(**{**plain, **values}))


class ImageBeingWritten(ImageCatalogue):
    """An image that is being written, and its shelf; nothing comes of its reading back but that error."""

    def __init__(self, error: HegmError | None = None) -> None:
        super().__init__()
        self.error = error
        self.ends: list[str] = []
        self.criu_dir_fd = -1
        self.discarded = anyio.Event()

    async def lend(self, _path: str, _rights: Rights, **_how: object) -> ImageBeingWritten:
        return self

    async def collect_criu_files(self) -> None:
        """Collect no file: there are none."""

    async def finish(self, manifest: Manifest, _on_progress: object = None) -> Manifest:
        if self.error is not None:
            raise self.error
        return manifest

    async def discard(self) -> None:
        self.ends.append("discarded")
        self.discarded.set()


class DisconnectingAgents(ModelAgent):
    """Disconnects when ordered."""

    def _report(self, key: object, order: Order, result: str, **values: object) -> None:
        super()._report(key, order, result, **values)
        self._scope.cancel()
