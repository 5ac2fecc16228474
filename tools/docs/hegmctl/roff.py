"""A manual page in the man(7) macros, which every system has. Knows the markup, not what the pages say.

Prose is plain text in which `backticks` mark what is typed literally. Hyphens in there become minus signs, so that an
option that is copied from the page works.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmctl.tables import wrapped

LINE_COLUMNS = 76


def literal(text: str) -> str:
    """Return what the user types, character for character."""
    for plain, escaped in (
        ("\\", "\\(rs"),
        ("-", "\\-"),
        ("'", "\\(aq"),
        ("`", "\\(ga"),
        ("^", "\\(ha"),
        ("~", "\\(ti"),
    ):
        text = text.replace(plain, escaped)
    return text


def prose(text: str) -> list[str]:
    """Text with its literal parts in bold, in lines as short as readers of the source like them."""
    parts = text.split("`")
    marked = "".join(
        f"\\fB{literal(part)}\\fR" if index % 2 else part.replace("\\", "\\(rs") for index, part in enumerate(parts)
    )
    return [_safe(line) for line in wrapped(marked, LINE_COLUMNS)]


def _safe(line: str) -> str:
    """A line that begins like a request must not be taken for one."""
    return f"\\&{line}" if line.startswith((".", "'")) else line


class Page:
    """A page under construction."""

    def __init__(self, name: str, section: int, day: str, source: str, manual: str) -> None:
        self._lines = [
            '.\\" Made from the tables of the program; to change it, change those.',
            f'.TH {name.upper()} {section} {day} "{source}" "{manual}"',
        ]

    def text(self) -> str:
        """The page, whole."""
        return "\n".join([*self._lines, ""])

    def section(self, title: str) -> None:
        self._lines.append(f".SH {title}")

    def subsection(self, title: str) -> None:
        self._lines.append(f".SS {literal(title)}")

    def name(self, name: str, summary: str) -> None:
        self.section("NAME")
        self._lines.append(f"{name} \\- {summary}")

    def paragraph(self, text: str) -> None:
        if not self._lines[-1].startswith((".SH", ".SS")):
            self._lines.append(".PP")
        self._lines += prose(text)

    def synopsis(self, lines: Iterable[str]) -> None:
        """How commands are written: the words in small letters are typed, those in capitals are filled in."""
        for number, line in enumerate(lines):
            if number:
                self._lines.append(".br")
            words = (word if word[0] in "[(" or word.isupper() else f"\\fB{literal(word)}\\fR" for word in line.split())
            self._lines.append(" ".join(words))

    def item(self, tag: str, text: str, *more: str) -> None:
        """Add a term, and its definition in one or more paragraphs."""
        self._lines += [".TP", " ".join(prose(tag)), *prose(text)]
        for paragraph in more:
            self._lines += [".IP", *prose(paragraph)]

    def example(self, lines: Iterable[str]) -> None:
        """Lines to be typed or read as they stand."""
        self._lines += [".RS 4", ".EX", *[_safe(literal(line)) for line in lines], ".EE", ".RE"]
