"""From which step ranks continue, and how their generations follow one another. The crew only records calls."""

from __future__ import annotations

from typing import Any

import pytest

from hegmctl.generations import (
    GATHERING,
    HARD_LIMIT_S,
    MAX_FRUITLESS,
    OVER,
    RESTORING,
    RUNNING,
    Attempt,
    Generations,
    choose,
)
from tests.cells import in_one_test


def _recorded(ranks: int, *steps: int) -> list[frozenset[int]]:
    return [frozenset(steps)] * ranks


@in_one_test(
    ("offers", "recorded", "slots", "expected"),
    [
        # All are at one step.
        ((7, 7), (7,), {0: 5, 1: 6}, (7, None, None)),
        # A rank failed after the last all-reduce and before its step: the others give it the higher one.
        ((7, 8, 7), (7, 8), {0: 5}, (8, None, 1)),
        ((None, 8), (8,), {}, (8, None, 1)),
        # The rank's own values are unknown for the higher step.
        ((7, 8), (7,), {}, (7, None, 0)),
        # Only the snapshots hold a whole state.
        ((None, None), (), {0: 5, 1: 6}, (6, 1, None)),
        # A snapshot of that very step is there.
        ((None, 6), (6,), {0: 5, 1: 6}, (6, 1, None)),
        ((None, 6), (), {0: 5}, (5, 0, None)),
        ((None, None), (), {}, None),
    ],
)
def test_all_ranks_continue_from_the_highest_step_that_each_can_restore(
    offers: tuple[int | None, ...], recorded: tuple[int, ...], slots: dict[int, int], expected: Any
) -> None:
    source = choose(offers, _recorded(len(offers), *recorded), slots)
    assert (None if source is None else (source.step, source.slot, source.donor)) == expected


def test_a_state_that_cannot_be_sent_helps_only_if_all_ranks_have_it() -> None:
    assert choose((None, 8), _recorded(2, 8), {}, gives=False) is None
    found = choose((8, 8), _recorded(2, 8), {}, gives=False)
    assert found is not None
    assert found.step == 8


def test_only_a_training_without_a_step_starts_over() -> None:
    found = choose((None, None), _recorded(2), {}, is_new=True)
    assert found is not None
    assert found.step is None
    assert choose((None, None), _recorded(2), {}, is_new=False) is None


