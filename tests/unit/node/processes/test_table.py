"""Identity in the process table: one process from its first reading to its death, and never its successor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hegmd.node.processes.table import NOTE_ENDED, REREAD_PER_REFRESH, ProcessFacts, ProcessTable, Visibility
from tests.unit.node.processes.pretended_proc import PretendedProc, Start, end, one

POD = "214f3ba8-4b69-4bdb-a7d5-5ecc73f04ae9"


def test_a_living_process_is_known_by_pid_and_start_time(table: ProcessTable, start: Start) -> None:
    child = start()
    facts = one(table, child.pid)
    assert (facts.presence, facts.name, facts.uid, facts.note) == (Visibility.VISIBLE, "sleep", os.getuid(), None)
    stat = Path(f"/proc/{child.pid}/stat").read_text()
    assert facts.start_ticks == int(stat.rpartition(")")[2].split()[19])
    assert facts.started_utc is not None
    assert abs(facts.started_utc - os.stat(f"/proc/{child.pid}").st_mtime) < 60
    assert table.pidfd_count == 1


def test_unchanged_records_are_the_same_object(table: ProcessTable, start: Start) -> None:
    child = start()
    assert one(table, child.pid) is one(table, child.pid)


def test_a_death_shows_without_the_pid_being_reaped(table: ProcessTable, start: Start) -> None:
    child = start()
    assert one(table, child.pid).presence is Visibility.VISIBLE
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and a zombie still
    facts = one(table, child.pid)
    assert facts == ProcessFacts(pid=child.pid, presence=Visibility.ENDED, note=NOTE_ENDED)
    assert table.pidfd_count == 0
    child.wait()
    assert one(table, child.pid).presence is Visibility.ENDED


def test_a_process_stopped_by_a_signal_is_shown_as_stopped(table: ProcessTable, start: Start) -> None:
    child = start()
    assert one(table, child.pid).note is None
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    note = one(table, child.pid).note
    assert note == f"it is stopped by a signal or a debugger; run: kill -CONT {child.pid}"
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)
    assert one(table, child.pid).note is None


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
    assert one(table, child.pid).presence is Visibility.VISIBLE
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
    assert (after.presence, after.pid) == (Visibility.VISIBLE, before.pid)
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
    assert (facts.presence, facts.name, facts.start_ticks) == (Visibility.ENDED, None, None)
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


@pytest.mark.thorough
def test_a_change_with_the_same_identity_is_detected(proc: PretendedProc, start: Start) -> None:
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
    assert one(table, 7).presence is Visibility.VISIBLE
    proc.remove(7)
    assert one(table, 7).name == "train"  # unreadable for a moment is no news
    end(child)
    assert one(table, 7).presence is Visibility.ENDED
    table.close()


def test_no_facts_of_the_successor_of_a_death_in_the_middle_of_reading_again(proc: PretendedProc, start: Start) -> None:
    old, other = start(), start()
    proc.held = {7: old.pid}
    proc.put(7, name=b"old", start_ticks=100)
    proc.put(8)

    def open_pidfd(pid: int) -> int:
        if pid == 8:  # admitted in the same refresh, before the known ones are read again
            end(old)
            proc.put(7, name=b"new", start_ticks=200)
            return os.pidfd_open(other.pid)
        return proc.open_pidfd(pid)

    table = ProcessTable(str(proc.root), open_pidfd=open_pidfd)
    before = one(table, 7)
    found = table.refresh([7, 8])
    assert found[8].presence is Visibility.VISIBLE
    assert found[7] is before
    assert table.refresh([7, 8])[7].presence is Visibility.ENDED
    table.close()
