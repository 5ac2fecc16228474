"""How fast the worker carrier takes 4 GiB out of a process and brings them in again, beside a plain memcpy.

The plain memcpy is one `memmove` a storage, by one thread, between the very pages that the carrier copies between and
in the same round: every page present and mapped on both sides, nothing freed, nothing made. The carrier has as many
threads as there are cores, and its time is all of `offload` and of `bring_back`: mapping the descriptor, copying,
freeing the storages, making them again. So it starts with a handicap, and the figure that is judged is how many times
as long it takes; 0.7 of memcpy's speed is 1.43 times its time.

Out is measured twice. Memory that a job has had from the start is in small pages, unless the node is set to huge ones
for all; once it was moved it is in huge ones. The rows without a budget say where the time goes.

Each round is a process's life: new tensors, out, in, out again, in again. Figures are medians over the rounds, ratios
are made within a round. Without PyTorch there is nothing to carry, and all of it is left out with a word.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import anyio

from hegmd.agent import copying, transfer
from hegmd.memory.pool import Key, Memory, Pool
from hegmd.memory.pool_memory import Window
from tests.bench.report import Row

GIB = 1 << 30
COPIED_BYTES = 4 * GIB
STORAGES = 4
ROUNDS = 5
BUDGET_TIMES = 1 / 0.7
# Places in the descriptor for the plain copies; the carrier has its own, a page further.
_SPAN_BYTES = COPIED_BYTES // STORAGES


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: the carrier is left out", file=sys.stderr)
        return []
    pool = Pool(COPIED_BYTES * 2)
    try:
        began = perf_counter()
        memory = anyio.run(pool.take, Key("bench", "carrier"), COPIED_BYTES)
        taken_s = perf_counter() - began
        rounds = [_round(memory) for _ in range(ROUNDS)]
    finally:
        pool.close()
    return [*_rows(rounds), Row("the pool takes 4 GiB, before the job is stopped", taken_s * 1e3, "ms")]


def _rows(rounds: list[dict[str, float]]) -> list[Row]:
    def median(what: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(what, rounds))

    def speed(what: str) -> Row:
        return Row(what, COPIED_BYTES / 1e9 / median(lambda one: one[what]), "GB/s")

    def against(what: str, plain: str) -> Row:
        return Row(f"{what}, against memcpy", median(lambda one: one[what] / one[plain]), "times", BUDGET_TIMES)

    return [
        speed("memcpy out"),
        speed("memcpy in"),
        speed("out of small pages"),
        against("out of small pages", "memcpy out"),
        speed("out of small pages, copying alone"),
        against("out of small pages, copying alone", "memcpy out"),
        Row("out of small pages, freeing", 1e3 * median(_freeing_s), "ms"),
        speed("out of huge pages"),
        against("out of huge pages", "memcpy out of huge pages"),
        speed("in"),
        against("in", "memcpy in"),
    ]


def _freeing_s(one: dict[str, float]) -> float:
    return one["out of small pages"] - one["out of small pages, copying alone"]


def _round(memory: Memory) -> dict[str, float]:
    """How long each takes, in seconds."""
    import torch

    tensors: list[Any] = [torch.full((_SPAN_BYTES,), 7, dtype=torch.uint8) for _ in range(STORAGES)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = [_SPAN_BYTES] * STORAGES
    spans = _spans(storages)
    took = {"memcpy out": _memcpy_s(memory, spans, inwards=False)}
    took["out of small pages, copying alone"] = _timed_s(
        lambda: copying.copy_out(memory.fd, memory.size_bytes, spans, _ignore)
    )
    for out in ("out of small pages", "out of huge pages"):
        fd = os.dup(memory.fd)
        began = perf_counter()
        offloaded = transfer.offload(fd, storages, sizes, _ignore)
        took[out] = perf_counter() - began
        began = perf_counter()
        offloaded.bring_back(memory.fd, _ignore)
        took["in"] = perf_counter() - began
        offloaded.close()
        spans = _spans(storages)
        took["memcpy in"] = _memcpy_s(memory, spans, inwards=True)
        took["memcpy out of huge pages"] = _memcpy_s(memory, spans, inwards=False)
    return took


def _spans(storages: list[Any]) -> list[tuple[int, int, int]]:
    return [(storage.data_ptr(), index * _SPAN_BYTES, _SPAN_BYTES) for index, storage in enumerate(storages)]


def _memcpy_s(memory: Memory, spans: list[tuple[int, int, int]], *, inwards: bool) -> float:
    with Window(memory.fd, 0, memory.size_bytes) as base:
        ctypes.memset(base, 7, COPIED_BYTES)  # maps all of it
        return _timed_s(lambda: _memcpy(base, spans, inwards=inwards))


def _memcpy(base: int, spans: list[tuple[int, int, int]], *, inwards: bool) -> None:
    for address, place, size_bytes in spans:
        if inwards:
            ctypes.memmove(address, base + place, size_bytes)
        else:
            ctypes.memmove(base + place, address, size_bytes)


def _timed_s(action: Callable[[], None]) -> float:
    began = perf_counter()
    action()
    return perf_counter() - began


def _ignore(_so_far_bytes: int) -> None:
    pass
