"""The targets for the figures of moves, and that a missed target is reported with its largest parts."""

from __future__ import annotations

from tests.gpu.moves_timing import Measured
from tests.gpu.moves_verdicts import verdicts

FAST = {"out": 390e9, "in": 40e9}


def moved(took_s: float, estimate_s: float | None, rates: dict[str, float], size_gib: int = 32) -> Measured:
    parts = {"helper checkpoint": 0.4, "helper restore": 0.3, "agent free": 0.03, "agent free.resize": 0.5}
    return Measured(size_gib, "migrate", "peer", "gpu0 to 1", took_s, estimate_s, {}, rates, parts)


def test_a_move_that_meets_all_aims_is_reported_as_such() -> None:
    verdict_lines = verdicts([moved(0.7, 0.8, FAST)] * 5)
    assert [line.partition(": ")[0] for line in verdict_lines] == ["kept", "kept", "kept"], verdict_lines
    assert "stands for 0.700 s, 0.8 allowed (5 times)" in verdict_lines[0]
    assert "off by +14% (5 times)" in verdict_lines[1]
    assert "copies out at 99.0% of the link" in verdict_lines[2]


def test_each_aim_can_be_missed_and_a_slow_move_names_its_largest_parts() -> None:
    verdict_lines = verdicts([moved(1.0, 1.31, {"out": 370e9})] * 3)
    assert [line.partition(": ")[0] for line in verdict_lines] == ["**not kept**"] * 3, verdict_lines
    parts = "helper checkpoint 0.400 s, helper restore 0.300 s, agent free 0.030 s"
    assert verdict_lines[0].endswith(f"(3 times, fewer than 5), of which {parts}")


def test_small_jobs_and_other_directions_are_held_to_no_link() -> None:
    assert len(verdicts([moved(0.7, None, {"out": 100e9}, size_gib=1)])) == 0
    assert len(verdicts([moved(0.7, None, {"in": 1e9})])) == 1, "what comes in by peer stays on its GPU"
