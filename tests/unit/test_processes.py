"""The process table against real processes, and against a pretended /proc where a real one cannot be brought to it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hegmd.processes.table import (
    NOTE_ENDED,
    NOTE_GONE_OR_HIDDEN,
    NOTE_HIDDEN,
    NOTE_NO_PID,
    NOTE_OTHER_NAMESPACE,
    REREAD_PER_REFRESH,
    Presence,
    ProcessFacts,
    ProcessTable,
)

Start = Callable[..., "subprocess.Popen[bytes]"]
POD = "214f3ba8-4b69-4bdb-a7d5-5ecc73f04ae9"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts children that do nothing until they are killed, at the latest at the end of the test."""
    children: list[subprocess.Popen[bytes]] = []

    def run(*argv: str | bytes) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(argv or ("sleep", "1000"), stdin=subprocess.PIPE)
        children.append(child)
        return child

    yield run
    for child in children:
        end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


@pytest.fixture
def table() -> Iterator[ProcessTable]:
    table = ProcessTable()
    yield table
    table.close()


class PretendedProc:
    """A /proc of files, whose pids stand for whatever process the test holds a pidfd of."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.held: dict[int, int] = {}
        self.opened = 0
        (root / "self").symlink_to(str(os.getpid()))

    def put(
        self,
        pid: int,
        *,
        name: bytes = b"train",
        start_ticks: int = 5000,
        uids: tuple[int, int, int] = (1000, 1000, 1000),
        cgroup: str = "0::/system.slice/train.service\n",
        state: str = "S",
    ) -> None:
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        rest = " ".join([state, *["0"] * 18, str(start_ticks), *["0"] * 30])
        (folder / "stat").write_bytes(b"%d (%s) %s\n" % (pid, name, rest.encode()))
        (folder / "status").write_text(
            f"Name:\tx\nUid:\t{uids[0]}\t{uids[1]}\t{uids[2]}\t{uids[1]}\nGid:\t0\t0\t0\t0\n"
        )
        (folder / "cgroup").write_text(cgroup)

    def remove(self, pid: int) -> None:
        for file in (self.root / str(pid)).iterdir():
            file.unlink()
        (self.root / str(pid)).rmdir()

    def open_pidfd(self, pid: int) -> int:
        self.opened += 1
        if pid not in self.held:
            raise OSError(errno.ESRCH, "No such process")
        return os.pidfd_open(self.held[pid])

    def table(self, **options: int) -> ProcessTable:
        return ProcessTable(str(self.root), open_pidfd=self.open_pidfd, **options)


@pytest.fixture
def proc(tmp_path: Path) -> PretendedProc:
    return PretendedProc(tmp_path)


def one(table: ProcessTable, pid: int, unproven: frozenset[int] = frozenset()) -> ProcessFacts:
    return table.refresh([pid], unproven)[pid]


def test_a_living_process_is_known_by_pid_and_start_time(table: ProcessTable, start: Start) -> None:
    child = start()
    facts = one(table, child.pid)
    assert (facts.presence, facts.name, facts.uid, facts.note) == (Presence.VISIBLE, "sleep", os.getuid(), None)
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    assert facts.start_ticks == int(stat.rpartition(")")[2].split()[19])
    assert facts.started_utc is not None
    assert abs(facts.started_utc - os.stat(f"/proc/{child.pid}").st_mtime) < 60
    assert table.pidfd_count == 1


def test_what_did_not_change_is_the_same_object(table: ProcessTable, start: Start) -> None:
    child = start()
    assert one(table, child.pid) is one(table, child.pid)


def test_a_death_shows_without_the_pid_being_reaped(table: ProcessTable, start: Start) -> None:
    child = start()
    assert one(table, child.pid).presence is Presence.VISIBLE
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie still
    facts = one(table, child.pid)
    assert facts == ProcessFacts(pid=child.pid, presence=Presence.ENDED, note=NOTE_ENDED)
    assert table.pidfd_count == 0
    child.wait()
    assert one(table, child.pid).presence is Presence.ENDED


def test_a_process_that_leaves_the_gpu_gives_its_descriptor_back(table: ProcessTable, start: Start) -> None:
    first, second = start(), start()
    table.refresh([first.pid, second.pid])
    assert table.pidfd_count == 2
    assert table.refresh([second.pid]).keys() == {second.pid}
    assert table.pidfd_count == 1
    assert table.refresh([]) == {}
    assert table.pidfd_count == 0


def test_closing_twice_and_using_again_is_fine(start: Start) -> None:
    table, child = ProcessTable(), start()
    one(table, child.pid)
    table.close()
    table.close()
    assert one(table, child.pid).presence is Presence.VISIBLE
    table.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root may choose the next pid")
def test_a_reused_pid_is_a_new_process(table: ProcessTable, start: Start) -> None:
    old = start("sleep", "1000")
    before = one(table, old.pid)
    end(old)
    for _ in range(50):  # others on this machine start processes too
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(old.pid - 1))
        new = start("tail", "-f", "/dev/null")
        if new.pid == old.pid:
            break
        end(new)
    else:
        pytest.skip("the machine is too busy to hand out a pid on request")
    after = one(table, old.pid)
    assert (after.presence, after.pid) == (Presence.VISIBLE, before.pid)
    assert after is not before
    assert after.started_utc is not None
    assert before.started_utc is not None
    assert after.started_utc >= before.started_utc
    assert table.pidfd_count == 1


def test_a_reused_pid_gets_nothing_of_its_predecessor(proc: PretendedProc, start: Start) -> None:
    old, new = start(), start()
    proc.held[4711] = old.pid
    proc.put(4711, name=b"old", start_ticks=100, uids=(1, 1, 1), cgroup=f"0::/kubepods/pod{POD}\n")
    table = proc.table()
    before = one(table, 4711)
    assert (before.name, before.uid, before.workload is not None) == ("old", 1, True)
    end(old)
    proc.held[4711] = new.pid
    proc.put(4711, name=b"new", start_ticks=200, uids=(2, 2, 2), cgroup="0::/\n")
    after = one(table, 4711)
    assert (after.name, after.uid, after.start_ticks, after.workload) == ("new", 2, 200, None)
    table.close()


def test_a_process_that_ends_while_it_is_read_leaves_no_facts(proc: PretendedProc, start: Start) -> None:
    """The successor of a pid is in /proc already when the predecessor's descriptor was just opened."""
    old = start()
    proc.put(4711, name=b"successor", start_ticks=900)

    def open_and_kill(pid: int) -> int:
        pidfd = os.pidfd_open(old.pid)
        end(old)
        return pidfd

    table = ProcessTable(str(proc.root), open_pidfd=open_and_kill)
    facts = one(table, 4711)
    assert (facts.presence, facts.name, facts.start_ticks) == (Presence.ENDED, None, None)
    assert table.pidfd_count == 0
    table.close()


