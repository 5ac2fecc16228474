"""Sizes and margins of pool segments, and of GPU memory beyond what a process already uses.

The plan, which decides whether a job fits and estimates the downtime, and the code that reserves memory must agree on
these figures. Pure.
"""

from __future__ import annotations

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB
# The agent writes a table of its storages before the bytes, and aligns each to a page.
TABLE_BYTES = 4 * MIB
TABLE_SHARE = 32
# Smaller segments get no margin: their pages can be allocated quickly while the job is parked.
MARGIN_FROM_BYTES, MARGIN_SHARE = 256 * MIB, 64
# The GPU memory that a process needs during a restore, beyond the figure of NVML.
RESTORE_MARGIN_BYTES = 256 * MIB
# GPU memory that a process may need beyond its own video memory: contexts, kernel stacks and other allocations that the
# driver repeats. Not measured, so the figure is generous.
UNSEEN_BYTES = 2048 * MIB
# The size of the blocks that PyTorch's allocator requests from the driver for storages that are neither small nor
# large.
SEGMENT_BYTES = 20 * MIB
# The last part of a GPU's memory can never be reserved completely. No other process can compute in what remains here.
LAST_BYTES = 64 * MIB
# If storages and their copies do not fit on one GPU together, at least this much is allocated in each round.
ROUND_BYTES = 1 << 30
# The size of one allocation of GPU memory. One message of the helper can carry that many descriptors, and the service
# manager can store them.
PIECE_BYTES = 1 << 30
MAX_PIECES = 128
# The memory that the driver moves for a process whose agent moves the rest, including the reserve for a rollback:
# contexts, modules and cuBLAS. The driver's fixed times include it.
NEXT_TO_NOTHING_BYTES = 768 * MIB
# The memory that must be free in addition while a reservation passes to a job, if another process on the GPU cannot be
# paused. Then one allocation of that process is harmless: a context takes 0.5 GiB, and framework allocators grow by
# less than the rest.
CALM_BYTES = 2048 * MIB
# How much further than their sizes storages can reach in the flat space: each begins at a multiple of 512 bytes, and a
# copy has at most 65,536 of them.
FLAT_BYTES = 32 * MIB
# The assumed size of the helper's context on each GPU, until hegmd has measured one there; and the largest measurement
# that hegmd uses, because a measured process can have other memory too.
CONTEXT_BYTES = 512 * MIB
MAX_CONTEXT_BYTES = 1024 * MIB


def whole_size(size_bytes: int) -> int:
    """Return the size of a segment for so many bytes of storages: with the agent's table, in whole huge pages."""
    wanted_bytes = size_bytes + size_bytes // TABLE_SHARE + TABLE_BYTES
    return (wanted_bytes + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def with_margin(size_bytes: int) -> int:
    """Return how much to reserve for a job that is still training: it may have grown a little when it is parked.

    A segment that is too small by one byte is allocated again while the job is parked, which takes seconds for a large
    job.
    """
    return size_bytes + (size_bytes // MARGIN_SHARE if size_bytes >= MARGIN_FROM_BYTES else 0)


def storages_in(whole_bytes: int) -> int:
    """Return for how many bytes of storages a segment of that size is made; 0 if it is too small for any.

    `whole_size` of that is at least `whole_bytes`, and equal if these are whole huge pages.
    """
    found_bytes = max(0, (whole_bytes - TABLE_BYTES) * TABLE_SHARE // (TABLE_SHARE + 1))
    while found_bytes + 1 + (found_bytes + 1) // TABLE_SHARE + TABLE_BYTES <= whole_bytes:
        found_bytes += 1
    return found_bytes


def piece_bytes(size_bytes: int) -> int:
    """Return the size of one allocation of so much GPU memory; larger if there would be too many."""
    found_bytes = PIECE_BYTES
    while size_bytes > MAX_PIECES * found_bytes:
        found_bytes *= 2
    return found_bytes


def round_bytes(storage_reservation_bytes: int, size_bytes: int) -> int:
    """Return how much of `size_bytes` is allocated in one round: at most what is free at first.

    The same amount is free again after each round, except for a block that already has bytes of the next round. The
    allocator's rounding has its own reserve.
    """
    return max(ROUND_BYTES, storage_reservation_bytes - piece_bytes(size_bytes))


def rounds_of(size_bytes: int, overlap_bytes: int) -> int:
    """Return the number of rounds if `overlap_bytes` of the storages have no memory of their own at first."""
    return 1 if overlap_bytes <= 0 else -(-size_bytes // round_bytes(size_bytes - overlap_bytes, size_bytes))


def staging_out_needed_bytes(size_bytes: int, *, at_rest: bool) -> int:
    """Return how much must be free on a GPU for staging to the pool; twice that while the job still trains."""
    own_bytes = size_bytes + FLAT_BYTES
    return own_bytes + CALM_BYTES + (0 if at_rest else size_bytes)


def staging_in_needed_bytes(size_bytes: int) -> int:
    """Return how much must be free on a GPU, beyond the reservations for a process, for a copy that precedes it.

    A restore needs some free memory of its own.
    """
    return size_bytes + FLAT_BYTES + 2 * CALM_BYTES
