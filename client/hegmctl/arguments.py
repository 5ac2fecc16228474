"""Parses a command line by the tables in `grammar`, with GNU conventions.

`--option=value` and `--option value`, `-f` and `-fv` and `-qf`, options anywhere, `--` before words to leave alone.
Every mistake is a usage error with a hint. The parser guesses nothing and does not ask the daemon.
"""

from __future__ import annotations

import os

from hegmctl.grammar import COMMANDS, GLOBAL_OPTIONS, GROUPS
from hegmctl.grammar.rows import Command
from hegmctl.grammar.words import COUNT, FLAG, JOB, PID, POSITIVE, SECONDS, SIZE, TEXT, Argument, Option
from hegmd.errors import NOT_FOUND, USAGE, Bug, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from hegmd.protocol.messages import Request
    from hegmd.protocol.record import Field

MAX_WAIT_S = 1_000_000.0
MAX_NUMBER = 2**53
# No unit is the end of another one.
_UNITS_S = {"min": 60.0, "h": 3600.0, "s": 1.0}


def absolute(path: str) -> str:
    """Return the absolute path of what was typed. Raises HegmError in a directory that was removed."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError as error:
        raise HegmError(
            NOT_FOUND,
            f"{path} has no absolute path: the current directory was removed",
            "change into a directory that exists",
        ) from error


def usage_error(message: str, hint: str) -> HegmError:
    """Return a usage error: what is wrong, and what to write instead."""
    return HegmError(USAGE, message, hint)


class Arguments:
    """A parsed command line: the command (None without one), and typed access to options and arguments."""

    def __init__(
        self, command: Command | None, values: dict[str, list[Any]], tail: tuple[str, ...], group: str = ""
    ) -> None:
        self.row = command
        self.tail = tail
        self.group = group
        self._values = values

    @property
    def command(self) -> Command:
        """Return the row of the command. Raises Bug without one."""
        if self.row is None:
            raise Bug("a command line without a command was served")
        return self.row

    def values(self, key: str) -> list[Any]:
        return self._values.get(key, [])

    def request(self, op: str = "", **given: object) -> Request:
        """Return the command's request with the given options and the fields in `given`. Raises USAGE."""
        from hegmctl.grammar.fields import TIMEOUT
        from hegmd.protocol.messages import REQUESTS
        from hegmd.protocol.record import REQUIRED

        everything: tuple[Option | Argument, ...] = (*self.command.arguments, *self.command.options)
        places = {each.field: each for each in everything if each.field}
        kind = REQUESTS[op or self.command.request]
        values: dict[str, object] = dict(given)
        for field in kind.fields:
            place = places.get(field.name)
            if field.name in values:
                continue
            if field.name == TIMEOUT:
                values[TIMEOUT] = self.seconds("timeout")
            elif place is not None:
                typed = self.values(place.key)
                if typed:
                    values[field.name] = _value(field, place, typed)
                elif field.default is REQUIRED:
                    raise _missing(self.command, place.key)
        return kind(**values)

    def flag(self, key: str) -> bool:
        return key in self._values

    def text(self, key: str) -> str | None:
        """Return the last value given, or None."""
        found = self._values.get(key)
        return str(found[-1]) if found else None

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(str(value) for value in self._values.get(key, ()))

    def whole(self, key: str) -> int | None:
        """Return the last value of an option that takes a whole number or a size."""
        found = self._values.get(key)
        return int(found[-1]) if found else None

    def wholes(self, key: str) -> tuple[int, ...]:
        return tuple(int(value) for value in self._values.get(key, ()))

    def seconds(self, key: str) -> float | None:
        """Return the last value of an option that takes seconds."""
        found = self._values.get(key)
        return float(found[-1]) if found else None

    def required(self, key: str) -> str:
        return str(self._values[key][-1])


