"""The texts of `--help`, made from `grammar` and imported only for help. No command is named here."""

from __future__ import annotations

from hegmctl.grammar import COMMANDS, DESCRIPTION, GLOBAL_OPTIONS, GROUPS, PROGRAM
from hegmctl.grammar.rows import Command
from hegmctl.grammar.words import Option
from hegmctl.tables import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SOCKET_ORDER = (
    "hegmctl looks for the daemon at the path given with --socket; else at the one in HEGM_SOCKET; else at "
    "/run/hegm/hegmd.sock, the node's own daemon, if it exists and the caller may use it; else at "
    "$XDG_RUNTIME_DIR/hegm/hegmd.sock, where `hegmd --user` listens; else at /tmp/hegm-UID/hegmd.sock, where "
    "`hegmctl run` starts a daemon for a user who has no such directory."
)
LEFT_COLUMNS = 26


def usage(command: Command) -> str:
    words = [PROGRAM, command.name]
    if command.options:
        words.append("[OPTION]...")
    words += [f"[{argument.name}]..." if argument.many else argument.name for argument in command.arguments]
    if command.tail:
        words.append(f"[--] {command.tail}...")
    return " ".join(words)


def shown_commands() -> list[Command]:
    return [command for command in COMMANDS.values() if not command.hidden]


def program_help(columns: int) -> str:
    lines = [f"Usage: {PROGRAM} [OPTION]... COMMAND [ARGUMENT]...", "", *wrapped(DESCRIPTION, columns), "", "Commands:"]
    for command in shown_commands():
        lines += _entry(command.name, command.summary, columns)
    lines += ["", "Options, before or after the command:"]
    lines += _option_entries(GLOBAL_OPTIONS, columns)
    lines += ["", "Socket:", *wrapped(SOCKET_ORDER, columns, "  "), ""]
    lines += [f"`{PROGRAM} help COMMAND` explains a command; man {PROGRAM} lists the exit statuses.", ""]
    return "\n".join(lines)


def group_help(group: str, columns: int) -> str:
    lines = [f"Usage: {PROGRAM} {group} COMMAND ...", "", f"Commands that {GROUPS[group]}:"]
    for command in shown_commands():
        if command.name.startswith(group + " "):
            lines += _entry(command.name, command.summary, columns)
    return "\n".join([*lines, ""])


def command_help(command: Command, columns: int) -> str:
    lines = [f"Usage: {usage(command)}", "", *wrapped(sentence(command), columns)]
    if command.arguments:
        lines += ["", "Arguments:"]
        for argument in command.arguments:
            lines += _entry(argument.name, argument.doc, columns)
    if command.options:
        lines += ["", "Options:", *_option_entries(command.options, columns)]
    if command.examples:
        lines += ["", "Examples:"]
        for example, meaning in command.examples:
            lines += [f"  {example}", f"      {meaning}"]
    names = " ".join(option.names[-1] for option in GLOBAL_OPTIONS)
    lines += ["", *wrapped(f"Options of every command: {names}; see `{PROGRAM} --help`.", columns), ""]
    return "\n".join(lines)


def sentence(command: Command) -> str:
    """Return what the command does: its summary as a sentence, then the rest."""
    summary = command.summary[0].upper() + command.summary[1:] + "."
    return " ".join(part for part in (summary, command.doc, command.exits) if part)


def option_forms(option: Option) -> str:
    """`-w, --watch[=SECONDS]` and the like."""
    forms = ", ".join(option.names)
    if option.implied is not None:
        return f"{forms}[={option.metavar}]"
    return f"{forms} {option.metavar}" if option.metavar else forms


def _option_entries(options: Iterable[Option], columns: int) -> list[str]:
    lines: list[str] = []
    for option in options:
        short = option.names[0].startswith("--")
        lines += _entry(("    " if short else "") + option_forms(option), option.doc, columns)
    return lines


def _entry(left: str, right: str, columns: int) -> list[str]:
    head = f"  {left}"
    text = wrapped(right, columns, " " * LEFT_COLUMNS)
    if len(head) > LEFT_COLUMNS - 2:
        return [head, *text]
    return [head + text[0][len(head) :], *text[1:]]
