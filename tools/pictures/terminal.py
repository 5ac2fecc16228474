"""Terminal recordings as SVG that plays once and rests at its last screen. Without animation only that screen is seen.

Understands what hegmctl prints: text, line ends, carriage returns, "erase to the end of the line", and colours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from tools.pictures.record import COLUMNS, ROWS
from tools.pictures.themes import MONO, Theme

CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 7.82, 17, 13
MARGIN, BAR = 14, 30
MAX_PAUSE_S = 1.0
_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(\r\n|\n)|(\r)|([^\x1b\r\n]+)")


@dataclass
class Line:
    """One row of the screen: its cells now, and each content that it had, with its time."""

    cells: list[tuple[str, str]] = field(default_factory=list)
    versions: list[tuple[float, list[tuple[str, str]]]] = field(default_factory=list)


def events_of(path: Path) -> list[tuple[float, str]]:
    """The events of a recording, with each pause cut to MAX_PAUSE_S."""
    shown, clock, last = [], 0.0, 0.0
    for at, text in json.loads(path.read_text())["events"]:
        clock += min(at - last, MAX_PAUSE_S)
        last = at
        shown.append((clock, text))
    return shown


def excerpt(events: list[tuple[float, str]], begin: str, end: str) -> list[tuple[float, str]]:
    """The events from the first that has `begin` up to the one after it that has `end`, from time 0 on."""
    first = next(number for number, (_, text) in enumerate(events) if begin in text)
    last = next(number for number, (_, text) in enumerate(events) if number >= first and end in text)
    start, head = events[first]
    cut = [(0.0, head[head.index(begin) :]), *events[first + 1 : last + 1]]
    return [(at - start if number else 0.0, text) for number, (at, text) in enumerate(cut)]


def play(events: Iterable[tuple[float, str]], columns: int) -> list[Line]:
    """Run the events through a small terminal that wraps long lines. Returns its lines with their versions."""
    lines, column, style = [Line()], 0, ""
    for at, text in events:
        for code, letter, newline, carriage, plain in _TOKEN.findall(text):
            cells = lines[-1].cells
            if letter == "m":
                style = code
            elif letter == "K":
                del cells[column:]
            elif newline:
                _keep(lines[-1], at)
                lines.append(Line())
                column = 0
            elif carriage:
                column = 0
            for character in plain:
                if column == columns:
                    _keep(lines[-1], at)
                    lines.append(Line())
                    column = 0
                lines[-1].cells[column : column + 1] = [(character, style)]
                column += 1
        _keep(lines[-1], at)
    return lines


def _keep(line: Line, at: float) -> None:
    if line.cells and (not line.versions or line.versions[-1][1] != line.cells):
        line.versions.append((at, list(line.cells)))


def _spans(cells: list[tuple[str, str]], colours: dict[str, str]) -> str:
    """Cells as tspans, one for each run of equal style."""
    runs: list[tuple[str, str]] = []
    for character, style in cells:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + character, style)
        else:
            runs.append((character, style))
    written = []
    for words, style in runs:
        look = ' font-weight="700"' if style == "1" else f' fill="{colours[style]}"' if style in colours else ""
        written.append(f"<tspan{look}>{escape(words)}</tspan>" if look else escape(words))
    return "".join(written)


def _texts(number: int, line: Line, colours: dict[str, str]) -> list[str]:
    written = []
    for index, (at, cells) in enumerate(line.versions):
        is_last = index == len(line.versions) - 1
        if is_last:
            timing = f'<set attributeName="visibility" to="hidden" begin="0s" dur="{at:.2f}s"/>' if at > 0 else ""
            hidden = ""
        else:
            shown_s = max(line.versions[index + 1][0] - at, 0.02)
            timing = f'<set attributeName="visibility" to="visible" begin="{at:.2f}s" dur="{shown_s:.2f}s"/>'
            hidden = ' visibility="hidden"'
        y = number * CELL_HEIGHT
        written.append(f'<text y="{y}"{hidden} xml:space="preserve">{timing}{_spans(cells, colours)}</text>')
    return written


def _scrolling(lines: list[Line], rows: int) -> tuple[int, str]:
    """How far the text is moved up at the end, and the animation that leads there."""
    starts = [min((at for at, _ in line.versions), default=-1.0) for line in lines]
    steps, top = [(0.0, 0)], 0
    for number, at in enumerate(starts):
        if number - rows + 1 > top and at >= 0:
            top = number - rows + 1
            steps.append((at, top))
    if top == 0:
        return 0, ""
    end = steps[-1][0] or 1.0
    values = ";".join(f"0 {-offset * CELL_HEIGHT}" for _, offset in steps)
    times = ";".join(f"{at / end:.4f}" for at, _ in steps)
    return top, (
        f'<animateTransform attributeName="transform" type="translate" calcMode="discrete" values="{values}"'
        f' keyTimes="{times}" dur="{end:.2f}s" fill="freeze"/>'
    )


def demo(theme: Theme, recording: Path) -> str:
    """All of `make demo`."""
    return _draw(theme, events_of(recording), "make demo")


def migrate(theme: Theme, recording: Path) -> str:
    """The plan of a migration, and the migration, out of the same recording."""
    events = excerpt(events_of(recording), "  $ hegmctl migrate", "operation 1: migrate of")
    return _draw(theme, events, "hegmctl migrate")


def _draw(theme: Theme, events: list[tuple[float, str]], title: str) -> str:
    """The events as an SVG of COLUMNS and at most ROWS."""
    columns, rows = COLUMNS, ROWS
    colours = {"31": "#cf222e", "32": theme.good, "33": theme.warm, "36": theme.ours, "2": theme.quiet}
    lines = play(events, columns)
    while lines and not lines[-1].versions:
        lines.pop()
    rows = min(rows, len(lines))
    top, animation = _scrolling(lines, rows)
    texts = [text for number, line in enumerate(lines) for text in _texts(number, line, colours)]
    width, height = columns * CELL_WIDTH + 2 * MARGIN, rows * CELL_HEIGHT + 2 * MARGIN + BAR
    dots = "".join(f'<circle cx="{18 + 18 * n}" cy="15" r="5" fill="{theme.line}"/>' for n in range(3))
    inner = rows * CELL_HEIGHT + 4
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{theme.panel}" stroke="{theme.line}"/>\n{dots}'
        f'<text x="{width / 2:.0f}" y="20" text-anchor="middle" font-family="{MONO}" font-size="12"'
        f' fill="{theme.quiet}">{escape(title)}</text>\n'
        f'<svg x="{MARGIN}" y="{BAR + MARGIN - 4}" width="{width - 2 * MARGIN:.0f}" height="{inner}">'
        f'<g font-family="{MONO}" font-size="{FONT_SIZE}" fill="{theme.text}">'
        f'<g transform="translate(0 {-top * CELL_HEIGHT})">{animation}<g transform="translate(0 {FONT_SIZE})">\n'
        + "\n".join(texts)
        + "\n</g></g></g></svg>\n</svg>\n"
    )
