"""The command line of hegmctl as tables: commands, their options and arguments, and their meaning.

The parser (`arguments`), `--help` (`help`), the manual page, the completions of three shells, the reference of the JSON
output, and the calls of both libraries are derived from them. To add a command, add a row, a function if `commands.ask`
does not serve it, and a renderer if its reply is new.

It is not argparse, because that takes 9 ms to import in every call, as much as a whole Python start, and because it
offers neither its grammar nor suggestions for mistyped words. Data only.
"""

from __future__ import annotations

from hegmctl.grammar.imaging import IMAGING
from hegmctl.grammar.looking import LOOKING
from hegmctl.grammar.moving import MOVING
from hegmctl.grammar.rows import Command
from hegmctl.grammar.sharing import SHARING
from hegmctl.grammar.starting import STARTING
from hegmctl.grammar.words import COMMAND_NAMES, FILES, GPUS, JOBS, PATH, PIDS, PLACES, SECONDS, Argument, Option

PROGRAM = "hegmctl"
SUMMARY = "control hegmd, the daemon of this node's GPUs"
DESCRIPTION = (
    "hegmctl shows the GPUs of this node and the processes on them, moves jobs between GPUs, and checks the node. It "
    "talks to the daemon hegmd over a Unix socket. On a terminal it prints coloured tables; into a pipe, plain text; "
    "with --json, JSON. Unknown values are shown as `-`, never as 0."
)

GLOBAL_OPTIONS: tuple[Option, ...] = (
    Option("--socket", kind=PATH, metavar="PATH", complete=FILES, doc="the daemon's socket"),
    Option("--json", doc="print JSON as described in docs/json.md; errors too, to standard error"),
    Option("-q", "--quiet", doc="print the result only"),
    Option("--color", doc="use colours, even in a pipe"),
    Option("--no-color", doc="use no colours; same as NO_COLOR in the environment or TERM=dumb"),
    Option(
        "--timeout",
        kind=SECONDS,
        metavar="SECONDS",
        doc="time limit in seconds for an answer (default 10, doctor 120) or a batch (default 60)",
    ),
    Option("-h", "--help", doc="show help for the program or the command"),
    Option("--version", doc="print the version of hegmctl; `hegmctl version` also shows the daemon's"),
)

GROUPS: dict[str, str] = {
    "hegm": "let `python train.py` save its state at SIGUSR1, as HeGM does",
    "images": "show and manage images of jobs on disk",
    "simulate": "allocate memory on simulated GPUs, or make them fail",
}

_ASIDE = (
    Command(
        "help",
        "explain a command",
        arguments=(Argument("COMMAND", many=True, complete=COMMAND_NAMES, doc="the command"),),
    ),
    Command(
        "__complete",
        "list candidates for shell completions: one on each line, and none without a daemon",
        arguments=(Argument("WHAT", choices=(GPUS, PLACES, JOBS, PIDS), doc="what to list"),),
        handler="commands:complete",
        hidden=True,
    ),
)

COMMANDS: dict[str, Command] = {
    command.name: command for command in (*LOOKING, *STARTING, *MOVING, *SHARING, *IMAGING, *_ASIDE)
}
