"""The daemon's desk of a supervised command, against a daemon that sends the orders of each test. The supervisor itself
sleeps until a signal; here the tests poll the desk.

Longer than 400 lines because every test has the same desk, and the daemon that orders what it does.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from hegmctl.prestart import LOCK_FD, OPERATION, STATE_FD
from hegmctl.recovering import Recovery
from hegmctl.restart_client import DAEMON_WITHIN_S, LONG_S, DaemonAuthority
from hegmctl.supervisor import GAVE_UP_STATUS, LEFT_STATUS, NOT_ITS_TURN_STATUS, GiveUp, Start
from hegmd.errors import Refused
from hegmd.protocol.connection import IncomingRequest
from hegmd.protocol.messages import Noted, RecoveryWish, Supervise, SuperviseReport, SupervisorOrder
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, failing, saying
from tests.unit.hegmctl.test_agentless import INJECT, TRAINS, probes, running
from tests.unit.offspring import children, reap

PATIENCE_S = HANG_S
COMMAND = ("python3", "train.py")
ENVIRON = {"HEGM_RUN": "run-1", "HEGM_GPU": "gpu0", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.fixture(autouse=True)
def without_signals() -> Iterator[None]:
    """Block SIGIO: a desk also gets it for each message, and it would end a process that has not blocked it."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGIO, before)


class DeskNode:
    """A desk, the daemon that it attends, and the messages of both."""

    def __init__(
        self, path: Path, folder: Path, command: tuple[str, ...] = COMMAND, resumes: str | None = None, **environ: str
    ) -> None:
        self.path = path
        self.messages: list[str] = []
        self.lock_path = folder / "lock"
        say = self.messages.append
        self.desk = DaemonAuthority(str(path), command, {**ENVIRON, **environ}, say=say, resumes=resumes)
        self.daemon: FakeDaemon | None = None
        self._caller: Caller | None = None
        self._asked = 0
        self._ordered = 0

    def listen(self) -> FakeDaemon:
        """Have a daemon there from now on, which lets it attend."""
        answers = {**node.answers(), Supervise: self._attend, SuperviseReport: saying(Noted())}
        self.daemon = FakeDaemon(self.path, answers)
        return self.daemon

    def _attend(self, caller: Caller, request: IncomingRequest) -> None:
        self._caller, self._asked = caller, request.id

    def until(self, is_so: Callable[[], bool]) -> None:
        """Have the desk look after what has come until that is so."""
        deadline = monotonic() + PATIENCE_S
        while not is_so():
            assert monotonic() < deadline, (self.messages, self.daemon and self.daemon.requests)
            self.desk.turn(monotonic(), None)
            select.poll().poll(2)

    def offers(self) -> list[Supervise]:
        assert self.daemon is not None
        return [request for request in self.daemon.requests if isinstance(request, Supervise)]

    def reports(self) -> list[SuperviseReport]:
        assert self.daemon is not None
        return [request for request in self.daemon.requests if isinstance(request, SuperviseReport)]

    def attend(self) -> Supervise:
        """Let it connect; what it offered."""
        self.until(lambda: bool(self.offers()))
        return self.offers()[-1]

    def order(self, do: str, *, state: bytes | None = None, operation: str = "4", **how: Any) -> None:
        """Order it; with a state, also the descriptors that come with one."""
        assert self._caller is not None
        self._ordered += 1
        order = SupervisorOrder(order=self._ordered, do=do, operation=operation, **how)
        fds: list[int] = []
        if state is not None:
            fds = [os.memfd_create("state") for _ in how.get("ranks") or (0,)]
            for memory in fds:
                os.write(memory, state)
            fds.append(os.open(self.lock_path, os.O_RDWR | os.O_CREAT))
        self._caller.send(self._caller.protocol.event(self._asked, order, len(fds)), fds)
        for fd in fds:
            os.close(fd)

    def expect(self) -> None:
        """Have it know that its command may leave, and see it leave."""
        self.order("expect")
        self.until(lambda: any(report.order for report in self.reports()))
        assert self.desk.ended(LEFT_STATUS, sent_signal=None)

    def start(self, **how: Any) -> Start:
        """Order a start; what the desk wants of its supervisor then, which does it."""
        self.order("start", state=b"the state", **how)
        self.until(lambda: self.desk.next_start() is not None)
        wanted = self.desk.next_start()
        assert isinstance(wanted, Start)
        self.desk.started(77)
        return wanted


