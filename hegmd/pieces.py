"""How large a piece of the host pool is for so many bytes of storages.

Owns that one figure, because two have to agree on it: the plan that says whether a job fits, and the pool that takes
the pages. Pure.
"""

from __future__ import annotations

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB
# The agent writes a table of its storages before the bytes, and starts each on a page.
TABLE_BYTES = 4 * MIB
TABLE_SHARE = 32


def whole_size(size_bytes: int) -> int:
    """How large a piece for so many bytes of storages is: with room for the agent's table, in whole huge pages."""
    wanted = size_bytes + size_bytes // TABLE_SHARE + TABLE_BYTES
    return (wanted + HUGE_PAGE_BYTES - 1) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
