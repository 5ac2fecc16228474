"""Names that a restarted script binds before its loops: imports in between are found as usual."""

from __future__ import annotations

import types

import pytest

from hegmd.agent.state.code.loop_shadows import Shadows


def test_modules_are_found_as_by_the_other_finders() -> None:
    shadows = Shadows(lambda _name, _frame: None, lambda _lines: None)
    found = shadows.find_spec("colorsys")
    assert found is not None
    assert found.name == "colorsys"
    assert shadows.find_spec("no_module_has_this_name") is None


@pytest.mark.parametrize(
    ("rest", "given", "is_fitting"),
    [
        ((2, 9, 1), (0, 9), True),
        ((2, 9, 1), (4, 9), True),  # the script has continued from a checkpoint of its own, later than the snapshot
        ((2, 9, 1), (9, 9), True),
        ((1, 10, 3), (4, 10, 3), True),
        ((2, 9, 1), (4, 8), False),
        ((2, 9, 1), (4, 9, 2), False),
        ((2, 9, 1), (8, 8), False),
    ],
)
def test_a_script_that_has_loaded_a_later_checkpoint_of_its_own_was_not_recovered(
    rest: tuple[int, ...], given: tuple[int, ...], is_fitting: bool
) -> None:
    """Its loop goes over fewer epochs than the snapshot's, and the job was given up."""
    ends: list[list[str]] = []
    shadows = Shadows(lambda _name, _frame: rest, ends.append)
    module = types.ModuleType("of_the_user")
    module.__file__ = "/home/user/of_the_user.py"
    shadows.install_in(module)
    assert module.range(*given) == range(*rest)
    assert (ends == []) is is_fitting


def test_a_loop_over_a_reversed_range_ended_its_restarted_script() -> None:
    """The rest of it goes downwards, and the script asks for a range that goes upwards."""
    ends: list[list[str]] = []
    shadows = Shadows(lambda _name, _frame: (3, 1, -1), ends.append)
    module = types.ModuleType("of_the_user")
    module.__file__ = "/home/user/of_the_user.py"
    shadows.install_in(module)
    assert list(reversed(module.range(2, 5))) == [3, 2]
    assert ends == []
