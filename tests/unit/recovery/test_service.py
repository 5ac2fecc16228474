"""All protected jobs of a node: what goes wrong for one of them ends neither its protection nor the daemon."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hegmd.errors import DENIED, HegmError
from hegmd.memory.pool import Pool, Source
from hegmd.memory.sizes import MIB
from hegmd.protocol.recovery import KEPT, RecoveryAttempt
from hegmd.recovery.protection import Protection
from hegmd.recovery.records import JobSnapshots, SnapshotFiles
from hegmd.recovery.service import Recoveries, run_once
from hegmd.recovery.slots import JobSlots
from tests.unit.recovery.test_snapshots import write

ANOTHER_UID = 54321


class Failing:
    """A protection that fails, as where the disk is full."""

    job = "job j1"

    async def run(self) -> None:
        raise OSError(28, "No space left on device")


async def test_a_protection_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Its error ends nothing but that run of it, and is in the log."""
    with caplog.at_level(logging.ERROR):
        await run_once(cast("Protection", Failing()), pause_s=0.0)
    assert "failed, and starts again" in caplog.text
    assert "No space left" in caplog.text


class Jobs:
    """The one job of another user."""

    job = SimpleNamespace(id="j1", name="train", uid=ANOTHER_UID)

    def named(self, _wanted: str, _may: object) -> Any:
        return self.job

    def __iter__(self) -> Iterator[Any]:
        return iter([self.job])


def _listen(*_: object) -> None:
    pass


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield made
    made.close()


async def test_the_slots_of_another_user_are_neither_shown_nor_used_nor_deleted(pool: Pool, tmp_path: Path) -> None:
    slots = JobSlots(pool, "j1")
    memory = await slots.take(0, 0, 8192, Source(os.geteuid(), 1))
    write(memory.fd, generation=1, step=7)
    attempt = RecoveryAttempt(fell_utc=1.0, why="ended by signal 9")
    record = JobSnapshots(
        job="j1", uid=ANOTHER_UID, ranks=1, attempts=(attempt,), begins_anew=("secret",), kept="given up", kept_utc=1.0
    )
    SnapshotFiles(tmp_path).save(record)
    nobody: Any = SimpleNamespace(listen=_listen)
    rest = dict.fromkeys(("events", "gpus", "look", "variables", "is_in_hand"), nobody)
    made = Recoveries(
        workers=nobody, supervisors=nobody, jobs=cast("Any", Jobs()), pool=pool, state_dir=tmp_path, **rest
    )
    made.open()
    (view,) = (await made.show([], lambda _uid: False)).jobs
    assert (view.state, view.held_bytes > 0) == (KEPT, True)
    assert (view.slots, view.recoveries, view.begins_anew, view.why) == ((), (), (), None)
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        made.require_kept("j1", ANOTHER_UID + 1)
    assert refused.value.code is DENIED
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        await made.drop("j1", lambda _uid: False)
    assert refused.value.code is DENIED
    assert slots.held()
    made.require_kept("j1", ANOTHER_UID)
    (shown,) = (await made.show([], lambda _uid: True)).jobs
    assert [slot.step for slot in shown.slots] == [7]
    assert await made.drop("j1", lambda _uid: True) > 0
    assert not slots.held()
