"""Both library faces ask for operations in the same way, and tell how they come on."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from hegmctl.async_connection import AsyncConnection, connect_async
from hegmctl.connection import Connection, connect
from hegmd.errors import REFUSED, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, OperationProgress
from hegmd.protocol.record import Record
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, FakeDaemon, IncomingRequest, failing, saying
from tests.unit.hegmctl.running import ROOT

DONE = Operation(id="7", kind="migrate", phase="done", processes=(), created_utc=0.0, size_bytes=10)
STORY = m.StoryReply(operation=DONE, story=())
PROGRESS = tuple(OperationProgress(id="7", phase=phase, size_bytes=10) for phase in ("reserving", "offloading", "done"))
DRAINED = m.Drained(operations=(DONE,))
REPLY = m.OperationReply(operation=DONE)

# The calls, and the request that each has to send.
CALLS: list[tuple[Callable[[Any], Any], m.Request, Record]] = [
    (lambda face: face.migrate(4711, "gpu1"), m.Migrate(pids=(4711,), to="gpu1"), REPLY),
    (
        lambda face: face.migrate([1, 2], "gpu1", wait=False, dry_run=True, limit_s=5.0),
        m.Migrate(pids=(1, 2), to="gpu1", wait=False, dry_run=True, limit_s=5.0),
        REPLY,
    ),
    (lambda face: face.suspend(4711, limit_s=5.0), m.Suspend(pids=(4711,), limit_s=5.0), REPLY),
    (lambda face: face.suspend([1, 2], wait=False), m.Suspend(pids=(1, 2), wait=False), REPLY),
    (lambda face: face.suspend(4711, carrier="host"), m.Suspend(pids=(4711,), carrier="host"), REPLY),
    (
        lambda face: face.migrate(4711, "gpu1", carrier="peer"),
        m.Migrate(pids=(4711,), to="gpu1", carrier="peer"),
        REPLY,
    ),
    (lambda face: face.quiesce(4711, hold_s=9.0, limit_s=5.0), m.Quiesce(pids=(4711,), hold_s=9.0, limit_s=5.0), REPLY),
    (lambda face: face.quiesce([1, 2], wait=False), m.Quiesce(pids=(1, 2), wait=False), REPLY),
    (lambda face: face.handoff(4711, "/one", limit_s=5.0), m.Handoff(pid=4711, path="/one", limit_s=5.0), REPLY),
    (lambda face: face.resume(4711), m.Resume(pid=4711), REPLY),
    (lambda face: face.resume(4711, "gpu1", wait=False), m.Resume(pid=4711, to="gpu1", wait=False), REPLY),
    (
        lambda face: face.checkpoint(4711, "/images/one", leave_running=True, limit_s=5.0),
        m.Checkpoint(pid=4711, path="/images/one", leave_running=True, limit_s=5.0),
        REPLY,
    ),
    (lambda face: face.restore("/images/one", "gpu1"), m.Restore(path="/images/one", to="gpu1"), REPLY),
    (lambda face: face.drain("gpu0"), m.Drain(gpu="gpu0"), DRAINED),
    (
        lambda face: face.drain("gpu0", ["gpu1"], wait=False, dry_run=True, limit_s=5.0),
        m.Drain(gpu="gpu0", to=("gpu1",), wait=False, dry_run=True, limit_s=5.0),
        DRAINED,
    ),
    (lambda face: face.swap(1, 2, dry_run=True), m.Swap(first=1, second=2, dry_run=True), DRAINED),
    (
        lambda face: face.swap(1, 2, wait=False, limit_s=5.0),
        m.Swap(first=1, second=2, wait=False, limit_s=5.0),
        DRAINED,
    ),
    (lambda face: face.operations(), m.Operations(), m.OperationsReply(operations=(DONE,))),
    (lambda face: face.story("7"), m.Story(id="7"), STORY),
    (lambda face: face.cancel("7"), m.CancelOperation(id="7"), REPLY),
    (lambda face: face.cancel("7", drop=True), m.CancelOperation(id="7", drop=True), REPLY),
]


def telling(reply: Record) -> Answerer:
    """Tell how it comes on, then answer."""

    def answer(caller: Caller, request: IncomingRequest) -> Record:
        for progress in PROGRESS:
            caller.event(request.id, progress)
        return reply

    return answer


@pytest.fixture
def daemon(socket_path: Path) -> Iterator[FakeDaemon]:
    answers = node.answers()
    for _call, request, reply in CALLS:
        with_events = request.event is not None and not isinstance(request, m.Story)
        answers[type(request)] = telling(reply) if with_events else saying(reply)
    with FakeDaemon(socket_path, answers) as running:
        yield running


@pytest.mark.parametrize(("call", "request_", "reply"), CALLS, ids=lambda value: getattr(value, "op", None))
async def test_both_faces_make_the_same_request_and_give_its_answer(
    daemon: FakeDaemon, call: Callable[[Any], Any], request_: m.Request, reply: Record
) -> None:
    with connect(str(daemon.path)) as hegmd:
        assert call(hegmd) == reply
        daemon.wait_until(lambda: daemon.requests.count(request_) == 1)
    async with connect_async(str(daemon.path)) as face:
        assert await call(face) == reply
        daemon.wait_until(lambda: daemon.requests.count(request_) == 2)


async def test_progress_is_reported_as_it_comes_and_can_be_followed(daemon: FakeDaemon) -> None:
    daemon.answers[m.Story] = telling(STORY)
    reports: list[OperationProgress] = []
    with connect(str(daemon.path)) as hegmd:
        hegmd.swap(1, 2, on_progress=reports.append)
        assert tuple(reports) == PROGRESS
        assert tuple(hegmd.follow("7")) == PROGRESS

    async def hear(progress: OperationProgress) -> None:
        await anyio.lowlevel.checkpoint()
        reports.append(progress)

    reports.clear()
    async with connect_async(str(daemon.path)) as face:
        await face.drain("gpu0", on_progress=hear)
        assert tuple(reports) == PROGRESS
        assert tuple([progress async for progress in face.follow("7")]) == PROGRESS
    daemon.wait_until(lambda: daemon.requests.count(m.Story(id="7", follow=True)) == 2)


async def test_a_refusal_is_the_daemons_own(daemon: FakeDaemon) -> None:
    daemon.answers[m.CancelOperation] = failing(HegmError(REFUSED, "operation 7 is done: it is over", "see the others"))
    with connect(str(daemon.path)) as hegmd, pytest.raises(HegmError, match="it is over") as refused:
        hegmd.cancel("7")
    assert refused.value.code is REFUSED
    async with connect_async(str(daemon.path)) as face:
        with pytest.raises(HegmError, match="it is over"):
            await face.cancel("7")


def _public(face: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(face, inspect.isfunction) if not name.startswith("_")}


def test_both_libraries_offer_the_same_and_the_page_documents_all() -> None:
    sync, asynchronous = _public(Connection), _public(AsyncConnection)
    of_the_socket = {"close", "fileno", "wait_for_its_end"}
    assert sync - of_the_socket == asynchronous
    page = (ROOT / "docs" / "library.md").read_text()
    named = set(re.findall(r"`([a-z_]+)\(", page))
    missing = sync - of_the_socket - {"greet", "call_with_descriptors", "converse"} - named
    assert not missing
