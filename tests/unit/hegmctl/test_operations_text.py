"""`hegmctl ops` and `hegmctl op`: what an operation waits for is told with its command, and its story in full."""

from __future__ import annotations

import time

from hegmctl.operating_text import operation_text, operations_text, story_text, whole_story_text
from hegmctl.tables import Style
from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, OperationProcess, Reason, StoryLine, Wait

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
MOVING = SUSPENDED.replace(id="8", kind="migrate", phase="evacuating", waits=None)
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


def test_what_waits_stands_below_the_table_with_a_command_to_be_copied() -> None:
    lines = operations_text(m.OperationsReply(operations=(SUSPENDED, MOVING)), PIPE)
    assert lines[-3:] == ["Waiting:", "  operation 7: it is suspended", "    next: hegmctl resume 4711"]


def test_nothing_that_waits_is_no_heading() -> None:
    assert "Waiting:" not in operations_text(m.OperationsReply(operations=(MOVING,)), PIPE)


def test_one_that_is_held_says_its_reason_once() -> None:
    held = SUSPENDED.replace(
        failure=Reason(code="refused", message="no room", hint="free some"),
        waits=Wait(why="its job stands: no room", next="hegmctl resume 4711"),
    )
    text = "\n".join(operation_text(m.OperationReply(operation=held), PIPE))
    assert text.count("no room") == 1
    assert "next: hegmctl resume 4711" in text


def test_a_story_has_the_time_since_its_beginning() -> None:
    assert "    1.000 s  settling      recovered -> inspect 4711" in story_text(STORY, PIPE)


def test_a_whole_story_has_the_clock_the_cause_and_what_was_found() -> None:
    lines = whole_story_text(STORY, PIPE)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_790_000_001))
    assert f"{clock}.000  recovered, by hegmd was started: settling" in lines
    assert "    then: inspect 4711" in lines
    assert "    out_bytes 10" in lines
    assert "(3 earlier lines are no longer remembered)" in lines


def test_nothing_from_outside_reaches_the_terminal_raw() -> None:
    bad = SUSPENDED.replace(waits=Wait(why="\x1b[2J", next="\x1b[1m"))
    line = StoryLine(utc=0.0, event="\x1b[1m", cause="\x1b[1m", detail="\x1b[1m", phase="\x1b[1m", effects=("\x1b[1m",))
    for lines in (
        operations_text(m.OperationsReply(operations=(bad,)), PIPE),
        whole_story_text(m.StoryReply(operation=bad, story=(line,), untold=0), PIPE),
    ):
        assert not any("\x1b" in text for text in lines)
