"""Explains CRIU's errors: from the end of its log to one sentence and a hint.

CRIU logs a lot when it fails, with the reason in the middle and its consequences after it. The table has the most
frequent reasons, each from a log of CRIU 4.2.1 that a test reproduces where possible. Others are reported in CRIU's own
words. Pure.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hegmd.errors import EXTERNAL, HegmError
from hegmd.node.criu_program import bare_error, is_error

_TAIL_LINES = 12


class _Row(NamedTuple):
    """A pattern of CRIU's, the sentence (with the pattern's groups) and the hint."""

    pattern: str
    message: str
    hint: str


_DUMP_AGAIN = "have the script close it, then checkpoint again; the job continues"
_TABLE: tuple[_Row, ...] = (
    _Row(
        r"File (?P<path>\S+) has bad size (?P<now>\d+) \(expect (?P<then>\d+)\)",
        "{path} has {now} bytes; it had {then} when the image was written",
        "restore that file's former content, or use --truncate-outputs if it only grew",
    ),
    _Row(
        r"File (?P<path>\S+) has (?:a )?bad build-?ID",
        "{path} is another build than when the image was written: its build id differs",
        "restore where the same version is installed: in the same container image, or with the same packages",
    ),
    _Row(
        r"Can't open file (?P<path>\S+)(?: on restore)?: No such file or directory",
        "{path} does not exist",
        "put that file where it was when the image was written",
    ),
    _Row(
        r"Can't open file (?P<path>\S+)(?: on restore)?: Permission denied",
        "the job's user has no permission to open {path}",
        "check the owner of the file and of the folders and links above it; the job had it open",
    ),
    _Row(
        r"Can't create ghost regfile: (?:Permission denied|Operation not permitted)",
        "the job's user has no permission to create files in a folder where the job had an unlinked file open",
        "check the owner of the folders where the job keeps temporary files",
    ),
    _Row(
        r"Connected TCP socket",
        "the job has a TCP connection to a process outside the job",
        f"ask for connections to be closed, or {_DUMP_AGAIN}",
    ),
    _Row(
        r"(?:half of stream unix connection|External socket is used|unix: FATAL: Peer \d+ unresolved)",
        "the job has a Unix socket connected to a process outside the job",
        _DUMP_AGAIN,
    ),
    _Row(
        r"(?:Can't fork for (?P<pid>\d+): File exists|Pid (?P<other>\d+) do not match expected)",
        "the number {pid} is in use by another process, process group or session",
        "end its process (ps -eo pid,pgid,sid), or restore in a new pid namespace: unshare --pid --fork --mount-proc",
    ),
    _Row(
        r"Unable to create a thread: -17",
        "the number of a thread of the job is in use by another thread or process",
        "restore it again when the number is free, or restore in a new pid namespace: "
        "unshare --pid --fork --mount-proc",
    ),
    _Row(
        r"Can't handle non-regular mapping on (?P<pid>\d+)'s map",
        "process {pid} has device memory mapped, which CRIU cannot dump",
        "forked children keep their parent's GPU mappings unless hegmd's agent drops them: use `hegmctl run`",
    ),
    _Row(
        r"(?:send_fds failed \(-22\)|Can't retrieve FDs from socket)",
        "the job has a descriptor open that the kernel passes to no other process, such as io_uring",
        "switch it off in the library that uses it, then checkpoint again; the job continues",
    ),
    _Row(
        r"(?:session leader of (?P<pid>\d+)|dangling tty|--shell-job|isn't tty|tty: .*(?:inherit|standard stream))",
        "the job has a terminal or a session whose leader is outside the job",
        "start it without a terminal (setsid, nohup, a unit), or checkpoint the process that started it",
    ),
    _Row(
        r"cg: .*(?i:fail|can't|error|not found)",
        "CRIU failed on the job's control groups",
        "remove manage-cgroups from CRIU's configuration files: hegmd tells CRIU to leave control groups alone",
    ),
    _Row(
        r"pidfd pid (?P<pid>\d+) is not a part of process tree",
        "the job has a pidfd of process {pid} open, which is not in the job",
        _DUMP_AGAIN,
    ),
    _Row(
        r"Can't lookup mount=",
        "the job has something open on a mount that CRIU does not see: a POSIX message queue, or a file of a mount "
        "namespace of its own",
        f"run the job in the node's own mount namespace, or {_DUMP_AGAIN}",
    ),
    _Row(
        r"(?:mnt: .*(?i:can't|unable|failed|doesn't|isn't))",
        "CRIU failed on a mount in the job's mount namespace",
        "run the job in the node's own mount namespace, or checkpoint it by its container runtime",
    ),
    _Row(
        r"SysVIPC shmem map",
        "the job has System V shared memory mapped, which belongs to the whole node",
        "share memory through a file or a memfd instead; the job continues",
    ),
    _Row(
        r"net: .*(?:failed|can't)",
        "CRIU failed on the job's network",
        "close the job's connections first, or run the job in the node's own network namespace",
    ),
    _Row(
        r"(?:Not supported images version|Unknown image|[Mm]agic|Failed unpacking object|version .*not supported)",
        "this CRIU does not know the version or format of the image",
        "use the CRIU that the image names, or a newer one; to check the image, run: hegmctl images verify",
    ),
    _Row(
        r"Can't dump ghost file .* of (?P<size>\d+) size",
        "the job holds a deleted file of {size} bytes, too large for the image",
        _DUMP_AGAIN,
    ),
    _Row(
        r"Can't dump file (?P<fd>\d+) of that type \[(?P<mode>\w+)\] \((?P<what>.*)\)",
        "the job has descriptor {fd} open, which CRIU cannot dump: {what}",
        _DUMP_AGAIN,
    ),
    _Row(
        r"Can't create ghost regfile: File exists",
        "an interrupted restore left a file in place of a deleted one",
        "remove the files named *.cr.N.ghost in the folders of the job's deleted files, then restore again",
    ),
    _Row(
        r"No space left on device",
        "the disk of the image is full",
        "free space there, or name another directory; the job continues",
    ),
    _Row(
        r"(?:Cannot allocate memory|Out of memory)",
        "the node or the control group is out of memory",
        "free memory on the node, or raise the limit of the control group",
    ),
    _Row(
        r"(?:Can't bind|bind\(\)|Address already in use)",
        "an address at which the job listened is in use",
        "end the process that listens there (ss -ltnp), then restore again",
    ),
    _Row(r"vdso: ", "this CRIU does not know this kernel's vDSO", "install a newer CRIU: contrib/criu/install.sh"),
    _Row(
        r"(?:Operation not permitted|Permission denied)",
        "the kernel denied CRIU an operation",
        "run: hegmctl doctor; then read the end of CRIU's log in hegmd's log: security modules and limits of a "
        "container are the usual causes",
    ),
)


def failure(step: str, log: str, output: str, status: int | None) -> HegmError:
    """Return the error for a dump or a restore that failed."""
    errors = [line for line in (*log.splitlines(), *output.splitlines()) if is_error(line)]
    ended = "was stopped before it was done" if status is None else f"failed with status {status}"
    facts = {"status": status, "log_tail": log.splitlines()[-_TAIL_LINES:]}
    for row in _TABLE:
        for line in errors:
            if (found := re.search(row.pattern, line)) is not None:
                sentence = row.message.format_map(_MatchedErrors(found.groupdict()))
                message = f"CRIU's {step} {ended}: {sentence}"
                return HegmError(EXTERNAL, message, row.hint, {**facts, "complaint": bare_error(line)})
    reason = bare_error(errors[0]) if errors else "CRIU logged no reason"
    hint = "read the end of CRIU's log: journalctl -u hegmd" if errors else "run: hegmctl doctor"
    return HegmError(EXTERNAL, f"CRIU's {step} {ended}: {reason}", hint, facts)


def not_there(pid: int) -> HegmError:
    """Return the error for a job that does not exist although CRIU reported success."""
    message = f"CRIU reported success, but the job's process {pid} does not exist: it ended as soon as it continued"
    hint = "read the job's output and the kernel's log (dmesg); the image is unchanged"
    return HegmError(EXTERNAL, message, hint, {"pid": pid})


class _MatchedErrors(dict[str, str | None]):
    """The groups that matched; of several for one thing, whichever did."""

    def __getitem__(self, name: str) -> str:
        value = super().get(name) or (super().get("other") if name == "pid" else None)
        if value is not None and name == "path":
            return "/" + value.lstrip("/")  # CRIU names files from the root directory on
        return value or "?"


def had_numbers_taken(log: str) -> bool:
    """True if a restore failed because a pid or thread id of the job was in use."""
    return re.search(r"Unable to create a thread: -17|Can't fork for \d+: File exists", log) is not None


def had_left_overs(log: str) -> bool:
    """Return True if a restore failed because of files of an interrupted one, and has removed them."""
    return "Can't create ghost regfile: File exists" in log and "Unlink remap" in log
