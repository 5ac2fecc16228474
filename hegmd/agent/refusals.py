"""What the agent says when it cannot do what it was told: always which process, always the next step."""

from __future__ import annotations

import os

from ..errors import REFUSED, HegmError

DEBUG_HINT = "start the job with HEGM_AGENT_DEBUG=FILE to log more; it continues"
BUSY_HINT = "try again when it is parked or waiting"


def refusal(message: str, hint: str) -> HegmError:
    """That it cannot be done as things are."""
    return HegmError(REFUSED, f"process {os.getpid()}: {message}", hint)


def not_made(size_bytes: int, error: BaseException, *, on_gpu: bool) -> HegmError:
    """That storages could not be made again; where their GPU had no room, `lacks_bytes` says for how many bytes."""
    where = "GPU" if on_gpu else "node"
    facts = {"lacks_bytes": size_bytes} if on_gpu and _is_out_of_memory(error) else {}
    return HegmError(
        REFUSED,
        f"{size_bytes} bytes could not be reloaded into process {os.getpid()}: {error}",
        f"free memory on the {where}, then try again; the bytes are kept",
        facts,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class for it, which moved between releases, and other errors of CUDA only say so."""
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()


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
            f"the thread was not parked, because its signals cannot be blocked: {declined}",
            "raise its limits of descriptors and threads (ulimit -n, -u), then try again; the job continues",
        )
    return no_boundary(limit_s, "") if busy is None else refusal(f"{busy}, not at rest", BUSY_HINT)
