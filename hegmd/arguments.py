"""The command line of hegmd, as a table: the parser and the man page are both made from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from hegmd import __version__

SUMMARY = "node daemon that sees a machine's GPUs and the jobs on them"


@dataclass(frozen=True, slots=True)
class Argument:
    """One option. Without a metavar it is a switch."""

    flag: str
    metavar: str | None
    help: str


ARGUMENTS: tuple[Argument, ...] = (
    Argument("--config", "FILE", "read this configuration instead of /etc/hegm/hegmd.toml (HEGM_CONFIG)"),
    Argument("--socket", "PATH", "listen here instead of /run/hegm/hegmd.sock (HEGM_SOCKET)"),
    Argument("--state-dir", "DIR", "keep state here instead of /var/lib/hegm (HEGM_STATE_DIR)"),
    Argument("--user", None, "be a private daemon: own processes only, paths in the user's own directories"),
    Argument("--simulate", "SPEC", "simulate GPUs: 2x8GiB for two of that size, or a TOML file with a topology"),
    Argument("--until", "PID", "end after that process, once no job, client or operation is left"),
    Argument("--check-config", None, "read the configuration, report every mistake in it, and exit"),
    Argument("--doctor", None, "check this node without a daemon, one JSON object a line, and exit"),
    Argument("--log-level", "LEVEL", "debug, info, warning or error"),
    Argument("--log-format", "FORMAT", "auto, journal, json or text"),
)


def parser() -> argparse.ArgumentParser:
    """The parser for the table."""
    made = argparse.ArgumentParser(prog="hegmd", description=f"{SUMMARY}.", allow_abbrev=False)
    for argument in ARGUMENTS:
        if argument.metavar is None:
            made.add_argument(argument.flag, action="store_true", help=argument.help)
        else:
            made.add_argument(argument.flag, metavar=argument.metavar, help=argument.help)
    made.add_argument("--version", action="version", version=f"hegmd {__version__}")
    return made
