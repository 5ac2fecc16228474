"""The contract of every carrier of tensor bytes, as a plain function for any test framework.

The same checks run for the pool and for video memory, over a stub driver or a real one. The migration machine relies
on them: reserved memory stays reserved until it is released, whatever happens to the copying process; every step
except the copy can be repeated; and storages are allocated only where memory is reserved. The caller compares the
bytes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from hegmd.errors import HegmError
from hegmd.migration.contracts import Carrier, Made, MigratedProcess
from tests.kit.contracts import ContractBroken

__all__ = ["check_carrier"]

Makes = Callable[[], int]
Meanwhile = Callable[[Carrier], Awaitable[None]]


async def check_carrier(
    carrier: Carrier,
    subject: MigratedProcess,
    *,
    size_bytes: int,
    too_many_bytes: int,
    made: Makes,
    while_out: Meanwhile | None = None,
) -> None:
    """Offload the bytes of a process and reload them, and check every promise on the way.

    `subject` has an agent whose training thread is parked and whose storages have `size_bytes`; `too_many_bytes` are
    more than can be reserved. `made` counts the allocations of the agent so far; `while_out` is called while the bytes
    are offloaded, for example to restart the copying process. `size_bytes` of 0 means a carrier that leaves all bytes
    to the driver. Raises ContractBroken.
    """
    carries = size_bytes > 0
    await _check_holding(carrier, subject, size_bytes, too_many_bytes)
    await carrier.reserve(subject, size_bytes + size_bytes // 2)  # it had more when it was counted, before its boundary
    for _ in range(2):
        await carrier.prepare(subject)
    counts: list[int] = []
    out_bytes = await carrier.offload(subject, counts.append)
    _must(out_bytes == size_bytes, f"{size_bytes} bytes were to be taken out, and {out_bytes} were by its word")
    _must_increase(counts, size_bytes)
    held_bytes = carrier.held_bytes(subject)
    _must(held_bytes >= size_bytes, f"{size_bytes} bytes are out, and {held_bytes} are held")
    for _ in range(2):
        async with carrier.overlap_checkpoint(subject) as passed:
            _must(passed.size_bytes <= size_bytes, "no more passes than there is")
        _must(not carrier.is_staged(subject), "bytes that are out are where they may stay")
    for _ in range(2):
        await carrier.abandon(subject)
    _must(carrier.held_bytes(subject) == held_bytes, "held bytes stay held while no process is ready to copy")
    if while_out is not None:
        await while_out(carrier)
    for _ in range(2):
        await carrier.fetch(subject, counts.append)
        await carrier.prepare(subject)
    for _ in range(2):
        async with carrier.overlap_restore(subject):
            _must(carrier.held_bytes(subject) == held_bytes, "what comes nearer is held as it was")
    await _check_return(carrier, subject, size_bytes, made, carries=carries)
    for _ in range(2):
        await carrier.release(subject)
        _must(carrier.held_bytes(subject) == 0, "nothing is held when it was given back")


async def _check_holding(carrier: Carrier, subject: MigratedProcess, size_bytes: int, too_many_bytes: int) -> None:
    _must(carrier.held_bytes(subject) == 0, "nothing is held at first")
    await carrier.release(subject)
    await carrier.abandon(subject)
    for wanted_bytes in (size_bytes // 2, size_bytes, size_bytes // 2):
        await carrier.reserve(subject, wanted_bytes)
        held_bytes = carrier.held_bytes(subject)
        _must(held_bytes >= wanted_bytes, f"{wanted_bytes} bytes were to be held, and {held_bytes} are")
    held_bytes = carrier.held_bytes(subject)
    if size_bytes:
        try:
            await carrier.reserve(subject, too_many_bytes)
        except HegmError as error:
            _must(bool(error.hint), "a refusal to hold so much has a hint")
        else:
            raise ContractBroken(f"{too_many_bytes} bytes cannot be held, and it says that they are")
        _must(carrier.held_bytes(subject) == held_bytes, "a refusal leaves what was held")
    for _ in range(2):
        await carrier.release(subject)
        _must(carrier.held_bytes(subject) == 0, "nothing is held when it was given back")


async def _check_return(
    carrier: Carrier, subject: MigratedProcess, size_bytes: int, made: Makes, *, carries: bool
) -> None:
    before, inside = made(), 0
    counts: list[int] = []

    @asynccontextmanager
    async def making() -> AsyncGenerator[Made]:
        nonlocal inside
        began = made()
        yield lambda: False
        inside += made() - began

    back_bytes = await carrier.reload(subject, counts.append, making)
    _must(back_bytes == size_bytes, f"{size_bytes} bytes were to come back, and {back_bytes} did by its word")
    _must_increase(counts, size_bytes)
    count = made() - before
    _must(count == inside, f"storages were made {count} times, {inside} of them where their room is seen to")
    _must(bool(count) is carries, f"storages were made {count} times")


def _must_increase(reports: list[int], size_bytes: int) -> None:
    _must(reports == sorted(reports), f"what is told of how it comes on goes up: {reports}")
    _must(all(0 <= so_far <= size_bytes for so_far in reports), f"more than {size_bytes} bytes were told of: {reports}")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise ContractBroken(what)
