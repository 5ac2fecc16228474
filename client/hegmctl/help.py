"""What `--help` says, made from `grammar` and loaded only then. Nothing here knows a single command by name."""

from __future__ import annotations

from hegmctl.grammar import DESCRIPTION, GLOBAL_OPTIONS, GROUPS, PROGRAM, VERBS, Option, Verb
from hegmctl.tables import wrapped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

SOCKET_ORDER = (
    "The daemon is looked for at the path given with --socket; else at the one in HEGM_SOCKET; else at "
    "/run/hegm/hegmd.sock, the node's own daemon, if that is there and the caller may use it; else at "
    "$XDG_RUNTIME_DIR/hegm/hegmd.sock, where `hegmd --user` listens; else at /tmp/hegm-UID/hegmd.sock, where "
    "`hegmctl run` starts a daemon for a user who has no such directory."
)
LEFT_COLUMNS = 26


def usage(verb: Verb) -> str:
    """How the command is written, in one line."""
    words = [PROGRAM, verb.name]
    if verb.options:
        words.append("[OPTION]...")
    words += [f"[{argument.name}]..." if argument.many else argument.name for argument in verb.arguments]
    if verb.tail:
        words.append(f"[--] {verb.tail}...")
    return " ".join(words)


def shown_commands() -> list[Verb]:
    """The commands that people are told of."""
    return [verb for verb in VERBS.values() if not verb.hidden]


def program_help(columns: int) -> str:
    """What `hegmctl --help` prints."""
    lines = [f"Usage: {PROGRAM} [OPTION]... COMMAND [ARGUMENT]...", "", *wrapped(DESCRIPTION, columns), "", "Commands:"]
    for verb in shown_commands():
        lines += _entry(verb.name, verb.summary, columns)
    lines += ["", "Options, before or after the command:"]
    lines += _option_entries(GLOBAL_OPTIONS, columns)
    lines += ["", "Socket:", *wrapped(SOCKET_ORDER, columns, "  "), ""]
    lines += [f"`{PROGRAM} help COMMAND` explains a command; man {PROGRAM} lists the exit statuses.", ""]
    return "\n".join(lines)


def group_help(group: str, columns: int) -> str:
    """What `--help` prints for a group of commands."""
    lines = [f"Usage: {PROGRAM} {group} COMMAND ...", "", f"Commands that {GROUPS[group]}:"]
    for verb in shown_commands():
        if verb.name.startswith(group + " "):
            lines += _entry(verb.name, verb.summary, columns)
    return "\n".join([*lines, ""])


def verb_help(verb: Verb, columns: int) -> str:
    """What `hegmctl COMMAND --help` prints."""
    lines = [f"Usage: {usage(verb)}", "", *wrapped(sentence(verb), columns)]
    if verb.arguments:
        lines += ["", "Arguments:"]
        for argument in verb.arguments:
            lines += _entry(argument.name, argument.doc, columns)
    if verb.options:
        lines += ["", "Options:", *_option_entries(verb.options, columns)]
    if verb.examples:
        lines += ["", "Examples:"]
        for command, meaning in verb.examples:
            lines += [f"  {command}", f"      {meaning}"]
    names = " ".join(option.names[-1] for option in GLOBAL_OPTIONS)
    lines += ["", *wrapped(f"Options of every command: {names}; see `{PROGRAM} --help`.", columns), ""]
    return "\n".join(lines)


def sentence(verb: Verb) -> str:
    """What the command does: its summary as a sentence, then the rest."""
    summary = verb.summary[0].upper() + verb.summary[1:] + "."
    return " ".join(part for part in (summary, verb.doc, verb.exits) if part)


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
