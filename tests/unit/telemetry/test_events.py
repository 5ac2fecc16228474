"""The event log: numbering, forgetting, and readers that are early, late, slow or gone."""

from __future__ import annotations

import re
import time
from pathlib import Path

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from hegmd.errors import BAD_REQUEST, Bug, HegmError
from hegmd.migration.machine.describe import HAPPENINGS
from hegmd.migration.machine.next_effects import TERMINAL
from hegmd.protocol.snapshots import EVENT_KINDS, Event
from hegmd.telemetry.events import MISSED, EventLog, require_kinds
from tests.cells import in_one_test


def log_with(count: int, capacity: int = 1000) -> EventLog:
    log = EventLog(capacity, clock=lambda: 1000.0)
    for number in range(1, count + 1):
        log.record("gpu.lost" if number % 2 else "process.started", "info", f"number {number}")
    return log


def seqs(events: tuple[Event, ...]) -> list[int]:
    return [event.seq for event in events]


def test_events_are_numbered_from_one_and_keep_their_facts() -> None:
    log = EventLog(clock=lambda: 12.5)
    event = log.record("gpu.lost", "error", "gpu0 is gone", gpu="gpu0", pid=7, facts={"uuid": "GPU-1"})
    assert event == Event(
        seq=1,
        time_utc=12.5,
        kind="gpu.lost",
        severity="error",
        message="gpu0 is gone",
        gpu="gpu0",
        pid=7,
        facts={"uuid": "GPU-1"},
    )
    assert log.next_seq == 2
    assert log.remembered() == (event,)


def test_an_unknown_severity_is_a_bug() -> None:
    log = EventLog()
    with pytest.raises(Bug):
        log.record("gpu.lost", "catastrophe", "boom")
    assert log.next_seq == 1


def test_the_oldest_are_forgotten_and_counted_all_the_same() -> None:
    log = log_with(10, capacity=4)
    assert seqs(log.remembered()) == [7, 8, 9, 10]
    assert log.counts == {"gpu.lost": 5, "process.started": 5}


def test_events_that_are_all_remembered_have_no_gap() -> None:
    assert [event.kind for event in log_with(10, capacity=4).remembered(since=0)].count(MISSED) == 0


def test_asking_for_forgotten_events_is_answered_with_a_count() -> None:
    missed, *rest = log_with(10, capacity=4).remembered(since=3)
    assert (missed.kind, missed.severity, missed.facts) == (MISSED, "warning", {"count": 4, "next_seq": 7})
    assert missed.seq == 6
    assert [event.seq for event in rest] == [7, 8, 9, 10]


def test_an_event_number_from_before_a_restart_returns_everything_and_a_note() -> None:
    missed, *rest = log_with(3).remembered(since=500)
    assert (missed.kind, missed.facts["count"]) == (MISSED, None)
    assert [event.seq for event in rest] == [1, 2, 3]


def test_an_event_number_of_another_run_does_not_count_for_this_one() -> None:
    """A daemon that had come as far as its predecessor left out what it had done until then."""
    log = log_with(9)
    missed, *rest = log.remembered(since=5, run="another")
    assert (missed.kind, missed.facts["count"]) == (MISSED, None)
    assert [event.seq for event in rest] == list(range(1, 10))
    for run in (log.run, None, ""):
        assert seqs(log.remembered(since=5, run=run)) == [5, 6, 7, 8, 9]
    assert log.remembered(since=0, run="another")[0].seq == 1, "who asks for everything has lost nothing"
    assert EventLog().run != EventLog().run


@in_one_test(
    ("kinds", "says", "hints"),
    [
        (("gpu", "gup"), "'gup'", "config, events, gpu,"),
        (("gpu.lots",), "'gpu.lots'", "gpu.back, gpu.evacuated,"),
        (("gpu.",), "'gpu.'", "gpu.back"),
        (("",), "''", "config"),
        (("x" * 1000,), "'" + "x" * 40 + "'", "config"),
    ],
)
def test_an_unknown_kind_was_awaited_without_end(kinds: tuple[str, ...], says: str, hints: str) -> None:
    with pytest.raises(HegmError) as refused:
        require_kinds(kinds)
    assert refused.value.code is BAD_REQUEST
    assert says in refused.value.message
    assert hints in refused.value.hint


def test_every_recorded_kind_can_be_requested() -> None:
    sources = "\n".join(path.read_text() for path in (Path(__file__).parents[3] / "hegmd").rglob("*.py"))
    recorded = set(re.findall(r'record(?:_gpu|_event)?\(\s*"([a-z_]+\.[a-z_-]+)"', sources))
    recorded |= set(re.findall(r'_kill\(.+"(job\.[a-z-]+)"\)', sources))
    recorded |= {f"operation.{phase}" for phase in TERMINAL} | set(HAPPENINGS) | {MISSED}
    table = {kind for kinds in EVENT_KINDS.values() for kind in kinds}
    assert recorded == table
    assert all(kind.startswith(f"{family}.") for family, kinds in EVENT_KINDS.items() for kind in kinds)
    require_kinds([*EVENT_KINDS, *table])


