"""The commands that move jobs, as real processes: requests, output, Ctrl-C, and exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest

from hegmd.errors import CANCELLED, REFUSED, TIMEOUT, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.operations import (
    Operation,
    OperationProcess,
    OperationProgress,
    Plan,
    PlannedProcess,
    Reason,
    StoryLine,
)
from hegmd.protocol.record import Record
from tests.cells import in_one_test
from tests.unit.hegmctl.fake_daemon import Answerer, Caller, FakeDaemon, IncomingRequest, failing, saying
from tests.unit.hegmctl.running import hegmctl
from tests.unit.hegmctl.terminal import Terminal
from tests.unit.hegmctl.test_cli import Running
from tests.wide import quick_first

GIB = 1 << 30
LATE = Reason(code=TIMEOUT.name, message="no batch boundary within 60 s", hint="a longer --timeout")
BY_US = Reason(code=CANCELLED.name, message="cancelled by uid 0", hint="run the command again to retry")
MOVED = OperationProcess(pid=4711, began_on="gpu0", gpu="gpu1", to="gpu1", size_bytes=2 * GIB, state="running")
STAYED = MOVED.replace(gpu="gpu0", to="gpu0")
DONE = Operation(
    id="7", kind="migrate", phase="done", processes=(MOVED,), created_utc=0.0, size_bytes=2 * GIB, downtime_s=0.25
)
ROLLED_BACK = DONE.replace(phase="rolled-back", processes=(STAYED,), downtime_s=None, failure=LATE)
TURNED = ROLLED_BACK.replace(failure=BY_US)
UNDER_WAY = DONE.replace(phase="quiescing", processes=(STAYED.replace(to="gpu1"),), downtime_s=None)
PLAN = Plan(
    kind="migrate",
    way="agent",
    workers=(PlannedProcess(pid=4711, name="train.py", gpu="gpu0", to="gpu1", size_bytes=GIB, carrier="worker"),),
    size_bytes=GIB,
    reservation_bytes={"gpu1": GIB},
    gpu_free_bytes={"gpu1": 8 * GIB},
    pool_needed_bytes=GIB,
    pool_free_bytes=4 * GIB,
    estimate_s=1.25,
    is_distributed=False,
    steps=("take room",),
)
OUT = OperationProgress(id="7", phase="offloading", moved_bytes=GIB, size_bytes=2 * GIB)
STORY = (
    StoryLine(utc=10.0, event="", phase="planned"),
    StoryLine(utc=10.5, event="begin", cause="request", phase="reserving", effects=("reserve-pool",)),
)
BAR = "operation 7  [##########..............]  offloading  1.0 GiB of 2.0 GiB"
QUESTION = "Cancel operation 7? Otherwise it continues [y/N] "


def coming_on(reply: Record | None) -> Answerer:
    """Tell that the bytes are half way, then answer; or with None, never."""

    def answer(caller: Caller, request: IncomingRequest) -> Record | None:
        caller.event(request.id, OUT)
        return reply

    return answer


def _reply(operation: Operation) -> m.OperationReply:
    return m.OperationReply(operation=operation)


# ---- requests and replies -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "request_"),
    [
        ("migrate 4711 4712 --to gpu1", m.Migrate(pids=(4711, 4712), to="gpu1")),
        ("migrate 4711 --to gpu1 --wait", m.Migrate(pids=(4711,), to="gpu1")),
        ("migrate 4711 --to=gpu1 --no-wait --timeout 5", m.Migrate(pids=(4711,), to="gpu1", wait=False, limit_s=5.0)),
        ("migrate -n 4711 --to gpu1", m.Migrate(pids=(4711,), to="gpu1", dry_run=True)),
        ("suspend 4711 --timeout 5s", m.Suspend(pids=(4711,), limit_s=5.0)),
        ("suspend 4711 --no-wait", m.Suspend(pids=(4711,), wait=False)),
        ("suspend 4711 --dry-run", m.Suspend(pids=(4711,), dry_run=True)),
        ("suspend 4711 --carrier worker", m.Suspend(pids=(4711,), carrier="worker")),
        ("migrate 4711 --to gpu1 --carrier=host", m.Migrate(pids=(4711,), to="gpu1", carrier="host")),
        ("quiesce 4711", m.Quiesce(pids=(4711,))),
        ("quiesce 4711 --timeout 5 --hold 5min", m.Quiesce(pids=(4711,), limit_s=5.0, hold_s=300.0)),
        ("quiesce 4711 4712 --no-wait", m.Quiesce(pids=(4711, 4712), wait=False)),
        ("offload 4711 --timeout 5", m.Suspend(pids=(4711,), limit_s=5.0)),
        ("handoff 4711 /images/one --timeout 5", m.Handoff(pid=4711, path="/images/one", limit_s=5.0)),
        ("handoff -n 4711 /images/../one", m.Handoff(pid=4711, path="/one", dry_run=True)),
        ("resume 4711", m.Resume(pid=4711)),
        ("resume 4711 --to gpu1 --no-wait", m.Resume(pid=4711, to="gpu1", wait=False)),
        ("resume 4711 --dry-run --timeout 5", m.Resume(pid=4711, dry_run=True, limit_s=5.0)),
        ("checkpoint 4711 /images/one", m.Checkpoint(pid=4711, path="/images/one")),
        (
            "checkpoint --leave-running 4711 /images/one --no-wait --timeout 5",
            m.Checkpoint(pid=4711, path="/images/one", leave_running=True, wait=False, limit_s=5.0),
        ),
        ("checkpoint -n 4711 /images/../one", m.Checkpoint(pid=4711, path="/one", dry_run=True)),
        ("restore /images/one", m.Restore(path="/images/one")),
        ("restore /images/one --to gpu1 -n", m.Restore(path="/images/one", to="gpu1", dry_run=True)),
        ("restore /images/one --stdout - --stderr -", m.Restore(path="/images/one", outlets=("stdout", "stderr"))),
        ("restore /one --truncate-outputs --timeout 5", m.Restore(path="/one", as_then=True, limit_s=5.0)),
        ("drain gpu0", m.Drain(gpu="gpu0")),
        ("drain gpu0 --to gpu1,gpu2 --to gpu3 -n", m.Drain(gpu="gpu0", to=("gpu1", "gpu2", "gpu3"), dry_run=True)),
        ("drain gpu0 --no-wait --timeout 5", m.Drain(gpu="gpu0", wait=False, limit_s=5.0)),
        ("swap 1 2", m.Swap(first=1, second=2)),
        ("swap 1 2 --dry-run", m.Swap(first=1, second=2, dry_run=True)),
        ("swap 1 2 --no-wait --timeout 5", m.Swap(first=1, second=2, wait=False, limit_s=5.0)),
        ("ops", m.Operations()),
        ("op 7", m.Story(id="7")),
        ("op 7 -f", m.Story(id="7", follow=True)),
        ("cancel 7", m.CancelOperation(id="7")),
        ("cancel 7 --drop --yes", m.CancelOperation(id="7", drop=True)),
    ],
)
@pytest.mark.parametrize("json_too", quick_first([((),), (("--json",),)], 1))
def test_each_command_sends_its_request(
    daemon: FakeDaemon, line: str, request_: m.Request, json_too: tuple[str, ...]
) -> None:
    replies: dict[type[Record], Record] = {
        m.OperationReply: _reply(DONE),
        m.Drained: m.Drained(operations=(DONE,)),
        m.OperationsReply: m.OperationsReply(operations=(DONE,)),
        m.StoryReply: m.StoryReply(operation=DONE, story=STORY),
    }
    reply = replies[type(request_).reply]
    daemon.answers[type(request_)] = saying(reply)
    ran = hegmctl(*line.split(), *json_too, socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert daemon.wait_for(type(request_)) == request_
    if json_too:
        document = json.loads(ran.stdout)
        assert document.pop("schema") == 1
        assert document == json.loads(json.dumps(reply.to_plain()))
    else:
        assert "7" in ran.stdout


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("migrate 4711", "migrate needs --to and a GPU"),
        ("migrate --to gpu1", "migrate needs a JOB"),
        ("suspend", "suspend needs a JOB"),
        ("resume", "resume needs JOB"),
        ("drain", "drain needs GPU"),
        ("drain gpu0 --to ,", "--to names no GPU"),
        ("swap 1", "swap needs OTHER"),
        ("op", "op needs ID"),
        ("cancel", "cancel needs ID"),
        ("ops 7", "ops does not take '7'"),
        ("drain gpu0 --timeout 1e300", "the time is too long"),
    ],
)
def test_missing_packages_are_reported_without_a_question(daemon: FakeDaemon, line: str, says: str) -> None:
    ran = hegmctl(*line.split(), socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert not daemon.requests


@in_one_test("verb", "run migrate quiesce suspend offload handoff resume drain swap ops op cancel".split())
def test_each_command_explains_itself(verb: str) -> None:
    ran = hegmctl(verb, "--help", socket="/nowhere")
    assert ran.returncode == 0
    assert f"hegmctl {verb}" in ran.stdout
    waits = {"migrate", "quiesce", "suspend", "offload", "handoff", "resume", "drain", "swap"}
    assert ("--no-wait" in ran.stdout) == (verb in waits)
    assert ("--dry-run" in ran.stdout) == (verb in {*waits, "run"})


def test_a_refusal_has_every_reason_and_nothing_on_standard_output(daemon: FakeDaemon) -> None:
    daemon.answers[m.Swap] = failing(
        HegmError(REFUSED, "process 1 has no agent\nprocess 2 has no agent", "hegmctl run")
    )
    ran = hegmctl("swap", "1", "2", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (6, "")
    assert ran.stderr == "hegmctl: process 1 has no agent\nprocess 2 has no agent; hegmctl run\n"


def test_a_swap_whose_one_job_ended_exits_as_for_its_end_and_not_as_for_the_other_job(daemon: FakeDaemon) -> None:
    """Issue 14, row 11: the step of the other job is rolled back, which has a status of its own."""
    daemon.answers[m.Swap] = saying(m.Drained(operations=(ROLLED_BACK,), left=(LATE.replace(code="not-found"),)))
    assert hegmctl("swap", "1", "2", socket=daemon.path).returncode == 5


def test_a_plan_is_shown_and_that_nothing_was_done(daemon: FakeDaemon) -> None:
    daemon.answers[m.Migrate] = saying(m.OperationReply(plan=PLAN))
    daemon.answers[m.Drain] = saying(m.Drained(operations=(), plans=(PLAN, PLAN)))
    ran = hegmctl("migrate", "4711", "--to", "gpu1", "-n", socket=daemon.path)
    assert ran.stdout.splitlines()[-1] == "nothing was changed: this is only the plan"
    ran = hegmctl("drain", "gpu0", "-n", socket=daemon.path)
    assert ran.stdout.splitlines()[-2:] == ["2 could be moved, 0 not", "nothing was changed: this is only the plan"]


@pytest.mark.parametrize(
    ("reply", "status", "last"),
    [
        (m.Drained(operations=(DONE,)), 0, "1 moved (operation 7): 4711 gpu0 -> gpu1"),
        (m.Drained(operations=(DONE, ROLLED_BACK)), 8, "1 moved, 1 not"),
        (m.Drained(operations=(DONE,), left=(LATE.replace(code="refused"),)), 6, "1 moved, 1 not"),
        (m.Drained(operations=(ROLLED_BACK,), left=(LATE.replace(code="denied"),)), 8, "0 moved, 2 not"),
        (m.Drained(operations=(UNDER_WAY, UNDER_WAY)), 0, "0 moved, 2 under way, 0 not"),
        (m.Drained(operations=()), 0, "there is no process on it to move"),
    ],
)
def test_a_drain_ends_as_its_first_job_that_stayed(
    daemon: FakeDaemon, reply: m.Drained, status: int, last: str
) -> None:
    daemon.answers[m.Drain] = saying(reply)
    ran = hegmctl("drain", "gpu0", socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (status, "")
    assert ran.stdout.splitlines()[-1] == last


def test_a_rolled_back_operation_ends_with_its_own_status(daemon: FakeDaemon) -> None:
    daemon.answers[m.Suspend] = saying(_reply(ROLLED_BACK))
    ran = hegmctl("suspend", "4711", socket=daemon.path)
    assert (ran.returncode, ran.stderr) == (TIMEOUT.exit_status, "")
    assert ran.stdout.splitlines() == [
        "operation 7: migrate of 4711: rolled back (gpu0, 2.0 GiB)",
        "  no batch boundary within 60 s",
        "  next: a longer --timeout",
    ]


def test_without_waiting_the_id_is_printed(daemon: FakeDaemon) -> None:
    daemon.answers[m.Migrate] = saying(_reply(UNDER_WAY))
    ran = hegmctl("migrate", "4711", "--to", "gpu1", "--no-wait", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (0, "operation 7: migrate of 4711: quiescing (gpu0 -> gpu1, 2.0 GiB)\n")
    ran = hegmctl("migrate", "4711", "--to", "gpu1", "--no-wait", "--json", socket=daemon.path)
    assert json.loads(ran.stdout)["operation"]["id"] == "7"


# ---- how it comes on -------------------------------------------------------------------------------------------------


def test_a_progress_bar_appears_and_disappears_on_a_terminal(daemon: FakeDaemon) -> None:
    waiting: list[tuple[Caller, IncomingRequest]] = []

    def answer(caller: Caller, request: IncomingRequest) -> None:
        caller.event(request.id, OUT.replace(moved_bytes=0))
        caller.event(request.id, OUT)
        waiting.append((caller, request))

    daemon.answers[m.Migrate] = answer
    with Terminal("migrate", "4711", "--to", "gpu1", socket=daemon.path) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        daemon.wait_for(m.Migrate)
        caller, request = waiting[0]
        caller.reply(request.id, _reply(DONE))
        assert terminal.end() == 0
        assert terminal.picture.lines == [
            "operation 7: migrate of 4711: done (gpu0 -> gpu1, 2.0 GiB, downtime 0.250 s)",
            "",
        ]


@pytest.mark.parametrize("words", [("-q",), ()])
def test_no_bar_is_drawn_in_a_pipe_or_with_quiet(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    daemon.answers[m.Migrate] = coming_on(_reply(DONE))
    if words:
        with Terminal(*words, "migrate", "4711", "--to", "gpu1", socket=daemon.path) as terminal:
            assert terminal.end() == 0
            assert "#" not in terminal.picture.raw
    else:
        ran = hegmctl("migrate", "4711", "--to", "gpu1", socket=daemon.path)
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.startswith("operation 7: migrate of 4711: done")


def test_in_json_every_step_is_a_line_and_the_last_one_is_the_answer(daemon: FakeDaemon) -> None:
    daemon.answers[m.Drain] = coming_on(m.Drained(operations=(DONE,)))
    ran = hegmctl("drain", "gpu0", "--json", socket=daemon.path)
    step, answer = (json.loads(line) for line in ran.stdout.splitlines())
    assert step == {"schema": 1, **OUT.to_plain()}
    assert [operation["phase"] for operation in answer["operations"]] == ["done"]


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def _asked_to_cancel(daemon: FakeDaemon) -> bool:
    return any(isinstance(request, m.CancelOperation) for request in daemon.requests)


@pytest.mark.parametrize("typed", ["n\n", "\n", "what?\n", "\x04"])
def test_ctrl_c_asks_once_and_continues_by_default(daemon: FakeDaemon, typed: str) -> None:
    daemon.answers[m.Migrate] = coming_on(None)
    with Terminal("migrate", "4711", "--to", "gpu1", socket=daemon.path) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda lines: lines[-1].startswith(QUESTION))
        terminal.type(typed)
        assert terminal.end() == -signal.SIGINT
        shown = "\n".join(terminal.picture.lines)
        assert "operation 7 continues: see hegmctl op 7; end it: hegmctl cancel 7" in shown
        assert shown.count("Cancel operation") == 1
        assert BAR not in shown
    assert not _asked_to_cancel(daemon)


def test_a_second_ctrl_c_leaves_it_going(daemon: FakeDaemon) -> None:
    daemon.answers[m.Migrate] = coming_on(None)
    with Terminal("migrate", "4711", "--to", "gpu1", socket=daemon.path) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda lines: lines[-1] == QUESTION)
        assert terminal.end(signal.SIGINT) == -signal.SIGINT
        assert any("operation 7 continues" in line for line in terminal.picture.lines), terminal.picture.raw[-300:]
    assert not _asked_to_cancel(daemon)


def test_confirming_rolls_the_operation_back(daemon: FakeDaemon) -> None:
    daemon.answers[m.Migrate] = coming_on(None)
    daemon.answers[m.CancelOperation] = saying(_reply(UNDER_WAY))
    daemon.answers[m.Story] = coming_on(m.StoryReply(operation=TURNED, story=STORY))
    with Terminal("migrate", "4711", "--to", "gpu1", socket=daemon.path, columns=120) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda lines: lines[-1] == QUESTION)
        terminal.type("y\n")
        assert terminal.end() == CANCELLED.exit_status
        assert "operation 7: migrate of 4711: rolled back (gpu0, 2.0 GiB)" in terminal.picture.lines
        assert "  cancelled by uid 0" in terminal.picture.lines
    assert daemon.wait_for(m.CancelOperation) == m.CancelOperation(id="7")
    assert daemon.wait_for(m.Story) == m.Story(id="7", follow=True)


def test_the_end_of_an_operation_that_cannot_be_cancelled_is_reported(daemon: FakeDaemon) -> None:
    daemon.answers[m.Migrate] = coming_on(None)
    daemon.answers[m.CancelOperation] = failing(HegmError(REFUSED, "operation 7 is past the point", "let it finish"))
    daemon.answers[m.Story] = coming_on(m.StoryReply(operation=DONE, story=STORY))
    with Terminal("migrate", "4711", "--to", "gpu1", socket=daemon.path, columns=120) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        terminal.process.send_signal(signal.SIGINT)
        terminal.until(lambda lines: lines[-1] == QUESTION)
        terminal.type("yes\n")
        assert terminal.end() == CANCELLED.exit_status
        shown = "\n".join(terminal.picture.lines)
        assert "operation 7 is past the point; let it finish" in shown
        assert "operation 7: migrate of 4711: done" in shown
        assert "operation 7 could no longer be cancelled" in shown


@pytest.mark.parametrize(
    ("line", "request_", "rest"),
    [
        ("migrate 4711 --to gpu1", m.Migrate, ""),
        ("drain gpu0", m.Drain, "; the jobs after it stay"),
        ("swap 1 2", m.Swap, "; the swap is carried out by the daemon: see `hegmctl ops`"),
    ],
)
def test_ctrl_c_in_a_pipe_does_not_ask_and_shows_what_continues(
    daemon: FakeDaemon, line: str, request_: type[m.Request], rest: str
) -> None:
    daemon.answers[request_] = coming_on(None)
    with Running(*line.split(), "--json", socket=daemon.path) as moving:
        moving.line()
        status, out, err = moving.end(signal.SIGINT)
    assert (status, out) == (-signal.SIGINT, "")
    note = json.loads(err)["note"]
    assert note == f"operation 7 continues: see hegmctl op 7; end it: hegmctl cancel 7{rest}"
    assert not _asked_to_cancel(daemon)


def test_ctrl_c_without_a_terminal_does_not_ask(daemon: FakeDaemon) -> None:
    """A terminal to look at, and an input that is none."""
    daemon.answers[m.Migrate] = coming_on(None)
    words = ("migrate", "4711", "--to", "gpu1")
    with Terminal(*words, socket=daemon.path, stdin=subprocess.DEVNULL) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        assert terminal.end(signal.SIGINT) == -signal.SIGINT
        assert "Cancel" not in terminal.picture.raw
        assert any("operation 7 continues" in line for line in terminal.picture.lines)
    assert not _asked_to_cancel(daemon)


def test_ctrl_c_before_the_start_shows_where_to_look(daemon: FakeDaemon) -> None:
    with Running("migrate", "4711", "--to", "gpu1", socket=daemon.path) as moving:
        daemon.wait_for(m.Migrate)
        message = "hegmctl: an operation that was started continues: run hegmctl ops\n"
        assert moving.end(signal.SIGINT) == (-signal.SIGINT, "", message)


def test_a_client_that_only_follows_gets_no_question(daemon: FakeDaemon) -> None:
    daemon.answers[m.Story] = coming_on(None)
    with Terminal("op", "7", "-f", socket=daemon.path) as terminal:
        terminal.until(lambda lines: lines[-1] == BAR)
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == -signal.SIGINT
        assert "Cancel" not in terminal.picture.raw
