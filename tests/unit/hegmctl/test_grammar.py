"""The table of commands, and what must agree with it."""

from __future__ import annotations

import pytest

from hegmctl.grammar import COMMANDS, GLOBAL_OPTIONS, GROUPS
from hegmctl.grammar.rows import Command, load
from hegmctl.grammar.words import FLAG
from hegmctl.help import command_help, program_help, shown_commands
from hegmctl.tables import width
from tests.cells import in_one_test

ALL = list(COMMANDS.values())


@in_one_test("command", ALL, ids=lambda command: command.name)
def test_everything_that_a_row_names_exists(command: Command) -> None:
    assert callable(load(command.handler))
    assert all(callable(load(form.render)) for form in command.forms if form.render)
    if command.handler == "commands:ask":
        assert command.name == "help" or all(form.request and form.render for form in command.forms)


@in_one_test("command", ALL, ids=lambda command: command.name)
def test_options_of_a_command_do_not_clash(command: Command) -> None:
    names = [name for option in (*GLOBAL_OPTIONS, *command.options) for name in option.names]
    keys = [option.key for option in (*GLOBAL_OPTIONS, *command.options)] + [
        argument.name for argument in command.arguments
    ]
    assert len(names) == len(set(names))
    assert len(keys) == len(set(keys))


@in_one_test("command", ALL, ids=lambda command: command.name)
def test_a_command_is_explained_in_the_house_manner(command: Command) -> None:
    texts = [command.summary, *(one.doc for one in command.options), *(one.doc for one in command.arguments)]
    for text in texts:
        assert text
        assert not text.endswith(".")
        assert text[0].islower() or text.startswith("Prometheus")
    for option in command.options:
        assert (option.kind == FLAG) == (not option.metavar), option.names
        assert option.names[-1].startswith("--"), "the last name is the long one: the value is kept under it"
    assert all(not argument.many for argument in command.arguments[:-1]), "only the last can be many"


def test_groups_have_commands() -> None:
    for group in GROUPS:
        assert any(name.startswith(group + " ") for name in COMMANDS)
        assert group not in COMMANDS


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_help_fits_the_terminal_and_leaves_nothing_out(columns: int) -> None:
    text = program_help(columns)
    assert all(command.name in text for command in shown_commands())
    assert all(name in text for option in GLOBAL_OPTIONS for name in option.names)
    assert "__complete" not in text
    for command in shown_commands():
        explained = command_help(command, columns)
        assert all(name in explained for option in command.options for name in option.names)
        assert all(argument.name in explained for argument in command.arguments)
        shown = {f"  {example}" for example, _meaning in command.examples}  # which are not to be broken
        assert all(width(line) <= columns or line in shown for line in explained.splitlines())
