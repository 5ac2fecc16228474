"""Held video memory: the books, what is kept beyond the daemon, and what comes back from there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import HelperLost, HelperReply
from hegmd.memory.sizes import MAX_PIECES
from hegmd.memory.video_memory import GIB, MIB, VideoMemory, piece_sizes
from hegmd.system.descriptors import Descriptors
from tests.unit.descriptor_store import DescriptorStore

GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"
OTHER = "GPU-fedcba98-7654-3210-fedc-ba9876543210"
WHO = "7.4711-123.storages"


class Gpus:
    """A helper whose video memory is memfds: held memory reduces the free memory of the GPU."""

    def __init__(self, capacity_bytes: int = 64 * GIB) -> None:
        self.capacity_bytes = capacity_bytes
        self.requests: list[Mapping[str, object]] = []
        self.wait = anyio.Event()
        self.wait.set()
        self.begun = anyio.Event()
        self.losses = 0

    async def call(self, op: str, args: Mapping[str, object], *, deadline_s: float) -> HelperReply:
        assert op == "hold"
        assert deadline_s > 1
        self.requests.append(args)
        self.begun.set()
        await self.wait.wait()
        if self.losses:
            self.losses -= 1
            raise HelperLost("was killed", [op], 1, "")
        sizes = args["sizes"]
        assert isinstance(sizes, list)
        if sum(sizes) > self.capacity_bytes:
            raise Refused("no room", "free some", {"asked_bytes": sum(sizes)})
        return HelperReply({"sizes": sizes}, Descriptors([os.memfd_create("video") for _ in sizes]))


@pytest.fixture
async def store() -> AsyncIterator[DescriptorStore]:
    made = DescriptorStore()
    yield made
    await made.drop(*list(made.kept))


@pytest.fixture
async def memory(store: DescriptorStore) -> AsyncIterator[VideoMemory]:
    made = VideoMemory(Gpus(), store)
    yield made
    made.close()


async def test_a_request_is_repeated_if_the_helper_was_killed_before_its_start_was_noticed() -> None:
    """A resume that came a moment after ended as suspended again, for lack of room that there was."""
    helper = Gpus()
    helper.losses = 1
    memory = VideoMemory(helper)
    await memory.reserve(WHO, GPU, GIB)
    assert memory.of(WHO) == {GPU: GIB}
    helper.losses = 2
    with pytest.raises(HelperLost):
        await memory.reserve(WHO, GPU, 2 * GIB)
    assert memory.of(WHO) == {GPU: GIB}
    memory.close()


def test_pieces_are_gigabytes_in_whole_units_and_never_too_many() -> None:
    assert piece_sizes(0) == []
    assert piece_sizes(1) == [2 * MIB]
    assert piece_sizes(2 * GIB + 3 * MIB) == [GIB, GIB, 4 * MIB]
    for size_bytes in (140 * GIB, 288 * GIB + 1, 1000 * GIB):
        sizes = piece_sizes(size_bytes)
        assert size_bytes <= sum(sizes) < size_bytes + 2 * MIB
        assert len(sizes) <= MAX_PIECES + 1


async def test_held_memory_is_reported_by_owner_and_gpu(memory: VideoMemory) -> None:
    await memory.reserve(WHO, GPU, 2 * GIB + MIB)
    await memory.reserve(WHO, OTHER, MIB)
    await memory.reserve("8.1-1.rest", GPU, MIB)
    assert memory.of(WHO) == {GPU: 2 * GIB + 2 * MIB, OTHER: 2 * MIB}
    assert [(piece.at, piece.size_bytes) for piece in memory.pieces(WHO, GPU)] == [
        (0, GIB),
        (GIB, GIB),
        (2 * GIB, 2 * MIB),
    ]
    await memory.release(WHO, GPU)
    await memory.release(WHO, GPU)
    assert memory.of(WHO) == {OTHER: 2 * MIB}
    assert memory.pieces(WHO, GPU) == ()


async def test_a_second_reservation_adds_only_the_missing_bytes(store: DescriptorStore) -> None:
    gpus = Gpus()
    memory = VideoMemory(gpus, store)
    for size_bytes in (GIB, GIB, MIB, 3 * GIB, 0):
        await memory.reserve(WHO, GPU, size_bytes)
    assert [request["sizes"] for request in gpus.requests] == [[GIB], [GIB, GIB]]
    assert [piece.at for piece in memory.pieces(WHO, GPU)] == [0, GIB, 2 * GIB]
    memory.close()


async def test_the_time_of_a_release_by_the_store_was_missing_in_the_log(
    store: DescriptorStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenth of a second of a migration in rounds: the driver frees memory with its last descriptor."""
    caplog.set_level("DEBUG", "hegmd.memory.video_memory")
    memory = VideoMemory(Gpus(), store)
    for is_kept in (False, True):
        await memory.reserve(WHO, GPU, 2 * GIB)
        if is_kept:
            await memory.keep(WHO, GPU)
        caplog.clear()
        await memory.give_first(WHO, GPU, 1)
        messages = [record.getMessage().split(" took ")[0] for record in caplog.records]
        assert messages == ["video memory: give", *(["video memory: drop"] if is_kept else [])]
        await memory.release(WHO, GPU)


