"""How the ring between video memory and the pool is best cut: `ring_sweep.py [BYTES]`. Prints rates; judges nothing.

In less than half a minute on one GPU, with memory of its own at both ends and no other process, in huge pages where the
node has enough of them.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import IN, OUT, MemoryRange
from hegmd.gpu_helper.preallocation import SessionResources
from hegmd.gpu_helper.staging import HostMemory, HostSpace, ReservedGpuMemory, StagedCopy, StagingSizes
from hegmd.memory.pool_memory import read_huge_free_bytes

MIB, GIB = 1 << 20, 1 << 30
SIZE_BYTES = 6 * GIB
WITHIN_S = 25.0


def paces() -> Iterator[StagingSizes]:
    """Return the settings to try, the likeliest first."""
    for strands in (8, 12, 16, 24, 32):
        yield StagingSizes(most_strands=strands, most_inward_strands=strands)
    for slot_mib in (1, 2, 4, 16, 32):
        yield StagingSizes(slot_bytes=slot_mib * MIB)
    for slots in (3, 4):
        yield StagingSizes(slots_a_strand=slots, slot_bytes=4 * MIB)
    for strands, slot_mib in ((12, 2), (16, 2), (16, 4), (32, 2), (32, 4)):
        yield StagingSizes(most_strands=strands, most_inward_strands=strands, slot_bytes=slot_mib * MIB)


def pool(size_bytes: int) -> int:
    is_huge = read_huge_free_bytes() >= size_bytes
    fd = os.memfd_create("pool", os.MFD_HUGETLB if is_huge else 0)
    os.ftruncate(fd, size_bytes)
    print(f"{size_bytes / GIB:.0f} GiB in {'huge' if is_huge else 'ordinary'} pages, {os.cpu_count()} cores")
    return fd


def show(pace: StagingSizes, host: HostMemory, video: VideoSpace, provisions: SessionResources) -> None:
    """Print one line: each direction twice, the better one."""
    space = HostSpace(video.context, host, pace)
    provisions.provide(pace.streams)
    streams = provisions.streams(video.ordinal)[: pace.streams]
    rates: dict[str, float] = {}
    for direction in (OUT, IN) * 2:
        places = [MemoryRange(0, 0, host.size_bytes, 0)]
        done = StagedCopy(video.context, space, direction, ReservedGpuMemory(video), streams).run(
            places, lambda _: None
        )
        rates[direction] = max(rates.get(direction, 0.0), done.copied_bytes / done.copy_s / 1e9)
    space.ring.close()
    print(
        f"{pace.strands:3} strands, {pace.slots_a_strand} slots of {pace.slot_bytes // MIB:2} MiB: "
        f"{rates[OUT]:5.1f} GB/s out, {rates[IN]:5.1f} GB/s in",
        flush=True,
    )


def main() -> None:
    began = time.monotonic()
    size_bytes = int(sys.argv[1]) if len(sys.argv) > 1 else SIZE_BYTES
    cuda.start()
    context = cuda.retain(0)
    handle = cuda.create(0, size_bytes)
    held, fd = cuda.export(handle), pool(size_bytes)
    cuda.release_handle(handle)
    video = VideoSpace(0, {0: context}, [(held, size_bytes)], start=0, peer=True)
    host, provisions = HostMemory(fd, size_bytes), SessionResources({0: context})
    for pace in paces():
        if time.monotonic() - began > WITHIN_S:
            print("the rest is left out: there was no time for it")
            break
        show(pace, host, video, provisions)
    provisions.close()
    video.close()
    host.close()
    cuda.release(0)
    os.close(held)
    os.close(fd)


if __name__ == "__main__":
    main()
