"""What the agent costs a training that is asked for nothing, and how fast its carrier copies.

Paired with the same work without the agent, in this process. The copies are compared with a plain memcpy between the
same pages: the storages and the pool's memory, both of which have been touched before.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import timeit
from time import perf_counter
from typing import Any

BOUNDARY_CALLS = 200_000
COPIED_BYTES = 1 << 30
ROUNDS = 7


def run() -> list[tuple[str, float, str, float | None]]:
    """(name, value, unit, budget); a budget of copies is what has to be reached, all others are not to be passed."""
    return [*_boundary(), *_copies()]


def _boundary() -> list[tuple[str, float, str, float | None]]:
    from types import SimpleNamespace

    from hegmd.agent import boundary
    from hegmd.agent.quiesce import Gate

    iterators = type("_BaseDataLoaderIter", (), {"__next__": lambda self: 1})
    plain, hooked = iterators(), type("Hooked", (), {"__next__": lambda self: 1})
    boundary.watch_loaders(SimpleNamespace(_BaseDataLoaderIter=hooked), Gate())
    costs: list[float] = []
    watched = hooked()
    for _ in range(ROUNDS):
        pair = [timeit.timeit("next(it)", globals={"it": it}, number=BOUNDARY_CALLS) for it in (plain, watched)]
        costs.append((pair[1] - pair[0]) / BOUNDARY_CALLS * 1e9)
    return [("a boundary with nothing asked", statistics.median(costs), "ns", 100.0)]


def _copies() -> list[tuple[str, float, str, float | None]]:
    import torch

    from hegmd.agent import transfer

    tensors: list[Any] = [torch.ones(COPIED_BYTES // 4, dtype=torch.uint8) for _ in range(4)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = [storage.nbytes() for storage in storages]
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, transfer.room_bytes(sizes))
        plain, out, back = [], [], []
        for _ in range(ROUNDS):
            plain.append(_memcpy_s(fd, storages, sizes))
            began = perf_counter()
            evacuated = transfer.evacuate(os.dup(fd), storages, sizes, lambda _: None)
            out.append(perf_counter() - began)
            began = perf_counter()
            evacuated.bring_back(fd, lambda _: None)
            back.append(perf_counter() - began)
            evacuated.close()
        fresh = [_memcpy_fresh_s(fd) for _ in range(ROUNDS)]
    finally:
        os.close(fd)
    speeds = [COPIED_BYTES / 1e9 / statistics.median(times) for times in (plain, fresh, out, back)]
    return [
        ("plain memcpy, warm pages", speeds[0], "GB/s", None),
        ("plain memcpy into fresh pages", speeds[1], "GB/s", None),
        ("out, of plain memcpy", speeds[2] / speeds[0], "", 0.7),
        ("out", speeds[2], "GB/s", None),
        ("in, of plain memcpy into fresh pages", speeds[3] / speeds[1], "", 0.7),
        ("in", speeds[3], "GB/s", None),
    ]


def _memcpy_s(fd: int, storages: list[Any], sizes: list[int]) -> float:
    with mmap.mmap(fd, os.fstat(fd).st_size) as room:
        view = ctypes.c_char.from_buffer(room)
        base, at = ctypes.addressof(view), 0
        ctypes.memset(base, 1, sum(sizes))
        began = perf_counter()
        for storage, size_bytes in zip(storages, sizes, strict=True):
            ctypes.memmove(base + at, storage.data_ptr(), size_bytes)
            at += size_bytes
        took_s = perf_counter() - began
        del view
    return took_s


def _memcpy_fresh_s(fd: int) -> float:
    with mmap.mmap(fd, COPIED_BYTES) as room, mmap.mmap(-1, COPIED_BYTES) as fresh:
        source, target = ctypes.c_char.from_buffer(room), ctypes.c_char.from_buffer(fresh)
        ctypes.memmove(ctypes.addressof(source), ctypes.addressof(source), COPIED_BYTES)
        began = perf_counter()
        ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), COPIED_BYTES)
        took_s = perf_counter() - began
        del source, target
    return took_s
