"""The contract of every method that takes processes off their GPUs, as plain functions for any test framework.

The same checks run for the simulated ledger and for a driver, stub or real. The migration machine relies on them:
every step can be repeated, and no process is restored where no memory is reserved for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from hegmd.errors import HegmError
from hegmd.migration.contracts import Method, MigratedProcess, OutOfMemory
from tests.kit.contracts import ContractBroken


async def check_method(
    method: Method, subject: MigratedProcess, other_gpu: str, *, total_bytes: int, needs_reservation: bool = True
) -> None:
    """Take a process off its GPU and back, to the other one and home again, and look at every promise on the way.

    `subject` runs on its GPU, and the other one has room for it but not for `total_bytes`. `needs_room` is whether a
    process can be lost for lack of room, as it can with any real driver. Raises ContractBroken.
    """
    here = subject.gpu or ""
    await _check_reservations(method, subject, other_gpu, total_bytes)
    await _check_lock(method, replace(subject, stays_locked=True))
    for source, target in ((here, other_gpu), (other_gpu, here)):
        there = replace(subject, gpu=source, target_gpu=target, previous_gpu=None)
        off = await _taken_off(method, there)
        if needs_reservation:
            await _check_out_of_memory(method, off, target)
        await _brought_back(method, off, target)
        await method.release(replace(subject, gpu=target), source)
        held = method.reservations(replace(subject, gpu=target))
        _must(set(held) == {target}, f"nothing is held on {source} any more, and {dict(held)} is")


async def _check_reservations(method: Method, subject: MigratedProcess, gpu: str, total_bytes: int) -> None:
    size_bytes = subject.driver_bytes + subject.storage_reservation_bytes
    for _ in range(2):
        await method.reserve(subject, gpu, size_bytes)
        held_bytes = method.reservations(subject).get(gpu, 0)
        _must(held_bytes >= size_bytes, f"{size_bytes} bytes were asked for and {held_bytes} are held")
    larger = replace(subject, driver_bytes=total_bytes)
    await _must_refuse(lambda: method.reserve(larger, gpu, total_bytes), "more memory than a GPU has")
    _must(method.reservations(subject).get(gpu, 0) >= size_bytes, "a refusal leaves the reservation")
    for _ in range(2):
        await method.release(subject, gpu)
        _must(gpu not in method.reservations(subject), "a released reservation is not held")


async def _check_lock(method: Method, rank: MigratedProcess) -> None:
    """A rank is locked and unlocked again, and an inspection meanwhile changes nothing."""
    for _ in range(2):
        await method.lock(rank)
    first, again = await method.inspect(rank), await method.inspect(rank)
    _must(first == again, f"a look at a rank changes nothing: {first}, then {again}")
    _must((first.gpu, first.failed) == (rank.gpu, ""), f"a locked rank is where it was: {first}")
    for _ in range(2):
        await method.unlock(rank)
    _must(not (await method.inspect(rank)).locked, "a rank that was unlocked runs")


async def _taken_off(method: Method, subject: MigratedProcess) -> MigratedProcess:
    """It as it is after that."""
    standing = await method.inspect(subject)
    _must((standing.gpu, standing.busy, standing.failed) == (subject.gpu, False, ""), f"it runs: {standing}")
    await method.reserve(subject, subject.target_gpu or "", subject.driver_bytes + subject.storage_reservation_bytes)
    left = await method.checkpoint(subject)
    off = replace(subject, gpu=None, previous_gpu=subject.gpu, driver_bytes=left.driver_bytes or subject.driver_bytes)
    again = await method.checkpoint(replace(off, gpu=subject.gpu))
    _must(
        again.reserved_bytes is None or again.reserved_bytes >= 0, "a checkpoint of one that is off finds its work done"
    )
    standing = await method.inspect(off)
    _must(standing.gpu is None and not standing.failed, f"it is off its GPU: {standing}")
    if left.reserved_bytes:
        held_bytes = method.reservations(off).get(subject.gpu or "", 0)
        _must(
            held_bytes >= left.reserved_bytes,
            f"{left.reserved_bytes} bytes are kept for the way back, not {held_bytes}",
        )
    return off


async def _check_out_of_memory(method: Method, off: MigratedProcess, gpu: str) -> None:
    await method.release(off, gpu)
    try:
        await method.restore(off, gpu)
    except OutOfMemory:
        pass
    else:
        raise ContractBroken("a process was brought back where no room was held for it")
    standing = await method.inspect(off)
    _must(standing.gpu is None and not standing.failed, f"a restore that was refused changed something: {standing}")
    await method.reserve(off, gpu, off.driver_bytes + off.storage_reservation_bytes)


async def _brought_back(method: Method, off: MigratedProcess, gpu: str) -> None:
    for _ in range(2):
        await method.restore(off, gpu)
    back = replace(off, gpu=gpu)
    standing = await method.inspect(back)
    _must((standing.gpu, standing.busy, standing.failed) == (gpu, False, ""), f"it runs on {gpu}: {standing}")
    for _ in range(2):
        async with method.storage_allocation(back):
            pass
    await method.verify(back)


async def _must_refuse(ask: Callable[[], Awaitable[object]], what: str) -> None:
    try:
        await ask()
    except HegmError as error:
        _must(bool(error.hint), f"the refusal of {what} has a hint")
    else:
        raise ContractBroken(f"{what} is refused")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ContractBroken(what)
