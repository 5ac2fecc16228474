"""Explains CRIU's errors: from the end of its log to one sentence and a hint.

CRIU logs a lot when it fails, with the reason in the middle and its consequences after it. The table has the most
frequent reasons, each from a log of CRIU 4.2.1 that a test reproduces where possible. Others are reported in CRIU's own
words. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hegmd.errors import EXTERNAL, HegmError
from hegmd.node.criu_program import bare_error, is_error

__all__ = ["failure", "not_there"]

_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class _Row:
    """A pattern of CRIU's, the sentence (with the pattern's groups) and the hint."""

    pattern: str
    message: str
    hint: str


_DUMP_AGAIN = "have the script close it, then checkpoint again; the job goes on as before"
_TABLE: tuple[_Row, ...] = (
    _Row(
        r"File (?P<path>\S+) has bad size (?P<now>\d+) \(expect (?P<then>\d+)\)",
        "{path} has {now} bytes and had {then} when the image was made",
        "put that file back as it was, or restore with --truncate-outputs if it only grew",
    ),
    _Row(
        r"File (?P<path>\S+) has (?:a )?bad build-?ID",
        "{path} is not the file that it was when the image was made: its build id differs",
        "restore where the same version of it is installed: the same container image, the same packages",
    ),
    _Row(
        r"Can't open file (?P<path>\S+)(?: on restore)?: No such file or directory",
        "{path} is not there",
        "put that file where it was when the image was made",
    ),
    _Row(
        r"Can't open file (?P<path>\S+)(?: on restore)?: Permission denied",
        "the job's user may not open {path}",
        "see who owns it, and the folders and links on the way to it; the job had it open when the image was made",
    ),
    _Row(
        r"Can't create ghost regfile: (?:Permission denied|Operation not permitted)",
        "the job's user may not make files in a folder where the job had one whose name is gone",
        "see who owns the folders where it had such files, such as temporary ones",
    ),
    _Row(
        r"Connected TCP socket",
        "the job has a TCP connection to outside of itself",
        f"ask for connections to be closed, or {_DUMP_AGAIN}",
    ),
    _Row(
        r"(?:half of stream unix connection|External socket is used|unix: FATAL: Peer \d+ unresolved)",
        "the job has a unix socket that is connected to outside of itself",
        _DUMP_AGAIN,
    ),
    _Row(
        r"(?:Can't fork for (?P<pid>\d+): File exists|Pid (?P<other>\d+) do not match expected)",
        "the process number {pid} is taken, as a process, a group or a session",
        "end what has it (ps -eo pid,pgid,sid), or restore in a fresh pid namespace: unshare --pid --fork --mount-proc",
    ),
    _Row(
        r"Unable to create a thread: -17",
        "the number of one of the job's threads is taken by another thread or process",
        "restore it again: such numbers come and go; or restore in a fresh pid namespace: "
        "unshare --pid --fork --mount-proc",
    ),
    _Row(
        r"Can't handle non-regular mapping on (?P<pid>\d+)'s map",
        "process {pid} has device memory mapped, which CRIU cannot dump",
        "forked children keep their parent's GPU mappings unless hegmd's agent drops them: use `hegmctl run`",
    ),
    _Row(
        r"(?:send_fds failed \(-22\)|Can't retrieve FDs from socket)",
        "the job has something open that the kernel does not hand to anybody else, as io_uring is",
        "switch it off in the library that uses it, then checkpoint again; the job goes on as before",
    ),
    _Row(
        r"(?:session leader of (?P<pid>\d+)|dangling tty|--shell-job|isn't tty|tty: .*(?:inherit|standard stream))",
        "the job belongs to a terminal or a session whose leader is outside of it",
        "start it without a terminal (setsid, nohup, a unit), or checkpoint what started it",
    ),
    _Row(
        r"cg: .*(?i:fail|can't|error|not found)",
        "CRIU cannot deal with the job's control groups",
        "hegmd tells CRIU to leave them alone: see that no --manage-cgroups stands in the configuration of CRIU",
    ),
    _Row(
        r"pidfd pid (?P<pid>\d+) is not a part of process tree",
        "the job has a pidfd of process {pid} open, which is not in it",
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
        "CRIU cannot deal with a mount that the job sees",
        "run the job in the node's own mount namespace, or checkpoint it by its container runtime",
    ),
    _Row(
        r"SysVIPC shmem map",
        "the job has System V shared memory mapped, which belongs to the whole node",
        "use memory shared by a file or a memfd instead; the job goes on as before",
    ),
    _Row(
        r"net: .*(?:failed|can't)",
        "CRIU cannot deal with the job's network",
        "close connections before, or run the job in the node's own network namespace",
    ),
    _Row(
        r"(?:Not supported images version|Unknown image|[Mm]agic|Failed unpacking object|version .*not supported)",
        "the image is of a version, or a form, that this CRIU does not know",
        "use the CRIU that the image names, or a newer one; `hegmctl images verify` tells whether it is whole",
    ),
    _Row(
        r"Can't dump ghost file .* of (?P<size>\d+) size",
        "the job holds a deleted file of {size} bytes, too large to be kept in the image",
        _DUMP_AGAIN,
    ),
    _Row(
        r"Can't dump file (?P<fd>\d+) of that type \[(?P<mode>\w+)\] \((?P<what>.*)\)",
        "the job has something open that CRIU cannot dump: descriptor {fd}, {what}",
        _DUMP_AGAIN,
    ),
    _Row(
        r"Can't create ghost regfile: File exists",
        "a restore that was cut off has left a file there that it had made for a deleted one",
        "remove the files that end in .cr.N.ghost, beside where the job's deleted files were, then restore again",
    ),
    _Row(
        r"No space left on device",
        "there is no room left where the image is written",
        "make room there, or name another directory; the job goes on as before",
    ),
    _Row(
        r"(?:Cannot allocate memory|Out of memory)",
        "there is not enough memory",
        "free memory on the node, or raise the limit of the control group",
    ),
    _Row(
        r"(?:Can't bind|bind\(\)|Address already in use)",
        "an address that the job listened at is in use",
        "end what listens there (ss -ltnp), then restore again",
    ),
    _Row(
        r"vdso: ",
        "this CRIU does not know this kernel's vDSO",
        "get a newer one: contrib/criu/install.sh",
    ),
    _Row(
        r"(?:Operation not permitted|Permission denied)",
        "the kernel refuses CRIU something",
        "see `hegmctl doctor` and the end of CRIU's log in hegmd's; security modules and a container's own limits are "
        "the usual cause",
    ),
)


def failure(step: str, log: str, output: str, status: int | None) -> HegmError:
    """The error for a dump or a restore that failed."""
    errors = [line for line in (*log.splitlines(), *output.splitlines()) if is_error(line)]
    ended = "was ended before it was done" if status is None else f"failed with status {status}"
    facts = {"status": status, "log_tail": log.splitlines()[-_TAIL_LINES:]}
    for row in _TABLE:
        for line in errors:
            if (found := re.search(row.pattern, line)) is not None:
                sentence = row.message.format_map(_Known(found.groupdict()))
                message = f"CRIU's {step} {ended}: {sentence}"
                return HegmError(EXTERNAL, message, row.hint, {**facts, "complaint": bare_error(line)})
    reason = bare_error(errors[0]) if errors else "it says nothing about why"
    hint = (
        "see the end of CRIU's log in hegmd's: journalctl -u hegmd"
        if errors
        else "see whether CRIU works here: hegmctl doctor"
    )
    return HegmError(EXTERNAL, f"CRIU's {step} {ended}: {reason}", hint, facts)


def not_there(pid: int) -> HegmError:
    """The error for a job that is not there once CRIU has said that it is restored."""
    message = f"CRIU calls the restore done, and the job's process {pid} is not there: it ended as soon as it went on"
    hint = "see its own output for its last words and the kernel's (dmesg) for how it ended; the image is as it was"
    return HegmError(EXTERNAL, message, hint, {"pid": pid})


class _Known(dict[str, str | None]):
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
    """Whether a restore has failed for files of one before it that was cut off, and has taken them away."""
    return "Can't create ghost regfile: File exists" in log and "Unlink remap" in log
