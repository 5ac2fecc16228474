"""How fast a training's state of 2 GiB is written into the pool's memory, checked, and put back, beside a plain memcpy.

The plain memcpy is one `memmove` by one thread between the very pages that the state is copied between, all of them
present. Writing is all of `plain.write`: the walk through the value, the copies, the checksums. Putting back is
`carriage.fill`, into tensors that are there; before it `plain.read` has held every byte against its checksum, which is
a row of its own. The budget is 0.9 of memcpy's speed, so 1.11 times its time, each way.

What each takes of all processors is said beside its speed: that is what bounds it where there are many, or a GPU.
Medians over the rounds; ratios are made within a round. Without PyTorch there is no state, and all of it is left out.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from time import perf_counter, process_time
from typing import Any

import anyio

from hegmd.agent.state.storage import raw_copy, state_file
from hegmd.memory.pool import Key, Memory, Pool
from hegmd.memory.pool_memory import Window
from tests.bench.report import Row

GIB = 1 << 30
TENSORS = 32
TENSOR_BYTES = 64 << 20
SMALL_TENSORS = 2000
COPIED_BYTES = TENSORS * TENSOR_BYTES
ROUNDS = 5
BUDGET_TIMES = 1 / 0.9


def run() -> list[Row]:
    if find_spec("torch") is None:
        print("no PyTorch here: the state is left out", file=sys.stderr)
        return []
    value = _state()
    size_bytes = state_file.size_bytes(value)
    pool = Pool(size_bytes * 2)
    try:
        memory = anyio.run(pool.take, Key("bench", "state"), size_bytes)
        rounds = [_round(memory, value) for _ in range(ROUNDS)]
    finally:
        pool.close()
    return _rows(rounds)


def _state() -> dict[str, Any]:
    """A model's and an optimizer's: some large tensors, and many small ones."""
    import torch

    return {
        "large": [torch.full((TENSOR_BYTES // 4,), float(number)) for number in range(TENSORS)],
        "small": {number: {"step": torch.tensor(7.0), "bias": torch.ones(512)} for number in range(SMALL_TENSORS // 2)},
    }


def _rows(rounds: list[dict[str, float]]) -> list[Row]:
    def median(what: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(what, rounds))

    def speed(what: str) -> Row:
        return Row(what, COPIED_BYTES / 1e9 / median(lambda one: one[what]), "GB/s")

    def against(what: str, plain_copy: str) -> Row:
        return Row(f"{what}, against memcpy", median(lambda one: one[what] / one[plain_copy]), "times", BUDGET_TIMES)

    def worked(what: str) -> Row:
        return Row(f"{what}, processors", median(lambda one: one[f"{what}, processors"]) * GIB / COPIED_BYTES, "s/GiB")

    rows: list[Row] = []
    for what, plain_copy in (("written", "memcpy out"), ("checked", ""), ("put back", "memcpy in")):
        rows += [speed(what), worked(what)]
        if plain_copy:
            rows.append(against(what, plain_copy))
    return [speed("memcpy out"), speed("memcpy in"), *rows]


def _round(memory: Memory, value: dict[str, Any]) -> dict[str, float]:
    """How long each takes, in seconds."""
    import torch

    took = {"memcpy out": _memcpy_s(memory, value["large"], inwards=False)}
    with _timed(took, "written"):
        state_file.write(memory.fd, value)
    with _timed(took, "checked"):
        found = state_file.read(memory.fd)
    pairs = list(zip(found["large"], value["large"], strict=True))
    for number, small in found["small"].items():
        pairs.extend((small[name], value["small"][number][name]) for name in small)
    with _timed(took, "put back"):
        raw_copy.fill(pairs)
    if not torch.equal(found["large"][3], value["large"][3]) or value["large"][3][0] != 3.0:
        raise RuntimeError("what was put back is not what was written")
    took["memcpy in"] = _memcpy_s(memory, value["large"], inwards=True)
    for number, tensor in enumerate(value["large"]):
        tensor.fill_(float(number))
    return took


def _memcpy_s(memory: Memory, tensors: list[Any], *, inwards: bool) -> float:
    with Window(memory.fd, 0, memory.size_bytes) as base:
        ctypes.memset(base, 7, COPIED_BYTES)  # maps all of it
        return _timed_s(lambda: _memcpy(base, tensors, inwards=inwards))


def _memcpy(base: int, tensors: list[Any], *, inwards: bool) -> None:
    for place, tensor in zip(range(0, COPIED_BYTES, TENSOR_BYTES), tensors, strict=True):
        if inwards:
            ctypes.memmove(tensor.data_ptr(), base + place, TENSOR_BYTES)
        else:
            ctypes.memmove(base + place, tensor.data_ptr(), TENSOR_BYTES)


@contextmanager
def _timed(took: dict[str, float], what: str) -> Iterator[None]:
    """Note what it takes, by the clock and of all processors."""
    began, began_working = perf_counter(), process_time()
    yield
    took[what] = perf_counter() - began
    took[f"{what}, processors"] = process_time() - began_working


def _timed_s(action: Callable[[], object]) -> float:
    began = perf_counter()
    action()
    return perf_counter() - began
