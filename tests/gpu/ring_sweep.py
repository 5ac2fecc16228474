"""How the ring between video memory and the pool is best cut: `ring_sweep.py [BYTES] [GPUS]`. Prints rates only.

In less than half a minute, with memory of its own at both ends and no other process, in huge pages where the node has
enough of them. With `0,1` both GPUs copy at once in this process, as they do for the ranks of a job. For the helper's
way of copying, set GLIBC_TUNABLES as `hegmd/gpu_helper/link.py` does.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.address_space import VideoSpace
from hegmd.gpu_helper.allocations import IN, OUT, MemoryRange
from hegmd.gpu_helper.host_memory import HostMemory
from hegmd.gpu_helper.preallocation import SessionResources
from hegmd.gpu_helper.staging import HostSpace, ReservedGpuMemory, StagedCopy, StagingSizes
from hegmd.memory.pool_memory import read_huge_free_bytes
from tests.patience import HANG_S

MIB, GIB = 1 << 20, 1 << 30
SIZE_BYTES = 6 * GIB
WITHIN_S = 25.0


def paces() -> Iterator[StagingSizes]:
    """Return the settings to try, the likeliest first."""
    yield StagingSizes()
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


class Side:
    """One GPU, with memory on it and in the pool."""

    def __init__(self, gpu: int, size_bytes: int) -> None:
        self.context = cuda.retain(gpu)
        handle = cuda.create(gpu, size_bytes)
        self._held, self._fd = cuda.export(handle), pool(size_bytes)
        cuda.release_handle(handle)
        self._video = VideoSpace(gpu, {gpu: self.context}, [(self._held, size_bytes)], start=0, peer=True)
        self._host, self._provisions = HostMemory(self._fd, size_bytes), SessionResources({gpu: self.context})

    def measure(self, pace: StagingSizes, together: threading.Barrier) -> dict[str, float]:
        """Return the better rate of two in each direction."""
        cuda.use(self.context)
        space = HostSpace(self.context, self._host, pace)
        self._provisions.provide(pace.streams)
        streams = self._provisions.streams(self._video.ordinal)[: pace.streams]
        rates: dict[str, float] = {}
        for direction in (OUT, IN) * 2:
            together.wait(HANG_S)
            places = [MemoryRange(0, 0, self._host.size_bytes, 0)]
            copy = StagedCopy(self.context, space, direction, ReservedGpuMemory(self._video), streams)
            done = copy.run(places, lambda _: None)
            rates[direction] = max(rates.get(direction, 0.0), done.copied_bytes / done.copy_s / 1e9)
        space.close_ring()
        return rates

    def close(self) -> None:
        self._provisions.close()
        self._video.close()
        self._host.close()
        cuda.release(self._video.ordinal)
        os.close(self._held)
        os.close(self._fd)


def main() -> None:
    began = time.monotonic()
    size_bytes = int(sys.argv[1]) if len(sys.argv) > 1 else SIZE_BYTES
    gpus = [int(gpu) for gpu in sys.argv[2].split(",")] if len(sys.argv) > 2 else [0]
    cuda.start()
    sides = [Side(gpu, size_bytes) for gpu in gpus]
    with ThreadPoolExecutor(len(sides)) as threads:
        for pace in paces():
            if time.monotonic() - began > WITHIN_S:
                print("the rest is left out: there was no time for it")
                break
            together = threading.Barrier(len(sides))
            found = list(threads.map(lambda side, pace=pace, at=together: side.measure(pace, at), sides))
            rates = "; ".join(f"{rates[OUT]:5.1f} GB/s out, {rates[IN]:5.1f} GB/s in" for rates in found)
            slots = f"{pace.slots_a_strand} slots of {pace.slot_bytes // MIB:2} MiB"
            print(f"{pace.strands:3} strands, {pace.inward_strands} in, {slots}: {rates}", flush=True)
    for side in sides:
        side.close()


if __name__ == "__main__":
    main()
