"""Lives of one process's bytes under the real carriers: some of its memory stays with it, and everything else fails.

The helper, its video memory, the driver's rule of what may be opened, and the agent are models; `PeerCarrier`,
`HostCarrier`, the route and the pool are the real ones. A life takes the bytes out, has the driver bring the rest back,
and puts them in again, with luck drawn from its seed. The promise: whatever was tried, at last every byte is back.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.lowlevel

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, HelperReply
from hegmd.memory.pool import MemoryKeeping, Pool
from hegmd.migration.carriers.copying import CopyingCarrier
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import PeerCarrier
from hegmd.migration.contracts import MigratedProcess
from hegmd.protocol.agents import NO_HANDLE, AgentReport, packed, unpacked_spans
from hegmd.workers.workers import AgentConnection

KIB, MIB = 1 << 10, 1 << 20
TRIES = 40
Make = Callable[["Node"], Any]


def peer(node: Node) -> CopyingCarrier:
    return PeerCarrier(node.helper, node.gpus, node.memory, node.pool)  # type: ignore[arg-type]  # these are models


def host(node: Node) -> CopyingCarrier:
    return HostCarrier(node.helper, node.gpus, node.pool, node.memory)  # type: ignore[arg-type]  # these are models


class Process:
    """Its storages, and its agent. Those in `stays` lie in memory that it never gives back."""

    def __init__(self, random: Random) -> None:
        self.contents = [random.randbytes(random.randint(1, 96) * KIB) for _ in range(random.randint(1, 6))]
        self.storages = [bytearray(content) for content in self.contents]
        self.stays = {number for number in range(len(self.contents)) if random.random() < 0.4}
        self.is_predicted = random.random() < 0.5
        self.restored: set[int] = set()
        self.filled = len(self.contents)
        self.identity = SimpleNamespace(uid=0, start_ticks=1)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.contents))

    async def order(self, do: str, *, fds: Sequence[int] = (), on_progress: Any = None, **how: Any) -> AgentReport:
        await anyio.lowlevel.checkpoint()
        return AgentReport(order=1, result="done", **getattr(self, f"_{do}")(fds, how))

    def _export(self, _: Sequence[int], how: Mapping[str, Any]) -> dict[str, Any]:
        own = self.stays if self.is_predicted and how["partly"] else set()
        spots = [
            (NO_HANDLE if number in own else number, 0, len(content)) for number, content in enumerate(self.contents)
        ]
        handles = tuple(bytes([number]) for number in range(len(self.contents)))
        return {"handles": handles, "places": packed(spots), "first": 0, "at_bytes": 0, "left": 0}

    def _free(self, _: Sequence[int], __: Mapping[str, Any]) -> dict[str, Any]:
        self.storages = [bytearray(len(content)) for content in self.contents]
        self.filled = 0
        return {"size_bytes": self.size_bytes}

    _make = _export

    def _filled(self, _: Sequence[int], how: Mapping[str, Any]) -> dict[str, Any]:
        self.filled = max(self.filled, how["first"] + how["count"])
        return {"held_bytes": 0}

    def _copy(self, fds: Sequence[int], how: Mapping[str, Any]) -> dict[str, Any]:
        for number, start, size_bytes, place in unpacked_spans(how["spans"]):
            if how["direction"] == "out":
                os.pwrite(fds[0], self.storages[number][start : start + size_bytes], place)
            else:
                self.storages[number][start : start + size_bytes] = os.pread(fds[0], size_bytes, place)
        return {}


@dataclass
class Piece:
    """Held video memory, by descriptor."""

    fd: int
    size_bytes: int
    at: int = 0


@dataclass
class Memory:
    """Video memory by owner."""

    held: dict[str, tuple[str, Piece]] = field(default_factory=dict)

    async def reserve(self, who: str, gpu: str, size_bytes: int, *, spare: bool = False, start: int = 0) -> None:
        if spare:
            raise Refused("there is no room beside", "it is not needed")
        if self.of(who).get(gpu, 0) >= size_bytes:
            return
        await self.release(who, gpu)
        fd = os.memfd_create("video", os.MFD_CLOEXEC)
        os.truncate(fd, size_bytes + MIB)
        self.held[who] = gpu, Piece(fd, size_bytes + MIB)

    async def keep(self, who: str, gpu: str) -> bool:
        return True

    async def release(self, who: str, gpu: str) -> None:
        if who in self.held:
            os.close(self.held.pop(who)[1].fd)

    def of(self, who: str) -> Mapping[str, int]:
        found = self.held.get(who)
        return {} if found is None else {found[0]: found[1].size_bytes}

    def pieces(self, who: str, _gpu: str) -> Sequence[Piece]:
        return [self.held[who][1]]


class Helper:
    """Answers as the real one does, and fails at random."""

    def __init__(self, process: Process, random: Random) -> None:
        self._process, self._random = process, random
        self.odds = {"lost": random.choice([0.0, 0.1, 0.3]), "fails": random.choice([0.0, 0.1, 0.3])}
        self.number = 1
        self._lanes: dict[str, dict[str, int]] = {}

    async def call(self, op: str, args: Mapping[str, Any], **how: Any) -> HelperReply:
        await anyio.lowlevel.checkpoint()
        if how.get("helper") not in (None, self.number) or self._random.random() < self.odds["lost"]:
            self.end()
            raise HelperLost("the life has it so", [op], None, "")
        if op in {"copy", "shift"} and self._random.random() < self.odds["fails"]:
            raise DriverFailed("cuMemcpyAsync", 999, "CUDA_ERROR_UNKNOWN")
        values: dict[str, Any] = {"copied_bytes": 0, "open_s": 0.0, "copy_s": 0.0, "close_s": 0.0, "peer": True}
        getattr(self, "_" + op.replace("-", "_"))(args, how.get("fds", ()))
        return HelperReply(values, helper=self.number)

    def end(self) -> None:
        for lane in list(self._lanes):
            self._close({"lane": lane}, ())
        self.number += 1

    def _close(self, args: Mapping[str, Any], _: Sequence[int]) -> None:
        for fd in self._lanes.pop(args["lane"], {}).values():
            os.close(fd)

    def _open(self, args: Mapping[str, Any], fds: Sequence[int]) -> None:
        self._lanes[args["lane"]] = {"host": os.dup(fds[0])} if fds else {}

    def _mark(self, args: Mapping[str, Any], _: Sequence[int]) -> None:
        assert args["owner"] is None, "there is no room beside"

    def _attach_video(self, args: Mapping[str, Any], fds: Sequence[int]) -> None:
        self._lanes[args["lane"]]["video"] = os.dup(fds[0])

    def _copy(self, args: Mapping[str, Any], _: Sequence[int]) -> None:
        space = self._lanes[args["lane"]][args["through"]]
        for handle, offset, size_bytes, at in args["places"]:
            number = args["handles"][handle][0]
            if number in self._process.restored:
                raise DriverFailed("cuIpcOpenMemHandle", 800, "CUDA_ERROR_NOT_PERMITTED")
            storage = self._process.storages[number]
            if args["direction"] == "out":
                os.pwrite(space, storage[offset : offset + size_bytes], at)
            else:
                storage[offset : offset + size_bytes] = os.pread(space, size_bytes, at)

    def _shift(self, args: Mapping[str, Any], _: Sequence[int]) -> None:
        lane = self._lanes[args["lane"]]
        for there, here, size_bytes in args["places"]:
            if args["direction"] == "out":
                os.pwrite(lane["host"], os.pread(lane["video"], size_bytes, there), here)
            else:
                os.pwrite(lane["video"], os.pread(lane["host"], size_bytes, here), there)


class Gpus:
    """Two of them, with turns that no other process requests."""

    async def uuid_of(self, name: str) -> str:
        return f"GPU-{name}"

    def name_of(self, uuid: str) -> str:
        return uuid.removeprefix("GPU-")

    def turn(self, _: str) -> Any:
        return contextlib.nullcontext()

    turns = turn

    async def gpu(self, _: str) -> Any:
        return SimpleNamespace(memory_free_bytes=0)

    def changed(self) -> None:
        """Checks nothing."""


class Node:
    """One life's node."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.process = Process(self.random)
        self.helper = Helper(self.process, self.random)
        self.gpus, self.memory = Gpus(), Memory()
        self.pool = Pool(self.random.choice([3, 64]) * MIB, keep=MemoryKeeping([], None, None))


