"""The table of commands, and what must agree with it."""

from __future__ import annotations

import pytest

from hegmctl.grammar import FLAG, GLOBAL_OPTIONS, GROUPS, VERBS, Verb
from hegmctl.grammar.rows import load
from hegmctl.help import program_help, shown_commands, verb_help
from hegmctl.tables import width

ALL = list(VERBS.values())


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_what_a_row_names_is_there(verb: Verb) -> None:
    assert callable(load(verb.handler))
    assert all(callable(load(form.render)) for form in verb.forms if form.render)
    if verb.handler == "commands:ask":
        assert verb.name == "help" or all(form.request and form.render for form in verb.forms)


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_options_of_a_command_do_not_clash(verb: Verb) -> None:
    names = [name for option in (*GLOBAL_OPTIONS, *verb.options) for name in option.names]
    keys = [option.key for option in (*GLOBAL_OPTIONS, *verb.options)] + [one.name for one in verb.arguments]
    assert len(names) == len(set(names))
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("verb", ALL, ids=lambda verb: verb.name)
def test_a_command_is_explained_in_the_house_manner(verb: Verb) -> None:
    texts = [verb.summary, *(one.doc for one in verb.options), *(one.doc for one in verb.arguments)]
    for text in texts:
        assert text
        assert not text.endswith(".")
        assert text[0].islower() or text.startswith("Prometheus")
    for option in verb.options:
        assert (option.kind == FLAG) == (not option.metavar), option.names
        assert option.names[-1].startswith("--"), "the last name is the long one: the value is kept under it"
    assert all(not argument.many for argument in verb.arguments[:-1]), "only the last can be many"


def test_groups_have_commands() -> None:
    for group in GROUPS:
        assert any(name.startswith(group + " ") for name in VERBS)
        assert group not in VERBS


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_help_fits_the_terminal_and_leaves_nothing_out(columns: int) -> None:
    text = program_help(columns)
    assert all(verb.name in text for verb in shown_commands())
    assert all(name in text for option in GLOBAL_OPTIONS for name in option.names)
    assert "__complete" not in text
    for verb in shown_commands():
        explained = verb_help(verb, columns)
        assert all(name in explained for option in verb.options for name in option.names)
        assert all(argument.name in explained for argument in verb.arguments)
        shown = {f"  {example}" for example, _meaning in verb.examples}  # which are not to be broken
        assert all(width(line) <= columns or line in shown for line in explained.splitlines())