@pytest.fixture
def attended(socket_path: Path, tmp_path: Path) -> Iterator[DeskNode]:
    one = DeskNode(socket_path, tmp_path)
    with one.listen():
        yield one
        one.desk.close()


def test_a_supervisor_registers_its_run_and_its_child(attended: DeskNode) -> None:
    offer = attended.attend()
    assert (offer.run, offer.python, offer.left, offer.operation) == ("run-1", True, False, None)


def test_the_exit_status_of_an_unexpected_restart_is_the_commands_own(attended: DeskNode) -> None:
    attended.attend()
    assert not attended.desk.ended(LEFT_STATUS, sent_signal=None)
    attended.until(lambda: bool(attended.reports()))
    assert (attended.reports()[0].result, attended.reports()[0].status) == ("ended", LEFT_STATUS)


def test_an_exit_requested_by_a_signal_does_not_belong_to_a_restart(attended: DeskNode) -> None:
    attended.attend()
    attended.order("expect")
    attended.until(lambda: bool(attended.reports()))
    assert not attended.desk.ended(-signal.SIGTERM, sent_signal=signal.SIGTERM)


def test_it_is_started_with_another_environment_from_the_state_and_its_lock(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    assert attended.desk.next_start() is None
    how: dict[str, Any] = {
        "set": {"HIP_VISIBLE_DEVICES": "GPU-1"},
        "unset": ("CUDA_VISIBLE_DEVICES",),
        "python": "/opt/rocm/python",
    }
    start = attended.start(**how)
    assert list(start.command) == ["/opt/rocm/python", "train.py"]
    assert start.environ["HIP_VISIBLE_DEVICES"] == "GPU-1"
    assert "CUDA_VISIBLE_DEVICES" not in start.environ
    assert start.environ[OPERATION] == "4"
    state, lock = int(start.environ[STATE_FD]), int(start.environ[LOCK_FD])
    assert os.pread(state, 100, 0) == b"the state"
    assert os.path.samestat(os.fstat(lock), attended.lock_path.stat())
    assert start.keep == (state, lock)


def test_no_variable_of_an_earlier_start_leads_away_from_the_state(attended: DeskNode) -> None:
    """With a HEGM_STATES from somewhere the script found no state, and started over silently."""
    attended.attend()
    attended.expect()
    wanted = attended.start(set={"HEGM_STATES": "2:gone", "HEGM_STATE": "/gone", STATE_FD: "0", LOCK_FD: "0"})
    assert "HEGM_STATES" not in wanted.environ
    assert "HEGM_STATE" not in wanted.environ
    assert {int(wanted.environ[STATE_FD]), int(wanted.environ[LOCK_FD])} == set(wanted.keep)


def test_another_python_for_a_command_that_is_not_python_is_refused(socket_path: Path, tmp_path: Path) -> None:
    attended = DeskNode(socket_path, tmp_path, ("bash", "train.sh"))
    with attended.listen():
        assert not attended.attend().python
        attended.expect()
        attended.order("start", state=b"", python="/opt/python3")
        attended.until(lambda: attended.reports()[-1].result == "failed")
        assert "begins with bash" in attended.reports()[-1].message
        assert attended.desk.next_start() is None
        attended.desk.close()


@pytest.mark.parametrize("python", [sys.executable, "true", "/nowhere/python3"])
def test_the_python_of_a_program_is_determined_before_the_job_ends(attended: DeskNode, python: str) -> None:
    others = children()
    assert attended.attend().asks
    attended.order("ask", operation="", python=python, set={"PATH": "/usr/bin:/bin"})
    attended.until(lambda: bool(attended.reports()))
    report = attended.reports()[0]
    assert (report.order, report.result) == (1, "done" if python == sys.executable else "failed")
    assert report.message.startswith(f"{sys.implementation.name} ") == (python == sys.executable)
    assert attended.desk.next_start() is None
    reap(children() - others)


def test_a_start_that_ends_immediately_is_retried_and_then_reported(attended: DeskNode) -> None:
    """And a process that had the state back before it fell says nothing of the one after it."""
    attended.attend()
    attended.expect()
    attended.start()
    attended.lock_path.write_bytes(b"back")
    assert attended.desk.ended(1, sent_signal=None)
    assert attended.lock_path.read_bytes() == b""
    assert isinstance(attended.desk.next_start(), Start)
    attended.desk.started(78)
    assert attended.desk.ended(1, sent_signal=None)
    assert attended.desk.next_start() is None
    attended.until(lambda: attended.reports()[-1].result == "failed")
    assert attended.reports()[-1].starts == 2


def test_a_restart_was_given_up_when_its_prestarted_process_failed(attended: DeskNode) -> None:
    """It is started as without one then, as often as any other is; the script itself may end with that status."""
    attended.attend()
    attended.expect()
    attended.order("start", state=b"the state")
    attended.until(lambda: attended.desk.next_start() is not None)
    attended.desk.started(77, was_ready=True)
    for pid in (78, 79):
        assert attended.desk.ended(NOT_ITS_TURN_STATUS, sent_signal=None)
        assert isinstance(attended.desk.next_start(), Start)
        attended.desk.started(pid)
    assert attended.desk.ended(NOT_ITS_TURN_STATUS, sent_signal=None)
    assert attended.desk.next_start() is None
    attended.until(lambda: attended.reports()[-1].result == "failed")
    assert attended.reports()[-1].starts == 2


def test_a_training_that_fails_hours_after_its_restart_does_not_continue_from_the_old_state(attended: DeskNode) -> None:
    """No daemon had run since the end of the operation."""
    attended.attend()
    attended.expect()
    attended.start()
    os.pwrite(_lock(attended), b"back\0\0\0\0+", 0)
    assert not attended.desk.ended(1, sent_signal=None)
    assert attended.desk.next_start() is None
    assert attended.messages[0].startswith("it ended with 1 after it had continued, and is not started again; ")


@pytest.mark.parametrize(("notes", "goes_on"), [(b"++", False), (b"+\0", True), (b"", True)])
def test_ranks_are_started_again_unless_all_have_trained_on(attended: DeskNode, notes: bytes, goes_on: bool) -> None:
    attended.attend()
    attended.expect()
    wanted = attended.start(ranks=(0, 1))
    assert wanted.keep == (), "an image would have the lock by the launcher"
    with attended.lock_path.open("r+b", buffering=0) as lock:
        os.pwrite(lock.fileno(), notes, 8)
    assert attended.desk.ended(1, sent_signal=None) == goes_on
    assert isinstance(attended.desk.next_start(), Start) == goes_on
    assert not goes_on or not attended.lock_path.read_bytes()


def test_a_command_that_reports_that_it_cannot_continue_is_not_retried(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    attended.start()
    assert attended.desk.ended(GAVE_UP_STATUS, sent_signal=None)
    assert attended.desk.next_start() is None


def test_the_end_of_the_training_is_noted_where_the_next_daemon_finds_it(attended: DeskNode) -> None:
    """The training ended with 0 without a daemon, and its state was kept although no process needed it."""
    attended.attend()
    attended.expect()
    attended.start()
    os.pwrite(_lock(attended), b"back", 0)
    assert not attended.desk.ended(0, sent_signal=None)
    assert attended.lock_path.read_bytes() == b"backover"


def test_the_exit_of_a_command_without_its_state_does_not_count_as_the_trainings_end(attended: DeskNode) -> None:
    """`--resume 4 -- true` ended with 0 as if the training had finished. Both outcomes release the state."""
    attended.attend()
    attended.expect()
    attended.start()
    assert attended.desk.ended(0, sent_signal=None)
    assert not attended.lock_path.read_bytes().startswith(b"back")
    attended.until(lambda: attended.reports()[-1].result == "failed")
    assert "no training in it continued" in attended.reports()[-1].message
    assert attended.desk.next_start() is None


def test_a_training_without_the_agent_is_ended_before_it_starts_over(attended: DeskNode, tmp_path: Path) -> None:
    """Like `--resume 4 -- ./wrapper.sh`, which drops PYTHONPATH. It is not repeated, because it would fail again."""
    torch = tmp_path / "libtorch_cpu.so"
    torch.write_bytes(bytes(4096))
    attended.attend()
    attended.expect()
    attended.start()
    with running(sys.executable, "-I", "-c", TRAINS, str(torch), path=None) as process:
        attended.desk.started(process.pid)
        os.pwrite(_lock(attended), b"back", 0)
        assert attended.desk.turn(monotonic(), process.pid) is None  # a process with its state back is skipped
        os.ftruncate(_lock(attended), 0)
        attended.desk.turn(monotonic(), process.pid)
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
    assert attended.desk.ended(-signal.SIGKILL, sent_signal=None)
    assert attended.desk.next_start() is None
    attended.until(lambda: attended.reports()[-1].result == "failed")
    assert "has started over: the option -I leaves hegmd's agent out" in attended.reports()[-1].message
    assert "start it without -E, -I and -S" in attended.messages[-1]


def test_a_script_that_probed_pytorch_with_another_python_was_ended(attended: DeskNode, tmp_path: Path) -> None:
    torch = tmp_path / "libtorch_cpu.so"
    torch.write_bytes(bytes(4096))
    attended.attend()
    attended.expect()
    attended.start()
    words = (*probes(str(torch)), sys.executable, "-I", "-c", TRAINS, str(torch))
    with attended.lock_path.open("r+b") as right, running(*words, path=INJECT, fds=(right.fileno(),)) as process:
        attended.desk.started(process.pid)
        attended.desk.turn(monotonic(), process.pid)
        assert process.poll() is None
    assert attended.messages == []


def test_a_start_whose_state_is_loaded_late_is_reported_once(attended: DeskNode) -> None:
    """Like `--resume 4 -- docker run ...`: no process on this node can inspect those processes."""
    attended.attend()
    attended.expect()
    attended.start()
    began = monotonic()
    for later_s in (LONG_S - 1, LONG_S + 1, LONG_S + 2):
        assert attended.desk.turn(began + later_s, os.getpid()) is not None
    assert [line.partition(",")[0] for line in attended.messages] == ["it was started 120 s ago"]


def test_a_job_with_its_own_exit_code_does_not_count_as_ended(socket_path: Path, tmp_path: Path) -> None:
    """The agent exits with HEGM_EXIT_CODE. Only 99 counted as leaving, so no process was started again."""
    attended = DeskNode(socket_path, tmp_path, HEGM_EXIT_CODE="77")
    with attended.listen():
        attended.attend()
        attended.order("expect")
        attended.until(lambda: any(report.order for report in attended.reports()))
        assert attended.desk.ended(77, sent_signal=None)
        assert attended.start().environ[OPERATION] == "4"
        attended.desk.close()


def test_without_the_descriptors_of_its_state_a_command_does_not_start_over(attended: DeskNode) -> None:
    """A process at its limit of open files loses them on the way; it was started without, and trained from nothing."""
    attended.attend()
    attended.expect()
    attended.order("start")
    attended.until(lambda: any(report.result == "failed" for report in attended.reports()))
    assert "0 of 2 descriptors" in attended.reports()[-1].message
    assert attended.desk.next_start() is None


def test_a_restart_keeps_the_settings_of_the_previous_one_although_its_end_was_not_reported(attended: DeskNode) -> None:
    """The message that the former operation had ended was sent over a closed connection."""
    attended.attend()
    attended.expect()
    attended.start(set={"TRIED": "1"})
    attended.order("expect", operation="5")
    attended.until(lambda: len([report for report in attended.reports() if report.order]) == 3)
    assert attended.desk.ended(LEFT_STATUS, sent_signal=None)
    assert attended.desk.next_start() is None  # and surely not started from the former state
    attended.order("start", state=b"another", operation="5")
    attended.until(lambda: attended.desk.next_start() is not None)
    wanted = attended.desk.next_start()
    assert isinstance(wanted, Start)
    assert (wanted.environ[OPERATION], wanted.environ["TRIED"]) == ("5", "1")


def test_a_kill_before_the_exit_ended_the_supervisor_with_another_status(attended: DeskNode) -> None:
    attended.attend()
    attended.order("expect")
    attended.until(lambda: bool(attended.reports()))
    assert attended.desk.ended(-signal.SIGKILL, sent_signal=None)
    attended.order("forget")
    attended.until(lambda: attended.desk.next_start() is not None)
    wanted = attended.desk.next_start()
    assert isinstance(wanted, GiveUp)
    assert wanted.status == -signal.SIGKILL


def test_the_settings_of_a_successful_start_are_kept(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    attended.start(set={"EXTRA": "1"}, python="/opt/python3")
    attended.order("forget")
    attended.order("expect")
    attended.until(lambda: len([report for report in attended.reports() if report.order]) == 3)
    assert attended.desk.ended(LEFT_STATUS, sent_signal=None)
    again = attended.start(set={"HEGM_GPU": "gpu1"})
    assert (again.command[0], again.environ["EXTRA"], again.environ["HEGM_GPU"]) == ("/opt/python3", "1", "gpu1")


@pytest.mark.parametrize(
    ("changed", "path"),
    [({"set": {"PYTHONPATH": "/mine"}}, "/agent:/mine"), ({"unset": ["PYTHONPATH"]}, "/agent"), ({}, "/agent:/before")],
)
def test_a_search_path_option_does_not_make_the_script_start_over_without_the_agent(
    tmp_path: Path, changed: dict[str, Any], path: str
) -> None:
    """`--env PYTHONPATH=...` took the place of the folder that the agent comes from: its losses began a second time."""
    one = DeskNode(tmp_path / "socket", tmp_path, PYTHONPATH="/agent:/before")
    with one.listen():
        one.attend()
        one.expect()
        assert one.start(**changed).environ["PYTHONPATH"] == path
        one.desk.close()


def test_while_it_waits_it_can_be_given_up(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    attended.order("give-up", message="its state is held by operation 4", hint="go on with: hegmctl run --resume 4")
    attended.until(lambda: attended.desk.next_start() is not None)
    given_up = attended.desk.next_start()
    assert isinstance(given_up, GiveUp)
    assert (given_up.status, given_up.hint) == (GAVE_UP_STATUS, "go on with: hegmctl run --resume 4")


def test_a_restarted_daemon_receives_the_reports_that_it_waits_for(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    assert attended.daemon is not None
    attended.daemon.stop()
    attended.until(lambda: any("continues when hegmd answers again" in line for line in attended.messages))
    with attended.listen():
        offer = attended.attend()
        assert (offer.left, offer.operation, offer.started) == (True, "4", False)
        assert len(attended.messages) == 1
        assert isinstance(attended.start(), Start)
        attended.desk.close()


def test_a_start_that_an_earlier_daemon_has_ordered_is_not_done_twice(attended: DeskNode) -> None:
    attended.attend()
    attended.expect()
    attended.start()
    assert attended.daemon is not None
    attended.daemon.stop()
    with attended.listen():
        attended.until(lambda: bool(attended.offers()))
        assert attended.offers()[-1].started
        attended.order("start", state=b"")
        attended.until(lambda: bool(attended.reports()))
        assert (attended.reports()[-1].result, attended.reports()[-1].starts) == ("done", 1)
        assert attended.desk.next_start() is None
        attended.desk.close()


def test_a_prestarted_process_survives_the_daemon_that_requested_it(attended: DeskNode) -> None:
    """The daemon names the prestarted process, which reports what it cannot use: no job waits for a whole start."""
    offer = attended.attend()
    assert (offer.kept, offer.readies) == (False, None)
    attended.order("ready", operation="", imports=("torch",))
    attended.until(lambda: attended.desk.expected() is not None)
    kept = attended.desk.expected()
    attended.order("ready", imports=("torch",))
    attended.until(lambda: attended.desk.expected() is not kept)
    for_operation = attended.desk.expected()
    assert attended.daemon is not None
    attended.daemon.stop()
    with attended.listen():
        offer = attended.attend()
        assert (offer.kept, offer.readies) == (True, "4")
        assert attended.desk.expected() is for_operation
        attended.order("forget")
        attended.until(lambda: attended.desk.expected() is kept)
        attended.order("unready", operation="")
        attended.until(lambda: attended.desk.expected() is None)
        attended.desk.close()


def test_a_prestarted_process_that_could_not_be_kept_is_not_offered(attended: DeskNode) -> None:
    attended.attend()
    attended.order("ready", operation="", imports=("torch",))
    attended.until(lambda: attended.desk.expected() is not None)
    attended.desk.is_ready(None)
    assert attended.daemon is not None
    attended.daemon.stop()
    with attended.listen():
        assert not attended.attend().kept
        assert attended.desk.expected() is None
        attended.desk.close()


def test_no_process_is_prestarted_for_a_daemon_that_declines(attended: DeskNode) -> None:
    attended.attend()
    attended.order("ready", operation="", imports=("torch",))
    attended.until(lambda: attended.desk.expected() is not None)
    assert attended.daemon is not None
    attended.daemon.stop()
    refusal = failing(Refused("another supervises run-1", "run: hegmctl ps"))
    with FakeDaemon(attended.path, {**node.answers(), Supervise: refusal}):
        attended.until(lambda: attended.desk.expected() is None)
        attended.desk.close()


@pytest.mark.parametrize("resumes", ["9", None])
def test_a_daemon_that_refuses_the_agent_is_reported_once(
    socket_path: Path, tmp_path: Path, resumes: str | None
) -> None:
    """A job that wants to continue from a state gives up; a running job continues without restarts."""
    attended = DeskNode(socket_path, tmp_path, resumes=resumes)
    refusal = failing(Refused("operation 9 is done, and holds no state", "hegmctl ops lists operations"))
    with FakeDaemon(socket_path, {**node.answers(), Supervise: refusal}):
        if resumes is None:
            attended.until(lambda: bool(attended.messages))
            assert "the job runs, but cannot be restarted" in attended.messages[0]
            assert attended.desk.next_start() is None
        else:
            attended.until(lambda: attended.desk.next_start() is not None)
            assert isinstance(attended.desk.next_start(), GiveUp)
        attended.desk.close()


def _lock(attended: DeskNode) -> int:
    """The descriptor that the process it started has inherited."""
    target = attended.lock_path.resolve()
    found = [int(link.name) for link in Path("/proc/self/fd").iterdir() if link.exists() and link.resolve() == target]
    return found[0]


def _recovered(socket_path: Path, tmp_path: Path) -> DeskNode:
    attended = DeskNode(socket_path, tmp_path)
    recovery = Recovery(RecoveryWish(interval_s=30.0))
    say = attended.messages.append
    attended.desk = DaemonAuthority(str(socket_path), COMMAND, ENVIRON, say=say, recovery=recovery)
    return attended


def test_a_command_that_fails_is_started_from_a_snapshot_once_the_job_is_protected(
    socket_path: Path, tmp_path: Path
) -> None:
    """An earlier exit is the command's own, also a wanted one."""
    attended = _recovered(socket_path, tmp_path)
    with attended.listen():
        offer = attended.attend()
        assert offer.recover is not None
        assert offer.recover.interval_s == 30.0
        assert not attended.desk.ended(-signal.SIGKILL, sent_signal=None)
        attended.order("protect", operation="j7")
        attended.until(lambda: attended.desk.ended(-signal.SIGKILL, sent_signal=None))
        attended.until(lambda: attended.reports()[-1].result == "fell")
        assert attended.reports()[-1].status == -signal.SIGKILL
        wanted = attended.start(operation="j7", set={"HEGM_GPU": "gpu1"})
        assert (wanted.environ[OPERATION], wanted.environ["HEGM_GPU"]) == ("j7", "gpu1")
        assert not attended.desk.ended(-signal.SIGTERM, sent_signal=signal.SIGTERM)
        attended.desk.close()


def test_a_job_that_is_not_recovered_ends_as_its_command_did(socket_path: Path, tmp_path: Path) -> None:
    attended = _recovered(socket_path, tmp_path)
    with attended.listen():
        attended.attend()
        attended.order("protect", operation="j7")
        attended.until(lambda: attended.desk.ended(7, sent_signal=None))
        attended.start(operation="j7")  # and its state cannot be put back
        attended.until(
            lambda: attended.desk.ended(GAVE_UP_STATUS, sent_signal=None) and attended.desk.next_start() is None
        )
        attended.order("give-up", operation="j7", message="it is enough", hint="its state is kept")
        attended.until(lambda: isinstance(attended.desk.next_start(), GiveUp))
        wanted = cast("GiveUp", attended.desk.next_start())
        assert (wanted.status, wanted.message) == (7, "it is enough")
        attended.desk.close()


def test_the_next_daemon_gets_the_report_of_a_failed_command(socket_path: Path, tmp_path: Path) -> None:
    attended = _recovered(socket_path, tmp_path)
    with attended.listen():
        attended.attend()
        attended.order("protect", operation="j7")
        attended.until(lambda: attended.desk.ended(7, sent_signal=None))
    with attended.listen():
        attended.until(lambda: bool(attended.offers()))
        assert (attended.offers()[-1].fell, attended.offers()[-1].pid) == (7, None)
        attended.desk.close()


def test_a_failed_job_waits_for_its_daemon_for_a_bounded_time(socket_path: Path, tmp_path: Path) -> None:
    attended = _recovered(socket_path, tmp_path)
    with attended.listen():
        attended.attend()
        attended.order("protect", operation="j7")
        attended.until(lambda: attended.desk.ended(7, sent_signal=None))
        assert attended.desk.turn(monotonic() + 2 * DAEMON_WITHIN_S, None) is None
    attended.until(lambda: any("does not answer" in line for line in attended.messages))
    assert attended.desk.next_start() is None
    attended.desk.turn(monotonic() + DAEMON_WITHIN_S, None)
    wanted = attended.desk.next_start()
    assert isinstance(wanted, GiveUp)
    assert (wanted.status, "has not answered for 600 s" in wanted.message) == (7, True)
    attended.desk.close()