@contextlib.asynccontextmanager
async def _making() -> AsyncIterator[Callable[[], bool]]:
    yield lambda: False


async def _live(seed: int, make: Make) -> str:
    node = Node(seed)
    process, carrier = node.process, make(node)
    agent: AgentConnection = process  # type: ignore[assignment]  # it is a model
    subject = MigratedProcess(
        "1", "1", 1, 1, gpu="gpu0", target_gpu="gpu1", previous_gpu=None, size_bytes=process.size_bytes, agent=agent
    )
    calm = dict.fromkeys(node.helper.odds, 0.0)
    try:
        for _ in range(TRIES):
            with contextlib.suppress(HegmError):
                await carrier.reserve(subject, process.size_bytes + MIB)
                await carrier.offload(subject, lambda _: None)
                break
            if process.filled != len(process.contents) or not _is_whole(process):
                return "a take out that failed has changed something"
        else:
            return ""  # it was left where it was
        process.restored = set(process.stays)
        subject = replace(subject, gpu="gpu1", previous_gpu="gpu0")
        for turn in range(TRIES):
            if turn == TRIES // 2:
                node.helper.odds = calm
            with contextlib.suppress(HegmError):
                await carrier.reload(subject, lambda _: None, _making)
                return "" if _is_whole(process) else "it goes on with other bytes than it had"
        return "it stands for good, though nothing is in its way any more"
    finally:
        node.helper.odds = calm
        await carrier.release(subject)
        node.helper.end()
        node.pool.close()


def _is_whole(process: Process) -> bool:
    return [bytes(storage) for storage in process.storages] == process.contents


def live(seed: int, make: Make) -> str:
    """Return the faults of that life; empty for success."""
    return anyio.run(_live, seed, make)
