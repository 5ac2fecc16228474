"""Command lines and users' names: when they are read, and what clients get while a look-up hangs."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

import pytest

from hegmd.node.processes.lookups import (
    NO_USER_NAME_MAX_AGE_S,
    NOTE_STUCK,
    NOTE_UNREAD,
    NOTE_UNREADABLE,
    REREAD_PER_ROUND,
    USER_NAME_MAX_AGE_S,
    Lookups,
)
from hegmd.node.processes.procfs import COMMAND_MAX_CHARS, ProcessGone, Unreadable, read_command, read_start
from tests.patience import HANG_S

Process = tuple[int, int, str, int]


class DictNode:
    """A node whose command lines and users are in dicts."""

    def __init__(self) -> None:
        self.commands: dict[int, str] = {}
        self.users: dict[int, str] = {0: "root", 1000: "ada"}
        self.calls: list[int] = []
        self.now = 0.0
        self.error: Exception | None = None

    def read_command(self, _: str, pid: int) -> str:
        self.calls.append(pid)
        if self.error is not None:
            raise self.error
        return self.commands[pid]

    def user_name(self, uid: int) -> str:
        self.calls.append(uid)
        return self.users[uid]

    def lookups(self, read: Callable[[str, int], str] | None = None) -> Lookups:
        return Lookups(read_command=read or self.read_command, user_name=self.user_name, monotonic=lambda: self.now)


def me(name: str = "python3", uid: int = 1000) -> Process:
    """This very process, so that its start time can be read."""
    return os.getpid(), read_start("/proc", os.getpid())[0], name, uid


@pytest.fixture
def node() -> DictNode:
    node = DictNode()
    node.commands[os.getpid()] = "python3 train.py"
    return node


def round_of(lookups: Lookups, *processes: Process) -> None:
    lookups.read(lookups.request_for(processes))


def test_nothing_is_known_before_it_was_looked_up(node: DictNode) -> None:
    lookups = node.lookups()
    pid, start_ticks, _, _ = me()
    assert lookups.command(pid, start_ticks) == (None, NOTE_UNREAD)
    assert lookups.user(1000) is None
    wanted = lookups.request_for([me()])
    assert wanted.urgent
    lookups.read(wanted)
    assert lookups.command(pid, start_ticks) == ("python3 train.py", None)
    assert lookups.user(1000) == "ada"


def test_the_known_are_read_again_in_small_shares_and_without_hurry(node: DictNode) -> None:
    pid, start_ticks, _, _ = me()
    lookups = node.lookups()
    round_of(lookups, me())
    others = [(pid, start_ticks, "python3", 1000)] * (2 * REREAD_PER_ROUND + 5)
    sizes = [len(lookups.request_for(others).commands) for _ in range(3)]
    assert sizes == [REREAD_PER_ROUND, REREAD_PER_ROUND, 5]
    assert not lookups.request_for(others).urgent
    node.commands[pid] = "python3 evaluate.py"
    round_of(lookups, me())
    assert lookups.command(pid, start_ticks) == ("python3 evaluate.py", None)


def test_a_new_name_means_a_new_program(node: DictNode) -> None:
    lookups = node.lookups()
    round_of(lookups, me("bash"))
    assert not lookups.request_for([me("bash")]).urgent
    assert lookups.request_for([me("python3")]).urgent


def test_the_successor_of_a_pid_does_not_get_the_words_of_its_predecessor(node: DictNode) -> None:
    lookups = node.lookups()
    pid, start_ticks, name, uid = me()
    earlier = (pid, start_ticks - 100, name, uid)
    round_of(lookups, earlier)
    assert lookups.command(pid, start_ticks - 100) == (None, NOTE_UNREAD)
    round_of(lookups, me())
    assert lookups.command(pid, start_ticks) == ("python3 train.py", None)
    assert lookups.command(pid, start_ticks - 100) == (None, NOTE_UNREAD)


def test_exited_processes_are_forgotten(node: DictNode) -> None:
    lookups = node.lookups()
    pid, start_ticks, _, _ = me()
    round_of(lookups, me())
    round_of(lookups)
    assert lookups.command(pid, start_ticks) == (None, NOTE_UNREAD)


def test_an_unreadable_command_line_is_reported_and_not_read_each_time(node: DictNode) -> None:
    lookups = node.lookups()
    pid, start_ticks, _, _ = me()
    node.error = Unreadable("Permission denied")
    round_of(lookups, me())
    assert lookups.command(pid, start_ticks) == (None, NOTE_UNREADABLE)
    assert not lookups.request_for([me()]).urgent
    node.error = ProcessGone()
    round_of(lookups, me())
    assert lookups.command(pid, start_ticks) == (None, NOTE_UNREADABLE)
    node.error = None
    round_of(lookups, me())
    assert lookups.command(pid, start_ticks) == ("python3 train.py", None)


def test_users_are_read_at_intervals(node: DictNode) -> None:
    lookups = node.lookups()
    round_of(lookups, me(uid=1000), me(uid=4242))
    assert (lookups.user(1000), lookups.user(4242)) == ("ada", None)
    assert lookups.request_for([me(uid=1000), me(uid=4242)]).uids == ()
    node.now += NO_USER_NAME_MAX_AGE_S
    assert lookups.request_for([me(uid=1000), me(uid=4242)]).uids == (4242,)
    node.now += USER_NAME_MAX_AGE_S
    wanted = lookups.request_for([me(uid=1000), me(uid=4242)])
    assert set(wanted.uids) == {1000, 4242}
    assert not wanted.urgent  # the old name serves until the new one is there


def test_a_hanging_command_line_is_named_and_the_others_are_read(node: DictNode) -> None:
    entered, release = threading.Event(), threading.Event()
    lookups = node.lookups()
    pid, start_ticks, _, _ = me()
    round_of(lookups, (pid, start_ticks, "python3", 0))

    def hang(_: str, uid: int) -> str:
        entered.set()
        assert release.wait(HANG_S)
        raise ProcessGone

    stuck = Lookups(read_command=hang, user_name=node.user_name)
    thread = threading.Thread(target=stuck.read, args=(stuck.request_for([me()]),))
    thread.start()
    assert entered.wait(HANG_S)
    assert stuck.command(pid, start_ticks) == (None, NOTE_STUCK)
    assert stuck.command(1, 1) == (None, NOTE_UNREAD)
    release.set()
    thread.join()
    assert stuck.command(pid, start_ticks) == (None, NOTE_UNREAD)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "sh -c echo; read x"),
        ((b"\xff\xfe", b"two words"), "sh -c echo; read x \ufffd\ufffd two words"),
        ((b"a" * 9000,), "sh -c echo; read x " + "a" * (COMMAND_MAX_CHARS - 20) + "…"),
    ],
)
def test_command_lines_of_real_processes(words: tuple[bytes, ...], expected: str) -> None:
    argv = (b"sh", b"-c", b"echo; read x", *words)
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # the kernel shows no command line before exec is through
        assert read_command("/proc", child.pid) == expected
        child.kill()


def test_a_process_without_a_command_line_shows_its_name_in_brackets() -> None:
    kernel_thread = 2
    try:
        name = read_start("/proc", kernel_thread)[1]
    except ProcessGone:
        pytest.skip("no kernel threads in this pid namespace")
    if read_command("/proc", kernel_thread) != f"[{name}]":
        pytest.fail(f"process 2 is {read_command('/proc', kernel_thread)!r}")
