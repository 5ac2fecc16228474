"""Room on the disks that tests write to: how much of it a run needs, and the message if there is less.

Owns the figures. They are the peak of a whole run, with some to spare: what a test writes goes with
it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

MIB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
# The folder, or None for pytest's own, and the size, by part of the tests.
NEEDED: dict[str, dict[Path | None, int]] = {
    "quick": {None: 256 * MIB},
    "end to end": {None: 1024 * MIB, SHARED_MEMORY: 48 * MIB},
}


def skip_without(place: Path, needed_bytes: int) -> None:
    """For the few tests that need more: a container has 64 MiB of shared memory by default."""
    free_bytes = shutil.disk_usage(place).free
    if free_bytes < needed_bytes:
        pytest.skip(f"{place} has {free_bytes // MIB} MiB free, and this needs {needed_bytes // MIB} MiB there")


def sentence_on(place: Path, needed_bytes: int) -> str | None:
    """Return the fault of the disk at that place and its remedy; None if there is enough space."""
    there = place
    while not there.exists():  # pytest has not made its folder yet
        there = there.parent
    free_bytes = shutil.disk_usage(there).free
    if free_bytes >= needed_bytes:
        return None
    wanted = f"{there} has {free_bytes // MIB} MiB free, and these tests need {needed_bytes // MIB} MiB there"
    if there == SHARED_MEMORY:
        return f"{wanted}: make it larger (`mount -o remount,size=1g {there}`; --shm-size of a container)"
    return f"{wanted}: free some, or name another place with TMPDIR=FOLDER or --basetemp=FOLDER"
