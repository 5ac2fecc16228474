"""An operation's timeline as a drawing: an SVG for light and dark, and a page of it that needs no network.

Text from processes (names, messages) is escaped, and the page forbids scripts and every fetch.
"""

from __future__ import annotations

import os
from contextlib import suppress
from time import localtime, strftime, time

from hegmctl.operating_text import outcome
from hegmctl.quantities import binary_size
from hegmctl.tables import PLAIN, printable
from hegmctl.timeline import JOB, LANES, OFF, PARKED, TRAINS, timeline_of
from hegmd.errors import UNAVAILABLE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.timeline import Segment, Timeline
    from hegmd.protocol.messages import StoryReply

WIDTH, LABEL, EDGE, ROW, BAR, HEAD = 980, 74, 12, 24, 18, 46
_LETTER = 6.4  # of 11 pixels, on average
_NAMES = "page text quiet line ink job parked off agent daemon helper driver copies".split()
_LIGHT_COLOURS = "ffffff 1f2328 59636e d1d9e0 ffffff 1a7f37 9a6700 cf222e 1a7f37 0969da 6639ba bc4c00 1b7c83"
_DARK_COLOURS = "0d1117 e6edf3 9198a1 3d444d 0d1117 3fb950 d29922 f85149 3fb950 58a6ff ab7df8 f0883e 39c5cf"
LIGHT = {name: f"#{colour}" for name, colour in zip(_NAMES, _LIGHT_COLOURS.split(), strict=True)}
DARK = {name: f"#{colour}" for name, colour in zip(_NAMES, _DARK_COLOURS.split(), strict=True)}
_HEADS = [
    f'<th class="n">{name}</th>' if name in ("at", "took", "size", "speed") else f"<th>{name}</th>"
    for name in ("at", "took", "lane", "step", "size", "speed", "process")
]
# The style of the page around the drawing.
_PAGE_STYLE = """
body { background: var(--page); color: var(--text); font: 15px system-ui, sans-serif; margin: 24px auto;
  max-width: 1100px; padding: 0 16px; }
.drawing { overflow-x: auto; }
.timeline { min-width: 720px; width: 100%; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-top: 16px; }
th, td { border-bottom: 1px solid var(--line); padding: 3px 14px 3px 0; text-align: left; }
.n { text-align: right; }
"""


def escaped(text: str) -> str:
    """Escape the text for a document."""
    shown = printable(text)
    for letter, name in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        shown = shown.replace(letter, name)
    return shown


def svg_of(reply: StoryReply, *, theme: str = "", now_utc: float | None = None) -> str:
    """Return the drawing. `theme` is light or dark; without one it follows the reader's."""
    timeline = timeline_of(reply, time() if now_utc is None else now_utc)
    title = " ".join(outcome(reply.operation, PLAIN)[:1])
    shapes: list[str] = []
    y = HEAD
    for lane in LANES:
        rows = timeline.rows(lane)
        shapes.append(f'<text class="lane" x="{EDGE}" y="{y + 14}">{lane}</text>')
        for number, row in enumerate(rows):
            shapes += [_rect(timeline, segment, y + ROW * number) for segment in row]
        y += ROW * max(1, len(rows)) + 8
        shapes.append(f'<path class="rule" d="M{EDGE} {y - 5}H{WIDTH - EDGE}"/>')
    shapes += _breaks(timeline, y)
    ticks = _axis(timeline, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 26}" role="img" class="timeline">\n'
        f"<title>{escaped(title)}</title>\n<style>{_style(theme)}</style>\n"
        f'<rect class="page" width="{WIDTH}" height="{y + 26}"/>\n'
        f'<text class="head" x="{EDGE}" y="22">{escaped(_cut(title, WIDTH - 2 * EDGE, 7.6))}</text>\n'
        + "\n".join([*ticks, *shapes])
        + "\n</svg>\n"
    )


def html_of(reply: StoryReply, now_utc: float | None = None) -> str:
    """Return the page: the drawing, the result, and the steps with their figures."""
    timeline = timeline_of(reply, time() if now_utc is None else now_utc)
    rows = "\n".join(_table_row(each) for each in timeline.steps())
    lines = "<br>".join(escaped(line.strip()) for line in outcome(reply.operation, PLAIN))
    began = strftime("%Y-%m-%d %H:%M:%S", localtime(timeline.began_utc))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="color-scheme" content="light dark">
