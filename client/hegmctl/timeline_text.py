"""An operation's timeline in a terminal or a pipe: rows of bars for each lane, then the steps with figures.

The bars need neither colours nor characters beyond ASCII. A terminal with UTF-8 gets box-drawing characters.
"""

from __future__ import annotations

from time import time

from hegmctl.operating_text import outcome
from hegmctl.quantities import binary_size
from hegmctl.tables import Column, printable, table, wrapped
from hegmctl.timeline import JOB, LANES, OFF, PARKED, timeline_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.tables import Cell, Style
    from hegmctl.timeline import Segment, Timeline
    from hegmd.protocol.messages import StoryReply

COLUMNS_IN_A_PIPE = 100
_LABEL_COLUMNS = 8
MOST_ROWS = 4
_COLOURS = {"agent": "green", "daemon": "cyan", "helper": "cyan", "driver": "yellow", "copies": "green"}
# Left end, fill, right end, a bar of one column, and the fill of a shortened part.
_ASCII, _BOXES = ("[", "=", "]", "|", "~"), ("├", "─", "┤", "│", "~")


def timeline_text(reply: StoryReply, style: Style) -> list[str]:
    timeline = timeline_of(reply, time())
    lines = [*outcome(reply.operation, style), ""]
    if not timeline.segments:
        return [*lines, "there is nothing to draw: its story is not remembered"]
    if reply.untold:
        lines.append(f"({reply.untold} earlier events are no longer remembered)")
    width = max(20, (style.columns or COLUMNS_IN_A_PIPE) - _LABEL_COLUMNS)
    lines.append(" " * _LABEL_COLUMNS + _axis(timeline, width))
    for lane in LANES:
        lines += _lane(timeline, lane, width, style)
    if timeline.shortened:
        spent = ", ".join(f"{began_s:.3f} to {ended_s:.3f} s" for began_s, ended_s in timeline.shortened)
        lines += wrapped(f"~ is drawn shorter than it was: {spent}", style.paragraph_columns)
    lines += ["", *_figures(timeline), ""]
    return [*lines, *_steps(timeline, style)]


def _axis(timeline: Timeline, width: int) -> str:
    text = ""
    for number in range(max(2, width // 16)):
        column = number * 16
        label = f"{timeline.instant(column / width):.3g}"
        text = text.ljust(column) + (label if number else f"{label} s")
    return text[:width].rstrip()


def _lane(timeline: Timeline, lane: str, width: int, style: Style) -> list[str]:
    rows = timeline.rows(lane)
    lines = [
        f"{lane if number == 0 else '':<{_LABEL_COLUMNS}}{_row(timeline, row, width, style)}".rstrip()
        for number, row in enumerate(rows[:MOST_ROWS])
    ]
    more = sum(len(row) for row in rows[MOST_ROWS:])
    if more:
        lines.append(" " * _LABEL_COLUMNS + f"and {more} more at the same time")
    return lines or [lane]


def _row(timeline: Timeline, row: list[Segment], width: int, style: Style) -> str:
    shapes = _BOXES if style.ellipsis == "…" else _ASCII
    text, at = "", 0
    for segment in row:
        first = max(at, int(timeline.place(segment.began_s) * width))
        last = max(first + 1, round(timeline.place(segment.ended_s) * width))
        if first >= width or (last <= at and at):
            continue
        last = min(last, width)
        bar = _bar(segment, last - first, shapes)
        if any(begin >= segment.began_s and end <= segment.ended_s for begin, end in timeline.shortened):
            bar = bar.replace(shapes[1], shapes[4])
        text += " " * (first - at) + style.paint(bar, _colour(segment))
        at = last
    return text


def _colour(segment: Segment) -> str:
    if segment.lane != JOB:
        return _COLOURS.get(segment.lane, "")
    return {PARKED: "yellow", OFF: "red"}.get(segment.name, "green")


def _bar(segment: Segment, columns: int, shapes: tuple[str, ...]) -> str:
    left, fill, right, alone, _ = shapes
    if columns == 1:
        return alone
    name = printable(segment.name)
    inner = columns - 2
    return left + (name if len(name) <= inner else name[:inner] if inner >= 4 else "").ljust(inner, fill) + right


def _figures(timeline: Timeline) -> list[str]:
    """Return the downtime and the rate of each copy."""
    down_s = sum(each.took_s for each in timeline.segments if each.lane == JOB and each.name in (PARKED, OFF))
    lines = [f"in all {timeline.took_s:.3f} s; the job did not train for {down_s:.3f} s"]
    names = dict.fromkeys(each.name for each in timeline.segments if each.lane == "copies")
    for name in names:
        copied = timeline.copied(name)
        if copied is not None and copied.size_bytes:
            lines.append(
                f"copied {printable(name)}: {binary_size(copied.size_bytes)} in {copied.took_s:.3f} s{_speed(copied)}"
            )
    return lines


def _speed(segment: Segment) -> str:
    return "" if segment.bytes_per_s is None else f", {segment.bytes_per_s / 1e9:.1f} GB/s"


def _steps(timeline: Timeline, style: Style) -> list[str]:
    columns = (
        Column("AT", right=True),
        Column("TOOK", right=True),
        Column("LANE"),
        Column("STEP", shrink=10),
        Column("SIZE", right=True, drop=2),
        Column("SPEED", right=True, drop=1),
        Column("PROCESS", right=True, drop=3),
    )
    steps = timeline.steps()
    rows = [_cells(each) for each in steps]
    left = len(timeline.segments) - len(steps)
    note = [f"({left} shorter steps are left out; --json has them)"] if left and style.remarks else []
    return [*table(columns, rows, style), *note]


def _cells(each: Segment) -> list[Cell]:
    return [
        f"{each.began_s:.3f} s",
        f"{each.took_s:.3f} s",
        each.lane,
        each.name,
        binary_size(each.size_bytes) if each.size_bytes else "",
        "" if each.bytes_per_s is None else f"{each.bytes_per_s / 1e9:.1f} GB/s",
        each.pid,
    ]