async def test_missing_memory_changes_nothing(store: DescriptorStore) -> None:
    memory = VideoMemory(Gpus(capacity_bytes=2 * GIB), store)
    await memory.reserve(WHO, GPU, GIB)
    with pytest.raises(Refused, match="no room"):
        await memory.reserve(WHO, GPU, 4 * GIB)
    assert memory.of(WHO) == {GPU: GIB}
    memory.close()


async def test_a_request_is_refused_only_if_no_memory_could_be_freed() -> None:
    gpus = Gpus(capacity_bytes=2 * GIB)
    memory = VideoMemory(gpus)
    calls: list[str] = []

    async def free_memory(gpu: str) -> bool:
        calls.append(gpu)
        gpus.capacity_bytes *= 2
        return len(calls) < 3

    memory.free_memory = free_memory
    await memory.reserve(WHO, GPU, 4 * GIB)
    assert (calls, memory.of(WHO)) == ([GPU], {GPU: 4 * GIB})
    with pytest.raises(Refused, match="no room"):
        await memory.reserve("others", GPU, 64 * GIB)
    with pytest.raises(Refused, match="no room"):
        await memory.reserve("others", GPU, 16 * GIB + 1)
    assert calls == [GPU, GPU, GPU], "asked once each time, and not believed where there was nothing to give"
    memory.close()


async def test_memory_released_meanwhile_does_not_count_as_held() -> None:
    """The descriptors were closed, and their numbers would soon have belonged to other files."""
    gpus = Gpus()
    memory = VideoMemory(gpus)
    await memory.reserve(WHO, GPU, GIB)
    gpus.wait = anyio.Event()
    gpus.begun = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(memory.reserve, WHO, GPU, 3 * GIB)
        await gpus.begun.wait()
        await memory.release(WHO, GPU)
        gpus.wait.set()
    assert [(piece.at, piece.size_bytes) for piece in memory.pieces(WHO, GPU)] == [(0, GIB), (GIB, GIB)]
    for piece in memory.pieces(WHO, GPU):
        os.fstat(piece.fd)
    memory.close()


async def test_a_cancelled_hold_leaves_nothing() -> None:
    gpus = Gpus()
    gpus.wait = anyio.Event()
    memory = VideoMemory(gpus)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(memory.reserve, WHO, GPU, GIB)
        await gpus.begun.wait()
        tasks.cancel_scope.cancel()
    assert memory.of(WHO) == {}
    gpus.wait.set()
    await memory.reserve(WHO, GPU, GIB)
    memory.close()


# -- beyond the daemon ---------------------------------------------------------------------------------------------


async def test_a_reservation_is_exclusive_and_bytes_are_kept_until_released(
    memory: VideoMemory, store: DescriptorStore
) -> None:
    """A copy that another process closes at any time would be missing when a process is restored."""
    await memory.reserve(WHO, GPU, 2 * GIB)
    assert not store.kept
    assert await memory.keep(WHO, GPU)
    assert sorted(store.kept) == [f"hegm-vram-{WHO}-{GPU}-{at}-{GIB}" for at in (0, GIB)]
    await memory.reserve(WHO, GPU, 3 * GIB)
    assert len(store.kept) == 3, "what is added to what is kept is kept"
    await memory.release(WHO, GPU)
    assert not store.kept


