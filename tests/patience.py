"""How long tests wait for something that must happen: one limit, which only tells that it never will.

Owns the figure. No test depends on the speed of the machine: a limit of some seconds fails on one whose processors are
busy. A test ends as soon as what it waits for has happened, so a long limit costs nothing but when something hangs.
A time that a test gives to the product, to see it pass, is not waiting: such a time is the test's own.
"""

from __future__ import annotations

# A process that is started, or an answer, never took a tenth of this on a machine with ten times its work.
HANG_S = 120.0
