"""`hegm-ctrl checkpoint|resume|api-server`: HeGM's grammar, words and exit statuses."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hegmcompat.control import Control
from hegmcompat.surroundings import LauncherSettings, read_surroundings, require_token_off_loopback
from hegmcompat.terminal import explain, say
from hegmd.errors import HegmError

SUMMARY = "make trainings save their state, and let them continue"
_LAST_PORT = 65535
NOBODY = (
    "No GPU-using workers detected (no Launcher instances have registered a worker, or none hold /dev/nvidia* open)."
)


def port_of(text: str) -> int:
    """Parse a port. Raises argparse.ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; give a whole number from 0 to {_LAST_PORT}")
    return int(text)


DESCRIPTION = "HeGM external control CLI (checkpoint / resume)."


@dataclass(frozen=True, slots=True)
class Option:
    """An option: its flags, its meaning, and its arguments for argparse."""

    flags: tuple[str, ...]
    doc: str
    metavar: str = ""
    how: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Command:
    """A command and its options. The manual page is made of these too."""

    name: str
    doc: str
    options: tuple[Option, ...]


COMMANDS = (
    Command(
        "checkpoint",
        "Trigger checkpoint via SIGUSR1.",
        (
            Option(
                ("-p", "--pid"),
                "Target worker PID(s) to signal.",
                "PID...",
                {"dest": "pids", "type": int, "nargs": "+"},
            ),
            Option(("--all",), "Auto-detect all GPU-using PIDs and signal them.", how={"action": "store_true"}),
        ),
    ),
    Command(
        "resume",
        "Resume from checkpoints by removing lock files.",
        (
            Option(
                ("-P", "--ppid"),
                "Parent PID(s) whose lock files should be removed.",
                "PPID...",
                {"dest": "ppids", "type": int, "nargs": "+"},
            ),
            Option(
                ("--all",), "Resume all pending checkpoints under the base directory.", how={"action": "store_true"}
            ),
        ),
    ),
    Command(
        "api-server",
        "Run the in-container REST control API server.",
        (
            Option(
                ("--host",),
                "Bind address for the REST server (default: HEGM_CTRL_HOST, or 127.0.0.1). Any other than loopback "
                "needs HEGM_CTRL_TOKEN.",
                "HOST",
            ),
            Option(
                ("--port",),
                "TCP port for the REST server (default: HEGM_CTRL_PORT, or 8298).",
                "PORT",
                {"type": port_of},
            ),
        ),
    ),
)


def main() -> NoReturn:
    try:
        status = run(sys.argv[1:], os.environ)
    except HegmError as error:
        explain(error)
        status = error.code.exit_status
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def run(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command line and return its exit status. Raises HegmError, and SystemExit for a wrong command line."""
    surroundings = read_surroundings(environ)
    parser = build_parser()
    arguments = parser.parse_args(words)
    control = Control(surroundings)
    if arguments.command == "checkpoint":
        return _checkpoint(parser, arguments, control)
    if arguments.command == "resume":
        return _resume(parser, arguments, control)
    return _serve(arguments, control, surroundings)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hegm-ctrl", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        added = commands.add_parser(command.name, help=command.doc)
        for option in command.options:
            added.add_argument(*option.flags, help=option.doc, **option.how)
    return parser


def _checkpoint(parser: argparse.ArgumentParser, arguments: argparse.Namespace, control: Control) -> int:
    if arguments.pids and arguments.all:
        parser.error("checkpoint: specify either --pid or --all, not both")
    if arguments.all:
        results = control.checkpoint_all()
        if not results:
            say(NOBODY)
            return 1
    elif arguments.pids:
        results = control.checkpoint(arguments.pids)
    else:
        parser.error("checkpoint: one of --pid/--all is required")
    for pid, became in results.items():
        say(f"PID {pid}: {became}")
    return 0


def _resume(parser: argparse.ArgumentParser, arguments: argparse.Namespace, control: Control) -> int:
    if arguments.ppids and arguments.all:
        parser.error("resume: specify either --ppid or --all, not both")
    if arguments.all:
        results = control.resume_all()
    elif arguments.ppids:
        results = control.resume(arguments.ppids)
    else:
        parser.error("resume: one of --ppid/--all is required")
    for pid, became in results.items():
        say(f"PPID {pid}: {became}")
    return 0


def _serve(arguments: argparse.Namespace, control: Control, surroundings: LauncherSettings) -> int:
    from hegmcompat.rest import serve_beside

    host = surroundings.host if arguments.host is None else arguments.host
    port = surroundings.port if arguments.port is None else arguments.port
    require_token_off_loopback(host, surroundings.token)
    server = serve_beside(control, host, port, surroundings.token, is_quiet=surroundings.is_quiet)
    if server is None:
        return 1
    try:
        server.await_end()
    except KeyboardInterrupt:
        return 0
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    main()
