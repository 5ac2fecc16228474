"""What the agent says when it cannot do what it was told: always which process, always the next step."""

from __future__ import annotations

import os

from ..errors import REFUSED, HegmError

DEBUG_HINT = "the job goes on; start it with HEGM_AGENT_DEBUG=FILE to see more"
BUSY_HINT = "it has to be parked or waiting; try again at another moment"


def refusal(message: str, hint: str) -> HegmError:
    """That it cannot be done as things are."""
    return HegmError(REFUSED, f"process {os.getpid()}: {message}", hint)


def no_boundary(limit_s: float | None, when: str) -> HegmError:
    """That the training thread came to no boundary in time."""
    limit = "its limit" if limit_s is None else f"{limit_s:g} s"
    return refusal(
        " ".join(f"no batch boundary within {limit} {when}".split()),
        "allow more time; for a hand-written loop, call hegm.boundary() once a batch",
    )


def not_parked(limit_s: float | None, busy: str | None, declined: str | None) -> HegmError:
    """That nobody was parked: signals were not to be held back, another thread is busy, or nobody came in time."""
    if declined is not None:
        return refusal(
            f"the thread was not parked, since its signals cannot be held back: {declined}",
            "the job goes on; if it is short of descriptors or threads, raise its limits (ulimit -n, -u) and ask again",
        )
    return no_boundary(limit_s, "") if busy is None else refusal(f"{busy}, not at rest", BUSY_HINT)
