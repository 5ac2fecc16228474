"""The next daemon knows which processes an image had stopped."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.images.dump_records import DumpRecords
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import ProcessSet, population_of
from hegmd.workers.workers import Workers
from tests.unit.handed import (
    DisconnectingAgents,
    ImageBeingWritten,
    ImageCatalogue,
    attended,
    handoff_with,
    state,
    wished,
)
from tests.unit.moving_node import start_ticks


@pytest.mark.parametrize("how", ["abandon", "find"])
async def test_a_child_of_a_job_killed_with_the_daemon_before_a_complete_image_does_not_stay_stopped(
    how: str, tmp_path: Path, stopped: int
) -> None:
    """Only the daemon that was killed knew that it had stopped it; in the job's tree it is no more."""
    people = ProcessSet({1 << 22: 1, **population_of([stopped]).start_ticks})
    op = wished(1 << 22, root_ticks=1, begun=True)
    DumpRecords(tmp_path).note(op.id, people)
    handoff = handoff_with(ImageCatalogue(), tmp_path)
    if how == "abandon":
        await handoff.abandon(op)
    else:
        with pytest.raises(Refused, match="hegmd was stopped before the image in /images/one was complete"):
            await handoff.find(op)
    assert state(stopped) != "T"
    assert DumpRecords(tmp_path).people(op.id) is None


LOOKS = "#!/bin/sh\ncp {note} {seen}\nexit 1\n"


@pytest.mark.thorough
async def test_processes_that_criu_stops_are_on_disk_until_they_continue(tmp_path: Path, paused: int) -> None:
    program, op = tmp_path / "criu", attended(paused)
    program.write_text(LOOKS.format(note=tmp_path / "standing" / op.id, seen=tmp_path / "seen"))
    program.chmod(0o755)
    os.kill(paused, signal.SIGSTOP)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, paused, os.WSTOPPED)

    async def criu() -> Criu:
        return Criu(str(program), "4.2")

    lent, workers = ImageBeingWritten(), Workers(start_ticks)
    lent.criu_dir_fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = DisconnectingAgents(workers, paused)
        await agent.attend(tasks)

        async def come_back() -> None:
            await lent.discarded.wait()
            await agent.attend(tasks)

        tasks.start_soon(come_back)
        with pytest.raises(HegmError, match="CRIU"):
            await handoff_with(lent, tmp_path, criu, workers=workers).dump(op, lambda _: None)
        tasks.cancel_scope.cancel()
    os.close(lent.criu_dir_fd)
    result = json.loads((tmp_path / "seen").read_text())
    assert (result["start_ticks"], result["stopped"]) == ({str(paused): start_ticks(paused)}, [paused])
    assert state(paused) == "T", "somebody else has stopped it"
    assert list((tmp_path / "standing").iterdir()) == []


async def test_processes_stopped_before_the_dump_are_noted(tmp_path: Path) -> None:
    people = ProcessSet({7: 70, 8: 80}, frozenset({8}))
    DumpRecords(tmp_path).note("1", people)
    assert DumpRecords(tmp_path).people("1") == people


async def test_notes_of_ended_operations_and_of_another_boot_are_ignored(tmp_path: Path) -> None:
    notes = DumpRecords(tmp_path)
    notes.keep_only(())
    for op_id in ("1", "2"):
        notes.note(op_id, ProcessSet({7: 70}))
    notes.keep_only(("2",))
    assert (notes.people("1"), notes.people("2")) == (None, ProcessSet({7: 70}))
    note = tmp_path / "standing" / "2"
    note.write_text(json.dumps({**json.loads(note.read_text()), "boot": "another"}))
    assert notes.people("2") is None


def test_an_image_is_written_even_if_its_record_cannot_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its operation has begun, and has had its room in the journal from the beginning."""
    (tmp_path / "standing").write_text("a file")
    DumpRecords(tmp_path).note("1", ProcessSet({7: 70}))
    assert "the record of the processes stopped for operation 1" in caplog.text
    assert DumpRecords(tmp_path).people("1") is None


@pytest.mark.thorough
async def test_a_daemon_without_descriptors_still_resumes_a_job(tmp_path: Path, stopped: int) -> None:
    op = wished(stopped, begun=True)
    handoff = handoff_with(ImageCatalogue(), tmp_path)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with anyio.create_task_group() as tasks:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
            tasks.start_soon(handoff.abandon, op)
            await anyio.wait_all_tasks_blocked()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert state(stopped) != "T"


def test_a_note_that_cannot_be_read_without_descriptors_does_not_count_as_missing(tmp_path: Path) -> None:
    """The daemon resumed no process and removed the record: its processes stayed stopped for ever."""
    notes, before = DumpRecords(tmp_path), resource.getrlimit(resource.RLIMIT_NOFILE)
    notes.note("1", ProcessSet({7: 70}))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        with pytest.raises(HegmError, match="hegmd has reached its limit of"):
            notes.people("1")
        notes.note("2", ProcessSet({8: 80}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (notes.people("1"), notes.people("2")) == (ProcessSet({7: 70}), None)
