"""The types of settings: which values are valid, what to report of others, and how a person writes them.

Each type takes a value from TOML, the environment or a command line, and returns it as the program uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

# Linux takes paths of 4096 bytes, and sun_path has 108, each with its closing zero.
PATH_BYTES = 4095
SOCKET_PATH_BYTES = 107


class InvalidSetting(Exception):
    """A value that a setting cannot have: why, and what to write instead."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why)
        self.why = why
        self.hint = hint


class SettingType(Protocol):
    """The values that a setting takes. `form` describes them in a few words."""

    @property
    def form(self) -> str: ...

    def parse(self, value: object) -> object:
        """Return the value as the program uses it. Raises Unfit."""
        ...

    def show(self, value: Any) -> str | int | float | tuple[str, ...]:
        """Return the value as a person writes it in the file."""
        ...


def quoted(text: str) -> str:
    """Return the text on one line, shortened for a message."""
    return json.dumps(text if len(text) <= 80 else f"{text[:80]}...", ensure_ascii=False)


def name_of_type(value: object) -> str:
    """Return TOML's name for the type of that value."""
    names: dict[type, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number with a fraction",
        str: "text",
        list: "a list",
        dict: "a table",
    }
    return names.get(type(value), "a date or time")


class OneOf(NamedTuple):
    """A setting that takes one of a few words."""

    words: tuple[str, ...]

    @property
    def form(self) -> str:
        return "One of " + ", ".join(f'"{word}"' for word in self.words)

    def parse(self, value: object) -> object:
        if isinstance(value, str) and value in self.words:
            return value
        written = quoted(value) if isinstance(value, str) else name_of_type(value)
        raise InvalidSetting(f"{written} is not one of its values", "write " + self.form[0].lower() + self.form[1:])

    def show(self, value: Any) -> str:
        return str(value)


class SomeOf(NamedTuple):
    """Any of a few words, or none."""

    words: tuple[str, ...]

    @property
    def form(self) -> str:
        return "A list of any of " + ", ".join(f'"{word}"' for word in self.words)

    def parse(self, value: object) -> object:
        hint = f'write {self.form[0].lower()}{self.form[1:]}, such as ["{self.words[0]}"], or []'
        if not isinstance(value, (list, tuple)):
            raise InvalidSetting(f"a list is needed, not {name_of_type(value)}", hint)
        for word in cast("Sequence[object]", value):
            if word not in self.words:
                written = quoted(word) if isinstance(word, str) else name_of_type(word)
                raise InvalidSetting(f"{written} is not one of its values", hint)
        return tuple(dict.fromkeys(cast("Sequence[str]", value)))

    def show(self, value: Any) -> tuple[str, ...]:
        return tuple(value)


class Amount(NamedTuple):
    """A number within bounds; whole, or with a fraction."""

    minimum: float
    maximum: float
    whole: bool = True

    @property
    def form(self) -> str:
        return f"{'A whole' if self.whole else 'A'} number from {self.minimum} to {self.maximum}"

    def parse(self, value: object) -> object:
        hint = "write " + self.form[0].lower() + self.form[1:]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or (self.whole and isinstance(value, float)):
            quoted = ", without quotes" if isinstance(value, str) else ""
            raise InvalidSetting(
                f"a {'whole ' if self.whole else ''}number is needed, not {name_of_type(value)}", hint + quoted
            )
        if not self.minimum <= value <= self.maximum:  # a float that is not a number fails this as well
            raise InvalidSetting(f"{value} is out of bounds", hint)
        return value if self.whole else float(value)

    def show(self, value: Any) -> int | float:
        return int(value) if self.whole else float(value)


class PathName(NamedTuple):
    """An absolute path, or none."""

    optional: bool = False
    ending: str = ""
    most_bytes: int = PATH_BYTES

    @property
    def form(self) -> str:
        ending = f" that ends in {self.ending}" if self.ending else ""
        most = f" of at most {self.most_bytes} bytes" if self.most_bytes < PATH_BYTES else ""
        none = ', or "" for none' if self.optional else ""
        return f"An absolute path{ending}{most}{none}"

    def parse(self, value: object) -> object:
        hint = "write " + self.form[0].lower() + self.form[1:]
        if not isinstance(value, str):
            raise InvalidSetting(f"a path is needed, not {name_of_type(value)}", hint)
        if not value and self.optional:
            return None
        if not value.startswith("/") or "\0" in value:
            raise InvalidSetting(f"{quoted(value)} is not an absolute path", hint)
        size_bytes = len(value.encode(errors="surrogateescape"))
        if size_bytes > self.most_bytes:
            raise InvalidSetting(f"the path is {size_bytes} bytes long and {self.most_bytes} is the most", hint)
        if not value.endswith(self.ending) or value.endswith("/"):
            raise InvalidSetting(f"{quoted(value)} is not the path of such a file", hint)
        return Path(value)

    def show(self, value: Any) -> str:
        return "" if value is None else str(value)


class Mode(NamedTuple):
    """Permission bits, written in octal as a text, since TOML's bare 660 would be another number."""

    form: str = 'Permissions in octal and in quotes, from "0600" to "0777"'

    def parse(self, value: object) -> object:
        hint = 'write it as text, such as "0660"'
        if not isinstance(value, str):
            raise InvalidSetting(f"permissions are needed as text, not {name_of_type(value)}", hint)
        if not re.fullmatch(r"0?[0-7]{3}", value):
            raise InvalidSetting(f"{quoted(value)} is not a mode of three octal digits", hint)
        if int(value, 8) & 0o600 != 0o600:
            raise InvalidSetting(f'"{value}" would deny access to the daemon itself', "let the first digit be 6 or 7")
        return int(value, 8)

    def show(self, value: Any) -> str:
        return f"{value:04o}"


class GroupName(NamedTuple):
    form: str = 'A group, or "" to leave the group as it is'

    def parse(self, value: object) -> object:
        if not isinstance(value, str) or not re.fullmatch(r"[^\x00-\x1f\x7f:,/]*", value):
            raise InvalidSetting("the name of a group is needed", 'write it as text, such as "hegm"')
        return value

    def show(self, value: Any) -> str:
        return str(value)
