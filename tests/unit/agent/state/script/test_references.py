"""All names that refer to one object are stored together: a name that was rebound misleads no other."""

from __future__ import annotations

from hegmd.agent.state.script.references import matched


def anyhow(_mine: int, _yours: int) -> bool:
    return True


def test_a_model_that_takes_the_name_of_another_is_not_matched_to_it() -> None:
    """`model = second`: both of `model` and `second` are names of the second now, and the first has its own left."""
    saved = [["model", "second"], ["first"]]
    here = [["model", "first"], ["second"]]
    assert matched(saved, here, anyhow) == {0: 1, 1: 0}


def test_the_candidate_with_most_of_the_names_is_chosen() -> None:
    saved = [["a", "b", "c"], ["c", "d"]]
    here = [["c"], ["a", "b"], ["d", "x"]]
    assert matched(saved, here, anyhow) == {0: 1, 1: 0}


def test_no_object_is_matched_twice_or_with_an_unfitting_one() -> None:
    saved = [["a"], ["a"], ["b"]]
    here = [["a", "b"]]
    assert matched(saved, here, lambda mine, _yours: mine == 2) == {2: 0}
    assert len(matched(saved, here, anyhow)) == 1
