"""The row types of the table of commands. A row names its handler, its renderers and its request as text.

So parsing a command line does not import what only one command needs.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from hegmctl.grammar.words import Argument, Option, RequestField

# The JSON output of a form of a command.
ONE = "one document"
LINES = "one document a line"
AFTER_PROGRESS = "lines of progress, then one document"


class CommandForm:
    """One form of a command: what it requests, and what it prints.

    `words` select this form, such as `--reload`. `request` is the tag of its request; without one, `record` names the
    record that it prints. `render` names the renderer. `prints` is one of ONE, LINES and AFTER_PROGRESS. `call` is the
    name of its call in the library, by default the tag.
    """

    __slots__ = ("call", "prints", "record", "render", "request", "words")

    def __init__(
        self,
        words: str = "",
        *,
        request: str = "",
        record: str = "",
        render: str = "",
        prints: str = "",
        call: str | None = None,
    ) -> None:
        self.words = words
        self.request = request
        self.record = record
        self.render = render
        self.prints = prints
        self.call = request.replace(".", "_") if call is None else call


class Command:
    """One command, a row of the table.

    Arguments and options that are not in the row come from its request: see `fields`. `handler` is the function that
    serves the command, as `module:function`. `tail` names what may follow a `--` unparsed. `exits` explains its exit
    statuses. `interrupted` explains what happens to the steps after an interrupt.
    """

    __slots__ = (
        *("_all", "_arguments", "_options", "doc", "examples", "exits", "forms", "handler", "hidden"),
        *("interrupted", "name", "request", "summary", "tail"),
    )

    def __init__(  # noqa: PLR0913 - a row of the table, each column named
        self,
        name: str,
        summary: str,
        doc: str = "",
        *,
        exits: str = "",
        handler: str = "commands:ask",
        request: str = "",
        render: str = "",
        forms: tuple[CommandForm, ...] = (),
        options: tuple[Option | RequestField, ...] = (),
        arguments: tuple[Argument | RequestField, ...] = (),
        tail: str = "",
        examples: tuple[tuple[str, str], ...] = (),
        interrupted: str = "",
        hidden: bool = False,
    ) -> None:
        self.name = name
        self.summary = summary
        self.doc = doc
        self.exits = exits
        self.handler = handler
        self.request = request
        self.forms = forms or ((CommandForm(request=request, render=render),) if request else ())
        self._options = options
        self._arguments = arguments
        self._all: tuple[tuple[Argument, ...], tuple[Option, ...]] | None = None
        self.tail = tail
        self.examples = examples
        self.interrupted = interrupted
        self.hidden = hidden

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Return its arguments, with those of its request."""
        return self._read()[0]

    @property
    def options(self) -> tuple[Option, ...]:
        """Return its options, with those of its request."""
        return self._read()[1]

    def _read(self) -> tuple[tuple[Argument, ...], tuple[Option, ...]]:
        if self._all is None:
            from hegmctl.grammar.fields import words_of

            self._all = words_of(self._arguments, self._options, self.request)
        return self._all


def load(where: str, package: str = "hegmctl") -> Any:
    """Import `module:name` and return the object."""
    module, _, name = where.partition(":")
    __import__(f"{package}.{module}")
    return getattr(sys.modules[f"{package}.{module}"], name)
