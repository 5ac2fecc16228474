"""Looking again at what nobody tells of, without taking the processor from whom it is waited for.

A look that follows at once on the one before keeps two processes busy, who asks and who answers, beside the one that is
to get ahead. Nothing may depend on how long a pause is.
"""

from __future__ import annotations

import select

# Before the next request of a daemon, which looks at its GPUs every quarter of a second.
REQUEST_MS = 20
# Before the next command, which is a process of its own.
COMMAND_MS = 100


def pause(pause_ms: float = REQUEST_MS) -> None:
    """What goes between two looks."""
    select.poll().poll(pause_ms)
