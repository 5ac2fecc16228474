"""The descriptors that one store holds for several parts of the daemon return to each of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmd.memory.pool import MemoryKeeping
from hegmd.memory.pool_found import find_pieces
from hegmd.memory.spill_file import ENDING, SpillFolder
from hegmd.memory.video_memory import GIB, VideoMemory
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.memory.test_video_memory import GPU, Gpus

WHO = "7.4711.bytes"


async def test_video_memory_next_to_pool_segments_was_closed_as_unknown() -> None:
    """A daemon that is started again would have freed the bytes of a job on its way from GPU to GPU."""
    store = DescriptorStore()
    for name in (f"hegm-vram-{WHO}-{GPU}-0-{GIB}", "hegm-pool-7-4711-7.00c0ffee", "hegm-other"):
        fd = os.memfd_create(name)
        os.truncate(fd, 4096)
        await store.put(name, fd)
        os.close(fd)
    memory = VideoMemory(Gpus(), store)
    findings = await find_pieces(MemoryKeeping(store=store), memory.adopt)
    assert memory.of(WHO) == {GPU: GIB}
    assert [str(piece.name) for piece in findings.pieces] == ["hegm-pool-7-4711-7.00c0ffee"]
    assert [(one.name, one.size_bytes) for one in findings.distrusted] == [("hegm-other", 0)]
    assert len(store.kept) == 3, "what is found is still held"
    await memory.release(WHO, GPU)
    assert len(store.kept) == 2
    for piece in findings.pieces:
        if piece.memory is not None:
            piece.memory.close()
    await store.drop(*list(store.kept))


async def test_memory_in_small_pages_does_not_count_as_huge_pages() -> None:
    """Issue 14, row 20: no test noticed it. A file system in memory has blocks of exactly one page."""
    store = DescriptorStore()
    fd = os.memfd_create("usual")
    assert os.fstatvfs(fd).f_bsize == os.sysconf("SC_PAGESIZE")
    os.truncate(fd, 4096)
    await store.put("hegm-pool-7-4711-4096.00c0ffee", fd)
    os.close(fd)
    (piece,) = (await find_pieces(MemoryKeeping(store=store), VideoMemory(Gpus(), store).adopt)).pieces
    assert piece.memory is not None
    assert not piece.memory.huge
    assert piece.memory.size_bytes == 4096, "as large as what was asked for is large enough"
    piece.memory.close()
    await store.drop(*list(store.kept))


@pytest.mark.thorough
async def test_huge_pages_in_the_store_are_known_as_such() -> None:
    store = DescriptorStore()
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_HUGETLB)  # takes no page until it is written to
    os.truncate(fd, 1 << 21)
    await store.put("hegm-pool-7-4711-4096.00c0ffee", fd)
    os.close(fd)
    (piece,) = (await find_pieces(MemoryKeeping(store=store), VideoMemory(Gpus(), store).adopt)).pieces
    assert piece.memory is not None
    assert piece.memory.huge
    piece.memory.close()
    await store.drop(*list(store.kept))


async def test_a_spill_file_is_distrusted_with_its_own_fault(tmp_path: Path) -> None:
    (tmp_path / "spill").mkdir(mode=0o700)
    folder = SpillFolder(tmp_path / "spill", spare_bytes=0)
    fd = os.memfd_create("pool")
    os.truncate(fd, 4096)
    for name in ("hegm-pool-7-4711-4096.00c0ffee", "hegm-other"):
        folder.write(name, fd, 4096, lambda: False, lambda _: None)
    os.close(fd)
    os.truncate(folder.path("hegm-pool-7-4711-4096.00c0ffee"), 100)
    store = DescriptorStore()
    findings = await find_pieces(MemoryKeeping(spill=folder), VideoMemory(Gpus(), store).adopt)
    assert {one.name.removesuffix(ENDING): one.why for one in findings.distrusted} == {
        "hegm-pool-7-4711-4096.00c0ffee": "it is cut short",
        "hegm-other": "its name is not one that hegmd uses",
    }
