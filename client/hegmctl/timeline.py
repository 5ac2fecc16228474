"""An operation as lanes of time: what the job, agent, daemon, helper, driver and copies did, and when.

Turns a history into segments, and decides on their scale: a long wait is drawn shorter, so that the migration beside it
stays readable. Pure; `timeline_text` and `timeline_svg` draw it.

The daemon's lane has the phases. The lanes of agent, helper, driver and copies have the steps that events report. If a
history reports no steps, the lanes have the effects, from the request to the event that ends each.
"""

from __future__ import annotations

import re
from itertools import pairwise

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from hegmd.protocol.messages import StoryReply
    from hegmd.protocol.operations import StoryLine

JOB, AGENT, DAEMON, HELPER, DRIVER, COPIES = "job", "agent", "daemon", "helper", "driver", "copies"
LANES = (JOB, AGENT, DAEMON, HELPER, DRIVER, COPIES)
# States of a job, from best to worst. A job of several processes has the worst state of them.
TRAINS, PARKED, OFF, ENDED = "trains", "parked", "off the GPU", "ended"
_WORST = (TRAINS, PARKED, OFF, ENDED)
OVER = ("done", "rolled-back", "lost")
# An interval without a start or an end is long if it takes more than LONG_SHARE of all the others together. It is drawn
# with SHORT_SHARE of them.
LONG_SHARE, SHORT_SHARE = 0.8, 0.2

_AFTER = {
    "parked": PARKED,
    "overran": TRAINS,
    "withdrawn": TRAINS,
    "released": TRAINS,
    "checkpointed": OFF,
    "worker-exited": ENDED,
    "ended": ENDED,
}
# For a history without timings: who executes an effect.
_PERFORMED_BY = {
    **dict.fromkeys(("survey", "park", "withdraw", "disconnect", "reconnect", "offload", "reload", "release"), AGENT),
    **dict.fromkeys(("lock", "unlock", "checkpoint", "restore"), DRIVER),
}
_WORKER = re.compile(r"\bworker ([^ ,]+)")
_PARKED_S = re.compile(r"\bparked_s ([0-9.e-]+)")
_NEW_PID = re.compile(r"\bpid (\d+)")


class Segment:
    """An action in a lane, in seconds since the start of the operation."""

    __slots__ = ("began_s", "ended_s", "lane", "name", "pid", "size_bytes")

    def __init__(
        self, lane: str, name: str, began_s: float, ended_s: float, size_bytes: int = 0, pid: str = ""
    ) -> None:
        self.lane = lane
        self.name = name
        self.began_s = began_s
        self.ended_s = ended_s
        self.size_bytes = size_bytes
        self.pid = pid

    @property
    def took_s(self) -> float:
        return self.ended_s - self.began_s

    @property
    def bytes_per_s(self) -> float | None:
        """Return its rate; None if it moved no bytes."""
        return self.size_bytes / self.took_s if self.size_bytes and self.took_s > 0 else None


class Timeline:
    """The segments of one operation and their scale."""

    __slots__ = ("_pieces", "began_utc", "segments", "shortened", "took_s")

    def __init__(self, segments: Sequence[Segment], began_utc: float, took_s: float) -> None:
        self.segments = tuple(segments)
        self.began_utc = began_utc
        self.took_s = took_s
        #: The intervals that are drawn shorter, in seconds.
        self.shortened: tuple[tuple[float, float], ...] = ()
        self._pieces = self._scale()

    def _scale(self) -> tuple[tuple[float, float, float, float], ...]:
        """Return intervals of time with their places from 0 to 1: start, end, place of the start, place of the end."""
        ends = {end for segment in self.segments for end in (segment.began_s, segment.ended_s)}
        marks = sorted({0.0, self.took_s, *(min(max(end, 0.0), self.took_s) for end in ends)})
        spans = [(a, b) for a, b in pairwise(marks) if b > a]
        drawn = {span: span[1] - span[0] for span in spans}
        shortened: list[tuple[float, float]] = []
        for span in sorted(spans, key=lambda span: span[0] - span[1])[:3]:
            others_s = sum(drawn.values()) - drawn[span]
            if others_s > 0 and drawn[span] > LONG_SHARE * others_s:
                drawn[span] = SHORT_SHARE * others_s
                shortened.append(span)
        self.shortened = tuple(sorted(shortened))
        whole = sum(drawn.values()) or 1.0
        pieces: list[tuple[float, float, float, float]] = []
        at = 0.0
        for span in spans:
            pieces.append((*span, at, at + drawn[span] / whole))
            at += drawn[span] / whole
        return tuple(pieces)

    def place(self, at_s: float) -> float:
        """Return the place of an instant, from 0 to 1."""
        for began_s, ended_s, first, last in self._pieces:
            if at_s <= ended_s:
                return first + (last - first) * max(0.0, at_s - began_s) / (ended_s - began_s)
        return 1.0

    def instant(self, place: float) -> float:
        """Return the instant at a place."""
        for began_s, ended_s, first, last in self._pieces:
            if place <= last and last > first:
                return began_s + (ended_s - began_s) * (place - first) / (last - first)
        return self.took_s

    def rows(self, lane: str) -> list[list[Segment]]:
        """Return the segments of a lane in as few rows as possible without overlaps."""
        rows: list[list[Segment]] = []
        for segment in sorted(self.segments, key=lambda segment: (segment.began_s, -segment.ended_s)):
            if segment.lane != lane:
                continue
            row = next((row for row in rows if row[-1].ended_s <= segment.began_s + 1e-6), None)
            if row is None:
                rows.append([segment])
            else:
                row.append(segment)
        return rows

    def copied(self, name: str) -> Segment | None:
        """Return all copies of that name as one segment; None without any. They may have overlapped."""
        found = [segment for segment in self.segments if segment.lane == COPIES and segment.name == name]
        if not found:
            return None
        began_s = 0.0
        ended_s = 0.0  # the total time in which at least one was under way
        last_s = 0.0
        for segment in sorted(found, key=lambda segment: segment.began_s):
            ended_s += max(0.0, segment.ended_s - max(segment.began_s, last_s))
            last_s = max(last_s, segment.ended_s)
        return Segment(COPIES, name, began_s, ended_s, sum(segment.size_bytes for segment in found))

    def steps(self) -> list[Segment]:
        """Return the steps to list, by start: those of at least 1 % of the time, and those that moved bytes."""
        least_s = (self.took_s - sum(end - begin for begin, end in self.shortened)) / 100
        shown = [each for each in self.segments if each.size_bytes or each.took_s >= least_s]
        return sorted(shown, key=lambda each: (each.began_s, LANES.index(each.lane)))


