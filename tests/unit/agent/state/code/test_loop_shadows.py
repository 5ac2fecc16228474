"""Names that a restarted script binds before its loops: imports in between are found as usual."""

from __future__ import annotations

from hegmd.agent.state.code.loop_shadows import Shadows


def test_modules_are_found_as_by_the_other_finders() -> None:
    shadows = Shadows(lambda _name, _frame: None, lambda _lines: None)
    found = shadows.find_spec("colorsys")
    assert found is not None
    assert found.name == "colorsys"
    assert shadows.find_spec("no_module_has_this_name") is None
