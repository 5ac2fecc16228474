"""When corrected memory errors make a GPU failing."""

from __future__ import annotations

from hegmd.node.devices.condition import MANY_CORRECTED, WITHIN_S, CorrectedErrors


def test_errors_within_the_last_hour_count() -> None:
    errors = CorrectedErrors()
    assert errors.see(10_000, 0.0) == 0  # from before
    assert errors.see(10_000 + MANY_CORRECTED - 1, 600.0) == 0
    assert errors.see(10_000 + MANY_CORRECTED, 1200.0) == MANY_CORRECTED


def test_a_slow_rise_of_errors_is_never_a_failure() -> None:
    errors = CorrectedErrors()
    assert not any(errors.see(number, number * 2 * WITHIN_S / MANY_CORRECTED) for number in range(10 * MANY_CORRECTED))


def test_a_counter_that_was_reset_is_neither_a_fall_nor_a_rise() -> None:
    errors = CorrectedErrors()
    errors.see(5000, 0.0)
    assert errors.see(3, 10.0) == 0
    assert errors.see(3 + MANY_CORRECTED, 20.0) == MANY_CORRECTED
    assert errors.see(None, 30.0) == 0


def test_a_clock_that_is_set_back_keeps_no_samples_from_the_future() -> None:
    errors = CorrectedErrors()
    errors.see(0, 10_000.0)
    assert errors.see(MANY_CORRECTED, 100.0) == 0
    assert errors.see(2 * MANY_CORRECTED, 200.0) == MANY_CORRECTED
