"""The privileges that CRIU gets, and the refusals for lack of them."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu.credentials import Credentials
from hegmd.images.criu.needs import needs_of
from hegmd.images.criu.privileges import (
    CriuPrivileges,
    closed_to,
    privileges_for_root,
    rights_missing,
    to_dump,
    to_restore,
)
from hegmd.node.processes.process_tree import Descriptor, Tree, TreeProcess, read_tree

BOB, HIS = 1000, frozenset({1000, 100})
ALL = (1 << 41) - 1
SYS_RESOURCE, CHECKPOINT_RESTORE = 1 << 24, 1 << 40


def thread(gid: int = BOB, *groups: int) -> Credentials:
    return Credentials("core-1.img", frozenset({BOB}), frozenset({gid}), groups, {})


def proc(folder: Path, permitted: int, bounding: int = ALL) -> str:
    for name in ("self", "1"):
        (folder / name).mkdir()
        (folder / name / "status").write_text(f"Name:\tx\nCapPrm:\t{permitted:016x}\nCapBnd:\t{bounding:016x}\n")
    return str(folder)


def job(*descriptors: Descriptor) -> Tree:
    member = TreeProcess(pid=4, parent=1, start_ticks=5, state="S", group=4, session=4, uid=BOB, gid=BOB)
    return Tree(root=4, members=(member,), descriptors=descriptors)


def test_a_user_needs_no_more_than_two_capabilities_and_a_third_where_yama_keeps_them_from_their_own(
    tmp_path: Path,
) -> None:
    assert to_dump(job(), (100,), proc_root=str(tmp_path)) == CriuPrivileges(BOB, BOB, (100,), (8, 40))
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    assert to_dump(job(), (), proc_root=str(tmp_path)).capabilities == (8, 40, 19)
    assert CriuPrivileges(BOB, BOB, (4, 100)).word == "1000:1000:4,100:8,40"


def test_criu_gets_the_groups_that_the_job_had() -> None:
    assert to_restore([thread(100, 4, 27), thread(100, 4, 27)], BOB) == CriuPrivileges(BOB, 100, (4, 27))
    with pytest.raises(HegmError, match="2 different sets of groups"):
        to_restore([thread(100), thread(BOB)], BOB)


def test_a_container_without_a_capability_is_refused_before_the_job_parks(tmp_path: Path) -> None:
    """CRIU said «Can't get rlimit 0: Operation not permitted» of a user's job, in the middle of a dump by root."""
    lacking = proc(tmp_path, ALL & ~SYS_RESOURCE & ~CHECKPOINT_RESTORE)
    missing = rights_missing(frozenset({0, BOB}), as_user=False, in_unit=False, proc_root=lacking)
    assert missing is not None
    assert "CRIU needs CAP_SYS_RESOURCE for processes of uid 1000" in missing.message
    missing = rights_missing(frozenset({BOB}), as_user=True, in_unit=False, proc_root=lacking)
    assert missing is not None
    assert "CRIU needs CAP_CHECKPOINT_RESTORE, " in missing.message
    assert rights_missing(frozenset({0}), as_user=False, in_unit=False, proc_root=lacking) is None
    # A unit has the rights that the service manager gives it, whatever the daemon's sandbox.
    assert rights_missing(frozenset({BOB}), as_user=True, in_unit=True, proc_root=lacking) is None


@pytest.mark.parametrize(
    ("mode", "owner", "flags", "is_closed"),
    [
        (0o600, (BOB, BOB), os.O_RDWR, False),
        (0o644, (0, 0), os.O_RDONLY, False),
        (0o644, (0, 0), os.O_WRONLY | os.O_APPEND, True),
        (0o600, (0, 0), os.O_RDONLY, True),
        (0o620, (0, 100), os.O_WRONLY, False),
        (0o620, (0, 100), os.O_RDWR, True),
        (0o077, (BOB, 100), os.O_RDONLY, True),
    ],
)
def test_a_file_that_another_user_opened_for_the_job_needs_root_at_the_restore(
    mode: int, owner: tuple[int, int], flags: int, is_closed: bool, tmp_path: Path
) -> None:
    """The dump went through, the job was ended, and its owner could not bring it back."""
    with (tmp_path / "file").open("w") as file:
        descriptor = Descriptor(os.getpid(), file.fileno(), "/x", stat.S_IFREG | mode, flags, owner=owner)
        assert bool(list(closed_to(job(descriptor), BOB, HIS))) is is_closed


def test_groups_and_filters_of_a_process_are_read() -> None:
    (member,) = read_tree(os.getpid()).members[:1]
    status = Path("/proc/self/status").read_text().splitlines()
    assert member.gid == os.getgid()
    assert member.is_confined == ("Seccomp:\t2" in status)


def test_roots_criu_had_roots_rights_among_the_files_of_a_users_job() -> None:
    """A link in the place of one of them led to any file, once root brought that job back."""
    plain = job()
    (member,) = plain.members
    alike = member._replace(pid=5, parent=4)
    both = replace(plain, members=(member, alike))
    assert privileges_for_root(both, needs_of(both)) == to_dump(both, ())
    for other in (
        alike._replace(uid=0),
        alike._replace(gid=0),
        alike._replace(groups=(27,)),
        alike._replace(is_guarded=True),
        alike._replace(is_confined=True),  # CRIU cannot take a filter of system calls with a user's rights
    ):
        mixed = replace(plain, members=(member, other))
        assert privileges_for_root(mixed, needs_of(mixed)) is None
    roots = replace(plain, members=(member._replace(uid=0),))
    assert privileges_for_root(roots, needs_of(roots)) is None
