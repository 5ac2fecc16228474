"""Providers that answer, fail or hang as a test says, and their snapshots.

They take the place of the vendor's library; the code under test is never replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hegmd.node.devices.base import ProcessUse, VendorSnapshot
from hegmd.protocol.snapshots import Gpu, GpuUse, Health
from tests.patience import HANG_S

GIB = 1 << 30


def gpu(index: int, vendor: str = "nvidia", /, **fields: Any) -> Gpu:
    """A healthy GPU as a provider gives it."""
    values: dict[str, Any] = {
        "id": str(index),
        "index": index,
        "uuid": f"{vendor}-{index}",
        "pci_address": f"0000:0{index}:00.0",
        "name": "Test GPU",
        "vendor": vendor,
        "chip": "chip-1",
        "memory_total_bytes": 8 * GIB,
        "memory_used_bytes": 2 * GIB,
        "temperature_celsius": 40.0,
        "mig": False,
        "mps": False,
        "persistence": True,
        "driver_version": "580.1",
        "health": Health(state="ok", ecc_uncorrected=0, retired_pages=0),
    }
    return Gpu(**{**values, **fields})


def lost_gpu(index: int, vendor: str = "nvidia", /, **fields: Any) -> Gpu:
    """The same GPU after it fell off the bus, as a provider gives it."""
    healthy = gpu(index, vendor)
    values: dict[str, Any] = {
        "id": healthy.id,
        "index": index,
        "uuid": healthy.uuid,
        "name": healthy.name,
        "vendor": vendor,
        "state": "lost",
        "health": Health(state="failed"),
    }
    return Gpu(**{**values, **fields})


def use(pid: int, index: int = 0, vendor: str = "nvidia", vram_bytes: int | None = GIB) -> ProcessUse:
    return ProcessUse(pid=pid, use=GpuUse(gpu=f"{vendor}-{index}", vram_bytes=vram_bytes))


def snapshot(gpus: Sequence[Gpu] = (), uses: Sequence[ProcessUse] = ()) -> VendorSnapshot:
    return VendorSnapshot(
        gpus=tuple(gpus), uses=tuple(uses), driver_version="580.1", library_version="13", compute_version="13.0"
    )


class Provider:
    """A vendor's library in the hands of a test.

    `answer` is what the next snapshots are, or an exception that they raise. While `gate` is clear, a snapshot hangs,
    and `entered` is set once it does.
    """

    def __init__(self, *gpus: Gpu, vendor: str = "nvidia", uses: Sequence[ProcessUse] = ()) -> None:
        self.vendor = vendor
        self.answer: VendorSnapshot | Exception | Callable[[], VendorSnapshot] = snapshot(gpus, uses)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.calls: list[str] = []

    def show(self, *gpus: Gpu, uses: Sequence[ProcessUse] = ()) -> None:
        self.answer = snapshot(gpus, uses)

    def hang(self) -> None:
        self.entered.clear()
        self.gate.clear()

    def unblock(self) -> None:
        self.gate.set()

    def open(self) -> None:
        self.calls.append("open")

    def snapshot(self) -> VendorSnapshot:
        self.calls.append("snapshot")
        self.entered.set()
        answer = self.answer
        if not self.gate.wait(HANG_S):
            raise AssertionError("the test did not let the provider go")
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def close(self) -> None:
        self.calls.append("close")

    def count(self, call: str) -> int:
        return self.calls.count(call)


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, by_s: float) -> None:
        self.now_s += by_s
