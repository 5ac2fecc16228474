"""Answers that continue, into a pipe, across restarts of the daemon."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from hegmd.errors import DENIED, UNAVAILABLE, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.snapshots import Event
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, failing, remembering, saying
from tests.unit.hegmctl.running import ROOT, command, environment
from tests.unit.hegmctl.test_cli import Running

NEXT = Event(seq=3, time_utc=1_795_257_200.0, kind="gpu.back", severity="info", message="gpu1 is back", gpu="gpu1")


def test_watching_into_a_pipe_appends_under_the_time(socket_path: Path) -> None:
    with FakeDaemon(socket_path, node.answers()) as daemon, Running("ps", "-w0.01", socket=socket_path) as watching:
        for _ in range(2):
            assert len(watching.line().split(":")) == 3
            table = [watching.line() for _ in range(6)]
            assert table[0].startswith(" PID  USER")
            assert table[-1] == ""
        daemon.answers[m.Processes] = failing(HegmError(DENIED, "not any more", "ask"))
        status, out, err = watching.end()
    assert status == DENIED.exit_status
    assert "\x1b" not in out
    assert err == "hegmctl: not any more; ask\n"


def test_watching_in_json_is_a_document_a_line(socket_path: Path) -> None:
    with (
        FakeDaemon(socket_path, node.answers()),
        Running("ps", "--watch=0.01", "--json", socket=socket_path) as watching,
    ):
        for _ in range(3):
            document = json.loads(watching.line())
            assert document.pop("schema") == 1
            assert document == json.loads(json.dumps(node.PROCESSES.to_plain()))


@pytest.mark.parametrize("words", [("ps", "--watch=0.05"), ("events", "--follow")])
def test_a_daemon_missing_at_the_start_is_an_error(socket_path: Path, words: tuple[str, ...]) -> None:
    with Running(*words, socket=socket_path) as running:
        assert running.end()[0] == 3


def test_watching_waits_for_a_daemon_that_restarts_and_reports_that_once(socket_path: Path) -> None:
    with (
        FakeDaemon(socket_path, node.answers()) as first,
        Running("ps", "--watch=0.05", socket=socket_path) as watching,
    ):
        watching.line()
        first.stop()
        assert watching.line(of_errors=True).startswith("hegmctl: waiting for the daemon: ")
        with FakeDaemon(socket_path, node.answers()) as second:
            assert watching.line(of_errors=True) == "hegmctl: the daemon is back"
            second.wait_for(m.Processes)
            assert watching.end(signal.SIGINT)[0] == -signal.SIGINT


def _stopping(caller: Caller) -> None:
    """The messages of hegmd when it stops."""
    caller.send(caller.protocol.error(None, HegmError(UNAVAILABLE, "hegmd is stopping", "connect again")))
    caller.daemon.hang_up()


@pytest.mark.thorough
def test_following_continues_with_the_events_of_the_next_daemon(socket_path: Path) -> None:
    """A daemon counts from its own start: the numbers start over, and nothing may be missed for that."""
    answers = node.answers()
    answers[m.Events] = remembering(node.EVENTS, then=_stopping)
    with FakeDaemon(socket_path, answers) as first, Running("events", "-f", socket=socket_path) as following:
        assert following.line().endswith("2 GPUs were found")
        assert following.line().endswith("gpu1 is lost")
        assert "hegmd is stopping" in following.line(of_errors=True)
        first.stop()
        answers[m.Events] = remembering([NEXT.replace(seq=1)])
        with FakeDaemon(socket_path, answers):
            assert following.line(of_errors=True) == "hegmctl: the daemon is back"
            assert following.line().endswith("gpu1 is back")


def test_following_into_a_full_disk_does_not_wait_for_the_daemon(socket_path: Path) -> None:
    """hegmctl took its own failed write for a daemon that is away, and tried for ever."""
    with FakeDaemon(socket_path, node.answers()), Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            command("events", "--follow"),
            env=environment(socket_path, PYTHONUNBUFFERED="1"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
            timeout=HANG_S,
        )
    assert ran.returncode == UNAVAILABLE.exit_status
    assert ran.stderr.startswith("hegmctl: standard output cannot be written to: No space left on device")


@pytest.mark.thorough
def test_following_repeats_nothing_when_only_the_connection_broke(socket_path: Path) -> None:
    def answer(caller: Caller, request: IncomingRequest) -> None:
        remembering(node.EVENTS if len(requests) == 0 else [*node.EVENTS, NEXT])(caller, request)
        requests.append(request)
        if len(requests) == 1:
            caller.daemon.hang_up()

    requests: list[IncomingRequest] = []
    answers = node.answers()
    answers[m.Events] = answer
    with FakeDaemon(socket_path, answers), Running("events", "-f", "--since", "2", socket=socket_path) as following:
        assert following.line().endswith("gpu1 is lost")
        following.line(of_errors=True)
        assert following.line().endswith("gpu1 is back")
    assert [request.request for request in requests] == [m.Events(since=2, follow=True), m.Events(since=0, follow=True)]


@pytest.mark.thorough
def test_following_requests_the_next_events_or_all_of_a_new_daemon_run(socket_path: Path) -> None:
    """hegmctl compared times alone, and missed the events of a daemon whose clock was set back."""
    answers = node.answers(node.WELCOME.replace(run="one"))
    answers[m.Events] = remembering(node.EVENTS, then=lambda caller: caller.daemon.hang_up())
    with Running("events", "-f", "--since", "2", "--run", "none", socket=socket_path) as following:
        with FakeDaemon(socket_path, answers) as first:
            assert following.line().endswith("gpu1 is lost")
            following.line(of_errors=True)
            assert first.wait_for(m.Events, 1) == m.Events(since=2, follow=True, run="none")
            assert first.wait_for(m.Events, 2) == m.Events(since=3, follow=True)
        early = NEXT.replace(seq=1, time_utc=1.0)
        answers = node.answers(node.WELCOME.replace(run="two"))
        answers[m.Events] = remembering([early])
        with FakeDaemon(socket_path, answers) as second:
            assert following.line().endswith("gpu1 is back")
            assert second.wait_for(m.Events) == m.Events(since=0, follow=True)


def test_following_in_json_prints_notes_in_json(socket_path: Path) -> None:
    answers = node.answers()
    answers[m.Events] = remembering(node.EVENTS, then=_stopping)
    with FakeDaemon(socket_path, answers), Running("events", "-f", "--json", socket=socket_path) as following:
        assert json.loads(following.line())["seq"] == 1
        assert "waiting for the daemon" in json.loads(following.line(of_errors=True))["note"]


def test_a_watched_gpu_that_changes_shows_the_change(socket_path: Path) -> None:
    with (
        FakeDaemon(socket_path, node.answers()) as daemon,
        Running("ps", "--watch=0.01", "--json", socket=socket_path) as watching,
    ):
        watching.line()
        daemon.answers[m.Processes] = saying(node.PROCESSES.replace(processes=()))
        while json.loads(watching.line())["processes"]:
            pass