def test_names_may_hold_anything(proc: PretendedProc, start: Start) -> None:
    proc.held[7] = start().pid
    proc.put(7, name=b"a) S 1 (\n\xff", start_ticks=77)
    table = proc.table()
    facts = one(table, 7)
    assert (facts.name, facts.start_ticks) == ("a) S 1 (\n�", 77)
    table.close()


@pytest.mark.parametrize(
    ("uids", "owner"), [((5, 5, 5), 5), ((5, 0, 0), 0), ((0, 5, 5), 0), ((5, 5, 0), 0), ((5, 6, 6), 6)]
)
def test_a_process_with_several_users_is_the_mightiest_ones(
    proc: PretendedProc, start: Start, uids: tuple[int, int, int], owner: int
) -> None:
    proc.held[7] = start().pid
    proc.put(7, uids=uids)
    table = proc.table()
    assert one(table, 7).uid == owner
    table.close()


def test_a_change_under_the_same_identity_is_seen_in_time(proc: PretendedProc, start: Start) -> None:
    child = start()
    pids = range(10, 10 + 3 * REREAD_PER_REFRESH)
    for pid in pids:
        proc.held[pid] = child.pid
        proc.put(pid, name=b"python3")
    table = proc.table()
    first = table.refresh(pids)
    for pid in pids:
        proc.put(pid, name=b"pt_train", cgroup="0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    changed = [sum(facts.name == "pt_train" for facts in table.refresh(pids).values()) for _ in range(3)]
    assert changed == [REREAD_PER_REFRESH, 2 * REREAD_PER_REFRESH, 3 * REREAD_PER_REFRESH]
    last = table.refresh(pids)[10]
    assert last.workload is not None
    assert (last.workload.kind, last.started_utc) == ("slurm", first[10].started_utc)
    table.close()


def test_no_facts_of_a_death_in_the_middle_of_reading_again(proc: PretendedProc, start: Start) -> None:
    child = start()
    proc.held[7] = child.pid
    proc.put(7)
    table = proc.table()
    assert one(table, 7).presence is Presence.VISIBLE
    proc.remove(7)
    assert one(table, 7).name == "train"  # unreadable for a moment is no news
    end(child)
    assert one(table, 7).presence is Presence.ENDED
    table.close()


def test_a_hidden_process_is_told_from_an_ended_one(proc: PretendedProc, start: Start) -> None:
    child = start()
    proc.held[7] = child.pid
    table = proc.table()
    facts = one(table, 7)
    assert (facts.presence, facts.note, facts.start_ticks) == (Presence.UNSEEN, NOTE_HIDDEN, None)
    proc.put(7)
    assert one(table, 7).presence is Presence.VISIBLE
    proc.remove(7)
    end(child)
    assert one(table, 7).presence is Presence.ENDED
    table.close()


def test_a_pid_that_nobody_has_in_the_first_namespace_has_ended(table: ProcessTable, start: Start) -> None:
    child = start()
    end(child)
    facts = one(table, child.pid)
    expected = Presence.ENDED if table.in_first_namespace else Presence.UNSEEN
    assert (facts.presence, facts.start_ticks) == (expected, None)


def test_without_a_pidfd_an_ended_process_cannot_be_told_from_a_hidden_one(start: Start) -> None:
    def no_pidfds(pid: int) -> int:
        raise OSError(errno.EPERM, "Operation not permitted")

    table, child = ProcessTable(open_pidfd=no_pidfds), start()
    end(child)
    facts = one(table, child.pid)
    assert facts.presence is Presence.UNSEEN
    assert facts.note == (NOTE_GONE_OR_HIDDEN if table.in_first_namespace else NOTE_OTHER_NAMESPACE)


def test_a_pid_that_nobody_has_elsewhere_is_in_another_namespace(proc: PretendedProc) -> None:
    table = proc.table()
    facts = one(table, 7)
    assert (facts.presence, facts.note) == (Presence.UNSEEN, NOTE_OTHER_NAMESPACE)
    table.close()


@pytest.mark.parametrize("pid", [0, -1])
def test_a_pid_that_is_none(table: ProcessTable, pid: int) -> None:
    assert one(table, pid) == ProcessFacts(pid=pid, presence=Presence.UNSEEN, note=NOTE_NO_PID)


def test_an_unproven_pid_needs_a_gpus_device_outside_the_first_namespace(proc: PretendedProc, start: Start) -> None:
    proc.held[7] = start().pid
    proc.put(7)
    table = proc.table()
    assert one(table, 7, frozenset({7})).note == NOTE_OTHER_NAMESPACE
    assert one(table, 7, frozenset({7})).presence is Presence.UNSEEN
    (proc.root / "7" / "fd").mkdir()
    (proc.root / "7" / "fd" / "3").symlink_to("/dev/kfd")
    assert one(table, 7, frozenset({7})).presence is Presence.VISIBLE
    table.close()


def test_with_too_few_descriptors_the_start_time_is_read_each_time(start: Start) -> None:
    table = ProcessTable(pidfd_limit=1)
    held, other = start(), start()
    facts = table.refresh([held.pid, other.pid])
    loose = next(pid for pid, found in facts.items() if found.note is not None)
    assert table.pidfd_count == 1
    assert facts[loose].presence is Presence.VISIBLE
    assert "LimitNOFILE" in str(facts[loose].note)
    assert table.refresh([held.pid, other.pid])[loose] is facts[loose]
    end(held if held.pid == loose else other)
    assert table.refresh([held.pid, other.pid])[loose].presence is Presence.ENDED
    table.close()


def test_a_reused_pid_without_descriptors_is_told_by_its_start_time(proc: PretendedProc) -> None:
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
    assert one(table, 7).presence is Presence.ENDED


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
    assert (facts.presence, facts.start_ticks, proc.opened) == (Presence.VISIBLE, 5000, 0)
    assert "another namespace's" in str(facts.note)


def test_an_unreadable_proc_is_unknown_and_not_gone(proc: PretendedProc, start: Start) -> None:
    proc.held[7] = start().pid
    (proc.root / "7").mkdir()
    (proc.root / "7" / "stat").mkdir()  # reading a folder fails with EISDIR, as good an error as any
    table = proc.table()
    facts = one(table, 7)
    assert facts.presence is Presence.UNSEEN
    assert "Is a directory" in str(facts.note)
    table.close()


# What the tests above pretend, once more in the kernel's own words.

PROBE = """
import os, sys
from hegmd.processes.table import ProcessTable
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
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=15)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_root
def test_a_real_hidepid_mount(start: Start) -> None:
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    lines = probe("unshare", "-m", "sh", "-c", mount, "sh", uid=65534, pids=(start().pid,))
    assert lines == [f"UNSEEN {NOTE_HIDDEN}"]


@needs_root
def test_a_real_pid_namespace() -> None:
    inside = ("unshare", "--pid", "--fork", "--mount-proc")
    far_away = os.getpid() + 1_000_000
    assert probe(*inside, pids=(1, far_away)) == ["VISIBLE None", f"UNSEEN {NOTE_OTHER_NAMESPACE}"]
    assert probe(*inside, unproven=True, pids=(1,)) == [f"UNSEEN {NOTE_OTHER_NAMESPACE}"]
