"""The parts of a job's downtime in a move: every moment belongs to one part, and all parts add up to the downtime.

The daemon's log says of each effect, order to the agent, call of the helper, record in the journal and look at the
driver when it was over and how long it took. Here each moment is given to the innermost of these that was under way:
`agent free` before `effect offload` before the phase. Of those side by side it is the one that was over last, since
the others were not waited for. So what is left with an effect is the daemon's own work in it, and what is left with a
phase lies between two effects. What an agent says of the parts of an order is told beside it.

Pure: log lines and a story go in, seconds come out. The log's times are in whole milliseconds, and so is the truth of
this.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from hegmd.protocol.messages import StoryReply

_PHASE, _EFFECT, _CALL = range(3)
_TOOK = re.compile(r"^(\S+)\s.*?(?:operation \S+|(helper|node|video memory)|process (\d+)): (\S+) took ([\d.]+) ms")
_ON_DISK = re.compile(r"^(\S+)\s.*?operation \S+: \S+ after (\S+) is on disk, in ([\d.]+) ms")
# Orders and calls end with their reply; a part of an order has the order's name, a dot and its own.
_PART_OF_ORDER = "."
#: Parts with less time in total are not listed apart.
MIN_S = 0.0005
AROUND, SMALL = "before and after", "smaller ones"


@dataclass(frozen=True)
class Span:
    """Something that was under way, in seconds since 1970; `depth` says how far within another it is."""

    name: str
    began: float
    ended: float
    depth: int


def parts_of(story: StoryReply, log: Iterable[str], pid: int, began_utc: float, ended_utc: float) -> dict[str, float]:
    """Return the parts of that time, the longest first; parts of an order are named `agent ORDER.PART` beside it."""
    lines = list(log)
    spans = [*_phases(story), *_logged(lines, pid)]
    spent = {AROUND: 0.0}
    edges = {began_utc, ended_utc}
    for span in spans:
        edges |= {edge for edge in (span.began, span.ended) if began_utc < edge < ended_utc}
    for start, end in pairwise(sorted(edges)):
        under_way = [span for span in spans if span.began <= start and span.ended >= end]
        inner = max(under_way, key=lambda span: (span.depth, span.ended), default=None)
        name = AROUND if inner is None else inner.name
        spent[name] = spent.get(name, 0.0) + end - start
    for name, ended, took_s in _parts_of_orders(lines, pid):
        if began_utc < ended <= ended_utc:
            spent[name] = spent.get(name, 0.0) + took_s
    small_s = sum(took_s for name, took_s in spent.items() if took_s < MIN_S and not is_within_order(name))
    parts = {SMALL: small_s, **{name: took_s for name, took_s in spent.items() if took_s >= MIN_S}}
    return {name: took_s for name, took_s in sorted(parts.items(), key=lambda one: -one[1]) if took_s}


def is_within_order(name: str) -> bool:
    """Whether that is a part of what another part says already."""
    return name.startswith("agent ") and _PART_OF_ORDER in name


def _phases(story: StoryReply) -> list[Span]:
    return [Span(f"phase {line.phase}", line.utc, later.utc, _PHASE) for line, later in pairwise(story.story)]


def _logged(lines: Sequence[str], pid: int) -> list[Span]:
    spans: list[Span] = []
    for found in filter(None, map(_TOOK.search, lines)):
        at, who, process, name, took_ms = found.groups()
        if (process is not None and int(process) != pid) or _PART_OF_ORDER in name:
            continue
        what = who or ("agent" if process else "effect")
        spans.append(_span(f"{what} {name}", at, took_ms, _EFFECT if what == "effect" else _CALL))
    spans += [_span(f"disk {name}", at, ms, _CALL) for at, name, ms in _found(_ON_DISK, lines)]
    return spans


def _parts_of_orders(lines: Sequence[str], pid: int) -> list[tuple[str, float, float]]:
    return [
        (f"agent {name}", _utc(at), float(took_ms) / 1e3)
        for at, _, process, name, took_ms in _found(_TOOK, lines)
        if process is not None and int(process) == pid and _PART_OF_ORDER in name
    ]


def _found(pattern: re.Pattern[str], lines: Sequence[str]) -> list[tuple[str, ...]]:
    return [found.groups() for found in filter(None, map(pattern.search, lines))]


def _span(name: str, at: str, took_ms: str, depth: int) -> Span:
    ended = _utc(at)
    return Span(name, ended - float(took_ms) / 1e3, ended, depth)


def _utc(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
