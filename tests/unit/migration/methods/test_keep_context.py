"""The method that keeps contexts over a model of the node: it confirms free memory, and promises it once."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from hegmd.errors import HegmError, Refused
from hegmd.migration.contracts import MigratedProcess, OutOfMemory
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.keep_context import KeepContextMethod
from hegmd.protocol.snapshots import GpuUse

MIB = 1 << 20


@dataclass
class ModelNode:
    """A vendor library that counts its snapshots. After one snapshot, `later` replaces `uses`."""

    free: dict[str, int | None] = field(default_factory=lambda: {"gpu0": 1000 * MIB, "gpu1": 1000 * MIB})
    uses: list[GpuUse] = field(default_factory=list)
    later: list[list[GpuUse]] = field(default_factory=list)
    snapshot_count: int = 0

    async def look(self) -> Any:
        self.snapshot_count += 1
        shown = SimpleNamespace(
            gpus=[
                SimpleNamespace(id=name, uuid=f"GPU-{name}", memory_free_bytes=size) for name, size in self.free.items()
            ],
            processes=[SimpleNamespace(pid=4711, start_ticks=7, gpus=tuple(self.uses))],
            vendors=[],
        )
        if self.later:
            self.uses = self.later.pop(0)
        return shown


def use(size_mib: int | None, gpu: str = "gpu0") -> GpuUse:
    return GpuUse(gpu=gpu, kind="compute", vram_bytes=None if size_mib is None else size_mib * MIB)


def subject(pid: int = 4711, **values: Any) -> MigratedProcess:
    plain: dict[str, Any] = {
        "operation": "3",
        "name": str(pid),
        "pid": pid,
        "start_ticks": 7,
        "gpu": "gpu0",
        "target_gpu": None,
        "previous_gpu": None,
        "size_bytes": 4000 * MIB,
        "storage_reservation_bytes": 600 * MIB,
        "keeps_context": True,
        "stays_bytes": 500 * MIB,
    }
    return MigratedProcess(**{**plain, **values})


OUT = SimpleNamespace(held_bytes=4000 * MIB)
IN = SimpleNamespace(held_bytes=0)


async def test_a_checkpoint_waits_for_free_memory_and_reports_what_stays() -> None:
    node = ModelNode(uses=[use(4500)], later=[[use(4500)], [use(520)]])
    left = await KeepContextMethod(Gpus(node.look)).checkpoint(subject())
    assert left.stays_bytes == 520 * MIB
    assert node.snapshot_count == 3
    assert (left.reserved_bytes, left.driver_bytes) == (None, None)


@pytest.mark.thorough
async def test_memory_that_stays_beyond_the_plan_is_a_failure_with_numbers() -> None:
    node = ModelNode(uses=[use(1200)])
    with pytest.raises(HegmError, match="1200 MiB on gpu0 are its own, and at most 1000 MiB were expected") as found:
        await KeepContextMethod(Gpus(node.look)).checkpoint(subject())
    assert not isinstance(found.value, Refused), "it has changed"
    assert "hegmctl suspend 4711" in found.value.hint


async def test_memory_that_stays_is_measured_if_the_plan_did_not_know_it() -> None:
    """An unknown amount was mistaken for none, and a suspend that had freed everything was rolled back."""
    left = await KeepContextMethod(Gpus(ModelNode(uses=[use(1200)]).look)).checkpoint(subject(stays_bytes=None))
    assert left.stays_bytes == 1200 * MIB


@pytest.mark.parametrize("uses", [[], [use(None)], [use(100), use(None)]])
async def test_a_value_that_the_library_does_not_report_is_not_zero(uses: list[GpuUse]) -> None:
    left = await KeepContextMethod(Gpus(ModelNode(uses=uses).look)).checkpoint(subject())
    assert left.stays_bytes is None


async def test_free_memory_is_promised_once() -> None:
    node = ModelNode()
    method = KeepContextMethod(Gpus(node.look))
    back: dict[str, Any] = {"gpu": None, "previous_gpu": "gpu0", "target_gpu": "gpu0"}
    first, second = subject(**back), subject(4712, **back)
    await method.reserve(first, "gpu0", 600 * MIB)
    await method.reserve(first, "gpu0", 600 * MIB)
    assert method.reservations(first) == {"gpu0": 600 * MIB}
    with pytest.raises(OutOfMemory, match="needs 600 MiB on gpu0 and 1000 MiB are free, 600 MiB of it promised"):
        await method.reserve(second, "gpu0", 600 * MIB)
    assert method.reservations(second) == {}
    async with method.storage_allocation(first) as made:
        assert made() is False
    node.free["gpu0"] = 700 * MIB
    await method.reserve(second, "gpu0", 600 * MIB)
    await method.release(second, "gpu0")
    assert method.reservations(second) == {}


async def test_a_failed_allocation_keeps_its_promise() -> None:
    method = KeepContextMethod(Gpus(ModelNode().look))
    back = subject(gpu=None, previous_gpu="gpu0", target_gpu="gpu0")
    await method.reserve(back, "gpu0", 600 * MIB)
    with pytest.raises(OutOfMemory):
        async with method.storage_allocation(back):
            raise OutOfMemory("no memory", "free some")
    assert method.reservations(back) == {"gpu0": 600 * MIB}


@pytest.mark.parametrize("free_bytes", [500 * MIB, None])
async def test_too_little_or_unknown_memory_is_refused(free_bytes: int | None) -> None:
    method = KeepContextMethod(Gpus(ModelNode(free={"gpu0": free_bytes}).look))
    with pytest.raises(OutOfMemory, match="500 MiB" if free_bytes else "an unknown amount"):
        await method.reserve(subject(gpu=None, previous_gpu="gpu0"), "gpu0", 600 * MIB)


async def test_memory_is_kept_for_a_rollback_until_the_operation_releases_it() -> None:
    node = ModelNode(uses=[use(500)])
    method = KeepContextMethod(Gpus(node.look))
    await method.checkpoint(subject())
    left = subject(gpu=None, previous_gpu="gpu0")
    assert method.reservations(left) == {"gpu0": 600 * MIB}
    await method.release(left, "gpu0")
    assert method.reservations(left) == {}


async def test_a_restore_takes_no_snapshot_and_refuses_another_gpu() -> None:
    node = ModelNode()
    method = KeepContextMethod(Gpus(node.look))
    await method.restore(subject(gpu=None, previous_gpu="gpu0", target_gpu="gpu0"), "gpu0")
    with pytest.raises(Refused, match="keeps its CUDA context on gpu0 and cannot resume on gpu1"):
        await method.restore(subject(gpu=None, previous_gpu="gpu0", target_gpu="gpu1"), "gpu1")
    assert node.snapshot_count == 0


@pytest.mark.parametrize(
    ("gpu", "agent", "found"),
    [
        ("gpu0", IN, "gpu0"),
        ("gpu0", OUT, "gpu0"),  # killed before the memory was seen to be free: a later snapshot decides
        (None, OUT, None),
        (None, IN, "gpu0"),  # its agent has reloaded the bytes by itself
    ],
)
async def test_a_new_daemon_finds_out_whether_it_has_left(gpu: str | None, agent: Any, found: str | None) -> None:
    method = KeepContextMethod(Gpus(ModelNode().look))
    state = await method.inspect(subject(gpu=gpu, previous_gpu=None if gpu else "gpu0", agent=agent))
    assert (state.gpu, state.busy, state.failed) == (found, False, "")
