"""The join of the drivers' word with what is known of the pids: new records only where something changed."""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Iterator

import pytest

from hegmd.node.devices.base import ProcessUse
from hegmd.node.processes.lookups import NOTE_UNREAD
from hegmd.node.processes.procfs import read_command
from hegmd.node.processes.roll import NOTE_NOT_LOOKED_AT, ProcessList, ProcessListBuilder, ProcessListInputs, stand_in
from hegmd.node.processes.table import NOTE_ENDED, NOTE_HELD, NOTE_NO_PID, ProcessTable
from hegmd.protocol.snapshots import AgentInfo, GpuProcess, GpuUse

ME = os.getpid()


def use(pid: int, gpu: str = "GPU-a", vram_bytes: int | None = 1 << 30, kind: str = "compute") -> ProcessUse:
    return ProcessUse(pid=pid, use=GpuUse(gpu=gpu, vram_bytes=vram_bytes, kind=kind))


CALL = ProcessListInputs(
    uses=(use(ME),), ids={"GPU-a": "gpu0", "GPU-b": "gpu1"}, unproven=frozenset(), agents={}, held_bytes={}
)


@pytest.fixture
def roster() -> Iterator[ProcessListBuilder]:
    roster = ProcessListBuilder(ProcessTable())
    yield roster
    roster.close()


def call_roll(roster: ProcessListBuilder, call: ProcessListInputs, *, look_up: bool = True) -> ProcessList:
    readings = roster.read(call)
    if look_up:
        roster.lookups.read(readings.lookups)
    return roster.write(call, readings)


def only(roll: ProcessList) -> GpuProcess:
    (process,) = roll.processes
    return process


def test_a_process_with_all_its_facts(roster: ProcessListBuilder) -> None:
    agent = AgentInfo(name="hegm-agent", version="0.2")
    process = only(call_roll(roster, CALL._replace(agents={ME: agent}, held_bytes={ME: 77})))
    assert (process.pid, process.uid, process.agent, process.held_bytes) == (ME, os.getuid(), agent, 77)
    assert process.gpus == (GpuUse(gpu="gpu0", vram_bytes=1 << 30, kind="compute"),)
    assert process.command == read_command("/proc", ME)
    assert process.user == pwd.getpwuid(os.getuid()).pw_name
    assert process.note is None


def test_nothing_new_makes_the_same_objects(roster: ProcessListBuilder) -> None:
    first = call_roll(roster, CALL)
    again = call_roll(roster, CALL._replace(uses=(use(ME),), ids=dict(CALL.ids)))
    assert again.processes[0] is first.processes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"uses": (use(ME, vram_bytes=5),)},
        {"uses": (use(ME), use(ME, gpu="GPU-b"))},
        {"uses": (use(ME, kind="graphics"),)},
        {"agents": {ME: AgentInfo(name="hegm-agent", version="1")}},
        {"held_bytes": {ME: 1}},
        {"ids": {"GPU-a": "gpu7"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_change_makes_a_new_record(roster: ProcessListBuilder, change: dict[str, object]) -> None:
    first = call_roll(roster, CALL)
    second = call_roll(roster, CALL._replace(**change))  # type: ignore[arg-type]  # the table above has the right ones
    assert second.processes[0] != first.processes[0]
    assert call_roll(roster, CALL).processes[0] == first.processes[0]


def test_a_command_line_that_comes_late_is_missed_until_then(roster: ProcessListBuilder) -> None:
    early = only(call_roll(roster, CALL, look_up=False))
    assert (early.command, early.user, early.note) == (None, None, NOTE_UNREAD)
    assert early.start_ticks is not None
    late = only(call_roll(roster, CALL))
    assert late.command is not None
    assert late.note is None


def test_processes_come_by_pid_and_their_gpus_by_number(roster: ProcessListBuilder) -> None:
    ids = {f"GPU-{number}": f"gpu{number}" for number in range(12)}
    parent = os.getppid()
    uses = (use(ME, "GPU-10"), use(parent, "GPU-0"), use(ME, "GPU-2"))
    roll = call_roll(roster, CALL._replace(ids=ids, uses=uses))
    assert [process.pid for process in roll.processes] == sorted([ME, parent])
    mine = next(process for process in roll.processes if process.pid == ME)
    assert [held.gpu for held in mine.gpus] == ["gpu2", "gpu10"]


def test_unknown_memory_stays_unknown(roster: ProcessListBuilder) -> None:
    assert only(call_roll(roster, CALL._replace(uses=(use(ME, vram_bytes=None),)))).gpus[0].vram_bytes is None


def test_an_unknown_gpu_is_shown_by_its_uuid(roster: ProcessListBuilder) -> None:
    assert only(call_roll(roster, CALL._replace(uses=(use(ME, "MIG-1"),)))).gpus[0].gpu == "MIG-1"


def test_a_pid_without_a_process_is_listed_with_nothing_but_the_reason(roster: ProcessListBuilder) -> None:
    process = only(call_roll(roster, CALL._replace(uses=(use(0),))))
    assert (process.start_ticks, process.uid, process.name, process.command) == (None, None, None, None)
    assert process.note == NOTE_NO_PID


def test_an_ended_process_is_listed_while_the_driver_does_and_marked() -> None:
    def ended(pid: int) -> int:
        raise OSError(errno.ESRCH, "No such process")

    table = ProcessTable(open_pidfd=ended)
    if not table.in_first_namespace:
        pytest.skip("elsewhere a pid without a process is one of another namespace")
    roll = call_roll(ProcessListBuilder(table), CALL)
    assert (only(roll).note, roll.ended) == (NOTE_ENDED, {ME})
    held = call_roll(ProcessListBuilder(table), CALL._replace(uses=(), held_bytes={ME: 1}))
    assert only(held).note == NOTE_HELD  # a restart's state was reported to be listed by the driver


def test_processes_that_left_are_not_in_the_roll(roster: ProcessListBuilder) -> None:
    call_roll(roster, CALL)
    assert call_roll(roster, CALL._replace(uses=())) == ProcessList(departed=frozenset({ME}))
    assert call_roll(roster, CALL._replace(uses=())) == ProcessList()


def test_the_placeholder_keeps_the_known_facts_and_names_the_unknown_ones(roster: ProcessListBuilder) -> None:
    before = call_roll(roster, CALL)
    parent = os.getppid()
    roll = stand_in(CALL._replace(uses=(use(ME, vram_bytes=9), use(parent))), before)
    by_pid = {process.pid: process for process in roll.processes}
    assert by_pid[ME].command == before.processes[0].command
    assert by_pid[ME].gpus[0].vram_bytes == 9
    assert by_pid[parent] == GpuProcess(
        pid=parent, gpus=(GpuUse(gpu="gpu0", vram_bytes=1 << 30),), note=NOTE_NOT_LOOKED_AT
    )
    assert stand_in(CALL._replace(uses=()), before) == ProcessList(departed=frozenset({ME}))
