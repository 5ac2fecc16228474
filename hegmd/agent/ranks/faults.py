"""Faults that a script can have injected: HEGM_FAULT="rank=1,step=20,kind=sigkill".

Several are separated by semicolons. A fault happens in the first generation, or in the one that it names, so that it
does not happen again after the recovery.
"""

from __future__ import annotations

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

VARIABLE = "HEGM_FAULT"
KINDS = (
    "exception",
    "sigkill",
    "sigstop",
    "hang",
    "lock",
    "socket",
    "gil",
    "oom",
    "nccl",
    "segfault",
    "exit",
    "interrupt",
)
PHASES = ("restore", "forward", "backward", "commit", "torn", "after")
_LONG_S = 1e6


class Fault:
    """A fault: rank, step, phase, generation, and effect. Rank None means every rank."""

    __slots__ = ("generation", "kind", "phase", "rank", "step")

    def __init__(self, rank: int | None, step: int, kind: str, phase: str = "forward", generation: int = 1) -> None:
        self.rank = rank
        self.step = step
        self.kind = kind
        self.phase = phase
        self.generation = generation

    def is_due(self, rank: int, step: int, phase: str, generation: int) -> bool:
        """Return True if it happens there."""
        return self.rank in (None, rank) and (self.step, self.phase, self.generation) == (step, phase, generation)


def parse(text: str) -> tuple[Fault, ...]:
    """Return the faults that the text names. Raises ValueError, which says what is wrong."""
    return tuple([_parsed(part) for part in text.split(";") if part.strip()])


def _parsed(text: str) -> Fault:
    values: dict[str, str] = {}
    for word in text.split(","):
        name, has_value, value = word.strip().partition("=")
        if not has_value or name not in ("rank", "step", "kind", "phase", "generation") or name in values:
            raise ValueError(f"{VARIABLE}: `{word.strip()}` is not one of rank=, step=, kind=, phase=, generation=")
        values[name] = value
    for name, known in (("kind", KINDS), ("phase", PHASES)):
        if name in values and values[name] not in known:
            raise ValueError(f"{VARIABLE}: {name}={values[name]} is not one of {', '.join(known)}")
    if "step" not in values or "kind" not in values:
        raise ValueError(f"{VARIABLE}: `{text.strip()}` needs step= and kind=")
    rank = values.get("rank", "all")
    return Fault(
        None if rank == "all" else _number("rank", rank),
        _number("step", values["step"]),
        values["kind"],
        values.get("phase", "forward"),
        _number("generation", values.get("generation", "1")),
    )


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise ValueError(f"{VARIABLE}: {name}={text} is not a number")
    return int(text)


def inject(faults: Sequence[Fault], rank: int, step: int, phase: str, generation: int) -> None:
    """Have the fault happen that is due here, if any."""
    for fault in faults:
        if fault.is_due(rank, step, phase, generation):
            _happen(fault.kind, f"{VARIABLE}: {fault.kind} in rank {rank} at step {step}")


def _happen(kind: str, why: str) -> None:
    signal: Any = __import__("signal")
    torch: Any = sys.modules.get("torch")
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "sigstop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "hang":
        time.sleep(_LONG_S)
    elif kind == "lock":
        lock = __import__("_thread").allocate_lock()
        lock.acquire()
        lock.acquire()
    elif kind == "socket":
        ours, _theirs = __import__("socket").socketpair()
        ours.recv(1)
    elif kind == "gil":
        __import__("ctypes").PyDLL(None).sleep(int(_LONG_S))
    elif kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        raise SystemExit(3)
    elif kind == "interrupt":
        raise KeyboardInterrupt(why)
    elif kind == "oom":
        raise getattr(torch, "OutOfMemoryError", MemoryError)(why)
    elif kind == "nccl":
        raise getattr(torch.distributed, "DistBackendError", RuntimeError)(why)
    else:
        raise RuntimeError(why)