<title>operation {escaped(reply.operation.id)}</title>
<style>
{_style("")}
{_PAGE_STYLE}</style>
</head>
<body>
<h1>Operation {escaped(reply.operation.id)}</h1>
<p>{lines}</p>
<p>{escaped(began)}, in all {timeline.took_s:.3f} s; the job did not train for {_down_s(timeline):.3f} s.</p>
<div class="drawing">
{svg_of(reply, now_utc=now_utc)}</div>
<table>
<tr>{"".join(_HEADS)}</tr>
{rows}
</table>
</body>
</html>
"""


def write_file(path: str, text: str) -> None:
    """Write a whole file, or leave the existing one unchanged. Raises HegmError."""
    fresh = f"{path}.{os.getpid()}.new"
    try:
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(fresh)
        raise HegmError(
            UNAVAILABLE, f"{path} cannot be written: {error.strerror or error}", "name a file in a folder of yours"
        ) from error


def _style(theme: str) -> str:
    def colours(of: dict[str, str]) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in of.items())

    first = DARK if theme == "dark" else LIGHT
    dark = "" if theme else f"@media (prefers-color-scheme: dark){{:root{{{colours(DARK)}}}}}"
    lanes = "".join(f".{name}{{fill:var(--{name})}}" for name in LIGHT if name not in ("text", "quiet", "line"))
    return (
        f":root{{{colours(first)}}}{dark}{lanes}"
        "text{font:11px system-ui,sans-serif;fill:var(--quiet)}"
        "text.lane{font-size:13px;font-weight:600;fill:var(--text)}"
        "text.head{font-size:14px;font-weight:600;fill:var(--text)}text.in{fill:var(--ink);font-weight:600}"
        ".rule{stroke:var(--line);fill:none}.cut{fill:var(--page);opacity:.6}"
    )


def _x(timeline: Timeline, at_s: float) -> float:
    return LABEL + timeline.place(at_s) * (WIDTH - LABEL - EDGE)


def _rect(timeline: Timeline, segment: Segment, y: float) -> str:
    x = _x(timeline, segment.began_s)
    width = max(1.2, _x(timeline, segment.ended_s) - x)
    kind = segment.lane
    if kind == JOB:
        kind = {TRAINS: "job", PARKED: "parked", OFF: "off"}.get(segment.name, "quiet")
    inside = _cut(segment.name, width - 8, _LETTER)
    label = f'<text class="in" x="{x + 4:.1f}" y="{y + 13}">{escaped(inside)}</text>' if inside else ""
    return (
        f'<g><title>{escaped(_tooltip(segment))}</title><rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}"'
        f' height="{BAR}" rx="2"/>{label}</g>'
    )


def _tooltip(segment: Segment) -> str:
    size = f", {binary_size(segment.size_bytes)}" if segment.size_bytes else ""
    speed = "" if segment.bytes_per_s is None else f", {segment.bytes_per_s / 1e9:.1f} GB/s"
    who = f" (process {segment.pid})" if segment.pid else ""
    return f"{segment.lane}: {segment.name}{who}: {segment.took_s:.3f} s from {segment.began_s:.3f} s{size}{speed}"


def _cut(text: str, room: float, letter: float) -> str:
    """Return the part of the text that fits, or nothing if that is too short."""
    letters = int(room / letter)
    if len(text) <= letters:
        return text
    return text[: letters - 1] + "…" if letters >= 5 else ""


def _axis(timeline: Timeline, bottom: float) -> list[str]:
    shapes: list[str] = []
    for number in range(9):
        place = number / 8
        x = LABEL + place * (WIDTH - LABEL - EDGE)
        anchor = "end" if number == 8 else "middle"
        shapes.append(f'<path class="rule" d="M{x:.1f} {HEAD - 6}V{bottom - 5}" stroke-dasharray="2 4"/>')
        label = f"{timeline.instant(place):.3g} s"
        shapes.append(f'<text x="{x:.1f}" y="{bottom + 12}" text-anchor="{anchor}">{label}</text>')
    return shapes


def _breaks(timeline: Timeline, bottom: float) -> list[str]:
    """Return a veil over each shortened interval, with its true duration."""
    shapes: list[str] = []
    for began_s, ended_s in timeline.shortened:
        x, end = _x(timeline, began_s), _x(timeline, ended_s)
        shapes.append(
            f'<g><title>drawn shorter: {ended_s - began_s:.3f} s</title><rect class="cut" x="{x:.1f}" y="{HEAD - 6}"'
            f' width="{end - x:.1f}" height="{bottom - HEAD + 1}"/>'
            f'<text x="{(x + end) / 2:.1f}" y="{HEAD - 10}" text-anchor="middle">{ended_s - began_s:.3g} s</text></g>'
        )
    return shapes


def _down_s(timeline: Timeline) -> float:
    return sum(each.took_s for each in timeline.segments if each.lane == JOB and each.name in (PARKED, OFF))


def _table_row(each: Segment) -> str:
    size = binary_size(each.size_bytes) if each.size_bytes else ""
    speed = "" if each.bytes_per_s is None else f"{each.bytes_per_s / 1e9:.1f} GB/s"
    figures = [f"{each.began_s:.3f} s", f"{each.took_s:.3f} s", each.lane, escaped(each.name), size, speed, each.pid]
    cells = [
        f'<td class="n">{cell}</td>' if at in (0, 1, 4, 5) else f"<td>{cell}</td>" for at, cell in enumerate(figures)
    ]
    return f"<tr>{''.join(cells)}</tr>"
