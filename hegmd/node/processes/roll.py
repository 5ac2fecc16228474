"""The list of GPU processes: the drivers' reports (which pid uses which GPU) joined with the node's knowledge of the
pid.

Creates GpuProcess records in three steps, because the middle one may have to be abandoned: `read` reads the pids,
`lookups.read` waits for slow facts, `write` creates the records. Steps of one roster must not overlap; each may run in
another thread.

Records are frozen, and an unchanged one is the same object as before: 2,000 unchanged processes cost a comparison each,
and callers can compare identities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hegmd.node.devices.base import ProcessUse
from hegmd.node.processes.lookups import LookupRequest, Lookups
from hegmd.node.processes.table import NOTE_ENDED, NOTE_HELD, ProcessFacts, ProcessTable, Visibility
from hegmd.protocol.snapshots import AgentInfo, GpuProcess, GpuUse

NOTE_NOT_LOOKED_AT = "/proc was not read in time; try again"


class ProcessListInputs(NamedTuple):
    """The facts that are known before /proc is read.

    `uses` name GPUs by UUID; `ids` maps them to the node's ids. `unproven` are pids of a driver that may count in
    another namespace. `agents` and `held_bytes` are by pid; a process with held bytes is listed even if no driver
    reports it, like a suspended job.
    """

    uses: tuple[ProcessUse, ...]
    ids: Mapping[str, str]
    unproven: frozenset[int]
    agents: Mapping[int, AgentInfo]
    held_bytes: Mapping[int, int]


class ProcessReadings(NamedTuple):
    """The facts that were read about the pids, and the processes that left the GPUs without ending."""

    uses_of: Mapping[int, list[ProcessUse]]
    facts_of: Mapping[int, ProcessFacts]
    departed: frozenset[int]
    lookups: LookupRequest


class ProcessList(NamedTuple):
    """The processes, ordered by pid.

    `ended` are those that a driver still lists though they have ended. `departed` are those of the previous list that
    left their GPUs without ending.
    """

    processes: tuple[GpuProcess, ...] = ()
    ended: frozenset[int] = frozenset()
    departed: frozenset[int] = frozenset()


@dataclass(slots=True, eq=False, repr=False)
class _Line:
    """The inputs of a record, to decide whether it can be reused."""

    uses: list[ProcessUse]
    facts: ProcessFacts
    command: str | None
    command_note: str | None
    user: str | None
    agent: AgentInfo | None
    held_bytes: int
    record: GpuProcess


class ProcessListBuilder:
    """Creates the list again and again, over one table."""

    def __init__(self, table: ProcessTable) -> None:
        self._table = table
        self._lines: dict[int, _Line] = {}
        self._ids: Mapping[str, str] = {}

    @property
    def lookups(self) -> Lookups:
        """The facts to be read between `read` and `write`."""
        return self._table.lookups

    def read(self, call: ProcessListInputs) -> ProcessReadings:
        """Identify the pids. Reads /proc, but nothing that waits for another process."""
        uses_of = _uses_by_pid(call)
        facts_of = self._table.refresh(uses_of, call.unproven)
        visible = (
            (facts.pid, facts.start_ticks, facts.name, facts.uid)
            for facts in facts_of.values()
            if facts.start_ticks is not None and facts.name is not None and facts.uid is not None
        )
        return ProcessReadings(
            uses_of=uses_of, facts_of=facts_of, departed=self._table.departed, lookups=self.lookups.request_for(visible)
        )

    def write(self, call: ProcessListInputs, readings: ProcessReadings) -> ProcessList:
        """Create the records from what was read."""
        if call.ids != self._ids:
            self._ids = dict(call.ids)
            self._lines.clear()
        lines = {pid: self._line(pid, call, readings) for pid in sorted(readings.uses_of)}
        self._lines = lines
        return ProcessList(
            processes=tuple(line.record for line in lines.values()),
            ended=frozenset(pid for pid, facts in readings.facts_of.items() if facts.presence is Visibility.ENDED),
            departed=readings.departed,
        )

    def _line(self, pid: int, call: ProcessListInputs, readings: ProcessReadings) -> _Line:
        facts = readings.facts_of[pid]
        uses = readings.uses_of[pid]
        command, command_note, user = None, None, None
        if facts.start_ticks is not None:
            command, command_note = self.lookups.command(pid, facts.start_ticks)
        if facts.uid is not None:
            user = self.lookups.user(facts.uid)
        agent = call.agents.get(pid)
        held_bytes = call.held_bytes.get(pid, 0)
        line = self._lines.get(pid)
        if (
            line is not None
            and line.facts is facts
            and line.command == command
            and line.command_note == command_note
            and line.user == user
            and line.agent == agent
            and line.held_bytes == held_bytes
            and line.uses == uses
        ):
            return line
        record = GpuProcess(
            pid=pid,
            start_ticks=facts.start_ticks,
            started_utc=facts.started_utc,
            uid=facts.uid,
            user=user,
            name=facts.name,
            command=command,
            workload=facts.workload,
            gpus=_named_uses(uses, call.ids),
            held_bytes=held_bytes,
            agent=agent,
            note="; ".join(note for note in (_note(facts, uses), command_note) if note is not None) or None,
        )
        if line is not None and line.record == record:
            record = line.record
        return _Line(uses, facts, command, command_note, user, agent, held_bytes, record)

    def close(self) -> None:
        """Close the table's descriptors."""
        self._table.close()
        self._lines.clear()


def _uses_by_pid(call: ProcessListInputs) -> dict[int, list[ProcessUse]]:
    uses_of: dict[int, list[ProcessUse]] = {}
    for use in call.uses:
        uses_of.setdefault(use.pid, []).append(use)
    for pid in call.held_bytes:
        uses_of.setdefault(pid, [])
    return uses_of


def _note(facts: ProcessFacts, uses: Sequence[ProcessUse]) -> str | None:
    """Return the note of a process; one without a GPU is listed only because hegmd keeps its state."""
    return NOTE_HELD if facts.note == NOTE_ENDED and not uses else facts.note


def has_ended(process: GpuProcess) -> bool:
    """Return True if that record is of an ended process that a driver still lists."""
    return process.start_ticks is None and NOTE_ENDED in (process.note or "")


def stand_in(call: ProcessListInputs, before: ProcessList) -> ProcessList:
    """Return a list for when /proc could not be read: earlier records, and bare pids for others.

    For pids that are no longer reported it is unknown whether they ended.
    """
    known = {process.pid: process for process in before.processes}
    uses_of = _uses_by_pid(call)
    processes: list[GpuProcess] = []
    for pid, uses in sorted(uses_of.items()):
        named = _named_uses(uses, call.ids)
        record = known.get(pid) or GpuProcess(pid=pid, gpus=named, note=NOTE_NOT_LOOKED_AT)
        processes.append(record if record.gpus == named else record.replace(gpus=named))
    return ProcessList(
        processes=tuple(processes),
        ended=before.ended & uses_of.keys(),
        departed=frozenset(known.keys() - uses_of.keys() - before.ended),
    )


def _named_uses(uses: list[ProcessUse], ids: Mapping[str, str]) -> tuple[GpuUse, ...]:
    """Return the uses with the node's GPU ids, in order. An unknown UUID stays as it is."""
    named = [use.use.replace(gpu=ids.get(use.use.gpu, use.use.gpu)) for use in uses]
    if len(named) > 1:
        named.sort(key=lambda use: (len(use.gpu), use.gpu))
    return tuple(named)
