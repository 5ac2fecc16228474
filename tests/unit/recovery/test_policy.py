"""When a snapshot is due, which one counts, how often a job is recovered, and where."""

from __future__ import annotations

import pytest

from hegmd.protocol.slots import SlotRecord
from hegmd.protocol.snapshots import Gpu, Health
from hegmd.recovery.policy import (
    MAX_FRUITLESS,
    Budget,
    complete_generations,
    gpus_to_start_on,
    interval_s,
    raised,
    usual_interval_s,
)
from tests.cells import in_one_test


def _record(generation: int, step: int, rank: int = 0, ranks: int = 1) -> SlotRecord:
    return SlotRecord(
        generation=generation, step=step, rank=rank, ranks=ranks, size_bytes=10, taken_utc=0.0, took_s=0.1
    )


@in_one_test(
    ("wished_s", "cost_s", "expected_s"),
    [
        (None, 0.5, 50.0),
        (None, 0.001, 1.0),
        (30.0, 0.5, 30.0),
        (0.1, 0.5, 1.0),
        (float("nan"), 0.01, 0.1),
        (-5.0, 0.01, 0.1),
    ],
)
def test_snapshots_park_a_training_for_a_hundredth_of_its_time_by_default(
    wished_s: float | None, cost_s: float, expected_s: float
) -> None:
    """An interval that is shorter than two snapshots take is raised."""
    assert interval_s(wished_s, cost_s) == pytest.approx(expected_s)


def test_a_concurrent_copy_takes_at_most_a_tenth_of_the_time() -> None:
    assert interval_s(None, 0.02, 1.5) == pytest.approx(13.5)
    assert interval_s(2.0, 0.02, 1.5) == pytest.approx(2.0)


def test_a_message_reports_that_a_short_interval_was_raised() -> None:
    assert raised(0.5, 0.4) == "--recover=0.5s is too short: a snapshot takes 0.4 s, so the interval is 0.8 s"
    assert raised(0.8, 0.4) is None
    assert raised(None, 40.0) is None


def test_a_snapshot_counts_only_if_all_ranks_have_the_same_step() -> None:
    slots = {0: [_record(4, 40, 0, 2), _record(5, 50, 0, 2)], 1: [_record(4, 40, 1, 2), _record(6, 60, 1, 2)]}
    assert [record.generation for record in complete_generations(slots, 2)] == [4]
    slots[1][1] = _record(5, 51, 1, 2)
    assert [record.generation for record in complete_generations(slots, 2)] == [4]
    slots[1][1] = _record(5, 50, 1, 2)
    assert [record.generation for record in complete_generations(slots, 2)] == [5, 4]
    assert [record.generation for record in complete_generations(slots, 2, bad=(5,))] == [4]
    assert complete_generations({0: slots[0]}, 2) == []


def test_recovery_ends_after_three_attempts_without_progress() -> None:
    budget = Budget()
    for _ in range(MAX_FRUITLESS + 1):
        budget = budget.fell(500)
        if budget.exhausted(None) is None:
            budget = budget.spent()
    assert budget.recoveries == MAX_FRUITLESS
    assert "3 recoveries in a row" in (budget.exhausted(None) or "")


def test_a_training_that_makes_progress_is_recovered_up_to_max_recoveries() -> None:
    budget = Budget()
    for step in range(0, 100, 10):
        budget = budget.fell(step)
        assert budget.exhausted(None) is None
        budget = budget.spent()
    assert "--max-recoveries" in (budget.exhausted(10) or "")
    assert budget.exhausted(11) is None


def test_a_failure_at_an_unknown_step_is_not_progress() -> None:
    assert Budget(furthest_step=3).fell(None).fruitless == 1


def _gpu(number: int, state: str = "ok", condition: str = "healthy", vendor: str = "nvidia", free: int = 10) -> Gpu:
    return Gpu(
        id=f"gpu{number}",
        index=number,
        uuid=f"GPU-{number}",
        vendor=vendor,
        state=state,
        memory_free_bytes=free,
        health=Health(state="ok", condition=condition),
    )


def test_a_job_starts_on_its_former_gpu_if_that_is_healthy() -> None:
    gpus = [_gpu(0), _gpu(1, free=99)]
    assert gpus_to_start_on(("gpu0",), gpus) == ("gpu0",)
    assert gpus_to_start_on((), gpus) == ()


def test_a_gpu_of_the_same_vendor_replaces_a_lost_or_failing_one() -> None:
    others = [
        _gpu(1, vendor="amd", free=999),
        _gpu(2, free=5),
        _gpu(3, free=50),
        _gpu(4, condition="failing", free=500),
    ]
    assert gpus_to_start_on(("gpu0",), [_gpu(0, state="lost"), *others]) == ("gpu3",)
    assert gpus_to_start_on(("gpu2", "gpu0"), [_gpu(0, condition="failing"), *others]) == ("gpu2", "gpu3")
    assert gpus_to_start_on(("gpu0", "gpu1"), [_gpu(0, state="lost"), _gpu(1, state="lost")]) is None


def test_a_failing_gpu_is_used_if_no_other_is_left_but_a_gone_one_is_not() -> None:
    assert gpus_to_start_on(("gpu0",), [_gpu(0, condition="failing"), _gpu(1, condition="failing")]) == ("gpu0",)
    assert gpus_to_start_on(("gpu0",), [_gpu(0, condition="failing"), _gpu(1)]) == ("gpu1",)
    assert gpus_to_start_on(("gpu0",), [_gpu(0, condition="gone"), _gpu(1, condition="failing")]) is None


@in_one_test(
    ("wished_s", "pauses_s", "expected_s"),
    [
        (None, (), 1.0),
        (None, (5.0,), 60.0),
        (None, (0.1,), 10.0),
        (None, (5.0, 0.1), 10.0),
        (None, (5.0, 0.1, 0.1), 10.0),
        (None, (0.1, 0.1, 5.0), 10.0),
        # The state has grown, or the machine is busy for long.
        (None, (0.1, 5.0, 4.0), 400.0),
        (30.0, (20.0,), 40.0),
        (30.0, (20.0, 1.0), 30.0),
    ],
)
def test_one_slow_pause_made_the_next_snapshots_rare(
    wished_s: float | None, pauses_s: tuple[float, ...], expected_s: float
) -> None:
    """The first pause on a busy machine of 5 s left the job without a newer snapshot for 500 s."""
    assert usual_interval_s(wished_s, [(pause_s, 0.0) for pause_s in pauses_s]) == pytest.approx(expected_s)
