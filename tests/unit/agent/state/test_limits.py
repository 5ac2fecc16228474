"""The limits of the search for what changes: beyond them it finds nothing, and reports that."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from hegmd.agent.state.code import assignments
from hegmd.agent.state.code.position import is_users_module
from hegmd.agent.state.script import variables

#: The module's own name: a script's.
NAME = "a_script_of_many_parts"


@pytest.fixture
def script() -> Iterator[types.ModuleType]:
    module = types.ModuleType(NAME)
    module.__file__ = f"/home/somebody/{NAME}.py"
    taken: list[dict[str, Any]] = []
    vars(module).update(taken=taken, take=lambda: taken.append(_taken(sys._getframe(1))))
    others = {name: found for name, found in list(sys.modules.items()) if is_users_module(found)}
    for name in others:  # the modules of the test run would be searched with the script
        del sys.modules[name]
    sys.modules[NAME] = module
    yield module
    del sys.modules[NAME]
    sys.modules.update(others)


def _taken(frame: FrameType) -> dict[str, Any]:
    return variables.capture([frame], {})


def state_of(script: Any, text: str) -> dict[str, Any]:
    """Return the state of a script parked in its loop, in its function train()."""
    exec(compile(text, script.__file__, "exec"), vars(script))
    script.train()
    found: dict[str, Any] = script.taken[0]
    return found


def starts_over(script: Any, text: str) -> list[str]:
    """Return the notes about it."""
    return variables.begin_anew({variables.KEY: state_of(script, text)})


COUNTING = """
class Player:
    def __init__(self):
        self.wins = 0

players = [Player() for _ in range({players})]

def train():
    for turn in range(1):
        take()
        players[turn].wins += 1
"""


def test_objects_in_a_list_that_is_too_long_were_dropped_without_a_message(script: types.ModuleType) -> None:
    assert starts_over(script, COUNTING.format(players=1001)) == [f"not searched: the 1,001 objects of {NAME}.players"]


def test_values_within_the_limits_are_not_reported(script: types.ModuleType) -> None:
    assert starts_over(script, COUNTING.format(players=1000)) == []


@pytest.mark.thorough
def test_functions_beyond_the_limit_are_reported(script: types.ModuleType) -> None:
    calls = [f"def step_{number}():\n    step_{number + 1}()\n" for number in range(assignments.MAX_CODES + 1)]
    text = "".join(calls) + "def train():\n    for turn in range(1):\n        take()\n        turn and step_0()\n"
    assert starts_over(script, text) == ["not searched: functions beyond the first 600 that the loop may call"]


@pytest.mark.thorough
def test_a_list_with_too_many_parts_was_left_as_a_new_script_has_it(script: types.ModuleType) -> None:
    body = "    for turn in range(1):\n        take()\n        seen.append([turn])\n"
    text = f"def train():\n    seen = [[0]] * 200_001\n{body}"
    assert starts_over(script, text) == [
        f"not searched: seen (list) in train() at {NAME}.py:5, which has more than 200,000 parts"
    ]


def test_a_long_list_ends_with_the_number_of_the_others(script: types.ModuleType) -> None:
    names = [f"view_{number}" for number in range(40)]
    made = f"{' = '.join(names)} = memoryview(b'')"
    text = (
        f"def train():\n    {made}\n    for turn in range(1):\n        take()\n        used = [{', '.join(names)}]\n"
        f"        {made}\n"
    )
    found = starts_over(script, text)
    assert (len(found), found[-1]) == (33, "8 more")


MIXED = """
import random

class Mixer:
    def __init__(self, table, view):
        self.table = table
        self.view = view

def train():
    for epoch in range(1):
        mixer = Mixer({made}, memoryview(b""))
        for turn in range(1):
            take()
            mixer.table
"""


def test_an_object_of_random_numbers_between_two_loops_got_different_numbers(script: types.ModuleType) -> None:
    """On its way to the inner loop a restarted script draws where its generators are, and not where they were."""
    drawn = state_of(script, MIXED.format(made="random.sample(range(9), 3)"))
    [mixer] = drawn["instances"]
    kind, (_how, numbers) = mixer["values"]["table"][0]
    assert (kind, len(numbers)) == ("list", 3)
    assert drawn["anew"] == ["train().mixer.view"]


def test_an_object_that_depends_on_nothing_is_created_again(script: types.ModuleType) -> None:
    made = state_of(script, MIXED.format(made="[1, 2, 3]"))
    assert not any(entry["values"] or entry["whole"] for entry in made["instances"])
    assert made["anew"] == []
