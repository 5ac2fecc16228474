"""The parts of a command line: options, arguments, and what a value can be. Holds data only."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The kinds of values, which decide how they are checked.
FLAG = "flag"
TEXT = "text"
PATH = "a path"
COUNT = "a whole number"
POSITIVE = "a whole number over 0"
SECONDS = "a number of seconds"
SIZE = "a size such as 2GiB"
PID = "a process id"
JOB = "a job: its id, its name, or a process id"

# Kinds of words that the shell can complete; the daemon provides `gpus`, `places`, `jobs`, `pids` and `event-kinds`.
FILES = "files"
GPUS = "gpus"
PLACES = "places"
PIDS = "pids"
JOBS = "jobs"
COMMAND_NAMES = "commands"


class RequestField:
    """A field of the request as an option or argument. `options` replace the field's text."""

    __slots__ = ("field", "options")

    def __init__(self, field: str, **options: Any) -> None:
        self.field = field
        self.options = options


class Option:
    """One option, and the `field` of the request that it sets.

    `implied` is the value of an option that was given without one; another value needs the `=`. `splits` accepts
    several values separated by commas.
    """

    __slots__ = (
        "choices",
        "complete",
        "doc",
        "field",
        "implied",
        "key",
        "kind",
        "metavar",
        "names",
        "repeats",
        "splits",
    )

    def __init__(  # noqa: PLR0913 - the properties of an option, each named
        self,
        *names: str,
        doc: str,
        kind: str = FLAG,
        metavar: str = "",
        repeats: bool = False,
        splits: bool = False,
        implied: str | None = None,
        complete: str = "",
        choices: tuple[str, ...] = (),
        field: str = "",
    ) -> None:
        self.names = names
        self.key = names[-1].lstrip("-")
        self.doc = doc
        self.kind = kind
        self.metavar = metavar
        self.repeats = repeats
        self.splits = splits
        self.implied = implied
        self.complete = complete
        self.choices = choices
        self.field = field


class Argument:
    """A positional argument, or with `many` any number of them at the end; `field` as for an option.

    `choices` are all its values; together with `complete`, they are additional ones.
    """

    __slots__ = ("choices", "complete", "doc", "field", "key", "kind", "many", "name")

    def __init__(
        self,
        name: str,
        *,
        doc: str,
        kind: str = TEXT,
        many: bool = False,
        complete: str = "",
        choices: tuple[str, ...] = (),
        field: str = "",
    ) -> None:
        self.name = self.key = name
        self.doc = doc
        self.kind = kind
        self.many = many
        self.complete = complete
        self.choices = choices
        self.field = field