class RecordingActions:
    """Two ranks and no daemon."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str, dict[str, Any]]] = []
        self.killed: list[int] = []
        self.replaced: list[int] = []
        self.held: dict[int, tuple[int, int]] = {}
        self.records: set[int] = set()
        self.at: dict[int, tuple[float, float, int]] = {0: (0.0, 0.0, 0), 1: (0.0, 0.0, 0)}
        self.why: str | None = None
        self.noted: list[Attempt] = []
        self.cleared = 0

    def send(self, rank: int, do: str, **what: Any) -> None:
        self.sent.append((rank, do, what))

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def replace(self, rank: int) -> None:
        self.replaced.append(rank)

    def slots(self) -> dict[int, tuple[int, int]]:
        return self.held

    def has_record(self, rank: int, step: int) -> bool:
        return step in self.records

    def progress(self, rank: int) -> tuple[float, float, int]:
        return self.at[rank]

    def forget_records(self) -> None:
        self.cleared += 1
        self.held.clear()

    def note(self, attempt: Attempt) -> None:
        self.noted.append(attempt)

    def give_up(self, why: str, rank: int | None) -> None:
        self.why = why

    def sent_since(self, do: str) -> list[tuple[int, dict[str, Any]]]:
        """Return the messages of that kind since the last call."""
        found = [(rank, what) for rank, one, what in self.sent if one == do]
        self.sent = [one for one in self.sent if one[1] != do]
        return found


@pytest.fixture
def crew() -> RecordingActions:
    return RecordingActions()


@pytest.fixture
def running(crew: RecordingActions) -> Generations:
    """Two ranks that have begun at step 0, and are at step 7."""
    made = Generations(2, crew)
    for rank in (0, 1):
        made.joined(rank, 1, None, 0.0, is_new=True)
    assert [rank for rank, _ in crew.sent_since("plan")] == [0, 1]
    for rank in (0, 1):
        made.restored(rank, 1, 0.0)
        made.stepped(rank, 1, 0.0)
    crew.sent_since("go")
    crew.records = {7}
    crew.at = {0: (10.0, 1.0, 7), 1: (10.0, 1.0, 7)}
    assert made.phase == RUNNING
    return made


def _recovered(made: Generations, step: int, now: float) -> None:
    for rank in (0, 1):
        made.joined(rank, made.generation, step, now)
    for rank in (0, 1):
        made.restored(rank, made.generation, now)
    assert made.phase == RUNNING
    for rank in (0, 1):
        made.stepped(rank, made.generation, now)


def test_a_fault_of_one_rank_stops_all_and_each_continues_from_its_own_memory(
    crew: RecordingActions, running: Generations
) -> None:
    running.failed(1, 1, "ValueError: no", 11.0)
    assert crew.sent_since("abort") == [(0, {"generation": 2}), (1, {"generation": 2})]
    _recovered(running, 7, 11.5)
    assert [(rank, plan["step"], plan["slot"], plan["gives"]) for rank, plan in crew.sent_since("plan")] == [
        (0, 7, None, False),
        (1, 7, None, False),
    ]
    last = crew.noted[-1]
    assert (last.result, last.from_step, last.why) == ("recovered", 7, "rank 1: ValueError: no")
    assert (last.gathered_s, last.restored_s, last.trained_s) == (0.5, 0.5, 0.5)


def test_reports_of_ranks_of_an_older_generation_are_ignored(crew: RecordingActions, running: Generations) -> None:
    running.failed(1, 1, "first", 11.0)
    crew.sent_since("abort")
    running.failed(0, 1, "its collective ended", 11.0)
    running.restored(0, 1, 11.0)
    running.finished(0, 1, 11.0)
    assert (running.generation, running.phase, crew.sent_since("abort")) == (2, GATHERING, [])
    running.joined(0, 1, 7, 11.0)  # the second generation has not reached it yet
    assert crew.sent_since("abort") == [(0, {"generation": 2})]
    assert crew.sent_since("plan") == []


def test_a_rank_that_replaces_a_dead_one_gets_the_state_of_a_live_rank(
    crew: RecordingActions, running: Generations
) -> None:
    crew.held = {0: (1, 5)}
    running.died(1, "was ended by signal 9", 11.0)
    assert crew.replaced == [1]
    running.joined(1, 1, None, 12.0, is_new=True)
    running.joined(1, 2, None, 12.0, is_new=True)
    running.joined(0, 2, 7, 12.0)
    ((rank, plan),) = crew.sent_since("plan")
    assert (rank, plan["gives"], plan["slot"], plan["next_slot"]) == (0, True, None, 1)  # not over the last snapshot
    crew.held[1] = (2, 7)
    running.restored(0, 2, 12.0)
    ((rank, plan),) = crew.sent_since("plan")
    assert (rank, plan["slot"], plan["step"]) == (1, 1, 7)
    running.restored(1, 2, 12.0)
    assert [rank for rank, _ in crew.sent_since("go")] == [0, 1]


def test_no_rank_is_killed_for_being_late_while_the_job_is_suspended(
    crew: RecordingActions, running: Generations
) -> None:
    running.died(1, "was ended by signal 9", 11.0)
    for now in (50.0, 100.0, 1000.0):
        running.hold(now)
        running.tick(now + 1.0)
    assert crew.killed == []
    running.tick(1000.0 + 2 * running.hard_limit_s)
    assert crew.killed == [0]


def test_the_death_of_another_rank_while_all_stop_is_no_further_recovery(
    crew: RecordingActions, running: Generations
) -> None:
    running.failed(0, 1, "its peer closed the connection", 11.0)
    running.died(1, "was ended by signal 9", 11.0)
    assert (running.generation, running.recoveries, crew.replaced) == (2, 1, [1])
    assert crew.noted[-1].why == "rank 1 was ended by signal 9"
    running.died(1, "was ended by signal 9", 12.0)  # the new process, before it reaches its block
    assert (running.generation, running.recoveries) == (3, 2)


def test_a_snapshot_that_cannot_be_used_is_not_used_again(crew: RecordingActions, running: Generations) -> None:
    crew.held = {0: (1, 5), 1: (1, 6)}
    running.failed(0, 1, "torn", 11.0)
    for rank in (0, 1):
        running.joined(rank, 2, None, 11.0)
    assert {plan["slot"] for _, plan in crew.sent_since("plan")} == {1}
    running.unusable(1, 2, "1 of 2 parts do not match their checksums", 11.0)
    for rank in (0, 1):
        running.joined(rank, 3, None, 11.0)
    assert {plan["slot"] for _, plan in crew.sent_since("plan")} == {0}
    running.unusable(1, 3, "the same", 11.0)
    for rank in (0, 1):
        running.joined(rank, 4, None, 11.0)
    assert running.phase == OVER
    assert "no step has a state" in (crew.why or "")


def test_recoveries_without_progress_are_bounded(crew: RecordingActions, running: Generations) -> None:
    for _ in range(MAX_FRUITLESS):
        running.failed(1, running.generation, "again", 11.0)
        _recovered(running, 7, 11.0)
    running.failed(1, running.generation, "again", 11.0)
    assert running.phase == OVER
    assert "made no progress" in (crew.why or "")


def test_the_number_of_recoveries_is_bounded_by_its_option(crew: RecordingActions) -> None:
    made = Generations(2, crew, max_recoveries=0)
    for rank in (0, 1):
        made.joined(rank, 1, None, 0.0, is_new=True)
    made.failed(1, 1, "first", 1.0)
    assert "--max-recoveries" in (crew.why or "")


def test_a_rank_without_progress_is_queried_first_and_a_parked_one_is_not_hung(
    crew: RecordingActions, running: Generations
) -> None:
    assert running.tick(10.9)
    assert crew.sent_since("ask") == []
    running.tick(11.1)
    assert [rank for rank, _ in crew.sent_since("ask")] == [0, 1]
    running.is_parked()
    running.tick(20.0)
    assert running.phase == RUNNING
    running.tick(20.6)
    assert running.phase == GATHERING
    assert crew.noted[-1].why == "rank 0 completed no step for 10.6 s"
    assert crew.noted[-1].failed_at == 10.0


def test_a_rank_that_does_not_stop_is_killed_and_a_section_without_a_limit_may_take_long(
    crew: RecordingActions, running: Generations
) -> None:
    crew.at = {0: (10.0, 0.0, 7), 1: (10.0, 0.0, 7)}
    running.tick(1000.0)
    assert running.phase == RUNNING
    running.failed(1, 1, "no", 1000.0)
    running.joined(1, 2, 7, 1000.0)
    running.tick(1000.0 + HARD_LIMIT_S)
    assert crew.killed == []
    running.tick(1000.1 + HARD_LIMIT_S)
    assert crew.killed == [0]


def test_a_rank_that_waits_for_one_whose_block_has_ended_is_reported_with_that(
    crew: RecordingActions, running: Generations
) -> None:
    """The message blamed the rank with more batches, which waited in a collective."""
    running.finished(0, 1, 10.0)
    for now in (11.1, 11.7):
        running.tick(now)
    assert "rank 1 completed no step for 1.7 s, and the block of rank 0 has ended" in crew.noted[-1].why


def test_all_ranks_that_do_not_stop_are_killed_at_once_but_none_that_waits_for_the_state_of_another(
    crew: RecordingActions, running: Generations
) -> None:
    """Each stuck rank had its own limit, one after the other; and rank 0 was killed while rank 1 gave its state."""
    running.failed(1, 1, "no", 11.0)
    running.tick(11.1 + HARD_LIMIT_S)
    assert crew.killed == [0, 1]
    crew.killed.clear()
    running.joined(0, 2, None, 50.0)
    running.joined(1, 2, 7, 50.0)
    assert [(rank, plan["gives"]) for rank, plan in crew.sent_since("plan")] == [(1, True)]
    running.tick(50.1 + HARD_LIMIT_S)
    assert crew.killed == [1]


def test_a_rank_has_its_whole_limit_to_load_the_state_that_another_has_given(
    crew: RecordingActions, running: Generations
) -> None:
    """It had only what the giving rank had left of its own limit, and was killed for it."""
    running.failed(1, 1, "no", 11.0)
    running.joined(0, 2, None, 12.0)
    running.joined(1, 2, 7, 12.0)
    crew.held[0] = (1, 7)
    given_at = 11.0 + HARD_LIMIT_S
    running.restored(1, 2, given_at)
    running.tick(given_at + HARD_LIMIT_S - 1.0)
    assert crew.killed == []
    running.tick(given_at + HARD_LIMIT_S + 1.0)
    assert crew.killed == [0]


def test_a_second_block_begins_without_leftovers_of_the_first(crew: RecordingActions, running: Generations) -> None:
    crew.held = {0: (1, 7)}
    running.finished(0, 1, 12.0)
    assert crew.sent_since("over") == []  # the other rank may need its state
    running.finished(1, 1, 12.0)
    assert [rank for rank, _ in crew.sent_since("over")] == [0, 1]
    running.joined(0, 1, None, 13.0, is_new=True)
    assert crew.cleared == 1
    for rank in (0, 1):
        running.joined(rank, 2, None, 13.0, is_new=True)
    assert running.phase == RESTORING
    assert {plan["step"] for _, plan in crew.sent_since("plan")} == {None}
    assert not running.can_replace


def test_once_a_rank_ends_the_training_nothing_is_a_fault(crew: RecordingActions, running: Generations) -> None:
    running.ends()
    running.tick(1000.0)
    running.failed(0, 1, "its peer closed the connection", 1000.0)
    assert not running.can_replace
    assert (crew.noted, crew.sent_since("abort"), crew.sent_since("ask")) == ([], [], [])
