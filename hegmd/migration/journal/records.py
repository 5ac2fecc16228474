"""The journal's bytes: their format, how they are read after a crash, and how they are compacted.

Owns the format, and the fold from records back to operations. Does no I/O: the runner appends, syncs before it performs
an effect, and replaces the old journal with a compacted one by renaming. A record holds the event, the effects it led
to, and what it changed. The state is read, not computed again, so a newer machine can continue from an older one's
journal.

Layout: 8 bytes of magic with the version; then records. A record is a head of 12 bytes (length of the payload, CRC-32
of the payload and CRC-32 of these two, all big-endian), the payload in msgpack, and an end mark that is not zero. The
head has its own checksum, since a flipped bit in a length would otherwise look like an incomplete end and silently drop
everything after it. An interrupted write leaves a record that is truncated or continued by zeros; the journal
ends there. Anything else that does not match is refused, never read.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from hegmd.errors import BAD_REQUEST, UNAVAILABLE, HegmError
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.next_effects import TERMINAL
from hegmd.migration.machine.operation import Operation
from hegmd.protocol import codec
from hegmd.protocol.operations import Timing
from hegmd.protocol.record import Record, field, plain_value

VERSION = 2
_STEM = b"HEGMOPS"
MAGIC = _STEM + bytes([VERSION])
_HEAD = struct.Struct(">II")
_HEAD_BYTES = _HEAD.size + 4
_END = b"\xe5"
MAX_PAYLOAD_BYTES = 16 * 1024 * 1024
# Lines of its story that an operation keeps.
STORY_LINES = 200
# How many ended operations are kept, and for how long. The newest one is always kept, so that no id is used twice.
REMEMBERED = 100
REMEMBERED_S = 30 * 86400.0


class JournalBroken(HegmError):
    """The journal holds something that was never written like that."""

    def __init__(self, where: int, why: str) -> None:
        super().__init__(
            UNAVAILABLE,
            f"the journal of operations is damaged at byte {where}: {why}",
            "check the disk, move the file away and start hegmd again; the jobs do not change meanwhile",
            {"byte": where},
        )
        self.where = where


class JournalTooNew(JournalBroken):
    """A later hegmd has written it: it is correct, and nothing in it is guessed."""

    def __init__(self, version: int) -> None:
        HegmError.__init__(
            self,
            UNAVAILABLE,
            f"the journal of operations has version {version}; this hegmd reads versions up to {VERSION}",
            "install the newer hegmd that wrote it again, and let its operations end before you go back",
            {"version": version},
        )
        self.where = len(_STEM)


class JournalTooOld(JournalBroken):
    """An earlier hegmd wrote the journal, with other names for its fields. The file is kept as it is."""

    def __init__(self, version: int) -> None:
        HegmError.__init__(
            self,
            UNAVAILABLE,
            f"the journal of operations has version {version}; this hegmd reads version {VERSION}",
            "start the earlier hegmd again, resume or end its suspended jobs, then move operations.journal out of the "
            "state directory and start this hegmd",
            {"version": version},
        )
        self.where = len(_STEM)


class Line(Record):
    """A line of an operation's story."""

    utc: float = field("when, in seconds since 1970")
    event: str = field("name of the event; empty for the beginning")
    cause: str = field("where it came from", default="")
    detail: str = field("what it said", default="")
    phase: str = field("where the operation was after it")
    effects: tuple[str, ...] = field("what was to be done then", default=())
    timings: tuple[Timing, ...] = field("the steps of the effect that this event ends", default=())


class Entry(Record):
    """A record: the changes to an operation, or the whole operation."""

    op: str = field("id of the operation")
    seq: int = field("events that it has taken, this one included")
    whole: bool = field("whether this is the whole operation and not only what changed")
    values: Mapping[str, object] = field("fields of the operation; of `workers` only those that changed")
    story: tuple[Line, ...] = field("the line of this event; with the whole operation, all that is remembered")
    untold: int = field("lines that are no longer remembered", default=0)
    event: object = field("the event; nil at the beginning", default=None)
    effects: tuple[object, ...] = field("the effects that it led to", default=())
    now: float = field("the monotonic instant that the machine was given", default=0.0)


