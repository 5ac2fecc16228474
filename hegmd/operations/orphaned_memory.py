"""Assigns orphaned bytes, in pool segments and GPU memory, to the parked processes that they belong to.

The bytes go into a process's storages, so nothing is guessed: segments and GPU memory carry the pid and start time of
their process, and if several match, none is used. GPU memory without a start time, from earlier releases, is only
listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from hegmd.errors import Refused
from hegmd.memory.pool import Key, Pool
from hegmd.memory.pool import Source as PieceSource
from hegmd.memory.video_memory import DEVICE_BYTES, STORE_PREFIX, VideoMemory
from hegmd.migration.methods.gpus import BYTES, PASSING, bytes_name
from hegmd.protocol.operations import Orphan
from hegmd.workers.workers import AgentConnection, Workers

# The first bytes of memory that an agent copied to (hegmd/agent/transfer.py); the agent's random mark follows.
_MAGIC = b"HEGMWRK1"


class VideoCopy(NamedTuple):
    """Video memory with bytes that no operation has: its name, its GPU by UUID, what kind it is, whose, how much."""

    who: str
    gpu: str
    kind: str
    key: Key
    start_ticks: int | None
    size_bytes: int

    @property
    def name(self) -> str:
        """The name by which commands refer to it."""
        return f"{STORE_PREFIX}-{self.who}-{self.gpu}"

    @property
    def pid(self) -> int | None:
        return int(self.key.worker) if self.key.worker.isdigit() else None

    def is_of(self, worker: AgentConnection) -> bool:
        """Return True if it is that process's, and no other's of its number."""
        return self.start_ticks is not None and (self.pid, self.start_ticks) == (
            worker.pid,
            worker.identity.start_ticks,
        )


class VideoOrphans:
    """GPU memory with bytes that a descriptor store kept and whose operation is gone. `named` maps a UUID to a GPU
    name.

    With its process's start time it can be adopted with that process, and only its owner may drop it. With a pid alone
    it is assigned to no process. The owner of the process that has the pid now may drop it: either it is theirs, or its
    process is gone.
    """

    def __init__(
        self,
        memory: VideoMemory,
        owned: Callable[[Key], bool],
        why: Callable[[str], str],
        named: Callable[[str], str],
        workers: Workers,
    ) -> None:
        self._memory = memory
        self._owned = owned
        self._why = why
        self._named = named
        self._workers = workers

    def found(self) -> Iterable[VideoCopy]:
        for (who, gpu), size_bytes in self._memory.by_owner().items():
            operation, _, rest = who.partition(".")
            worker, _, what = rest.rpartition(".")
            kind, _, ticks = what.partition("@")
            key = Key(operation, worker)
            if kind in (BYTES, PASSING) and not self._owned(key):
                yield VideoCopy(who, gpu, kind, key, int(ticks) if ticks.isdigit() else None, size_bytes)

    def orphans(self) -> Iterable[Orphan]:
        for one in self.found():
            agent = None if one.pid is None else self._workers.find(one.pid)
            is_its = agent is not None and (one.start_ticks is None or one.is_of(agent))
            yield Orphan(
                name=one.name,
                kind="bytes",
                pid=one.pid,
                size_bytes=one.size_bytes,
                where=f"video memory of {self._named(one.gpu)}",
                why=self._why(one.key.operation),
                next=_next(one, agent),
                uid=agent.identity.uid if agent is not None and is_its else None,
            )

    async def drop(self, name: str) -> int | None:
        found = next(one for one in self.found() if one.name == name)
        await self._memory.release(found.who, found.gpu)
        return found.size_bytes


def _next(one: VideoCopy, agent: AgentConnection | None) -> str:
    if agent is not None and one.is_of(agent):
        if agent.held_bytes:
            return f"run: hegmctl adopt {one.pid}; that process needs these bytes"
        return f"run: hegmctl adopt --drop {one.name}; process {one.pid} does not need them"
    if one.start_ticks is not None:
        return f"run: hegmctl adopt --drop {one.name}, if process {one.key.worker} has exited or no longer answers"
    return f"run: hegmctl adopt --drop {one.name}, once process {one.key.worker} has exited"


class OrphanedMemory:
    """The orphaned bytes in both places."""

    def __init__(self, pool: Pool, memory: VideoMemory, video: VideoOrphans) -> None:
        self._pool = pool
        self._memory = memory
        self._video = video

    async def in_video(self, worker: AgentConnection, name: str) -> tuple[VideoCopy, ...]:
        """Return the GPU memory with the offloaded bytes of that process, which operations call by `name`: on one GPU,
        or on one for each of its devices. Empty if a pool segment has them, or none exist.

        Raises Refused if several match, or a part is lost.
        """
        if not worker.held_bytes or worker.about.mark:  # it copied them itself, and never to video memory
            return ()
        fitting = [one for one in self._video.found() if one.kind == BYTES and one.is_of(worker)]
        if not fitting:
            return ()
        piece = await found_for(self._pool, worker, name)
        if len({one.who for one in fitting}) == 1 and piece is None:
            return self._whole(tuple(fitting), worker)
        names = [one.name for one in fitting] + ([] if piece is None else [piece])
        names.sort()
        raise Refused(
            f"{len(names)} saved copies could belong to process {worker.pid}, and hegmd cannot tell which does",
            "drop those of an earlier move: hegmctl adopt --drop NAME; the process stays parked, and all are kept: "
            f"{', '.join(names)}",
            {"pid": worker.pid, "found": names},
        )

    def _whole(self, copies: tuple[VideoCopy, ...], worker: AgentConnection) -> tuple[VideoCopy, ...]:
        """Return the copies if they reach to the last byte that the process lacks. Raises Refused otherwise.

        A move in rounds has released its first part already.
        """
        reach_bytes = sum(self._reach_bytes(one) for one in copies)
        if reach_bytes < worker.held_bytes:
            names = ", ".join(one.name for one in copies)
            raise Refused(
                f"{worker.held_bytes} bytes are out of process {worker.pid}, and {names} reaches to {reach_bytes}",
                "read the log of the service manager around hegmd's last start; the missing bytes are lost",
                {"pid": worker.pid, "held_bytes": worker.held_bytes, "reach_bytes": reach_bytes},
            )
        return copies

    def _reach_bytes(self, one: VideoCopy) -> int:
        last = self._memory.pieces(one.who, one.gpu)[-1]
        return (last.at + last.size_bytes) % DEVICE_BYTES

    async def claim(self, worker: AgentConnection, key: Key) -> None:
        """Give the orphaned memory of that process, if any, to that operation. Raises HegmError."""
        if found := await self.in_video(worker, key.worker):
            to = bytes_name(key.operation, key.worker, worker.identity.start_ticks)
            for one in found:
                await self._memory.hand_on(one.who, one.gpu, to)
            return
        name = await found_for(self._pool, worker, key.worker)
        if name is not None:
            await self._pool.claim(name, key)

    def has(self, worker: AgentConnection, key: Key) -> bool:
        """Return True if that operation has them already."""
        to = bytes_name(key.operation, key.worker, worker.identity.start_ticks)
        return bool(self._pool.held_for(key) or self._memory.of(to))


async def found_for(pool: Pool, worker: AgentConnection, name: str) -> str | None:
    """Return the name of the pool segment with the offloaded bytes of that process; None if there is none.

    A segment without an owner's start time is used for no process; of several, the one that its agent has marked is
    used. Raises Refused if that is ambiguous: bytes of another moment would be taken for its own.
    """
    source = PieceSource(worker.identity.uid, worker.identity.start_ticks)
    fitting = [
        called
        for called, piece in pool.unclaimed().items()
        if piece.name.key.worker == name and piece.name.source == source and piece.usable_bytes >= worker.held_bytes
    ]
    if len(fitting) < 2:
        return next(iter(fitting), None)
    begins = _MAGIC + bytes.fromhex(worker.about.mark or "")
    marked = [called for called in fitting if await pool.beginning(called, len(begins)) == begins != _MAGIC]
    if len(marked) == 1:
        return marked[0]
    if not worker.about.entrusted:
        return None  # the agent has its own descriptor of its bytes
    raise Refused(
        f"{len(fitting)} pool segments could belong to process {worker.pid}, and its agent recognises none of them",
        f"it stays parked, and all are kept: {', '.join(sorted(fitting))}",
        {"pid": worker.pid, "pieces": sorted(fitting)},
    )
