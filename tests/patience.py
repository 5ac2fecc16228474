"""How long tests wait for something that must happen: one limit, after which it never will.

Owns the figure. No test depends on the speed of the machine: a limit of some seconds fails on one whose processors are
busy. A test ends as soon as what it waits for has happened, so a long limit costs nothing but when something hangs.
A time that a test gives to the product, to see it pass, is not waiting: such a time is the test's own.
"""

from __future__ import annotations

from collections.abc import Iterator

# A process that is started, or an answer, never took a tenth of this on a machine with ten times its work.
HANG_S = 120.0
# The limit of a whole test is in pyproject.toml. A type checker takes the processor for a minute or two, which it
# shares with all else that runs.
TYPE_CHECKER_S = 3600.0


def longer_and_longer(first_s: float) -> Iterator[float]:
    """Time limits for the product, for a test in which one thing takes too long and another has to be in time.

    On a busy machine nothing may be in time for a short limit, and with a long one the test takes as long. The test
    ends with the first limit that is long enough; where none is, the product is too slow for all of them.
    """
    limit_s = first_s
    while limit_s < HANG_S:
        yield limit_s
        limit_s *= 4