class History(NamedTuple):
    """An operation as the journal has it, and the events that led there."""

    operation: Operation
    story: tuple[Line, ...] = ()
    untold: int = 0

    def after(self, operation: Operation, line: Line) -> History:
        """The history with one more line."""
        story = (*self.story, line)
        dropped = max(0, len(story) - STORY_LINES)
        return History(operation, story[dropped:], self.untold + dropped)


class Reading(NamedTuple):
    """The content of a journal: the histories, the number of sound bytes, and whether an incomplete record follows.

    A writer truncates the file to `sound_bytes` and continues there.
    """

    histories: Mapping[str, History]
    sound_bytes: int
    torn: bool


# ---- writing ---------------------------------------------------------------------------------------------------------


def opening(operation: Operation, utc: float) -> bytes:
    """The record of a new operation, which has taken no event yet."""
    line = Line(utc=utc, event="", phase=operation.phase)
    return _framed(_whole(History(operation, (line,))))


def step(
    before: Operation,
    event: Event,
    after: Operation,
    effects: Iterable[Effect],
    *,
    now: float,
    utc: float,
    timings: tuple[Timing, ...] = (),
) -> tuple[bytes, Line]:
    """The record of one event, and its line in the story."""
    effects = tuple(effects)
    line = Line(
        utc=utc,
        event=event.tag,
        cause=event.cause,
        detail=_detail(event),
        phase=after.phase,
        effects=tuple([f"{effect.tag} {effect.worker}" for effect in effects]),
        timings=timings,
    )
    entry = Entry(
        op=after.id,
        seq=after.seq,
        whole=False,
        values=_changes(before, after),
        story=(line,),
        event=event.to_plain(),
        effects=tuple([effect.to_plain() for effect in effects]),
        now=now,
    )
    return _framed(entry), line


def compacted(histories: Iterable[History]) -> bytes:
    """A whole journal with one record for each operation that is not over, and for the newest that are."""
    kept = list(histories)
    dropped = forgotten(kept)
    records = [_framed(_whole(history)) for history in kept if history.operation.id not in dropped]
    return b"".join([MAGIC, *records])


def forgotten(histories: Iterable[History], now_utc: float | None = None) -> set[str]:
    """Return the ids of the ended operations to forget: those beyond the number, and at `now_utc` those too old."""
    over = [history for history in histories if history.operation.phase in TERMINAL]
    return {
        history.operation.id
        for newer, history in enumerate(reversed(over))
        if newer >= REMEMBERED or (newer and now_utc is not None and now_utc - _last_utc(history) > REMEMBERED_S)
    }


def _last_utc(history: History) -> float:
    return history.story[-1].utc if history.story else history.operation.created_utc


def _whole(history: History) -> Entry:
    operation = history.operation
    return Entry(
        op=operation.id,
        seq=operation.seq,
        whole=True,
        values=operation.to_plain(),
        story=history.story,
        untold=history.untold,
    )


def _changes(before: Operation, after: Operation) -> dict[str, object]:
    old, new = before.__dict__, after.__dict__
    changed = {name: value for name, value in new.items() if name != "workers" and value != old[name]}
    workers = [
        now.to_plain() for was, now in zip(before.workers, after.workers, strict=True) if was is not now and was != now
    ]
    values = {name: plain_value(value) for name, value in changed.items()}
    return values | ({"workers": workers} if workers else {})


def _detail(event: Event) -> str:
    """Describe an event by its fields. A field that is a whole record is left out; the entry's changes show it."""
    values = {name: value for name, value in event.__dict__.items() if name not in {"cause", "effect"}}
    return ", ".join(f"{name} {value}" for name, value in values.items() if not isinstance(value, Record))


def _framed(entry: Entry) -> bytes:
    # All but the story is plain already; to walk through it again would take half of the time that a record takes.
    payload = codec.encode({**entry.__dict__, "story": [line.to_plain() for line in entry.story]})
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise HegmError(
            BAD_REQUEST,
            f"a journal record of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_BYTES}",
            "move fewer processes in one operation",
        )
    head = _HEAD.pack(len(payload), zlib.crc32(payload))
    return b"".join((head, zlib.crc32(head).to_bytes(4, "big"), payload, _END))


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(data: bytes) -> Reading:
    """Return the histories in a journal. Raises JournalBroken for records that are invalid or out of order."""
    folded: dict[str, _OperationBuilder] = {}
    sound = start = _after_magic(data)
    try:
        for start, end, payload in payloads(data):  # noqa: B007 - it is where the reading stopped
            _fold(folded, Entry.from_plain(codec.decode(payload), "journal"))
            sound = end
        histories = {op: one.history() for op, one in folded.items()}
    except _OutOfOrder as error:
        raise JournalBroken(start, str(error)) from None
    except JournalBroken:
        raise
    except HegmError as error:
        raise JournalBroken(start, error.message) from error
    return Reading(histories, sound, torn=sound != len(data))


