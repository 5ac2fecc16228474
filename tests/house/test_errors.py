"""Every way to fail has a name, an exit status and a meaning of its own, and is written down for scripts."""

from __future__ import annotations

import pytest

from hegmd import errors
from tests.cells import in_one_test
from tests.house.source import ROOT


def test_every_code_is_in_the_list_of_codes() -> None:
    defined = {value.name for value in vars(errors).values() if isinstance(value, errors.Code)}
    assert defined == {code.name for code in errors.CODES}


def test_names_and_exit_statuses_are_distinct() -> None:
    assert len({code.name for code in errors.CODES}) == len(errors.CODES)
    statuses = [code.exit_status for code in errors.CODES]
    assert len(set(statuses)) == len(statuses)
    # 0 is success; from 126 on the shell speaks for itself, and what we say there means what it means there.
    of_the_shell = {errors.NOT_EXECUTABLE: 126, errors.NO_COMMAND: 127}
    assert all(0 < code.exit_status < 126 for code in errors.CODES if code not in of_the_shell)
    assert all(code.exit_status == status for code, status in of_the_shell.items())


@in_one_test("code", errors.CODES, ids=lambda code: code.name)
def test_an_error_code_has_a_meaning(code: errors.Code) -> None:
    assert len(code.meaning.split()) >= 3
    assert not code.meaning.endswith(".")


@pytest.mark.parametrize(("message", "hint"), [("", "free some room"), ("GPU 0 is full", "")])
def test_an_error_without_a_message_or_a_hint_is_a_bug(message: str, hint: str) -> None:
    with pytest.raises(errors.Bug):
        errors.Refused(message, hint)


@in_one_test("code", errors.CODES, ids=lambda code: code.name)
def test_a_code_is_documented(code: errors.Code) -> None:
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert f"`{code.name}`" in text
    assert code.meaning in text
