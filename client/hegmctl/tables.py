"""Text for people: what may be printed, how wide it is, colours, wrapped paragraphs and aligned tables.

Every text that came from outside passes `printable` on its way to a terminal: a process can put an escape sequence in
its name, and a table must not carry it out. `table` does that by itself, so that no caller can forget it. Pure: what
the terminal is like comes in as a `Style`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Cell = str | tuple[str, str]

UNKNOWN = "-"
GAP = "  "
WIDEST_PARAGRAPH = 100
# A colour that `paint` has put in; two spaces and more, as between columns; a word with the spaces around it.
_COLOUR, _GAP, _PIECE = r"\x1b\[[0-9;]*m", r"^ +|  +", r"^ *[^ ]+ *|[^ ]+ *"
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}


class Style:
    """What the place is like that the text goes to. `columns` is None where nothing has to fit, as in a pipe.

    `remarks` is whether to say anything beside the answer itself.
    """

    __slots__ = ("colour", "columns", "ellipsis", "lines", "remarks")

    def __init__(
        self,
        *,
        colour: bool = False,
        columns: int | None = None,
        lines: int | None = None,
        ellipsis: str = "~",
        remarks: bool = True,
    ) -> None:
        self.colour = colour
        self.columns = columns
        self.lines = lines
        self.ellipsis = ellipsis
        self.remarks = remarks

    def paint(self, text: str, colour: str) -> str:
        """The text in that colour, if colours are wanted and it has one."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour and colour else text

    @property
    def paragraph_columns(self) -> int:
        """How wide a paragraph may be."""
        return min(self.columns or WIDEST_PARAGRAPH, WIDEST_PARAGRAPH)


PLAIN = Style()


class Column:
    """A column. It may `shrink` to that width; the highest `drop` leaves first when the terminal is too narrow."""

    __slots__ = ("drop", "right", "shrink", "title")

    def __init__(self, title: str, *, right: bool = False, shrink: int | None = None, drop: int = 0) -> None:
        self.title = title
        self.right = right
        self.shrink = shrink
        self.drop = drop


def printable(text: str) -> str:
    """The text with everything escaped that a terminal could take for a command, or that hides or turns text around."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width(text: str) -> int:
    """How many columns of a terminal the text takes."""
    if text.isascii():
        return len(text)
    import unicodedata  # only here: it is a library of 1 MB that most tables never need

    columns = 0
    for c in text:
        if not unicodedata.combining(c):
            columns += 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return columns


def shortened(text: str, columns: int, ellipsis: str) -> str:
    """The text in at most that many columns, its end cut off if need be."""
    if width(text) <= columns:
        return text
    if columns < len(ellipsis):
        return ""
    kept = text[:columns]
    while kept and width(kept) > columns - len(ellipsis):
        kept = kept[:-1]
    return kept + ellipsis


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """The text as lines of at most that many columns; a word that is longer keeps its length."""
    lines: list[str] = []
    line = indent
    for word in text.split():
        if line != indent and width(line) + 1 + width(word) > columns:
            lines.append(line)
            line = indent
        line += word if line == indent else f" {word}"
    return [*lines, line]


def fitted(lines: Iterable[str], columns: int | None) -> list[str]:
    """The lines, each of at most that many columns, so that no terminal breaks one inside a word.

    What does not fit goes on under the last column that begins in the left half. A longer word keeps its length.
    """
    if columns is None:
        return list(lines)
    return [part for line in lines for part in (_broken(line, columns) if len(line) > columns // 2 else (line,))]


def _broken(line: str, columns: int) -> list[str]:
    if width(line) <= columns:  # a colour only makes it longer
        return [line]
    import re  # only here: 4 ms that most answers need not pay

    plain = re.sub(_COLOUR, "", line)
    if width(plain) <= columns:
        return [line]
    starts = [gap.end() for gap in re.finditer(_GAP, plain) if gap.end() <= columns // 2]
    indent = " " * (starts[-1] if starts else 2)
    parts: list[str] = []
    part, used = "", 0
    for piece in re.findall(_PIECE, line):
        text = re.sub(_COLOUR, "", piece)
        if part.strip() and used + width(text.rstrip()) > columns:
            parts.append(part.rstrip())
            part, used = indent, len(indent)
        part += piece
        used += width(text)
    return [*parts, part.rstrip()]


def table(columns: Sequence[Column], rows: Iterable[Sequence[Cell]], style: Style) -> list[str]:
    """The lines of an aligned table. A cell is a text, or a text and its colour."""
    texts: list[list[str]] = []
    colours: list[list[str]] = []
    for row in rows:
        texts.append([printable(cell if isinstance(cell, str) else cell[0]) for cell in row])
        colours.append(["" if isinstance(cell, str) else cell[1] for cell in row])
    natural = [
        max([width(column.title), *(width(row[index]) for row in texts)]) for index, column in enumerate(columns)
    ]
    shown, widths = _fit(columns, natural, style.columns)
    header = [columns[index].title for index in shown]
    lines = [style.paint(_line(header, widths, [columns[i] for i in shown], [""] * len(shown), style), "bold")]
    for row, paints in zip(texts, colours, strict=True):
        cells = [row[index] for index in shown]
        lines.append(_line(cells, widths, [columns[i] for i in shown], [paints[i] for i in shown], style))
    return lines


def _fit(columns: Sequence[Column], natural: list[int], room: int | None) -> tuple[list[int], list[int]]:
    """Which columns to show and how wide: first the wide ones shrink, then the least important ones leave."""
    shown = list(range(len(columns)))
    if room is None:
        return shown, natural
    while True:
        widths = [natural[index] for index in shown]
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - room
        while excess > 0:
            # One column's width at a time from the widest, so that none is starved for the sake of another.
            candidates = [
                (widths[place], place)
                for place, index in enumerate(shown)
                if (least := columns[index].shrink) is not None and widths[place] > least
            ]
            if not candidates:
                break
            widths[max(candidates)[1]] -= 1
            excess -= 1
        droppable = [(columns[index].drop, index) for index in shown if columns[index].drop]
        if excess <= 0 or not droppable:
            return shown, widths
        shown.remove(max(droppable)[1])


def _line(
    cells: Sequence[str], widths: Sequence[int], columns: Sequence[Column], colours: Sequence[str], style: Style
) -> str:
    parts: list[str] = []
    last = len(cells) - 1
    for place, (text, room, column, colour) in enumerate(zip(cells, widths, columns, colours, strict=True)):
        cut = shortened(text, room, style.ellipsis)
        padding = " " * (room - width(cut))
        painted = style.paint(cut, colour)
        if column.right:
            parts.append(padding + painted)
        else:
            parts.append(painted if place == last else painted + padding)
    return GAP.join(parts).rstrip()
