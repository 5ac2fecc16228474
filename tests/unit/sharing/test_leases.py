"""Leases and their ends, the state file, and the priorities that callers may set."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmd.errors import BAD_REQUEST, BUSY, DENIED, INCOMPATIBLE, NOT_FOUND, REFUSED, UNAVAILABLE, HegmError
from hegmd.sharing import state_file
from hegmd.sharing.history import FIRST_RETRY_S, MAX_RETRY_S, History
from hegmd.sharing.leases import MAX_LEASES, MAX_LEASES_OF_USER, Leases
from hegmd.sharing.records import LeaseRecord, QueuedRecord, SharingState, SuspendedRecord
from tests.patience import HANG_S
from tests.unit.moving_node import start_ticks
from tests.unit.sharing.shared_node import rules

Child = subprocess.Popen[bytes]


def lease(**changes: Any) -> LeaseRecord:
    added = LeaseRecord(number=0, size_bytes=1, priority=80, uid=0, since_utc=0.0, made_ticks=0, boot="")
    return added.replace(**changes)


class Watched:
    """Leases, and a list of those that ended without a request."""

    def __init__(self, **changes: Any) -> None:
        self.ended: list[str] = []
        self.changes = 0
        self.over = anyio.Event()
        self.leases = Leases(start_ticks, boot="this", changed=self._note_change, ended=self._note_end, **changes)

    def _note_change(self) -> None:
        self.changes += 1

    def _note_end(self, lease: LeaseRecord, why: str) -> None:
        self.ended.append(f"{lease.id}: {why}")
        self.over.set()


async def test_a_lease_ends_with_its_process(process: Child) -> None:
    watched = Watched()
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        added = watched.leases.add(lease(pid=process.pid, start_ticks=start_ticks(process.pid)))
        assert [added.id, added.boot] == ["l1", "this"]
        process.kill()
        with anyio.fail_after(HANG_S):
            await watched.over.wait()
        tasks.cancel_scope.cancel()
    assert watched.ended == [f"l1: process {process.pid} has ended"]
    assert list(watched.leases) == []


async def test_a_reused_pid_does_not_belong_to_a_lease(process: Child) -> None:
    with pytest.raises(HegmError, match="has ended") as refused:
        Watched().leases.add(lease(pid=process.pid, start_ticks=1))
    assert refused.value.code is REFUSED
    watched = Watched()
    watched.leases.enter([lease(number=4, boot="this", pid=process.pid, start_ticks=1, is_held=True)], 5)
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        with anyio.fail_after(HANG_S):
            await watched.over.wait()
        tasks.cancel_scope.cancel()
    assert watched.ended == [f"l4: process {process.pid} has ended"]


async def test_a_lease_ends_with_its_waiting_process_until_that_process_was_notified(
    process: Child, second_process: Child
) -> None:
    watched = Watched()
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        for child in (process, second_process):
            watched.leases.add(lease(waiter_pid=child.pid, waiter_ticks=start_ticks(child.pid)))
        for number in (1, 2):
            watched.leases.hold(number, "gpu0")
        watched.leases.answer(1)
        process.kill()
        process.wait()
        second_process.kill()
        with anyio.fail_after(HANG_S):
            await watched.over.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert watched.ended == [f"l2: process {second_process.pid}, which waited, has ended"]
    assert [(lease_record.id, lease_record.gpu, lease_record.is_held) for lease_record in watched.leases] == [
        ("l1", "gpu0", True)
    ]


async def test_nothing_is_left_of_a_lease_that_was_waited_for_and_has_ended() -> None:
    """A program that made leases for long kept a descriptor of the daemon for each of them."""
    watched = Watched()
    ticks = start_ticks(os.getpid())
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            made = watched.leases.add(lease(waiter_pid=os.getpid(), waiter_ticks=ticks))
            watched.leases.hold(made.number, "gpu0")
            await anyio.wait_all_tasks_blocked()
            watched.leases.answer(made.number)
            watched.leases.drop(made.number)
        with anyio.fail_after(HANG_S):
            while len(os.listdir("/proc/self/fd")) > before:
                await anyio.wait_all_tasks_blocked()
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()


async def test_a_lease_ends_on_time_even_if_no_daemon_ran_then() -> None:
    now = [100.0]
    watched = Watched(clock=lambda: now[0])
    watched.leases.enter([lease(number=1, boot="this", until_s=99.0), lease(number=2, boot="before")], 2)
    assert [lease_record.id for lease_record in watched.leases] == ["l1"], "the second lease is of an earlier boot"
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        with anyio.fail_after(HANG_S):
            await watched.over.wait()
        tasks.cancel_scope.cancel()
    assert watched.ended == ["l1: its time is over"]
    assert watched.leases.next_number == 3


def test_a_repeated_request_finds_the_same_lease() -> None:
    leases = Watched().leases
    ticks = start_ticks(os.getpid())
    request = lease(waiter_pid=os.getpid(), waiter_ticks=ticks, size_bytes=2)
    added = leases.add(request)
    leases.hold(added.number, "gpu0")
    for difference in ({"size_bytes": 3}, {"gpu": "gpu1"}, {"waiter_ticks": 1}, {"waiter_pid": None}, {"name": "x"}):
        assert leases.waited_for(request.replace(**difference)) is None
    found = leases.waited_for(request)
    assert found is not None
    assert found.id == added.id
    leases.answer(added.number)
    assert leases.waited_for(request) is None


def test_a_lease_is_found_by_id_or_name_and_the_callers_first() -> None:
    leases = Watched().leases
    leases.add(lease(name="serve", uid=1))
    leases.add(lease(name="serve", uid=2))
    assert leases.named("l1", lambda uid: uid == 2).id == "l1"
    assert leases.named("serve", lambda uid: uid == 2).id == "l2"
    with pytest.raises(HegmError, match="there is no lease 'serv'") as unknown:
        leases.named("serv", lambda uid: uid == 2)
    assert unknown.value.code is NOT_FOUND
    assert "did you mean serve?" in unknown.value.hint


def test_an_administrator_releases_an_own_lease_by_name_before_those_of_others() -> None:
    """The oldest lease of that name was released, whoever owned it."""
    leases = Watched().leases
    for uid in (1, 0, 2):
        leases.add(lease(name="serve", uid=uid))
    assert leases.named("serve", lambda _uid: True, own_uid=0).id == "l2"
    leases.drop(2)
    with pytest.raises(HegmError, match=r"2 leases are called 'serve': l1 \(uid 1\), l3 \(uid 2\)") as several:
        leases.named("serve", lambda _uid: True, own_uid=0)
    assert several.value.code is BAD_REQUEST
    assert leases.named("l3", lambda _uid: True, own_uid=0).id == "l3"


def test_one_user_cannot_take_all_leases_nor_a_name_twice() -> None:
    leases = Watched().leases
    leases.check_name("serve", 1)
    leases.add(lease(name="serve", uid=1))
    leases.check_name("serve", 2)
    for name, message in (
        ("serve", "lease l1 is called 'serve' already"),
        ("l3", "looks like the id"),
        ("a b", "letter"),
    ):
        with pytest.raises(HegmError, match=message):
            leases.check_name(name, 1)
    for _ in range(MAX_LEASES_OF_USER - 1):
        leases.add(lease(uid=1))
    with pytest.raises(HegmError, match="64 leases of uid 1 are open") as full:
        leases.check_name(None, 1)
    assert full.value.code is BUSY


# ---- the file --------------------------------------------------------------------------------------------------------

STATE = SharingState(
    next_lease=8,
    leases=(lease(number=7, name="serve", pid=1, start_ticks=2, is_held=True, gpu="gpu0"),),
    queue=(QueuedRecord(job=3, since_utc=1.5, size_bytes=2),),
    suspended=(SuspendedRecord(job=4, since_utc=2.5, why="l7 needs gpu0", turn_s=1.0, operation="9"),),
)


def test_the_state_file_round_trips(tmp_path: Path) -> None:
    assert state_file.load(tmp_path) == SharingState()
    state_file.save(tmp_path, STATE)
    assert state_file.load(tmp_path) == STATE


@pytest.mark.parametrize("cut", [1, 30, -1])
def test_a_damaged_file_is_kept_and_its_lease_numbers_are_not_reused(tmp_path: Path, cut: int) -> None:
    state_file.save(tmp_path, STATE)
    path = tmp_path / state_file.NAME
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut < 0 else data[:cut] + b"x" + data[cut + 1 :])
    assert state_file.load(tmp_path) == SharingState(next_lease=8)
    assert (tmp_path / state_file.DAMAGED_NAME).exists()
    assert not path.exists()


def test_a_file_of_a_newer_version_is_not_touched(tmp_path: Path) -> None:
    state_file.save(tmp_path, STATE)
    path = tmp_path / state_file.NAME
    newer = path.read_bytes().replace(b"HEGMSHARING2", b"HEGMSHARING3")
    path.write_bytes(newer)
    with pytest.raises(HegmError, match="its version is 3, and this one knows 2") as refused:
        state_file.load(tmp_path)
    assert refused.value.code is INCOMPATIBLE
    assert path.read_bytes() == newer


def test_an_older_daemon_does_not_read_a_list_of_gpus_as_one(tmp_path: Path) -> None:
    """The version stayed the same when jobs were placed on several GPUs."""
    state_file.save(tmp_path, STATE)
    path = tmp_path / state_file.NAME
    data = path.read_bytes()
    assert data.startswith(b"HEGMSHARING2 ")
    path.write_bytes(data.replace(b"HEGMSHARING2", b"HEGMSHARING1"))
    assert state_file.load(tmp_path) == STATE, "the state of an older daemon is read"


def test_an_unreadable_file_does_not_count_as_missing(tmp_path: Path) -> None:
    (tmp_path / state_file.NAME).mkdir()
    with pytest.raises(HegmError, match="cannot be read: Is a directory") as refused:
        state_file.load(tmp_path)
    assert refused.value.code is UNAVAILABLE


# ---- priorities and the past -----------------------------------------------------------------------------------------


def test_a_priority_is_a_number_or_a_name_up_to_the_callers_limit() -> None:
    sharing_rules = rules()
    assert [sharing_rules.priority(priority, is_admin=True) for priority in ("production", 100, "0")] == [80, 100, 0]
    assert [sharing_rules.priority(priority, is_admin=False) for priority in ("normal", 50, "best-effort")] == [
        50,
        50,
        20,
    ]
    assert [sharing_rules.lease_priority(None, is_admin=is_admin) for is_admin in (True, False)] == [80, 50]
    for priority, code in ((51, DENIED), ("production", DENIED), (101, BAD_REQUEST), (-1, BAD_REQUEST)):
        with pytest.raises(HegmError) as refused:
            sharing_rules.priority(priority, is_admin=False)
        assert refused.value.code is code
    with pytest.raises(HegmError, match="no priority 'norma'") as unknown:
        sharing_rules.priority("norma", is_admin=True)
    assert unknown.value.hint.startswith("did you mean normal?")


def test_repeated_failures_double_the_retry_interval() -> None:
    history = History()
    waits_s = [history.note_failure("j1", "no", 0.0) for _ in range(9)]
    assert waits_s[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waits_s[-1] == MAX_RETRY_S
    history.note_success("j1")
    assert history.of("j1").retry_at_s is None
    assert history.note_state("j1", "running", 5.0, 2.0).since_s == 2.0
    assert history.note_state("j1", "running", 6.0).since_s == 2.0
    assert history.note_state("j1", "suspended", 7.0, 9.0).since_s == 7.0, "not later than now"
    history.keep_only({"j2"})
    assert history.of("j1").state == ""


async def test_the_time_of_a_lease_begins_when_its_memory_is_free() -> None:
    now = [100.0]
    watched = Watched(clock=lambda: now[0])
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        added = watched.leases.add(lease(hold_s=5.0, until_s=1000.0))
        now[0] = 500.0
        watched.leases.hold(added.number, "gpu0")
        (held,) = watched.leases
        assert held.until_s == 505.0
        tasks.cancel_scope.cancel()


def test_the_time_of_a_lease_begins_when_its_waiting_process_gets_the_reply() -> None:
    """On a slow disk a short lease ended before its process got the reply. The request failed as cancelled."""
    now = [100.0]
    leases = Watched(clock=lambda: now[0]).leases
    waiter = {"waiter_pid": os.getpid(), "waiter_ticks": start_ticks(os.getpid())}
    added = leases.add(lease(hold_s=5.0, until_s=1000.0, **waiter))
    leases.hold(added.number, "gpu0")
    (held,) = leases
    assert (held.is_held, held.until_s) == (True, 1000.0)
    now[0] = 500.0
    lease_record = leases.answer(added.number)
    assert lease_record is not None
    assert (lease_record.waiter_pid, lease_record.until_s) == (None, 505.0)


async def test_setting_the_clock_does_not_change_when_a_lease_ends() -> None:
    """Setting the clock back by a day prolonged a lease by a day. Setting it forward ended the lease."""
    now, utc = [100.0], [1e9]
    watched = Watched(clock=lambda: now[0], utc=lambda: utc[0])
    async with anyio.create_task_group() as tasks:
        await tasks.start(watched.leases.run)
        watched.leases.hold(watched.leases.add(lease(hold_s=0.05)).number, "gpu0")
        utc[0] -= 86400.0
        (held,) = watched.leases
        assert watched.leases.until_utc(held) == pytest.approx(utc[0] + 0.05)
        now[0] += 0.06
        with anyio.fail_after(HANG_S):
            await watched.over.wait()
        watched.leases.hold(watched.leases.add(lease(hold_s=5.0)).number, "gpu0")
        utc[0] += 1e6
        now[0] += 1.0
        await anyio.wait_all_tasks_blocked()
        (held,) = watched.leases
        assert watched.leases.until_utc(held) == pytest.approx(utc[0] + 4.0)
        tasks.cancel_scope.cancel()
    assert watched.ended == ["l1: its time is over"]


def test_setting_the_clock_back_does_not_make_a_lease_younger() -> None:
    """A lease from before the clock was set back always came last: later leases got the memory for ever."""
    now, utc = [100.0], [1e9]
    leases = Watched(clock=lambda: now[0], utc=lambda: utc[0]).leases
    early = leases.add(lease(since_utc=utc[0]))
    utc[0] -= 86400.0
    now[0] += 10.0
    later = leases.add(lease(since_utc=utc[0]))
    now[0] += 10.0
    assert leases.ages_s() == {early.number: 20.0, later.number: 10.0}


def test_users_with_many_leases_cannot_block_an_administrator() -> None:
    leases = Watched().leases
    for number in range(MAX_LEASES):
        leases.check_name(None, 1 + number // MAX_LEASES_OF_USER)
        leases.add(lease(uid=1 + number // MAX_LEASES_OF_USER))
    with pytest.raises(HegmError, match="are open") as full:
        leases.check_name(None, 5000)
    assert full.value.code is BUSY
    leases.check_name(None, 0, is_admin=True)