def entries(data: bytes) -> Iterator[Entry]:
    """Every record in a journal, in order."""
    for _, _, payload in payloads(data):
        yield Entry.from_plain(codec.decode(payload), "journal")


def _after_magic(data: bytes) -> int:
    if data.startswith(MAGIC):
        return len(MAGIC)
    # Cut off, or continued by zeros, as a file is whose length was written and its data not.
    written = data.rstrip(b"\0")
    if len(written) < len(MAGIC) and MAGIC.startswith(written):
        return 0
    if data.startswith(_STEM) and data[len(_STEM)] > VERSION:
        raise JournalTooNew(data[len(_STEM)])
    if data.startswith(_STEM) and 0 < data[len(_STEM)] < VERSION:
        raise JournalTooOld(data[len(_STEM)])
    raise JournalBroken(0, "its first bytes are not those of a journal")


def payloads(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Start, end and payload of each whole record. Raises JournalBroken."""
    start = _after_magic(data)
    if start == 0:
        return
    while start < len(data):
        body = start + _HEAD_BYTES
        if body > len(data):
            return
        head = data[start : start + _HEAD.size]
        if zlib.crc32(head) != int.from_bytes(data[start + _HEAD.size : body], "big"):
            if not data[body - 1 :].rstrip(b"\0"):
                return  # zeros from within the head to the end
            raise JournalBroken(start, "the header of a record does not match its checksum")
        length, checksum = _HEAD.unpack(head)
        end = body + length + len(_END)
        if length > MAX_PAYLOAD_BYTES:
            raise JournalBroken(start, f"a record has {length} bytes, which is over the limit")
        if end > len(data):
            return
        payload = data[body : end - len(_END)]
        if data[end - len(_END) : end] != _END or zlib.crc32(payload) != checksum:
            if not data[end - len(_END) :].rstrip(b"\0"):
                return  # zeros from within the payload to the end
            raise JournalBroken(start, "a record does not match its checksum")
        yield start, end, payload
        start = end


class _OutOfOrder(Exception):
    """A record does not follow the one before."""


class _OperationBuilder:
    """An operation while it is read, as plain values: making records of it once, at the end, takes a tenth the time."""

    def __init__(self, entry: Entry) -> None:
        self.op = entry.op
        self.seq = entry.seq
        self.values: dict[str, Any] = dict(entry.values)
        self.workers: dict[str, Any] = {}
        self.story = list(entry.story)
        self.untold = entry.untold
        self._take_workers()

    def take(self, entry: Entry) -> None:
        self.seq = entry.seq
        self.values.update(entry.values)
        self._take_workers()
        self.story.extend(entry.story)

    def _take_workers(self) -> None:
        for worker in self.values.pop("workers", ()):
            self.workers[worker["name"]] = worker

    def history(self) -> History:
        values = {**self.values, "workers": list(self.workers.values())}
        operation = Operation.from_plain(values, f"operation {self.op}")
        if operation.id != self.op or operation.seq != self.seq:
            raise _OutOfOrder(f"operation {self.op} has the values of another")
        dropped = max(0, len(self.story) - STORY_LINES)
        return History(operation, tuple(self.story[dropped:]), self.untold + dropped)


def _fold(folded: dict[str, _OperationBuilder], entry: Entry) -> None:
    known = folded.get(entry.op)
    if entry.whole:
        if known is not None:
            raise _OutOfOrder(f"operation {entry.op} begins a second time")
        folded[entry.op] = _OperationBuilder(entry)
    elif known is None:
        raise _OutOfOrder(f"an event of operation {entry.op}, which never began")
    elif entry.seq != known.seq + 1:
        raise _OutOfOrder(f"event {entry.seq} of operation {entry.op} follows event {known.seq}")
    else:
        known.take(entry)
