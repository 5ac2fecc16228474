"""Checks of the daemon's directories: the state directory, and the directory for images."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

from hegmd.node.doctor.facts import MIB, CheckResult, NodeFacts, clipped, fail, ok, size_text, skip, warn
from hegmd.node.doctor.rights import may_use

STATE_BYTES = 256 * MIB
_IN_MEMORY = ("tmpfs", "ramfs")
_REMOTE = ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "9p", "glusterfs")


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo, with the fields that are needed."""

    point: str
    kind: str
    options: tuple[str, ...]


def mounts(facts: NodeFacts) -> list[Mount]:
    found: list[Mount] = []
    for line in (facts.read("proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if separator and len(fields) >= 6 and len(rest) >= 3:
            options = (*fields[5].split(","), *rest[2].split(","))
            found.append(Mount(_unescaped(fields[4]), rest[0], options))
    return found


def mount_of(facts: NodeFacts, path: Path) -> Mount | None:
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts(facts):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _unescaped(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def state(facts: NodeFacts) -> CheckResult:
    """The state directory is private to the daemon, and on a local disk that keeps its contents."""
    return _examine(facts, facts.state_dir) or _judge_state(facts, facts.state_dir)


def images(facts: NodeFacts) -> CheckResult:
    """The directory for images has space for a process that fills the largest GPU."""
    if facts.image_dir is None:
        return skip("no directory for images is configured (doctor.image_dir)")
    return _examine(facts, facts.image_dir) or _judge_images(facts, facts.image_dir)


def _examine(facts: NodeFacts, directory: Path) -> CheckResult | None:
    """Return what is wrong with a directory for memory of processes, or None."""
    sudo = "" if facts.user_mode else "sudo "
    shown = clipped(str(directory), 50)
    if not directory.is_dir():
        return fail(f"{shown} is not a directory", f"{sudo}install -d -m 0700 {directory}")
    if facts.uid != 0 and not facts.user_mode and not may_use(facts, directory, os.W_OK | os.X_OK):
        return skip(f"{shown} is closed to uid {facts.uid}, as it should be; only root can check it")
    try:
        # Really written and synced: modes do not show a read-only mount, a quota or a sandbox.
        with tempfile.TemporaryFile(dir=directory, prefix=".hegm-doctor-") as file:
            file.write(b"hegm")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return unwritable(facts, directory, error)
    mode = directory.stat().st_mode
    if mode & stat.S_ISVTX:
        return warn(
            f"{shown} is shared by all users, but images contain memory of jobs", "configure a directory of its own"
        )
    if mode & 0o077:
        return warn(
            f"{shown} is open to other users, but images contain memory of jobs", f"{sudo}chmod 0700 {directory}"
        )
    return None


def unwritable(facts: NodeFacts, directory: Path, error: OSError) -> CheckResult:
    """Return the error of an attempt to write there, and its remedy."""
    fix = f"ls -ld {directory}" if facts.user_mode else f"sudo ls -ld {directory}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = _free_space_hint(directory)
    elif facts.under_systemd:
        fix = f"sudo systemctl edit hegmd, with the lines [Service] and ReadWritePaths={directory}"
    return fail(f"{clipped(str(directory), 50)} cannot be written: {error.strerror}", fix)


def _judge_state(facts: NodeFacts, directory: Path) -> CheckResult:
    mount = mount_of(facts, directory)
    kind = "unknown file system" if mount is None else mount.kind
    shown = clipped(str(directory), 40)
    if kind in _IN_MEMORY:
        return warn(f"{shown} is on {kind}: it is lost at the next boot", "set daemon.state_dir to a disk")
    if kind in _REMOTE:
        fix = "set daemon.state_dir to a local disk"
        return warn(f"{shown} is on {kind}: when its server hangs, so does the journal", fix)
    return judge_space(directory, kind, STATE_BYTES)


def judge_space(directory: Path, kind: str, wanted_bytes: int) -> CheckResult:
    """Check that enough space is free there."""
    free_bytes, shown = free_on(directory), f"{clipped(str(directory), 40)} ({kind})"
    if free_bytes < wanted_bytes:
        required = size_text(wanted_bytes)
        return warn(f"{shown} has {size_text(free_bytes)} free; {required} are needed", _free_space_hint(directory))
    return ok(f"{shown} can be written, {size_text(free_bytes)} free")


def _judge_images(facts: NodeFacts, directory: Path) -> CheckResult:
    free_bytes, gpu = free_on(directory), facts.largest_gpu()
    mount = mount_of(facts, directory)
    shown = f"{clipped(str(directory), 35)} ({'unknown' if mount is None else mount.kind})"
    if mount is not None and mount.kind in _IN_MEMORY:
        return warn(f"{shown} is in memory: images take what jobs need", "set doctor.image_dir to a disk")
    if gpu is not None and gpu.memory_total_bytes is not None and free_bytes < gpu.memory_total_bytes:
        required = size_text(gpu.memory_total_bytes)
        return warn(
            f"{shown} has {size_text(free_bytes)} free; a full {gpu.id} takes {required}", _free_space_hint(directory)
        )
    return ok(f"{shown} can be written, {size_text(free_bytes)} free")


def free_on(directory: Path) -> int:
    """Return the bytes that an ordinary user can write there."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _free_space_hint(directory: Path) -> str:
    return f"free space: du -xh --max-depth=1 {directory}"
