"""`hegmctl top` beside a daemon: how it watches one, what it asks for, and what it says where it cannot draw."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hegmctl.connection import connect
from hegmctl.top.feed import Feed
from hegmctl.top.picture import Listener, NodeView
from hegmd.protocol import messages as m
from hegmd.protocol.jobs import Job, JobProcess
from hegmd.protocol.operations import Operation, Plan
from hegmd.protocol.snapshots import Event
from tests.patience import HANG_S
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, IncomingRequest, saying
from tests.unit.hegmctl.running import hegmctl
from tests.unit.hegmctl.terminal import Picture as Painting
from tests.unit.hegmctl.terminal import Terminal

JOB = Job(
    id="j7",
    name="bert",
    state="training",
    uid=1000,
    gpus=("gpu0",),
    vram_bytes=1 << 30,
    steps_per_s=2.5,
    started_utc=1.0,
    pid=4711,
    processes=(JobProcess(pid=4711, role="worker"), JobProcess(pid=4712, role="rank")),
)
DONE = Operation(id="3", kind="migrate", phase="done", processes=(), created_utc=1.0, size_bytes=0)
PLAN = Plan(
    kind="suspend",
    way="agent",
    workers=(),
    size_bytes=0,
    reservation_bytes={},
    gpu_free_bytes={},
    pool_needed_bytes=0,
    pool_free_bytes=0,
    estimate_s=0.5,
    is_distributed=False,
)
EVENT = Event(seq=5, time_utc=4e9, kind="operation.done", severity="info", message="operation 3: done")


class RecordingCallbacks(Listener):
    """Records the callbacks and wakes the thread that waits for them."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon
        self.views: list[NodeView] = []
        self.events: list[Event] = []
        self.troubles: list[str] = []

    def on_view(self, view: NodeView) -> None:
        self.views.append(view)
        self._wake()

    def happened(self, event: Event) -> None:
        self.events.append(event)
        self._wake()

    def away(self, why: str) -> None:
        self.troubles.append(why)
        self._wake()

    def _wake(self) -> None:
        with self._daemon.news:
            self._daemon.news.notify_all()


@pytest.fixture
def answering(daemon: FakeDaemon) -> FakeDaemon:
    daemon.answers[m.Gpus] = saying(m.GpusReply(taken_utc=1.0, gpus=(), vendors=()))
    daemon.answers[m.Jobs] = saying(m.JobsReply(taken_utc=1.0, jobs=(JOB,)))
    daemon.answers[m.Operations] = saying(m.OperationsReply(operations=(DONE,)))
    return daemon


def feed_of(daemon: FakeDaemon) -> Feed:
    return Feed(lambda: connect(str(daemon.path), timeout_s=HANG_S), interval_s=3600.0)


def test_a_resume_of_a_job_that_has_failed_has_a_plan_in_words(answering: FakeDaemon) -> None:
    """Its dry run was refused, so it could not be resumed in `hegmctl top`."""
    answering.answers[m.Resume] = saying(m.OperationReply(recovered="j1"))
    assert feed_of(answering).plan("resume", "j1", None, 80) == [
        "job j1 has failed, and would be started again from its newest snapshot once there is room",
        "nothing was changed: this is only the plan",
    ]


@pytest.mark.thorough
def test_an_event_triggers_a_new_view_and_a_lost_daemon_is_reported(answering: FakeDaemon) -> None:
    requests: list[tuple[Caller, IncomingRequest]] = []
    answering.answers[m.Events] = lambda caller, request: requests.append((caller, request))
    feed, callbacks = feed_of(answering), RecordingCallbacks(answering)
    feed.start(callbacks)
    try:
        answering.wait_until(lambda: bool(callbacks.views) and bool(requests))
        row = callbacks.views[0].jobs[0]
        assert (row.id, row.name, row.pids, row.steps_per_s) == ("j7", "bert", (4711, 4712), 2.5)
        assert callbacks.views[0].operations == (DONE,)
        view_count = len(callbacks.views)
        requests[0][0].event(requests[0][1].id, EVENT)
        answering.wait_until(lambda: callbacks.events == [EVENT] and len(callbacks.views) > view_count)
        answering.hang_up()
        answering.wait_until(lambda: len(requests) > 1)
        request = requests[1][1].request
        assert isinstance(request, m.Events)
        assert request.since == EVENT.seq + 1, "it goes on where it was"
    finally:
        feed.stop()
        answering.stop()
        feed.join(HANG_S)
    answering.wait_until(lambda: not answering.callers)


