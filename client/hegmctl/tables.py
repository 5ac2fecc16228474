"""Text for people: escaping, widths, colours, wrapped paragraphs and aligned tables.

All text from outside passes `printable` on its way to a terminal: a process can have an escape sequence in its name.
`table` applies it to every cell, so no caller can forget it. Pure: a `Style` describes the terminal.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Cell = str | tuple[str, str]

UNKNOWN = "-"
GAP = "  "
WIDEST_PARAGRAPH = 100
# A colour from `paint`; two or more spaces, as between columns; a word with the spaces around it.
_COLOUR, _GAP, _PIECE = r"\x1b\[[0-9;]*m", r"^ +|  +", r"^ *[^ ]+ *|[^ ]+ *"
_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}


class Style:
    """`columns` is None where lines have no limit, as in a pipe. `remarks`: notes beside the answer are wanted."""

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
        """Return the text in that colour, if colours are wanted and `colour` is not empty."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour and colour else text

    @property
    def paragraph_columns(self) -> int:
        return min(self.columns or WIDEST_PARAGRAPH, WIDEST_PARAGRAPH)


PLAIN = Style()


class Column:
    """A column can `shrink` to that width. In a narrow terminal the one with the highest `drop` goes first."""

    __slots__ = ("drop", "right", "shrink", "title")

    def __init__(self, title: str, *, right: bool = False, shrink: int | None = None, drop: int = 0) -> None:
        self.title = title
        self.right = right
        self.shrink = shrink
        self.drop = drop


def printable(text: str) -> str:
    """Escape everything that a terminal could take for a command, or that hides or reverses text."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def width(text: str) -> int:
    if text.isascii():
        return len(text)
    import unicodedata  # only here: a library of 1 MB that most tables do not need

    columns = 0
    for c in text:
        if not unicodedata.combining(c):
            columns += 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return columns


def shortened(text: str, columns: int, ellipsis: str) -> str:
    if width(text) <= columns:
        return text
    if columns < len(ellipsis):
        return ""
    kept = text[:columns]
    while kept and width(kept) > columns - len(ellipsis):
        kept = kept[:-1]
    return kept + ellipsis


def cut(line: str, columns: int) -> str:
    """Return the line, cut to that many columns. A line that has to be cut loses its colours."""
    plain = _too_long(line, columns)
    return line if plain is None else shortened(plain, columns, "")


def _too_long(line: str, columns: int) -> str | None:
    """Return the line without its colours if it is longer than that; None if it fits."""
    if width(line) <= columns:  # colour codes only make it longer
        return None
    import re  # only here: the import takes 4 ms, which most answers need not pay

    plain = re.sub(_COLOUR, "", line)
    return plain if width(plain) > columns else None


def wrapped(text: str, columns: int, indent: str = "") -> list[str]:
    """Return the text as lines of at most that many columns. A longer word keeps its length."""
    lines: list[str] = []
    line = indent
    for word in text.split():
        if line != indent and width(line) + 1 + width(word) > columns:
            lines.append(line)
            line = indent
        line += word if line == indent else f" {word}"
    return [*lines, line]


def fitted(lines: Iterable[str], columns: int | None) -> list[str]:
    """Break lines between words at that many columns.

    A continuation is indented to the last column of the line that starts in its left half. A longer word keeps its
    length.
    """
    if columns is None:
        return list(lines)
    return [part for line in lines for part in (_broken(line, columns) if len(line) > columns // 2 else (line,))]


def _broken(line: str, columns: int) -> list[str]:
    plain = _too_long(line, columns)
    if plain is None:
        return [line]
    import re  # only here, as in _too_long

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
    """Return the lines of an aligned table. A cell is a text, or a text and its colour."""
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
    """Return the columns to show and their widths. Wide ones shrink first, then the least important go."""
    shown = list(range(len(columns)))
    if room is None:
        return shown, natural
    while True:
        widths = [natural[index] for index in shown]
        excess = sum(widths) + len(GAP) * (len(widths) - 1) - room
        while excess > 0:
            # Always shrink the widest column, so that no column shrinks for the sake of a wider one.
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