def test_kinds_choose_by_name_or_by_family() -> None:
    log = log_with(4)
    log.record("gpu_like.thing", "info", "not of the family")
    assert seqs(log.remembered(kinds=("gpu",))) == [1, 3]
    assert seqs(log.remembered(kinds=("process.started",))) == [2, 4]
    assert seqs(log.remembered(since=3, kinds=("gpu", "process"))) == [3, 4]
    assert log.remembered(kinds=("gpu.los",)) == ()


def test_a_gap_is_reported_for_every_requested_kind() -> None:
    events = log_with(10, capacity=4).remembered(since=1, kinds=("inventory",))
    assert [event.kind for event in events] == [MISSED]


async def test_a_reader_gets_past_events_and_then_new_ones() -> None:
    log = log_with(2)
    got: list[int] = []

    async def read() -> None:
        async with log.subscribe() as events:
            async for event in events:
                got.append(event.seq)
                if event.seq == 4:
                    return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        await wait_all_tasks_blocked()
        assert got == [1, 2]
        log.record("gpu.lost", "info", "three")
        await wait_all_tasks_blocked()
        assert got == [1, 2, 3]
        log.record("gpu.back", "info", "four")
    assert got == [1, 2, 3, 4]


async def test_a_slow_reader_gets_the_number_of_lost_events_and_delays_no_other() -> None:
    log = EventLog(capacity=3)
    quick: list[int] = []

    async def read_quickly() -> None:
        async with log.subscribe() as events:
            async for event in events:
                quick.append(event.seq)
                if event.seq == 10:
                    return

    async with anyio.create_task_group() as tasks, log.subscribe() as slow:
        tasks.start_soon(read_quickly)
        for number in range(1, 11):
            log.record("gpu.lost", "info", f"number {number}")
            await wait_all_tasks_blocked()
        missed = await anext(slow)
        assert (missed.kind, missed.facts["count"]) == (MISSED, 7)
        assert [(await anext(slow)).seq for _ in range(3)] == [8, 9, 10]
    assert quick == list(range(1, 11))


async def test_a_cancelled_wait_loses_nothing() -> None:
    log = EventLog()
    async with log.subscribe() as events:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(events)
        assert scope.cancelled_caught
        log.record("gpu.lost", "info", "one")
        log.record("gpu.back", "info", "two")
        assert [(await anext(events)).seq for _ in range(2)] == [1, 2]
        assert events.next_seq == 3


async def test_a_subscription_from_next_seq_sees_only_later_events() -> None:
    log = log_with(5)
    async with log.subscribe(since=log.next_seq) as events:
        log.record("gpu.lost", "info", "six")
        assert (await anext(events)).seq == 6


async def test_reading_after_the_end_of_the_block_stops() -> None:
    log = log_with(2)
    async with log.subscribe() as events:
        pass
    await checkpoint()
    assert [event async for event in events] == []


async def test_events_of_other_kinds_do_not_end_a_wait() -> None:
    log = EventLog()
    got: list[int] = []

    async def read_one() -> None:
        async with log.subscribe(kinds=("gpu",)) as events:
            got.append((await anext(events)).seq)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_one)
        await wait_all_tasks_blocked()
        log.record("process.started", "info", "another matter")
        await wait_all_tasks_blocked()
        assert got == []
        log.record("gpu.lost", "info", "this one")
    assert got == [2]


@pytest.mark.thorough
def test_looking_through_all_that_can_be_remembered_takes_a_moment() -> None:
    """Each lookup searched the ring from its end: a million of them blocked the event loop for eleven seconds."""
    log = log_with(600_000, capacity=500_000)
    before_s = time.process_time()
    assert log.remembered(kinds=("config",)) == ()
    assert time.process_time() - before_s < 0.8
    assert [event.seq for event in (log.from_seq(100_001), log.from_seq(600_000)) if event] == [100_001, 600_000]
    assert (log.from_seq(100_000), log.from_seq(600_001)) == (None, None)


def test_a_reader_that_names_very_many_kinds_costs_no_more_than_one() -> None:
    """60,000 kinds, which fit into one frame, took the event loop six seconds for each request."""
    log = log_with(1000)
    kinds = tuple(f"kind{number}" for number in range(60_000))
    before_s = time.process_time()
    assert log.remembered(kinds=kinds) == ()
    assert len(log.remembered(kinds=(*kinds, "gpu"))) == 500
    assert time.process_time() - before_s < 1
