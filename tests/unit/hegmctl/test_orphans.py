"""`hegmctl adopt` and the end of `hegmctl ops`: orphans with their command, kept until a confirmation."""

from __future__ import annotations

import subprocess

import pytest

from hegmctl.operating_text import dropped_text, operations_text, orphans_text
from hegmctl.tables import Style
from hegmd.errors import NOT_FOUND, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, Orphan
from tests.patience import HANG_S
from tests.unit.hegmctl.fake_daemon import FakeDaemon, failing, saying
from tests.unit.hegmctl.running import command, environment

PIPE = Style()
NAME = "hegm-pool-7-4711-1073741824.00c0ffee"
BYTES = Orphan(
    name=NAME,
    kind="bytes",
    pid=4711,
    size_bytes=2**30,
    where="disk",
    why="operation 7 is not in the journal",
    next=f"hegmctl adopt --drop {NAME}",
)
SUSPENDED = Operation(id="4", kind="suspend", phase="suspended", processes=(), created_utc=0.0, size_bytes=0)


def test_the_command_is_on_its_own_line() -> None:
    lines = orphans_text(m.OrphansReply(orphans=(BYTES,)), PIPE)
    assert lines[0] == "Needs your attention:"
    assert f"    next: hegmctl adopt --drop {NAME}" in lines
    assert "1.0 GiB" in " ".join(lines)
    assert "operation 7 is not in the journal" in " ".join(" ".join(lines).split())
    assert orphans_text(m.OrphansReply(orphans=()), PIPE) == ["There are no orphans."]


def test_an_unknown_size_is_not_shown_as_none_at_all() -> None:
    (line, *_) = orphans_text(m.OrphansReply(orphans=(BYTES.replace(size_bytes=None),)), PIPE)[1:]
    assert ": -, disk" in line


def test_operations_that_need_a_person_come_last() -> None:
    lines = operations_text(m.OperationsReply(operations=(), orphans=(BYTES,)), PIPE)
    assert lines[0] == "There was no operation on this node."
    assert "Needs your attention:" in lines
    assert "Needs your attention:" not in operations_text(m.OperationsReply(operations=()), PIPE)


def test_dropped_bytes_are_named() -> None:
    assert dropped_text(m.Dropped(name=NAME, size_bytes=2**30), PIPE) == [f"dropped: {NAME}, 1.0 GiB"]


def test_nothing_from_outside_reaches_the_terminal_raw() -> None:
    lines = orphans_text(m.OrphansReply(orphans=(BYTES.replace(why="\x1b[2J", next="\x1b[1m"),)), PIPE)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("adopt", "1", "2"), 2, "one JOB"),
        (("adopt", "1", "--drop", "x"), 2, "one JOB"),
        (("adopt", "--drop", NAME), 2, "--yes"),  # no person is at the terminal to answer
        (("cancel", "4", "--drop"), 2, "--yes"),
        (("recovery", "--drop", "j4"), 2, "--yes"),
    ],
)
def test_orphans_are_handled_one_at_a_time_and_nothing_is_dropped_unasked(
    daemon: FakeDaemon, words: tuple[str, ...], status: int, message: str
) -> None:
    daemon.answers[m.Orphans] = saying(m.OrphansReply(orphans=(BYTES,)))
    daemon.answers[m.Story] = saying(m.StoryReply(operation=SUSPENDED, story=()))
    daemon.answers[m.Recovery] = saying(m.RecoveryReply(taken_utc=0.0, jobs=()))
    assert message in failed(daemon, words, status)


@pytest.mark.parametrize("words", [("recovery", "--drop", "j4"), ("cancel", "4", "--drop"), ("adopt", "--drop", "x")])
def test_a_person_had_to_confirm_that_something_unknown_is_dropped(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    daemon.answers[m.Orphans] = saying(m.OrphansReply(orphans=(BYTES,)))
    for request in (m.Story, m.Recovery):
        daemon.answers[request] = failing(HegmError(NOT_FOUND, "it does not exist", "look again"))
    assert "--yes" not in failed(daemon, words, NOT_FOUND.exit_status)


def failed(daemon: FakeDaemon, words: tuple[str, ...], status: int) -> str:
    """Return the error of a command that ends with that status."""
    ran = subprocess.run(
        command(*words), env=environment(daemon.path), capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert ran.returncode == status, ran.stderr
    return ran.stderr
