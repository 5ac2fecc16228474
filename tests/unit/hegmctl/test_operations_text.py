"""`hegmctl ops` and `hegmctl op`: the condition that an operation waits for, with its command, and the full story."""

from __future__ import annotations

import time

import pytest

from hegmctl.operating_text import operation_text, operations_text, story_text
from hegmctl.story_text import WORDS, whole_story_text
from hegmctl.tables import Style
from hegmd.migration.machine.events import Event
from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, OperationProcess, OperationProgress, Reason, StoryLine, Wait
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, IncomingRequest
from tests.unit.hegmctl.running import hegmctl

PIPE = Style()
SUSPENDED = Operation(
    id="7",
    kind="suspend",
    phase="suspended",
    processes=(OperationProcess(pid=4711, gpu=None, to=None, size_bytes=2**30, state="out"),),
    created_utc=1_790_000_000.0,
    size_bytes=2**30,
    waits=Wait(why="it is suspended", next="hegmctl resume 4711"),
)
MOVING = SUSPENDED.replace(id="8", kind="migrate", phase="offloading", waits=None)
STORY = m.StoryReply(
    operation=SUSPENDED,
    story=(
        StoryLine(utc=1_790_000_000.0, event="", phase="planned"),
        StoryLine(
            utc=1_790_000_000.9996,
            event="recovered",
            cause="hegmd was started",
            phase="settling",
            effects=("inspect 4711",),
        ),
        StoryLine(utc=1_790_000_002.5, event="inspected", cause="inspect", detail="out_bytes 10", phase="suspended"),
    ),
    untold=3,
)


def test_waiting_operations_are_listed_below_the_table_with_a_command() -> None:
    lines = operations_text(m.OperationsReply(operations=(SUSPENDED, MOVING)), PIPE)
    assert lines[-3:] == ["Waiting:", "  operation 7: it is suspended", "    next: hegmctl resume 4711"]


def test_nothing_that_waits_is_no_heading() -> None:
    assert "Waiting:" not in operations_text(m.OperationsReply(operations=(MOVING,)), PIPE)


def test_a_held_operation_shows_its_reason_once() -> None:
    held = SUSPENDED.replace(
        failure=Reason(code="refused", message="no room", hint="free some"),
        waits=Wait(why="the job is parked: no memory", next="hegmctl resume 4711"),
    )
    text = "\n".join(operation_text(m.OperationReply(operation=held), PIPE))
    assert text.count("no room") == 1
    assert "next: hegmctl resume 4711" in text


def test_a_story_has_the_time_since_its_beginning() -> None:
    assert "    1.000 s  settling      recovered -> inspect 4711" in story_text(STORY, PIPE)


def test_a_story_printed_internal_fields_to_people() -> None:
    """Issue 14, row 14: `room_bytes None, shares_bytes (), token , is_earlier False`."""
    story = (
        StoryLine(utc=1_790_000_000.0, event="", phase="planned"),
        StoryLine(utc=1_790_000_001.0, event="parked", detail="worker 4711-99, boundary 8", phase="quiescing"),
        StoryLine(
            utc=1_790_000_001.5,
            event="restored",
            cause="restore",
            detail="worker 4711-99, landed None, pid None, token , is_earlier False",
            phase="restoring",
            effects=("reload 4711-99",),
        ),
        StoryLine(
            utc=1_790_000_002.0,
            event="failed",
            detail="worker 4711-99, fault refused, code refused, message no room, hint free some",
            phase="reloading",
        ),
        StoryLine(utc=1_790_000_004.0, event="cancel-requested", cause="request", detail="by uid 7", phase="reloading"),
        StoryLine(utc=1_790_000_004.0, event="of-a-newer-hegmd", detail="x 1", phase="reloading"),
    )
    lines = whole_story_text(m.StoryReply(operation=MOVING, story=story, untold=3), PIPE)
    clock = time.strftime("%H:%M:%S", time.localtime(1_790_000_001))
    assert [line.split() for line in lines[-5:-3]] == [
        [f"{clock}.000", "1.000", "s", "agent", "4711", *"stopped the training at a batch boundary".split()],
        [f"{clock}.500", "0.500", "s", "hegmd", *"restored the process on its GPU (process 4711)".split()],
    ]
    assert lines[-3].split()[1:] == "0.500 s hegmd a step failed (process 4711): no room".split()
    assert lines[-2].split()[1:] == "2.000 s uid 7 asked for a rollback".split()
    assert lines[-1].split()[1:] == "0.000 s hegmd of-a-newer-hegmd".split()
    assert "(3 earlier lines are no longer remembered)" in lines
    assert not any(word in "\n".join(lines) for word in ("None", "token", "is_earlier", "effect", "reload 4711"))


def test_every_event_of_the_machine_has_words_for_people() -> None:
    """Issue 14, row 14: no event is printed by its internal name."""
    assert set(WORDS) == {"", *Event.register}


def test_a_success_is_one_line() -> None:
    """Issue 14, row 13: hegmctl printed three lines for a suspended job."""
    line = operation_text(m.OperationReply(operation=SUSPENDED), PIPE)
    assert len(line) == 1
    assert line[0].endswith("; next: hegmctl resume 4711")
    held = SUSPENDED.replace(phase="holding", waits=Wait(why="its job stands at a boundary", next="hegmctl resume 1"))
    (line_of_held,) = operation_text(m.OperationReply(operation=held), PIPE)
    assert line_of_held.endswith("; waits: its job stands at a boundary; next: hegmctl resume 1")


def test_nothing_from_outside_reaches_the_terminal_raw() -> None:
    bad = SUSPENDED.replace(waits=Wait(why="\x1b[2J", next="\x1b[1m"))
    line = StoryLine(utc=0.0, event="\x1b[1m", cause="\x1b[1m", detail="\x1b[1m", phase="\x1b[1m", effects=("\x1b[1m",))
    for lines in (
        operations_text(m.OperationsReply(operations=(bad,)), PIPE),
        whole_story_text(m.StoryReply(operation=bad, story=(line,), untold=0), PIPE),
    ):
        assert not any("\x1b" in text for text in lines)


@pytest.mark.parametrize("phase", ["suspended", "holding"])
def test_a_success_is_not_reported_on_stderr_as_waiting(daemon: FakeDaemon, phase: str) -> None:
    """Issue 14, row 13: stderr and stdout had `operation 2: suspended waits: it is suspended; next: ...`."""
    rest = Wait(why="it is suspended", next="hegmctl resume 4711")
    ended = SUSPENDED.replace(phase=phase, waits=rest)

    def come_to_rest(caller: Caller, request: IncomingRequest) -> m.OperationReply:
        caller.event(
            request.id, OperationProgress(id="7", phase=phase, moved_bytes=0, size_bytes=10, doing=None, waits=rest)
        )
        return m.OperationReply(operation=ended)

    daemon.answers[m.Suspend] = come_to_rest
    ran = hegmctl("suspend", "4711", socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert len(ran.stdout.splitlines()) == 1
