"""The messages of a command about an operation that waits for a person, and of one that waits for a job."""

from __future__ import annotations

from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, OperationProgress, Wait
from hegmd.protocol.record import Record
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, IncomingRequest, saying, unanswered
from tests.unit.hegmctl.running import hegmctl

DONE = Operation(id="7", kind="migrate", phase="done", processes=(), created_utc=1.7e9, size_bytes=0)


def test_a_command_in_a_pipe_reports_that_it_waits_for_a_stopped_job(daemon: FakeDaemon) -> None:
    """The reason does not change while the operation waits, so hegmctl prints each reason once."""
    wait = Wait(why="process 4711 is stopped by a signal or a debugger", next="kill -CONT 4711")
    waiting = OperationProgress(id="7", phase="quiescing", waits=wait)

    def answer(caller: Caller, request: IncomingRequest) -> Record | None:
        for progress in (OperationProgress(id="7", phase="reserving"), waiting, waiting.replace(size_bytes=1)):
            caller.event(request.id, progress)
        return m.OperationReply(operation=DONE)

    daemon.answers[m.Migrate] = answer
    ran = hegmctl("migrate", "4711", "--to", "gpu1", socket=daemon.path)
    message = "operation 7: quiescing waits: process 4711 is stopped by a signal or a debugger; next: kill -CONT 4711"
    assert ran.stderr == f"hegmctl: {message}\n"


def test_wait_ignored_its_timeout(daemon: FakeDaemon) -> None:
    job = m.Job(id="j1", name="train", state="training", started_utc=0.0, uid=0)
    daemon.answers.update({m.InspectJob: saying(m.JobReply(job=job)), m.WaitForJob: unanswered})
    ran = hegmctl("wait", "train", "--timeout", "0.05", socket=daemon.path)
    assert ran.returncode == 8
    assert ran.stderr.startswith("hegmctl: job j1 has not ended within 0.05 s; it continues")
