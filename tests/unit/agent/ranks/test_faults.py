"""The syntax of HEGM_FAULT, and the places of its faults."""

from __future__ import annotations

import pytest

from hegmd.agent.ranks.faults import inject, parse
from tests.cells import in_one_test


def test_a_fault_happens_in_its_rank_at_its_step_and_phase_of_its_generation() -> None:
    first, second = parse("rank=1,step=20,kind=sigkill; step=3,kind=hang,phase=commit,generation=2")
    assert first.is_due(1, 20, "forward", 1)
    assert not any(
        first.is_due(*place) for place in ((0, 20, "forward", 1), (1, 20, "commit", 1), (1, 20, "forward", 2))
    )
    assert second.is_due(5, 3, "commit", 2)
    assert parse("") == ()


def test_faults_that_are_exceptions_are_raised() -> None:
    inject(parse("step=1,kind=exception"), 0, 2, "forward", 1)
    with pytest.raises(RuntimeError, match="exception in rank 0 at step 1"):
        inject(parse("step=1,kind=exception"), 0, 1, "forward", 1)
    with pytest.raises(SystemExit):
        inject(parse("step=1,kind=exit"), 0, 1, "forward", 1)
    with pytest.raises(KeyboardInterrupt):
        inject(parse("step=1,kind=interrupt"), 0, 1, "forward", 1)


@in_one_test(
    ("text", "why"),
    [
        ("rank=1,step=20", "needs step= and kind="),
        ("step=x,kind=hang", "step=x is not a number"),
        ("step=1,kind=explode", "kind=explode is not one of exception"),
        ("step=1,kind=hang,when=now", "`when=now` is not one of rank="),
        ("step=1,step=2,kind=hang", "`step=2` is not one of rank="),
        ("step=1,kind=hang,phase=never", "phase=never is not one of restore"),
    ],
)
def test_an_impossible_fault_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)