def _value(field: Field, place: Option | Argument, typed: list[Any]) -> object:
    if field.name == "wait":
        return False  # the option is --no-wait
    if field.name == "path":
        return absolute(typed[-1])  # the daemon has another working directory
    if not field.type_text.startswith("tuple["):
        return typed[-1]
    if isinstance(place, Option) and place.splits:
        return tuple(part for text in typed for part in text.split(",") if part)
    return tuple(typed)


def _missing(command: Command, name: str) -> HegmError:
    hint = (
        "hegmctl jobs lists the jobs, hegmctl ps the processes"
        if name == "JOB"
        else f"`hegmctl {command.name} --help` explains it"
    )
    return usage_error(f"{command.name} needs a {name}", hint)


def parse(words: Sequence[str]) -> Arguments:
    """Parse the command line without the program's name. Raises HegmError USAGE."""
    return _Reader(words).read()


class _Reader:
    """A pass over the words."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._next = 0
        self._command: Command | None = None
        self._group = ""
        self._values: dict[str, list[Any]] = {}
        self._positionals: list[str] = []
        self._options: dict[str, Option] = {}
        self._allow(GLOBAL_OPTIONS)

    def _allow(self, options: tuple[Option, ...]) -> None:
        for option in options:
            for name in option.names:
                self._options[name] = option

    def read(self) -> Arguments:
        tail: tuple[str, ...] | None = None
        while self._next < len(self._words):
            word = self._words[self._next]
            self._next += 1
            if word == "--":
                tail = tuple(self._words[self._next :])
                break
            if word.startswith("--"):
                self._take_long(word)
            elif len(word) > 1 and word[0] == "-":
                self._take_short(word)
            elif self._begins_tail():
                tail = tuple(self._words[self._next - 1 :])
                break
            else:
                self._take_positional(word)
        if self._command is not None and not self._command.tail and tail:
            self._positionals.extend(tail)  # `--` only keeps these words from being read as options
            tail = ()
        wants_no_command = "help" in self._values or "version" in self._values
        if self._command is None:
            if tail and not wants_no_command:
                raise usage_error("a command is needed before `--`", "`hegmctl --help` lists the commands")
            return Arguments(None, self._values, (), self._group)
        if not wants_no_command:
            self._bind(self._command)
            if tail is not None and self._command.tail and not tail:
                raise usage_error(
                    f"there is no {self._command.tail} after `--`", f"write the {self._command.tail}, or leave `--` out"
                )
            if tail and not tail[0]:
                raise usage_error(f"the {self._command.tail} is empty", "name the program to run")
        return Arguments(self._command, self._values, tail or ())

    def _begins_tail(self) -> bool:
        """Return True if this word starts the command to run: the options after it belong to that command."""
        command = self._command
        return command is not None and bool(command.tail) and len(self._positionals) == len(command.arguments)

    def _take_long(self, word: str) -> None:
        name, equals, value = word.partition("=")
        option = self._options.get(name)
        if option is None:
            raise self._unknown_option(name)
        if option.kind == FLAG:
            if equals:
                raise usage_error(f"{name} takes no value", f"write {name} alone")
            self._put(option, name, None)
        elif equals:
            self._put(option, name, value)
        else:
            self._put(option, name, self._value_for(option, name))

    def _take_short(self, word: str) -> None:
        letters = word[1:]
        while letters:
            name, letters = "-" + letters[0], letters[1:]
            option = self._options.get(name)
            if option is None:
                raise self._unknown_option(name)
            if option.kind == FLAG:
                self._put(option, name, None)
                continue
            self._put(option, name, letters.removeprefix("=") if letters else self._value_for(option, name))
            return

    def _value_for(self, option: Option, name: str) -> str:
        if option.implied is not None:
            return option.implied
        if self._next == len(self._words):
            raise usage_error(f"{name} needs {option.metavar}", f"write {name} {option.metavar}")
        self._next += 1
        return self._words[self._next - 1]

    def _put(self, option: Option, name: str, text: str | None) -> None:
        value = True if text is None else convert(option.kind, text, f"{name} {text}")
        if option.repeats:
            self._values.setdefault(option.key, []).append(value)
        else:
            self._values[option.key] = [value]

    def _take_positional(self, word: str) -> None:
        if self._command is not None:
            self._positionals.append(word)
            return
        name = f"{self._group} {word}" if self._group else word
        if name in GROUPS:
            self._group = name
        elif name in COMMANDS:
            self._command = COMMANDS[name]
            self._allow(self._command.options)
        else:
            from hegmctl.suggestions import unknown_command

            raise unknown_command(name, self._group)

    def _bind(self, command: Command) -> None:
        waiting = list(self._positionals)
        for argument in command.arguments:
            if argument.many:
                self._values[argument.name] = [_checked(argument, word) for word in waiting]
                waiting = []
            elif waiting:
                self._values[argument.name] = [_checked(argument, waiting.pop(0))]
            else:
                raise usage_error(
                    f"{command.name} needs {argument.name}", f"`hegmctl {command.name} --help` explains it"
                )
        if waiting:
            hint = f"`hegmctl {command.name} --help` shows what it takes"
            raise usage_error(f"{command.name} does not take {waiting[0]!r}", hint)

    def _unknown_option(self, name: str) -> HegmError:
        from hegmctl.suggestions import unknown_option

        return unknown_option(name, self._options, self._command, self._group)


def _checked(argument: Argument, word: str) -> object:
    if argument.choices and not argument.complete and word not in argument.choices:
        from hegmctl.suggestions import unknown_choice

        raise unknown_choice(argument, word)
    return convert(argument.kind, word, f"{argument.name} {word}")


def convert(kind: str, text: str, what: str) -> object:
    """Return the value of the text. `what` names it in errors."""
    if kind in (COUNT, PID, POSITIVE) or (kind == JOB and text.lstrip("-").isdigit()):
        return _whole(kind, text, what)
    if kind == SECONDS:
        return seconds_of(text, what)
    if kind == SIZE:
        from hegmctl.quantities import parse_size

        try:
            size_bytes = parse_size(text)
        except ValueError:
            size_bytes = -1
        if size_bytes > MAX_NUMBER:
            raise usage_error(f"{what}: more than any GPU has", "write a size below 8 PiB")
        if size_bytes < 0:
            raise usage_error(f"{what}: {kind} is needed", "write bytes, or a number with KiB, MiB, GiB, TiB, MB or GB")
        return size_bytes
    if not text:
        raise usage_error(f"{what.rstrip()} is empty", "give it a value")
    if kind in (TEXT, JOB) and not _is_utf8(text):
        raise usage_error(f"{what} is not UTF-8", "write it as the daemon shows it")
    return text


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that Python could not decode are surrogates, which no frame can hold
        return False
    return True


def _whole(kind: str, text: str, what: str) -> int:
    is_number = text.isascii() and text.isdigit()
    number = int(text) if is_number and len(text) < 20 else -1
    if is_number and not 0 <= number <= MAX_NUMBER:
        raise usage_error(f"{what}: the number is too large", f"write one of at most {MAX_NUMBER}")
    if number < (0 if kind == COUNT else 1):
        needed = PID if kind == JOB else kind
        raise usage_error(f"{what}: {needed} is needed", "write it in digits, such as 4711")
    return number


def seconds_of(text: str, what: str) -> float:
    """Return the seconds in the text. Raises HegmError, which names `what`."""
    unit = next((unit for unit in _UNITS_S if text.endswith(unit)), "")
    try:
        seconds = float(text.removesuffix(unit)) * _UNITS_S.get(unit, 1.0)
    except ValueError:
        seconds = -1.0
    if seconds > MAX_WAIT_S:
        longest = f"{MAX_WAIT_S:,.0f}"
        raise usage_error(f"{what}: the time is too long", f"write at most {longest} seconds, about 11 days")
    if not seconds > 0:  # NaN fails the comparison
        raise usage_error(f"{what}: {SECONDS} over 0 is needed", "write it as 5, 0.5 or 10min")
    return seconds