async def test_stored_descriptors_are_available_to_the_next_daemon(memory: VideoMemory, store: DescriptorStore) -> None:
    await memory.reserve(WHO, GPU, 3 * GIB)
    await memory.keep(WHO, GPU)
    assert await memory.give_first(WHO, GPU, 1) == GIB
    assert len(store.kept) == 2, "what is given back in a move is to be free when the next round begins"
    inodes = [os.fstat(piece.fd).st_ino for piece in memory.pieces(WHO, GPU)]
    memory.close()

    later = VideoMemory(Gpus(), store)
    for name, fd in reversed(list(store.kept.items())):  # in any order
        later.adopt(name, os.dup(fd))
    assert [(piece.at, piece.size_bytes) for piece in later.pieces(WHO, GPU)] == [(GIB, GIB), (2 * GIB, GIB)]
    assert [os.fstat(piece.fd).st_ino for piece in later.pieces(WHO, GPU)] == inodes
    assert later.of(WHO) == {GPU: 2 * GIB}
    await later.release(WHO, GPU)
    assert not store.kept, "what is given back by a later daemon stays in the store"


async def test_bytes_with_a_lost_part_do_not_count_as_complete(memory: VideoMemory, store: DescriptorStore) -> None:
    await memory.reserve(WHO, GPU, 3 * GIB)
    await memory.keep(WHO, GPU)
    later = VideoMemory(Gpus(), store)
    for name, fd in store.kept.items():
        if f"-{GIB}-{GIB}" not in name:
            later.adopt(name, os.dup(fd))
    with pytest.raises(Refused, match=f"begins at {GIB} is gone"):
        later.pieces(WHO, GPU)
    later.close()


@pytest.mark.parametrize("name", ["hegm-vram", "hegm-vram-x", f"hegm-vram-a-{GPU}-1", f"hegm-pool-a-{GPU}-1-2"])
async def test_a_descriptor_of_another_name_stays_its_callers(memory: VideoMemory, name: str) -> None:
    fd = os.memfd_create("what")
    assert not memory.adopt(name, fd)
    os.close(fd)
    assert not memory.by_owner()


async def test_a_piece_that_was_kept_twice_counts_once(memory: VideoMemory) -> None:
    for _ in range(2):
        memory.adopt(f"hegm-vram-{WHO}-{GPU}-0-{GIB}", os.memfd_create("video"))
    assert memory.of(WHO) == {GPU: GIB}


async def test_a_value_that_cannot_be_kept_completely_is_not_kept(memory: VideoMemory, store: DescriptorStore) -> None:
    """Half of a job's bytes are useless, so the daemon must not count them as safe."""
    store.room = 2
    await memory.reserve(WHO, GPU, 3 * GIB)
    with pytest.raises(HegmError, match="does not take"):
        await memory.keep(WHO, GPU)
    assert not store.kept
    assert memory.of(WHO) == {GPU: 3 * GIB}


async def test_without_a_store_nothing_is_kept_and_that_is_reported() -> None:
    memory = VideoMemory(Gpus())
    await memory.reserve(WHO, GPU, GIB)
    assert await memory.keep(WHO, GPU) is False
    memory.close()


async def test_a_renamed_descriptor_is_stored_under_one_of_its_names_all_the_time(
    memory: VideoMemory, store: DescriptorStore
) -> None:
    await memory.reserve(WHO, GPU, 2 * GIB)
    await memory.keep(WHO, GPU)
    inodes = [os.fstat(piece.fd).st_ino for piece in memory.pieces(WHO, GPU)]
    store.room = 3
    with pytest.raises(HegmError, match="does not take"):
        await memory.hand_on(WHO, GPU, "8.4711.bytes@5")
    assert (memory.of(WHO), len(store.kept)) == ({GPU: 2 * GIB}, 2), "all is as it was"
    store.room = 4
    await memory.hand_on(WHO, GPU, "8.4711.bytes@5")
    assert (memory.of(WHO), memory.of("8.4711.bytes@5")) == ({}, {GPU: 2 * GIB})
    assert [os.fstat(piece.fd).st_ino for piece in memory.pieces("8.4711.bytes@5", GPU)] == inodes
    assert all("-8.4711.bytes@5-" in name for name in store.kept), store.kept
    later = VideoMemory(Gpus(), store)
    assert all(later.adopt(name, os.dup(fd)) for name, fd in store.kept.items())
    assert later.of("8.4711.bytes@5") == {GPU: 2 * GIB}
    later.close()
    await memory.release("8.4711.bytes@5", GPU)
    assert not store.kept
