"""The part of a move that each moment of the downtime belongs to, from a written log and story."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from hegmd.protocol.messages import StoryReply
from hegmd.protocol.operations import Operation, StoryLine
from tests.gpu.moves_parts import AROUND, SMALL, is_within_order, parts_of

BEGAN = 1_700_000_000.0
PID = 4711


def log_line(at_ms: int, what: str) -> str:
    at = datetime.fromtimestamp(BEGAN, timezone.utc).replace(microsecond=at_ms * 1000)
    return f"{at.isoformat(timespec='milliseconds')} debug hegmd.x: {what}"


def story_reply(*phases: tuple[int, str]) -> StoryReply:
    lines = tuple(StoryLine(utc=BEGAN + at_ms / 1e3, event="", phase=phase) for at_ms, phase in phases)
    operation = Operation(id="7", kind="migrate", phase="done", processes=(), created_utc=BEGAN, size_bytes=0)
    return StoryReply(operation=operation, story=lines)


STORY = ((-50, "quiescing"), (2, "offloading"), (100, "checkpointing"), (400, "done"))
LOG = [
    log_line(1, f"process {PID}: park took 51.0 ms"),
    log_line(3, "operation 7: offloading after parked is on disk, in 1.0 ms"),
    log_line(90, f"process {PID}: free took 30.0 ms"),
    log_line(90, f"process {PID}: free.give-back took 20.0 ms"),
    log_line(95, "operation 7: offload took 90.0 ms"),
    log_line(95, "process 12: survey took 5000.0 ms"),
    log_line(399, "operation 7: checkpoint took 298.0 ms"),
    log_line(390, "helper: checkpoint took 280.0 ms"),
    log_line(398, "node: look took 2.0 ms"),
    log_line(397, "helper: hold took 6.0 ms"),
]


def parts_ms() -> dict[str, int]:
    parts = parts_of(story_reply(*STORY), LOG, PID, BEGAN, BEGAN + 0.41)
    return {name: round(took_s * 1e3) for name, took_s in parts.items()}


def test_the_innermost_running_part_has_the_moment() -> None:
    assert parts_ms() == {
        "helper checkpoint": 280,
        "effect offload": 60,
        "agent free": 30,
        "agent free.give-back": 20,
        AROUND: 10,
        "effect checkpoint": 11,
        "phase offloading": 7,
        "helper hold": 5,
        "node look": 2,
        "disk parked": 1,
        "phase checkpointing": 2,
        "agent park": 1,
        "phase quiescing": 1,
    }


def test_all_parts_add_up_to_the_downtime() -> None:
    parts = parts_of(story_reply(*STORY), LOG, PID, BEGAN, BEGAN + 0.41)
    assert sum(took_s for name, took_s in parts.items() if not is_within_order(name)) == pytest.approx(0.41, abs=1e-6)


def test_small_parts_are_counted_together() -> None:
    log = [log_line(10, "helper: state took 0.3 ms")]
    parts = parts_of(story_reply((-5, "offloading"), (20, "done")), log, PID, BEGAN, BEGAN + 0.02)
    assert {name: round(took_s * 1e3, 1) for name, took_s in parts.items()} == {"phase offloading": 19.7, SMALL: 0.3}


def test_events_outside_that_time_are_not_counted() -> None:
    assert parts_of(story_reply(*STORY), LOG, PID, BEGAN + 0.5, BEGAN + 0.51) == {AROUND: pytest.approx(0.01)}
