"""What the agent costs a Python that starts and a training that is asked for nothing, and how fast its carrier copies.

Paired with the same work without the agent. The copies are compared with a plain memcpy between the same pages, out
with one between pages that have been touched before, in with one into pages that are made by it; the figure is how
many times as long the carrier takes, freeing and allocating included. The budget is 0.7 of memcpy's speed.

Without PyTorch there is nothing to copy, and that part is left out with a word.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import timeit
from importlib.util import find_spec
from time import perf_counter
from typing import Any

from hegmctl.running import prepare
from tests.bench.report import Row

BOUNDARY_CALLS = 200_000
COPIED_BYTES = 1 << 30
ROUNDS = 7
STARTS = 40
BUDGET_TIMES = 1 / 0.7


def run() -> list[Row]:
    rows = [*_boundary(), *_start()]
    if find_spec("torch") is None:
        print("no PyTorch here: the copies are left out", file=sys.stderr)
        return rows
    return [*rows, *_copies()]


def _start() -> list[Row]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HEGM_", "PYTHON"))}
    agented = dict(plain)
    prepare(agented, "/nonexistent/hegmd.sock", "bench", None)
    times_ms = [(_start_ms(plain), _start_ms(agented)) for _ in range(STARTS)]
    more_ms = statistics.median(after - before for before, after in times_ms[1:])
    return [Row("a Python start under `hegmctl run`: more by", more_ms, "ms")]


def _start_ms(environ: dict[str, str]) -> float:
    began = perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], env=environ, check=True)
    return (perf_counter() - began) * 1e3


def _boundary() -> list[Row]:
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
    return [Row("a boundary with nothing asked", statistics.median(costs), "ns", 100.0)]


def _copies() -> list[Row]:
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
    plain_s, fresh_s, out_s, back_s = (statistics.median(times) for times in (plain, fresh, out, back))
    return [
        Row("memcpy between warm pages", COPIED_BYTES / 1e9 / plain_s, "GB/s"),
        Row("out", COPIED_BYTES / 1e9 / out_s, "GB/s"),
        Row("out, against that memcpy", out_s / plain_s, "times", BUDGET_TIMES),
        Row("memcpy into fresh pages", COPIED_BYTES / 1e9 / fresh_s, "GB/s"),
        Row("in", COPIED_BYTES / 1e9 / back_s, "GB/s"),
        Row("in, against that memcpy", back_s / fresh_s, "times", BUDGET_TIMES),
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
