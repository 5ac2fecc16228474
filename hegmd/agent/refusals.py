"""The agent's error messages: each names the process and the next step."""

from __future__ import annotations

import os

from ..errors import REFUSED, HegmError

DEBUG_HINT = "start the job with HEGM_AGENT_DEBUG=FILE to log more; it continues"
BUSY_HINT = "try again when it is parked or waiting"
_HINT_MEET = (
    "call irecv in the step that uses the message; in a loop without a data loader, call hegm.boundary() before it "
    "receives: then the ranks meet"
)


def refusal(message: str, hint: str) -> HegmError:
    """Return the error for an order that cannot be carried out now."""
    return HegmError(REFUSED, f"process {os.getpid()}: {message}", hint)


def not_made(size_bytes: int, error: BaseException, *, on_gpu: bool) -> HegmError:
    """Return the error for storages that could not be allocated; `lacks_bytes` is what the GPU lacked."""
    where = "GPU" if on_gpu else "node"
    facts = {"lacks_bytes": size_bytes} if on_gpu and _is_out_of_memory(error) else {}
    return HegmError(
        REFUSED,
        f"{size_bytes} bytes could not be reloaded into process {os.getpid()}: {error}",
        f"free memory on the {where}, then try again; the bytes are kept",
        facts,
    )


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True for a lack of memory. PyTorch's class for it moved; other CUDA errors only say so."""
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()


def no_boundary(limit_s: float | None, when: str) -> HegmError:
    """Return the error for a training thread that reached no boundary in time."""
    limit = "its limit" if limit_s is None else f"{limit_s:g} s"
    return refusal(
        " ".join(f"no batch boundary within {limit} {when}".split()),
        "allow more time; for a hand-written loop, call hegm.boundary() once a batch",
    )


def not_parked(limit_s: float | None, busy: str | None, declined: str | None) -> HegmError:
    """Return the error for a failed park: signals could not be blocked, another thread is busy, or no boundary came in
    time."""
    if declined is not None:
        return refusal(
            f"the thread was not parked, because its signals cannot be blocked: {declined}",
            "raise its limits of descriptors and threads (ulimit -n, -u), then try again; the job continues",
        )
    return no_boundary(limit_s, "") if busy is None else refusal(f"{busy}, not parked", BUSY_HINT)


def never_meets() -> HegmError:
    """Return the error for ranks that wait for one another at each of their boundaries; later ones are no better."""
    why = "other ranks wait for it at each of its batch boundaries, so that the ranks cannot stop at one place"
    error = refusal(why, _HINT_MEET)
    error.facts["refusals"] = (why,)
    return error


def waits_in_join() -> HegmError:
    """Return the error for a rank that has no batches left, while others have some."""
    return refusal(
        "it has no batches left, and waits in `Join` for ranks that have some",
        "ask again while all ranks have batches, such as early in an epoch",
    )
