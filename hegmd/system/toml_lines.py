"""The line of each key in a TOML text.

The standard parser gives values but not their lines, which an error message needs. This walks a text that the parser
has accepted: it only finds keys, strings and brackets, and judges nothing.
"""

from __future__ import annotations

import re
import sys

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KeyPath = tuple[str, ...]

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n,]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_STRING = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*"{3,5}'  # up to two quotes of the text may precede the closing three
    r"|'''(?:[^']|'(?!''))*'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_PLAIN_VALUE = re.compile(r"[^,\]}\n#]*")


def lines_of(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, where each table and key first appears. The text has to be valid TOML."""
    return _Walk(text.replace("\r\n", "\n")).run()


class _Walk:
    """A pass over one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._counted_to = 0
        self._lines: dict[KeyPath, int] = {}

    def run(self) -> dict[KeyPath, int]:
        table: KeyPath | None = ()
        while self._skip(_GAP) < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._assignment(table)
        return self._lines

    def _header(self) -> KeyPath | None:
        brackets = 2 if self._text.startswith("[[", self._at) else 1
        self._at += brackets
        table = self._key(())
        self._at += brackets
        return table

    def _assignment(self, table: KeyPath | None) -> None:
        key = self._key(table)
        self._at += 1
        self._value(key)

    def _key(self, table: KeyPath | None) -> KeyPath | None:
        """Read a dotted key, record its line for each of its tables, and skip the blanks after it."""
        line = self._line_here()
        path = table
        while True:
            self._skip(_BLANK)
            part = self._key_part()
            if path is not None:
                path = (*path, part)
                self._lines.setdefault(path, line)
            if self._text[self._skip(_BLANK)] != ".":
                return path
            self._at += 1

    def _key_part(self) -> str:
        start = self._at
        if self._text[start] in "\"'":
            quoted = self._text[start : self._skip(_STRING)]
            return str(tomllib.loads(f"key = {quoted}")["key"])
        return self._text[start : self._skip(_BARE_KEY)]

    def _value(self, key: KeyPath | None) -> None:
        """Skip a value. Records keys of an inline table under `key`; keys inside an array have no path."""
        opening = self._text[self._skip(_BLANK)]
        if opening == "[":
            self._at += 1
            while self._text[self._skip(_GAP)] != "]":
                self._value(None)
            self._at += 1
        elif opening == "{":
            self._inline_table(key)
        elif opening in "\"'":
            self._skip(_STRING)
        else:
            self._skip(_PLAIN_VALUE)

    def _inline_table(self, table: KeyPath | None) -> None:
        self._at += 1
        while self._text[self._skip(_GAP)] != "}":
            self._assignment(table)
        self._at += 1

    def _skip(self, pattern: re.Pattern[str]) -> int:
        """Skip what the pattern matches here; returns the new position."""
        match = pattern.match(self._text, self._at)
        if match is not None:
            self._at = match.end()
        return self._at

    def _line_here(self) -> int:
        self._line += self._text.count("\n", self._counted_to, self._at)
        self._counted_to = self._at
        return self._line