def timeline_of(reply: StoryReply, now_utc: float) -> Timeline:
    """Return the timeline of an operation. One that has not ended lasts until `now_utc`."""
    story = reply.story
    if not story:
        return Timeline((), reply.operation.created_utc, 0.0)
    began_utc = min([story[0].utc, *(timing.began_utc for line in story for timing in line.timings)])
    ended_utc = story[-1].utc if reply.operation.phase in OVER else max(story[-1].utc, now_utc)
    segments = _phases(story, began_utc, ended_utc)
    segments += _job(reply, began_utc, ended_utc)
    segments += _reported(story, began_utc) or _effects(story, began_utc, ended_utc)
    return Timeline(segments, began_utc, max(0.0, ended_utc - began_utc))


def _phases(story: Sequence[StoryLine], began_utc: float, ended_utc: float) -> list[Segment]:
    changes: list[tuple[str, float]] = []
    for line in story:
        if not changes or changes[-1][0] != line.phase:
            changes.append((line.phase, line.utc - began_utc))
    return _between(DAEMON, [change for change in changes if change[0] not in OVER], changes, ended_utc - began_utc)


def _between(
    lane: str, shown: list[tuple[str, float]], changes: list[tuple[str, float]], end_s: float
) -> list[Segment]:
    """Return a segment for each shown state, until the next change."""
    ends = {id(change): later[1] for change, later in pairwise(changes)}
    segments = [Segment(lane, change[0], change[1], ends.get(id(change), end_s)) for change in shown]
    return [segment for segment in segments if segment.took_s > 0]


def _job(reply: StoryReply, began_utc: float, ended_utc: float) -> list[Segment]:
    """Return the states of the job, from the events of its processes."""
    operation = reply.operation
    alone = operation.way == "driver"
    first = OFF if operation.kind == "restore" else TRAINS
    state: dict[str, str] = {}
    changes: list[tuple[str, float]] = [(first, 0.0)]
    for line in reply.story:
        at_utc = line.utc
        found = _WORKER.search(line.detail)
        after = _state_after(line, operation.way)
        if found is not None and after is not None:
            state[found.group(1)] = after
            stood = _PARKED_S.search(line.detail) if line.event == "parked" else None
            at_utc -= float(stood.group(1)) if stood is not None else 0.0
        if alone:
            for effect in line.effects:
                tag, _, worker = effect.partition(" ")
                if tag == "checkpoint":
                    state[worker] = OFF
        worst = max(state.values(), key=_WORST.index, default=first)
        if worst != changes[-1][0]:
            changes.append((worst, max(changes[-1][1], at_utc - began_utc)))
    return _between(JOB, changes, changes, ended_utc - began_utc)


def _state_after(line: StoryLine, way: str) -> str | None:
    """Return the state of the event's process after the event; None if the event does not tell."""
    if line.event == "restored":
        return TRAINS if way == "driver" or _NEW_PID.search(line.detail) else PARKED
    if line.event == "inspected":
        if re.search(r"\bgpu None\b", line.detail):
            return OFF
        return PARKED if re.search(r"\bparked True\b", line.detail) else TRAINS
    return _AFTER.get(line.event)


def _reported(story: Sequence[StoryLine], began_utc: float) -> list[Segment]:
    """Return the steps that events report."""
    segments: list[Segment] = []
    for line in story:
        worker = _WORKER.search(line.detail)
        pid = "" if worker is None else worker.group(1).partition("-")[0]
        for timing in line.timings:
            if timing.lane in LANES:
                began_s = max(0.0, timing.began_utc - began_utc)
                segments.append(
                    Segment(timing.lane, timing.name, began_s, began_s + timing.took_s, timing.size_bytes, pid)
                )
    return segments


def _effects(story: Sequence[StoryLine], began_utc: float, ended_utc: float) -> list[Segment]:
    """Return the effects of agents and the driver, each until the event that ends it."""
    segments: list[Segment] = []
    open_since: dict[tuple[str, str], float] = {}
    for line in story:
        worker = _WORKER.search(line.detail)
        name = "" if worker is None else worker.group(1)
        began_at = open_since.pop((line.cause, name), None)
        if began_at is not None and line.cause in _PERFORMED_BY:
            lane, pid = _PERFORMED_BY[line.cause], name.partition("-")[0]
            segments.append(Segment(lane, line.cause, began_at - began_utc, line.utc - began_utc, 0, pid))
        for effect in line.effects:
            tag, _, who = effect.partition(" ")
            open_since[tag, who] = line.utc
    for (tag, who), began_at in open_since.items():
        if tag in _PERFORMED_BY and story[-1].phase not in OVER:
            lane, pid = _PERFORMED_BY[tag], who.partition("-")[0]
            segments.append(Segment(lane, tag, began_at - began_utc, ended_utc - began_utc, 0, pid))
    return segments
