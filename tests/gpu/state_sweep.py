"""How fast a restart's state could go between a GPU and the pool, each way by itself: `state_sweep.py [MIB]`.

Prints rates and judges nothing, in about half a minute on one GPU with PyTorch: what pinned memory comes to, which is
the link's limit; the way that the agent takes, with checksums by the GPU; the agent's ring by so many threads, with its
memory ready and not; the same with checksums by the processor; checksums alone; how fast the pool's pages are pinned,
and let go of, by one thread and by four; and with no ring at all, the GPU writing to pages of the pool that another
thread pins ahead of it. All that in huge pages, where the node has as many, and in ordinary ones.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import ctypes
import importlib
import mmap
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from hegmd.agent import copying, pinned_buffers
from hegmd.agent.crew import share_out
from hegmd.agent.cuda_driver import Copies
from hegmd.agent.staging import THREADS, Ring, loads
from hegmd.agent.state.storage import checksums, raw_copy
from hegmd.memory import pool_memory
from hegmd.memory.pool_memory import read_huge_free_bytes

MIB = 1 << 20
SIZE_MIB = 6 << 10
CHUNK_BYTES = 256 * MIB
WHERE = "cuda:0"
Span = tuple[int, int, int]


class Sweep:
    """Video memory, a piece of a pool, and the ways between them."""

    def __init__(self, torch: Any, size_bytes: int, *, huge: bool) -> None:
        self.size_bytes = size_bytes
        self.tensor = torch.empty(size_bytes, dtype=torch.uint8, device=WHERE)
        self.video: int = self.tensor.data_ptr()
        self.driver = Copies()
        self.fd = os.memfd_create("pool", os.MFD_CLOEXEC | (os.MFD_HUGETLB if huge else 0))
        os.ftruncate(self.fd, size_bytes)
        pool_memory.populate(self.fd, size_bytes)
        self.map = mmap.mmap(self.fd, size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self.map)
        self.pool = ctypes.addressof(self._anchor)

    def close(self) -> None:
        self._anchor = None
        self.map.close()
        os.close(self.fd)

    def say(
        self, what: str, action: Callable[[], object], size_bytes: int = 0, before: Callable[[], object] | None = None
    ) -> None:
        """The better of two."""
        best = 0.0
        for _ in range(2):
            if before is not None:
                before()
            began = time.perf_counter()
            action()
            best = max(best, (size_bytes or self.size_bytes) / (time.perf_counter() - began))
        print(f"{what:58} {best / 1e9:6.1f} GB/s", flush=True)

    # -- each way ------------------------------------------------------------------------------------------------------

    def pinned(self) -> None:
        """Measure one piece of pinned memory, large enough that fixed costs do not count."""
        size_bytes = min(self.size_bytes, CHUNK_BYTES * 4)
        with self._pinned(self.pool, size_bytes):
            stream = self.driver.make_stream()
            begins = (
                ("out", self.driver.begin_out, self.pool, self.video),
                ("in", self.driver.begin_in, self.video, self.pool),
            )
            for way, begin, to, source in begins:
                self.say(f"pinned, {way}", partial(self._whole, begin, to, source, size_bytes, stream), size_bytes)
            self.driver.end_stream(stream)

    def _whole(self, begin: Callable[..., None], to: int, source: int, size_bytes: int, stream: int | None) -> None:
        begin(to, source, size_bytes, stream)
        self.driver.wait(stream)

    @contextmanager
    def _pinned(self, address: int, size_bytes: int) -> Iterator[None]:
        self.driver.pin(address, size_bytes)
        yield
        self.driver.unpin(address)

    def pinning(self) -> None:
        """Every page of the pool, by threads that take a chunk each time."""
        context = self.driver.context()

        def each(call: Callable[[Span], None]) -> Callable[[Any, Any], None]:
            def work(take: Callable[[], Span | None], _tell: Callable[[int], None]) -> None:
                self.driver.use(context)
                while (chunk := take()) is not None:
                    call(chunk)

            return work

        for threads in (1, 4):
            for _ in range(2):
                began = time.perf_counter()
                share_out(
                    each(lambda chunk: self.driver.pin(chunk[1], chunk[2])), self._chunks(), copying.ignore, threads
                )
                middle = time.perf_counter()
                share_out(each(lambda chunk: self.driver.unpin(chunk[1])), self._chunks(), copying.ignore, threads)
                ended = time.perf_counter()
            there, gone = self.size_bytes / (middle - began) / 1e9, self.size_bytes / (ended - middle) / 1e9
            print(f"pool pinned by {threads}, let go of: {there:6.1f} and {gone:6.1f} GB/s", flush=True)

    def _chunks(self) -> list[Span]:
        return [
            (self.video + at, self.pool + at, min(CHUNK_BYTES, self.size_bytes - at))
            for at in range(0, self.size_bytes, CHUNK_BYTES)
        ]

    def ring(self) -> None:
        """Measure the agent's ring, without checksums and with those of the processor, over memory that is mapped and
        not.
        """
        out_loads = loads([(self.video, self.pool, self.size_bytes)])
        in_loads = loads([(self.pool, self.video, self.size_bytes)])
        for threads in (4, 8, 16):
            self._say_ring(
                f"ring of {threads} threads, out", threads, lambda ring: ring.out(out_loads, _moved, _ignore)
            )
            self._say_ring(f"ring of {threads} threads, in", threads, lambda ring: ring.into(in_loads, _moved, _ignore))
        summing = checksums.summing(_moved, {})
        what = "the same, out, added up by the processor"
        self._say_ring(what, THREADS, lambda ring: ring.out(out_loads, summing, _ignore))

    def _say_ring(self, what: str, threads: int, action: Callable[[Ring], object]) -> None:
        def whole() -> None:
            with Ring(self.driver, threads) as ring:
                action(ring)

        self.say(what, whole, before=_prepare)
        self.say(f"{what}, nothing ready", whole)

    def agent(self) -> None:
        """Measure all that the agent does with the bytes of one large tensor, and with pieces of it."""
        for pieces in (1, 400):
            size_bytes = self.size_bytes // pieces // copying.PAGE_BYTES * copying.PAGE_BYTES
            raws = [(self.tensor, self.video + at * size_bytes, size_bytes, WHERE) for at in range(pieces)]
            places = [at * size_bytes for at in range(pieces)]
            self.say(f"the agent's way, out, {pieces} tensors", partial(self._out, raws, places), before=_prepare)

    def _out(self, raws: list[Any], places: list[int]) -> None:
        raw_copy.copy_pieces_out(self.fd, self.size_bytes, raws, places, {}, copying.ignore)

    def adding(self) -> None:
        """Checksums of the pool by the processor, as before putting back."""
        for threads in (8, 16, 24):
            view = copying.private_view(self.fd, self.size_bytes)
            base = ctypes.addressof(ctypes.c_char.from_buffer(view))

            def check(address: int, _place: int, size_bytes: int) -> None:
                copying.fetch_pages(address, size_bytes)
                checksums.sum_of(address, size_bytes)

            spans = [(base, 0, self.size_bytes)]
            self.say(f"checked by {threads}", partial(copying.in_threads, check, spans, copying.ignore, threads))

    def direct(self) -> None:
        """No ring: one thread pins one chunk after the other, and the GPU follows. Letting go is not counted."""
        for _ in range(2):
            took_s = self._direct_s()
        print(
            f"{'straight to pages that are pinned ahead, out':58} {self.size_bytes / took_s / 1e9:6.1f} GB/s",
            flush=True,
        )

    def _direct_s(self) -> float:
        context, stream, ready = self.driver.context(), self.driver.make_stream(), queue.SimpleQueue[Span]()

        def pin_all() -> None:
            self.driver.use(context)
            for chunk in self._chunks():
                self.driver.pin(chunk[1], chunk[2])
                ready.put(chunk)

        began = time.perf_counter()
        pinner = threading.Thread(target=pin_all)
        pinner.start()
        for _ in self._chunks():
            video, pool, size_bytes = ready.get()
            self.driver.begin_out(pool, video, size_bytes, stream)
        self.driver.wait(stream)
        took_s = time.perf_counter() - began
        pinner.join()
        for chunk in self._chunks():
            self.driver.unpin(chunk[1])
        self.driver.end_stream(stream)
        return took_s


def _prepare() -> None:
    """Have the ring's memory there before the clock runs."""
    pinned_buffers.drop()
    pinned_buffers.prepare()
    pinned_buffers.wait()


def _ignore(_so_far_bytes: int) -> None:
    """Ignore the progress."""


def _moved(source: int, target: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def main() -> None:
    torch = importlib.import_module("torch")
    torch.cuda.init()
    size_bytes = (int(sys.argv[1]) if len(sys.argv) > 1 else SIZE_MIB) * MIB
    print(f"{size_bytes // MIB} MiB, {len(os.sched_getaffinity(0))} cores")
    kinds = {"huge": True, "ordinary": False}
    if read_huge_free_bytes() < size_bytes:
        del kinds["huge"]
    for kind, huge in kinds.items():
        print(f"-- {kind} pages")
        with closing(Sweep(torch, size_bytes, huge=huge)) as sweep:
            for part in (sweep.pinned, sweep.agent, sweep.ring, sweep.adding, sweep.pinning, sweep.direct):
                part()


if __name__ == "__main__":
    main()
