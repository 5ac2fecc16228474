"""Processes that cannot be seen, or not be held: hidden, in another namespace, or one too many for our descriptors."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.node.processes.table import (
    NOTE_GONE_OR_HIDDEN,
    NOTE_HIDDEN,
    NOTE_NO_PID,
    NOTE_OTHER_NAMESPACE,
    ProcessFacts,
    ProcessTable,
    Visibility,
)
from tests.patience import HANG_S
from tests.unit.node.processes.pretended_proc import PretendedProc, Start, end, one


def test_a_hidden_process_is_distinguished_from_an_ended_one(proc: PretendedProc, start: Start) -> None:
    child = start()
    proc.held[7] = child.pid
    table = proc.table()
    facts = one(table, 7)
    assert (facts.presence, facts.note, facts.start_ticks) == (Visibility.UNSEEN, NOTE_HIDDEN, None)
    proc.put(7)
    assert one(table, 7).presence is Visibility.VISIBLE
    proc.remove(7)
    end(child)
    assert one(table, 7).presence is Visibility.ENDED
    table.close()


def test_a_pid_that_no_process_has_in_the_first_namespace_has_ended(table: ProcessTable, start: Start) -> None:
    child = start()
    end(child)
    facts = one(table, child.pid)
    expected = Visibility.ENDED if table.in_first_namespace else Visibility.UNSEEN
    assert (facts.presence, facts.start_ticks) == (expected, None)


def test_without_a_pidfd_an_ended_process_cannot_be_distinguished_from_a_hidden_one(start: Start) -> None:
    def no_pidfds(pid: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    table, child = ProcessTable(open_pidfd=no_pidfds), start()
    end(child)
    facts = one(table, child.pid)
    assert facts.presence is Visibility.UNSEEN
    assert facts.note == (NOTE_GONE_OR_HIDDEN if table.in_first_namespace else NOTE_OTHER_NAMESPACE)


def test_a_pid_that_no_process_has_here_is_in_another_namespace(proc: PretendedProc) -> None:
    table = proc.table()
    facts = one(table, 7)
    assert (facts.presence, facts.note) == (Visibility.UNSEEN, NOTE_OTHER_NAMESPACE)
    table.close()


@pytest.mark.parametrize("pid", [0, -1])
def test_an_invalid_pid(table: ProcessTable, pid: int) -> None:
    assert one(table, pid) == ProcessFacts(pid=pid, presence=Visibility.UNSEEN, note=NOTE_NO_PID)


def test_an_unproven_pid_needs_a_gpus_device_outside_the_first_namespace(proc: PretendedProc, start: Start) -> None:
    proc.held[7] = start().pid
    proc.put(7)
    table = proc.table()
    assert one(table, 7, frozenset({7})).note == NOTE_OTHER_NAMESPACE
    assert one(table, 7, frozenset({7})).presence is Visibility.UNSEEN
    (proc.root / "7" / "fd").mkdir()
    (proc.root / "7" / "fd" / "3").symlink_to("/dev/kfd")
    assert one(table, 7, frozenset({7})).presence is Visibility.VISIBLE
    table.close()


def test_with_too_few_descriptors_the_start_time_is_read_each_time(start: Start) -> None:
    table = ProcessTable(pidfd_limit=1)
    held, other = start(), start()
    facts = table.refresh([held.pid, other.pid])
    loose = next(pid for pid, found in facts.items() if found.note is not None)
    assert table.pidfd_count == 1
    assert facts[loose].presence is Visibility.VISIBLE
    assert "LimitNOFILE" in str(facts[loose].note)
    assert table.refresh([held.pid, other.pid])[loose] is facts[loose]
    end(held if held.pid == loose else other)
    assert table.refresh([held.pid, other.pid])[loose].presence is Visibility.ENDED
    table.close()


def test_a_reused_pid_without_descriptors_is_recognised_by_its_start_time(proc: PretendedProc) -> None:
    def no_pidfds(pid: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    table = ProcessTable(str(proc.root), open_pidfd=no_pidfds)
    proc.put(7, name=b"old", start_ticks=100)
    before = one(table, 7)
    assert "Function not implemented" in str(before.note)
    proc.put(7, name=b"new", start_ticks=200)
    after = one(table, 7)
    assert (after.name, after.start_ticks) == ("new", 200)
    assert after.started_utc != before.started_utc
    proc.put(7, name=b"new", start_ticks=200, state="Z")
    assert one(table, 7).presence is Visibility.ENDED


def test_descriptors_that_become_free_again_are_used(proc: PretendedProc, start: Start) -> None:
    proc.held = {7: start().pid, 8: start().pid}
    proc.put(7)
    proc.put(8)
    table = proc.table(pidfd_limit=1)
    assert [facts.note is None for facts in table.refresh([7, 8]).values()] == [True, False]
    assert one(table, 8).note is None
    assert table.pidfd_count == 1
    table.close()


def test_another_namespaces_proc_is_read_without_pidfds(tmp_path: Path) -> None:
    proc = PretendedProc(tmp_path)
    (tmp_path / "self").unlink()
    (tmp_path / "self").symlink_to("1")
    proc.put(7)
    table = proc.table()
    facts = one(table, 7)
    assert (facts.presence, facts.start_ticks, proc.opened) == (Visibility.VISIBLE, 5000, 0)
    assert "another pid namespace" in str(facts.note)


def test_an_unreadable_proc_is_unknown_and_not_gone(proc: PretendedProc, start: Start) -> None:
    proc.held[7] = start().pid
    (proc.root / "7").mkdir()
    (proc.root / "7" / "stat").mkdir()  # reading a folder fails with EISDIR, as good an error as any
    table = proc.table()
    facts = one(table, 7)
    assert facts.presence is Visibility.UNSEEN
    assert "Is a directory" in str(facts.note)
    table.close()


# The same as in the tests above, but with the kernel's own output.

PROBE = """
import os, sys
from hegmd.node.processes.table import ProcessTable
if sys.argv[1] != "0":
    os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
table = ProcessTable()
pids = [int(word) for word in sys.argv[3:]]
found = table.refresh(pids, frozenset(pids) if sys.argv[2] == "unproven" else frozenset())
for pid in pids:
    print(found[pid].presence.name, found[pid].note)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to make namespaces")


def probe(*before: str, uid: int = 0, unproven: bool = False, pids: tuple[int, ...]) -> list[str]:
    words = (str(uid), "unproven" if unproven else "proven", *map(str, pids))
    argv = (*before, sys.executable, "-c", PROBE, *words)
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_root
def test_a_real_hidepid_mount(start: Start) -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    lines = probe("unshare", "-m", "sh", "-c", mount, "sh", uid=65534, pids=(start().pid,))
    assert lines == [f"UNSEEN {NOTE_HIDDEN}"]


@pytest.mark.thorough
@needs_root
def test_a_real_pid_namespace() -> None:
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    far_away = os.getpid() + 1_000_000
    assert probe(*inside, pids=(1, far_away)) == ["VISIBLE None", f"UNSEEN {NOTE_OTHER_NAMESPACE}"]
    assert probe(*inside, unproven=True, pids=(1,)) == [f"UNSEEN {NOTE_OTHER_NAMESPACE}"]
