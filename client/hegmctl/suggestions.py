"""Suggests the command, option or value that was probably meant. Loaded only after a mistake."""

from __future__ import annotations

from hegmctl.grammar import GROUPS, PROGRAM
from hegmctl.grammar.rows import Command
from hegmctl.grammar.words import Argument, Option
from hegmctl.help import shown_commands
from hegmd.errors import USAGE, HegmError
from hegmd.protocol.names import closest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping


def no_command(group: str) -> HegmError:
    if group:
        known = [
            command.name.removeprefix(f"{group} ")
            for command in shown_commands()
            if command.name.startswith(f"{group} ")
        ]
        return HegmError(USAGE, f"{group} needs a command after it", f"use {' or '.join(known)}")
    return HegmError(USAGE, "a command is needed", f"run: {PROGRAM} --help; or begin with: {PROGRAM} gpus")


def unknown_command(name: str, group: str) -> HegmError:
    names = [command.name for command in shown_commands()] + list(GROUPS)
    known = [candidate for candidate in names if candidate.startswith(f"{group} ")] if group else names
    close = closest(name, known)
    rest = f"`{PROGRAM} {group} --help` lists the commands" if group else f"`{PROGRAM} --help` lists the commands"
    return HegmError(USAGE, f"there is no command {name!r}", f"did you mean `{close}`? {rest}" if close else rest)


def unknown_option(name: str, known: Mapping[str, Option], command: Command | None, group: str) -> HegmError:
    """Return the usage error for an option that does not exist, or belongs to another command."""
    where = command.name if command else group
    rest = f"`{PROGRAM} {where} --help` lists the options" if where else f"`{PROGRAM} --help` lists the options"
    owners = [other.name for other in shown_commands() if any(name in option.names for option in other.options)]
    if command is None and owners:
        return HegmError(USAGE, f"{name} belongs to a command", f"write it after {' or '.join(owners)}")
    message = f"{command.name} has no option {name}" if command else f"there is no option {name}"
    close = closest(name, [candidate for candidate in known if len(candidate) > 2])
    return HegmError(USAGE, message, f"did you mean {close}? {rest}" if close and len(name) > 2 else rest)


def unknown_choice(argument: Argument, word: str) -> HegmError:
    close = closest(word, argument.choices)
    listed = f"it is one of {', '.join(argument.choices)}"
    return HegmError(
        USAGE,
        f"{argument.name} cannot be {word!r}",
        f"did you mean {close}? {listed}" if close else f"write another: {listed}",
    )
