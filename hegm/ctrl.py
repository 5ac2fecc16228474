"""HeGM's names for what `hegm-ctrl` does: functions for controllers that are written in Python."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "checkpoint_all_gpu",
    "checkpoint_pids",
    "main_cli",
    "pending_ppids",
    "registered_worker_pids",
    "resume_all_pending",
    "resume_ppids",
]


def _control() -> Any:
    """The object that answers, by the current environment variables. Raises HegmError for a value that cannot be."""
    surroundings: Any = importlib.import_module("hegmcompat.surroundings")
    return importlib.import_module("hegmcompat.control").Control(surroundings.read_surroundings(os.environ))


def checkpoint_pids(pids: Iterable[int]) -> dict[int, str]:
    """Ask these workers for their state; what became of each."""
    return dict(_control().checkpoint(pids))


def checkpoint_all_gpu() -> dict[int, str]:
    """The same for every worker of a launcher that uses a GPU."""
    return dict(_control().checkpoint_all())


def pending_ppids() -> list[int]:
    """The launchers that wait with a lock."""
    return list(_control().pending())


def resume_ppids(ppids: Iterable[int]) -> dict[int, str]:
    """Let these launchers go on."""
    return dict(_control().resume(ppids))


def resume_all_pending() -> dict[int, str]:
    """Let every launcher go on that waits."""
    return dict(_control().resume_all())


def registered_worker_pids() -> dict[int, int]:
    """Each launcher with its worker."""
    surroundings: Any = importlib.import_module("hegmcompat.surroundings")
    workers: Any = importlib.import_module("hegmcompat.workers")
    return dict(workers.registered(surroundings.read_surroundings(os.environ).folder))


def main_cli(argv: Sequence[str] | None = None) -> int:
    """The program `hegm-ctrl`, with these words or those of the command line; its exit status."""
    program: Any = importlib.import_module("hegmcompat.ctrl_cli")
    return int(program.run(sys.argv[1:] if argv is None else argv, os.environ))


if __name__ == "__main__":
    importlib.import_module("hegmcompat.ctrl_cli").main()
