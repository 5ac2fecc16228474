"""Wording of sizes, lists and processes in plans and refusals. Pure text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hegmd.protocol.names import gpu_meant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hegmd.migration.machine.operation import Operation
    from hegmd.migration.model import Candidate


def gigabytes(size_bytes: int) -> str:
    """The size as a person would say it."""
    size = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size_bytes} byte{'s' * (size_bytes != 1)}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes every size")


def listed(names: Sequence[str]) -> str:
    """The names as in a sentence."""
    return "".join(names) if len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"


def named(candidate: Candidate) -> str:
    """Return the name under which users know the process."""
    return candidate.name or str(candidate.pid)


def no_such_gpu(name: str, ids: Sequence[str]) -> tuple[str, str]:
    """Return message and hint for a name that no GPU of the node has."""
    close = gpu_meant(name, ids)
    meant = f"did you mean {close}? " if close else ""
    return f"there is no GPU {name:.40}", f"{meant}the GPUs here: {listed(ids) or 'none'}"


def no_such_process(pid: int) -> tuple[str, str]:
    """Return message and hint for a pid that no process has: it may never have had one."""
    return f"process {pid} does not exist", "if it was a job, it has ended: read its log; hegmctl ps lists the others"


def otherwise(op: Operation) -> str:
    """Return what a user can do with a suspended operation, as a hint."""
    drop = f"; or discard its state permanently: hegmctl cancel {op.id} --drop"
    return f"resume it with: {resuming(op)}{drop if next(op.live, op.workers[0]).is_absent else ''}"


def resuming(op: Operation) -> str:
    """Return the command that resumes a suspended job, or restarts it if its process has exited."""
    first = next(op.live, op.workers[0])
    return (
        f"hegmctl run --allow-restart --resume {op.id} -- COMMAND" if first.is_absent else f"hegmctl resume {first.pid}"
    )
