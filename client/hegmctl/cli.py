"""From the command line to the exit status: the only module that ends the process.

hegmctl is quick because a command imports only what it needs, and this module almost nothing. An interrupted hegmctl,
and one whose reader has closed the pipe, dies of that signal, because shells check for it in scripts and loops (and
show it as 130 and 141).
"""

from __future__ import annotations

import os
import sys

from hegmctl.interruption import Interrupted, die_of
from hegmd.errors import HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from hegmctl.arguments import Arguments
    from hegmctl.connection import Connection
    from hegmctl.output import Sink


class Session:
    """A run of hegmctl: the command line, the sink, and access to the daemon."""

    def __init__(self, arguments: Arguments, sink: Sink) -> None:
        self.arguments = arguments
        self.sink = sink

    def connect(self, timeout_s: float | None = None, *, socket: str | None = None) -> Connection:
        """Connect as the options say, or to that socket. `timeout_s` applies without --timeout. Raises HegmError."""
        from hegmctl.connection import TIMEOUT_S, connect

        given_s = self.arguments.seconds("timeout") or timeout_s or TIMEOUT_S
        return connect(socket or self.arguments.text("socket"), timeout_s=given_s)


def main() -> NoReturn:
    try:
        status = run(sys.argv[1:])
    except Interrupted as interrupted:
        die_of(interrupted.number)
    except KeyboardInterrupt:
        from signal import SIGINT

        die_of(SIGINT)
    except BrokenPipeError:
        from signal import SIGPIPE

        die_of(SIGPIPE)
    # Everything is written and closed. A regular shutdown of the interpreter would only free memory for 2.5 ms, a
    # quarter of the time that Python takes to start.
    os._exit(status)


def run(words: Sequence[str]) -> int:
    """Run hegmctl for these arguments, with this process's standard streams, and return the exit status."""
    from hegmctl.arguments import parse
    from hegmctl.output import escape_what_cannot_be_encoded, flush, sink_for

    escape_what_cannot_be_encoded()
    # Decided before the rest is parsed, so that an error in the rest is reported in the requested form.
    before_tail = words[: words.index("--")] if "--" in words else words
    sink = sink_for(json="--json" in before_tail, quiet=False, colour=None)
    try:
        arguments = parse(words)
        colour = False if arguments.flag("no-color") else True if arguments.flag("color") else None
        sink = sink_for(json=arguments.flag("json"), quiet=arguments.flag("quiet"), colour=colour)
        status = _serve(arguments, sink)
        flush()
    except HegmError as error:
        sink.error(error)
        return error.code.exit_status
    return status


def _serve(arguments: Arguments, sink: Sink) -> int:
    command = arguments.row
    if arguments.flag("help") or (command is not None and command.name == "help"):
        return _explain(arguments)
    if arguments.flag("version"):
        from hegmctl.output import write_lines
        from hegmd import __version__

        write_lines([f"hegmctl {__version__}"])
        return 0
    if command is None:
        from hegmctl.suggestions import no_command

        raise no_command(arguments.group)
    from hegmctl.grammar.rows import load

    status: int = load(command.handler)(Session(arguments, sink))
    return status


def _explain(arguments: Arguments) -> int:
    from hegmctl.arguments import parse
    from hegmctl.help import command_help, group_help, program_help
    from hegmctl.output import help_columns, write_lines
    from hegmctl.tables import fitted

    columns = help_columns()
    described = arguments
    if arguments.row is not None and arguments.row.name == "help" and not arguments.flag("help"):
        described = parse([*arguments.texts("COMMAND"), "--help"])
    if described.row is not None:
        text = command_help(described.row, columns)
    elif described.group:
        text = group_help(described.group, columns)
    else:
        text = program_help(columns)
    write_lines(fitted(text.rstrip("\n").split("\n"), columns))
    return 0
