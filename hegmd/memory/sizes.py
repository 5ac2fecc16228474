"""Sizes and margins: of the host pool for storages, and of a GPU besides what a process has there.

The plan, which decides whether a job fits and estimates the downtime, and the code that reserves memory have to agree
on these figures. Pure.
"""

from __future__ import annotations

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB
# The agent writes a table of its storages before the bytes, and aligns each to a page.
TABLE_BYTES = 4 * MIB
TABLE_SHARE = 32
# Pages for a smaller piece are quickly made: no margin is taken for it.
MARGIN_FROM_BYTES, MARGIN_SHARE = 256 * MIB, 64
# What a process needs on its GPU during a restore, beyond the figure of NVML.
RESTORE_MARGIN_BYTES = 256 * MIB
# What a process may need on its GPU beyond the memory of its own that its video memory was put into: what the driver
# makes anew for it, such as contexts and the stacks of kernels. Not measured, so it is plenty.
UNSEEN_BYTES = 2048 * MIB
# What PyTorch's allocator asks the driver for at once, for storages that are neither small nor large.
SEGMENT_BYTES = 20 * MIB
# As much as a whole GPU has can never be held to the last bit; in what is left here nobody else has room to compute.
LAST_BYTES = 64 * MIB
# Where storages and their copies have not room on one GPU together, so much at least is made at a time.
ROUND_BYTES = 1 << 30
# In what pieces video memory is held. As many come with one message of the helper's, and stay well below what the
# service manager stores for us.
PIECE_BYTES = 1 << 30
MAX_PIECES = 128
# What the driver carries of a process whose agent carries the rest, room for the way back included: contexts, modules
# and cuBLAS. It is in the driver's fixed times.
NEXT_TO_NOTHING_BYTES = 768 * MIB
# Where somebody cannot be held still while room changes hands, so much has to be free besides: what one process takes
# at once (a context has 0.5 GiB, and allocators of frameworks grow by less than the rest) then does no harm.
CALM_BYTES = 2048 * MIB
# How much further than their sizes storages can reach in the flat space: each begins at a multiple of 512 bytes, and a
# copy has 65,536 of them at the most.
FLAT_BYTES = 32 * MIB
# What a context of the helper takes on each GPU where it copies.
CONTEXT_BYTES = 512 * MIB


def whole_size(size_bytes: int) -> int:
    """Return the size of a segment for so many bytes of storages: with the agent's table, in whole huge pages."""
    wanted = size_bytes + size_bytes // TABLE_SHARE + TABLE_BYTES
    return (wanted + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES


def with_margin(size_bytes: int) -> int:
    """Return how much to take for a job that trains on: it has grown a little when it is parked.

    A piece that is too small by one byte is made again while the job is parked, which takes seconds for a large job.
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
    """Return how much of `size_bytes` is allocated in one round: as much as is free at first.

    That much is free again after each round, except for a piece with bytes of the next one. The allocator's rounding
    has memory of its own.
    """
    return max(ROUND_BYTES, storage_reservation_bytes - piece_bytes(size_bytes))


def rounds_of(size_bytes: int, overlap_bytes: int) -> int:
    """Return the number of rounds if `overlap_bytes` of the storages have no memory of their own at first."""
    return 1 if overlap_bytes <= 0 else -(-size_bytes // round_bytes(size_bytes - overlap_bytes, size_bytes))


def staging_out_needed_bytes(size_bytes: int, *, at_rest: bool) -> int:
    """Return what has to be free on a GPU for staging memory on the way to the pool.

    While the job still trains, the same amount again is left to it, and it is needed only briefly.
    """
    own_bytes = size_bytes + FLAT_BYTES
    return own_bytes + CALM_BYTES + (0 if at_rest else size_bytes)


def staging_in_needed_bytes(size_bytes: int) -> int:
    """Return what has to be free on a GPU, besides the reservations for a process, for a copy that precedes it.

    A restore needs some free memory itself, which this must not take.
    """
    return size_bytes + FLAT_BYTES + 2 * CALM_BYTES
