"""The properties that a node must share with the node of the dump, so that the job can continue there.

A restored process continues with the same instructions and addresses: every program and library that it has mapped must
be the same build, and the processor needs the features that the job has detected. All differences are found before
anything starts, and reported at once. Blocks: the files may be on disks that hang.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hegmd.errors import REFUSED
from hegmd.node.processes.process_tree import Tell, Tree, silent
from hegmd.protocol.operations import Reason
from hegmd.system.elf import NotElf, build_id

# Processor features by which libraries choose their code; the other flags do not matter.
_CHOSEN_BY = (
    "adx",
    "aes",
    "amx",
    "avx",
    "bmi",
    "cx16",
    "erms",
    "f16c",
    "fma",
    "fsrm",
    "lzcnt",
    "abm",
    "movbe",
    "pclmul",
)
_CHOSEN_TOO = ("popcnt", "rdrand", "rdseed", "sha", "sse", "ssse3", "vaes", "vpclmul", "xsave")
_LISTED = 8


class Differences(NamedTuple):
    """The reasons against a restore on this node, and the harmless differences."""

    refusals: tuple[Reason, ...]
    notes: tuple[str, ...]


def describe(tree: Tree, *, tell: Tell = silent) -> dict[str, Any]:
    """Return the node as the tree sees it, in plain values for a manifest. Files are read from the tree's root.

    `tell` gets the name of each file before it is read.
    """
    files: dict[str, Any] = {}
    for each in tree.mappings:
        if each.path.startswith("/") and not each.is_deleted and each.path not in files and _is_kept(each.path):
            tell(each.path)
            found = _look(Path(f"/proc/{each.pid}/root"), each.path)
            if found is not None:
                files[each.path] = found
    known = os.uname()
    return {"kernel": known.release, "machine": known.machine, "processor": sorted(_flags()), "files": files}


def differences(then: Mapping[str, Any], *, root: Path = Path("/"), tell: Tell = silent) -> Differences:
    """Return how this node differs from `then`. `root` is where the job finds its files: a sandbox may show others.

    Raises KeyError and TypeError if `then` is no such description.
    """
    known = os.uname()
    if then["machine"] != known.machine:
        message = f"the image was written on a node with {then['machine']} processors; this node has {known.machine}"
        return Differences((_refusal(message, "restore it on a node with the same kind of processor"),), ())
    missing = sorted(frozenset(then["processor"]) - _flags())
    refusals = list(_changed(then["files"], root, tell))
    if missing:
        message = f"this node's processor lacks {_listed(missing)}, which the job may use"
        refusals.append(_refusal(message, "restore it on a node with the same processor, or a newer one"))
    notes: list[str] = []
    if then["kernel"] != known.release:
        notes.append(f"the kernel was {then['kernel']} and is {known.release}")
    return Differences(tuple(refusals), tuple(notes))


def _changed(files: Mapping[str, Mapping[str, Any]], root: Path, tell: Tell) -> Iterator[Reason]:
    same = "restore it where the same packages are installed, for example in the same container image"
    for path, before in files.items():
        tell(path)
        now = _look(root, path)
        if now is None:
            yield _refusal(f"{path} does not exist, and the job has it mapped", same)
        elif before["build_id"] != now["build_id"]:
            yield _refusal(
                f"{path} is another build: its build id was {before['build_id'] or 'none'} and is "
                f"{now['build_id'] or 'none'}",
                same,
            )
        elif before["size_bytes"] != now["size_bytes"]:
            yield _refusal(f"{path} has {now['size_bytes']} bytes and had {before['size_bytes']}", same)


def _look(root: Path, path: str) -> dict[str, Any] | None:
    """Return size and build id of a regular file; None if there is none."""
    try:
        fd = os.open(root / path.lstrip("/"), os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        try:
            return {"size_bytes": status.st_size, "build_id": build_id(Path(f"/proc/self/fd/{fd}"))}
        except NotElf:
            return {"size_bytes": status.st_size, "build_id": None}
    except OSError:
        return None
    finally:
        os.close(fd)


def _is_kept(path: str) -> bool:
    """Return False for memory that only has a name: it is in the image, or created again."""
    return not path.startswith(("/dev/", "/memfd:", "/proc/", "/sys/", "/SYSV", "/anon_hugepage", "/[aio]"))


def _flags() -> frozenset[str]:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(flag for flag in value.split() if flag.startswith(_CHOSEN_BY + _CHOSEN_TOO))
    return frozenset()


def _listed(names: list[str]) -> str:
    rest = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


def _refusal(message: str, hint: str) -> Reason:
    return Reason(code=REFUSED.name, message=message, hint=hint)
