"""The parts of a command line: commands, their options and arguments, and what a value can be. Holds data only."""

from __future__ import annotations

# What a value is, and so how it is checked.
FLAG = "flag"
TEXT = "text"
PATH = "a path"
COUNT = "a whole number"
POSITIVE = "a whole number over 0"
SECONDS = "a number of seconds"
SIZE = "a size such as 2GiB"
PID = "a process id"

# What the shell can offer for a value; `gpus`, `places`, `pids` and `event-kinds` are asked of the daemon.
FILES = "files"
GPUS = "gpus"
PLACES = "places"
PIDS = "pids"
COMMANDS = "commands"


class Option:
    """One option. `implied` is the value of one that may be given without any; such a value needs the `=`."""

    __slots__ = ("choices", "complete", "doc", "implied", "key", "kind", "metavar", "names", "repeats")

    def __init__(
        self,
        *names: str,
        doc: str,
        kind: str = FLAG,
        metavar: str = "",
        repeats: bool = False,
        implied: str | None = None,
        complete: str = "",
        choices: tuple[str, ...] = (),
    ) -> None:
        self.names = names
        self.key = names[-1].lstrip("-")
        self.doc = doc
        self.kind = kind
        self.metavar = metavar
        self.repeats = repeats
        self.implied = implied
        self.complete = complete
        self.choices = choices


class Argument:
    """One argument in its place, or with `many` any number of them at the end.

    `choices` are all that it can be; beside `complete`, they are what it can be besides.
    """

    __slots__ = ("choices", "complete", "doc", "kind", "many", "name")

    def __init__(
        self,
        name: str,
        *,
        doc: str,
        kind: str = TEXT,
        many: bool = False,
        complete: str = "",
        choices: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.doc = doc
        self.kind = kind
        self.many = many
        self.complete = complete
        self.choices = choices


class Verb:
    """One command. `tail` names what may follow a `--` and is handed on as it is."""

    __slots__ = ("arguments", "doc", "examples", "hidden", "name", "options", "summary", "tail")

    def __init__(
        self,
        name: str,
        summary: str,
        doc: str = "",
        *,
        options: tuple[Option, ...] = (),
        arguments: tuple[Argument, ...] = (),
        tail: str = "",
        examples: tuple[tuple[str, str], ...] = (),
        hidden: bool = False,
    ) -> None:
        self.name = name
        self.summary = summary
        self.doc = doc
        self.options = options
        self.arguments = arguments
        self.tail = tail
        self.examples = examples
        self.hidden = hidden
