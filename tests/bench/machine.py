"""Describes this machine for the heading of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

from tests.bench.report import Machine

_ROOT = Path(__file__).resolve().parents[2]


def this_machine() -> Machine:
    """The machine, the time and the revision, as they are now."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        revision=_revision(),
        taken_utc=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        load=" ".join(f"{load:.1f}" for load in os.getloadavg()),
    )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _revision() -> str:
    """The commit that was measured, and whether it was that alone."""
    try:
        commit = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--", "hegmd", "client")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with changes" if changed else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
