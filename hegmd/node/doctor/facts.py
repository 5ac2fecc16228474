"""The inputs of the checks, and the form of their findings.

A check gets NodeFacts only: what the daemon knows, and the root below which the rest is read, so that a test can build
a node from files. Checks change nothing. A missing file is None; other read errors are raised and become a line of
their own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from hegmd.protocol.snapshots import Gpu, Vendor
from hegmd.system.programs import SYSTEM_PATH

SUMMARY_CHARACTERS = 100
_PIECE_BYTES = 64 * 1024
_PIECES_MAX = 64

MIB = 1024 * 1024
GIB = 1024 * MIB


class CheckResult(NamedTuple):
    """The result of a check: its status, one short line, and the next step if there is one."""

    status: str
    summary: str
    fix: str | None


def ok(summary: str) -> CheckResult:
    """All is as it should be."""
    return CheckResult("ok", clipped(summary), None)


def skip(reason: str) -> CheckResult:
    """The check does not apply here, or its facts are unknown."""
    return CheckResult("skip", clipped(reason), None)


def warn(summary: str, fix: str) -> CheckResult:
    """hegmd works, but something is slow, closed or at risk."""
    return CheckResult("warn", clipped(summary), fix)


def fail(summary: str, fix: str) -> CheckResult:
    """Something that hegmd needs cannot work."""
    return CheckResult("fail", clipped(summary), fix)


def _group_id(name: str) -> int | None:
    import grp

    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def _group_name(gid: int) -> str | None:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class NodeFacts:
    """A node, as the daemon describes it to the checks."""

    vendors: tuple[Vendor, ...]
    gpus: tuple[Gpu, ...]
    simulated: bool
    user_mode: bool
    under_systemd: bool
    socket_path: Path
    state_dir: Path
    image_dir: Path | None = None
    # The only CRIU that is used, where one is configured.
    criu: Path | None = None
    group: str = "hegm"
    # Host memory that is ready for the next suspend, and the configured amount.
    ready_bytes: int = 0
    ready_wanted_bytes: int = 0
    # The directories of programs, and those of the interpreters that jobs may use.
    program_path: str = SYSTEM_PATH
    python_path: str = "/usr/local/bin:/usr/bin:/bin"
    # /proc, /sys, /dev, /boot, /etc and the libraries are read below this.
    root: Path = Path("/")
    uid: int = field(default_factory=os.geteuid)
    gids: frozenset[int] = field(default_factory=lambda: frozenset((os.getegid(), *os.getgroups())))
    group_id: Callable[[str], int | None] = _group_id
    group_name: Callable[[int], str | None] = _group_name
    pidfd_open: Callable[[int], int] = os.pidfd_open

    def at(self, path: str) -> Path:
        """Return that path below the root; give it without a leading slash."""
        return self.root / path

    def read(self, path: str) -> str | None:
        """Return the text of that file; None if it does not exist. Other failures raise OSError."""
        try:
            with open(self.root / path, "rb", buffering=0) as file:
                # In pieces: the kernel allocates a buffer of the requested size and refuses large ones.
                pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
                return b"".join(islice(pieces, _PIECES_MAX)).decode("utf-8", "replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read_int(self, path: str) -> int | None:
        text = self.read(path)
        try:
            return None if text is None else int(text.strip(), 0)
        except ValueError:
            return None

    def names_in(self, path: str) -> tuple[str, ...]:
        """Return the sorted names in that directory; empty if it does not exist."""
        try:
            return tuple(sorted(os.listdir(self.root / path)))
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def vendor(self, name: str) -> Vendor | None:
        """Return that vendor's record; None if the daemon has no provider for it."""
        return next((vendor for vendor in self.vendors if vendor.vendor == name), None)

    def gpus_of(self, vendor: str) -> tuple[Gpu, ...]:
        """Return the GPUs of that vendor, including lost ones."""
        return tuple(gpu for gpu in self.gpus if gpu.vendor == vendor)

    @property
    def kernel_release(self) -> str:
        return (self.read("proc/sys/kernel/osrelease") or "").strip()

    def largest_gpu(self) -> Gpu | None:
        """Return the GPU with the most memory among those whose memory is known."""
        known = [gpu for gpu in self.gpus if gpu.memory_total_bytes is not None]
        return max(known, key=lambda gpu: gpu.memory_total_bytes or 0, default=None)


def clipped(text: str, characters: int = SUMMARY_CHARACTERS) -> str:
    """One line of at most that many characters, without control characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= characters else line[: characters - 1].rstrip() + "…"


def listed(names: Iterable[str], limit: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    every = list(names)
    if len(every) <= limit:
        return ", ".join(every)
    return f"{', '.join(every[:limit])} and {len(every) - limit} more"


def counted(number: int, thing: str, ending: str = "s") -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{ending}"


def size_text(size_bytes: int) -> str:
    """A size in the largest unit that leaves at least one before the point: 512 MiB, 1.5 GiB, 141 GiB."""
    value = float(size_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if value >= 10 or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.0f} TiB"


def version_numbers(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, for comparing: 6.8.0-45-generic gives (6, 8, 0)."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