def test_a_missing_daemon_is_reported_once_it_is_needed(answering: FakeDaemon) -> None:
    feed, callbacks = feed_of(answering), RecordingCallbacks(answering)
    answering.stop()
    feed.start(callbacks)
    try:
        answering.wait_until(lambda: bool(callbacks.troubles))
        assert callbacks.troubles[0].startswith("waiting for the daemon: ")
    finally:
        feed.stop()
        feed.join(HANG_S)


def test_a_command_names_the_job_and_its_plan_changes_nothing(answering: FakeDaemon) -> None:
    answering.answers[m.Suspend] = saying(m.OperationReply(plan=PLAN))
    answering.answers[m.Migrate] = saying(m.OperationReply(operation=DONE))
    answering.answers[m.Resume] = saying(m.OperationReply(operation=DONE))
    feed = feed_of(answering)
    assert any("0.50 s" in line for line in feed.plan("suspend", "j7", None, 80))
    assert answering.wait_for(m.Suspend) == m.Suspend(pids=("j7",), dry_run=True)
    messages: list[str] = []
    assert feed.carry_out("migrate", "j7", "gpu1", messages.append).startswith("operation 3")
    assert answering.wait_for(m.Migrate) == m.Migrate(pids=("j7",), to="gpu1")
    feed.carry_out("resume", "j7", None, messages.append)
    assert answering.wait_for(m.Resume) == m.Resume(pid="j7")


def test_without_a_terminal_it_names_the_alternative(daemon: FakeDaemon) -> None:
    ran = hegmctl("top", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "top needs a terminal" in ran.stderr
    assert "hegmctl jobs" in ran.stderr
    assert "prints no JSON" in hegmctl("top", "--json", socket=daemon.path).stderr
    with Terminal("top", socket=daemon.path, environ={"TERM": "dumb"}) as terminal:
        assert terminal.end() == 2


class SentMessages(Painting):
    """Keeps what was sent: textual sends more than the terminal of these tests can draw."""

    def feed(self, text: str) -> None:
        self.raw += text


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("environ", "words", "coloured"),
    [
        ({"TERM": "xterm-256color"}, (), True),
        ({"TERM": "vt100"}, (), False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, (), False),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, ("--color",), True),
    ],
)
def test_the_screen_has_colours_only_where_the_terminal_has(
    answering: FakeDaemon, environ: dict[str, str], words: tuple[str, ...], coloured: bool
) -> None:
    """Issue 19: a VT100 got colours, and textual ignores --color if NO_COLOR is set."""
    with Terminal("top", *words, socket=answering.path, environ=environ) as terminal:
        terminal.picture = SentMessages()
        terminal.until(lambda _lines: "GPUs" in terminal.picture.raw)
        terminal.type("q")
        terminal.end()
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-8][;m]", terminal.picture.raw)) == coloured


def test_without_textual_it_names_the_command_that_installs_it(daemon: FakeDaemon, tmp_path: Path) -> None:
    (tmp_path / "textual.py").write_text("raise ModuleNotFoundError('no textual here', name='textual')\n")
    paths = {"PYTHONPATH": f"{tmp_path}:client:."}
    with Terminal("top", socket=daemon.path, environ=paths) as terminal:
        assert terminal.end() != 0
        message = " ".join(" ".join(terminal.picture.lines).split())
    assert "top needs the package textual, which is not installed" in message
    assert "pip install 'hegmd[top]'" in message
