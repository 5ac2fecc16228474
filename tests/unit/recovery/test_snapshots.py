"""Rounds of snapshots: the slot and the number of each, also after an earlier daemon. And what none is taken for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hegmd.memory.pool import Pool, Source
from hegmd.memory.sizes import MIB
from hegmd.protocol.agents import CudaDevice
from hegmd.protocol.messages import AgentReport
from hegmd.protocol.slots import RECORD_BYTES, SlotRecord, packed
from hegmd.recovery.job import ProtectedJob
from hegmd.recovery.protection import Protection, require_devices
from hegmd.recovery.slots import JobSlots
from hegmd.recovery.snapshots import FIRST_AHEAD, LIMIT_S, MAX_AHEAD, SnapshotPostponed, SnapshotRounds, Unprotected
from hegmd.workers.workers import AgentConnection, OrderFailed

STATE_BYTES = 8192
SOURCE = Source(os.geteuid(), 1)


@pytest.fixture
def pool() -> Iterator[Pool]:
    created = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield created
    created.close()


class Process:
    """A training of one process. Its agent writes the snapshots that it is ordered to take."""

    pid, boundary, identity = 1, 5, SimpleNamespace(uid=SOURCE.uid, start_ticks=1)
    about = SimpleNamespace(rank=None)

    def __init__(self) -> None:
        self.written: list[int] = []

    async def order(self, _do: str, *, fds: list[int], generation: int, **_more: Any) -> AgentReport:
        if not fds:
            raise OrderFailed(self.pid, "snapshot", AgentReport(order=1, result="failed", state_bytes=STATE_BYTES))
        self.written.append(generation)
        write(fds[0], generation, step=self.boundary)
        return AgentReport(order=1, result="done", parked_s=0.1)


def _in_no_hand(_pid: int) -> bool:
    return False


def write(fd: int, generation: int, step: int, rank: int = 0, ranks: int = 1) -> None:
    """Set the record of a slot."""
    record = SlotRecord(
        generation=generation, step=step, rank=rank, ranks=ranks, size_bytes=STATE_BYTES, taken_utc=1.0, took_s=0.1
    )
    os.pwrite(fd, packed(record), os.fstat(fd).st_size - RECORD_BYTES)


async def test_a_snapshot_number_exceeds_every_slot_even_without_a_record(pool: Pool) -> None:
    """With a lower one, the snapshot before it would count as the newest."""
    slots, process = JobSlots(pool, "j1"), Process()
    for slot, generation in ((0, 6), (1, 9)):
        write((await slots.take(0, slot, STATE_BYTES, SOURCE)).fd, generation, step=generation)
    job = SimpleNamespace(slots=slots, node=SimpleNamespace(is_in_hand=_in_no_hand))
    rounds = SnapshotRounds(cast("ProtectedJob", job))
    taken = await rounds.take([cast("AgentConnection", process)], generation=6)
    assert process.written == [taken.generation]
    assert taken.generation > 9
    found = await slots.read()
    assert found[0, 0] == taken
    assert [record.generation for record in found.values() if record is not None] == [taken.generation, 9]


class Rank:
    """A rank of several. It makes so many steps until an order arrives, and each takes so long."""

    boundary, identity = 5, Process.identity

    def __init__(self, rank: int, clock: list[float]) -> None:
        self.about, self.pid = SimpleNamespace(rank=rank), rank + 1
        self.steps_ahead, self.step_s, self._clock = 0, 0.0, clock
        self.aheads: list[int] = []

    async def order(self, do: str, *, fds: list[int], generation: int, **more: Any) -> AgentReport:
        self.aheads.append(more["at"] - self.boundary)
        self.boundary += self.steps_ahead
        if self.boundary >= more["at"]:
            raise OrderFailed(self.pid, do, AgentReport(order=1, result="failed"))
        self._clock[0] += (more["at"] - self.boundary) * self.step_s
        self.boundary = more["at"]
        if not fds:
            raise OrderFailed(self.pid, do, AgentReport(order=1, result="failed", state_bytes=STATE_BYTES))
        if self._clock[0] > LIMIT_S:
            raise OrderFailed(self.pid, do, AgentReport(order=1, result="failed"))
        write(fds[0], generation, step=self.boundary, rank=self.about.rank, ranks=2)
        return AgentReport(order=1, result="done", parked_s=0.1)


async def test_no_snapshot_was_taken_of_slow_ranks_that_were_quick_once(pool: Pool) -> None:
    """The boundary stayed 64 steps ahead, which ranks with steps of 10 s do not reach within the limit."""
    clock = [0.0]
    ranks = [Rank(0, clock), Rank(1, clock)]
    job = SimpleNamespace(slots=JobSlots(pool, "j1"), node=SimpleNamespace(is_in_hand=_in_no_hand), count=_counted)
    rounds = SnapshotRounds(cast("ProtectedJob", job), lambda: clock[0])
    both = [cast("AgentConnection", rank) for rank in ranks]
    ranks[0].steps_ahead = 40
    await rounds.take(both, generation=1)
    assert max(ranks[0].aheads) == MAX_AHEAD
    await rounds.take(both, generation=2)
    assert ranks[0].aheads[-1] == MAX_AHEAD, "steps are short still"
    ranks[0].steps_ahead, ranks[0].step_s = 0, 10.0
    with pytest.raises(SnapshotPostponed):
        await rounds.take(both, generation=3)
    for generation in range(4, 9):
        clock[0] = 0.0
        await rounds.take(both, generation)
    assert ranks[0].aheads[-1] == FIRST_AHEAD


def _rounds_and_process(pool: Pool) -> tuple[SnapshotRounds, Any]:
    record = SimpleNamespace(ranks=1, launched=False)
    job = SimpleNamespace(slots=JobSlots(pool, "j1"), node=SimpleNamespace(is_in_hand=_in_no_hand), record=record)
    return SnapshotRounds(cast("ProtectedJob", job)), Process()


async def test_a_snapshot_with_an_image_uses_the_second_slot_and_becomes_the_newest(pool: Pool) -> None:
    rounds, process = _rounds_and_process(pool)
    taken = await rounds.take([process], generation=1)
    image = await rounds.beside_image("op7", generation=2, bad=())
    found = await rounds.slot_of(process, image)
    assert found is not None
    fd, generation = found
    write(fd, generation, step=9)
    assert generation > taken.generation
    kept = await JobSlots(pool, "j1").read()
    assert sorted((record.generation, record.step) for record in kept.values() if record is not None) == [
        (taken.generation, taken.step),
        (generation, 9),
    ]


async def test_no_snapshot_is_taken_with_an_image_without_known_size_or_memory(pool: Pool) -> None:
    rounds, process = _rounds_and_process(pool)
    assert await rounds.slot_of(process, await rounds.beside_image("op7", 1, ())) is None
    await rounds.take([process], generation=1)
    rounds._sizes[0] = 1 << 40
    assert await rounds.slot_of(process, await rounds.beside_image("op7", 2, ())) is None


@pytest.mark.parametrize(("numbers", "fits"), [((0, 1), True), ((0, 0), True), ((1, 0), True), ((0, 2), False)])
def test_a_recovery_was_promised_on_devices_that_a_new_process_does_not_have(
    numbers: tuple[int, int], *, fits: bool
) -> None:
    """Ranks on cuda:0 and cuda:2 of three GPUs would be started with two."""
    ranks = [cast("Any", SimpleNamespace()) for _ in numbers]
    for rank, number in zip(ranks, numbers, strict=True):
        rank.cuda = SimpleNamespace(devices=(CudaDevice(uuid="GPU-1", size_bytes=1, number=number),))
    if fits:
        require_devices(ranks, ("gpu0", "gpu2"))
        return
    with pytest.raises(Unprotected) as refused:
        require_devices(ranks, ("gpu0", "gpu2"))
    assert refused.value.why == "it uses cuda:2, and a new process would see 2 GPUs only, from cuda:0 to cuda:1"


async def _counted(_workers: object) -> None: ...


async def test_a_rank_without_a_batch_counted_as_on_another_node() -> None:
    """`hegmctl run` said that 1 of 2 ranks were on this node, where the other one only made data."""
    abouts = [SimpleNamespace(rank=rank, world_size=2) for rank in range(2)]
    ranks = [SimpleNamespace(connected=True, boundary=5 * (1 - about.rank), about=about) for about in abouts]
    supervisor = SimpleNamespace(offer=SimpleNamespace(pid=7))
    job = SimpleNamespace(own_workers=lambda: ranks, count=_counted, supervisor=supervisor, slots=None)
    with pytest.raises(SnapshotPostponed, match="rank 1 of 2 has not reached its first batch"):
        await Protection(cast("ProtectedJob", job))._processes()
