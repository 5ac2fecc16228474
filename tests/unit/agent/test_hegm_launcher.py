"""Leaving at a launcher's request: the state is whole beside the lock before the end, or the training continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hegmd.agent.hegm_launcher import ProcessExit, warn_of_another, write_whole
from hegmd.agent.hegm_signal import Request
from hegmd.agent.orders import Orders
from hegmd.agent.quiesce import Gate
from hegmd.agent.refusals import refusal
from hegmd.protocol.messages import AgentReport, Order
from tests.patience import HANG_S

PATIENCE_S = HANG_S


class _TrainingThread:
    """A training thread that passes a boundary whenever it is let, and the way out of its process."""

    def __init__(self, folder: Path, save: Callable[[int], object], busy: str | None = None, **environ: str) -> None:
        self.gate = Gate()
        self.request = Request()
        self.reports: list[AgentReport] = []
        self.orders = Orders(self.gate)
        self.orders.begin(self.reports.append)
        self.left = 0
        self.begins_anew: list[str] = []
        self.is_due_now = False
        self.save = save
        self.will_do = [True]
        self.news = threading.Semaphore(0)
        self.gate.on_change = self.news.release
        place = {"HEGM_CHECKPOINT_PATH": str(folder / "latest.pt"), **environ}
        self.departure = ProcessExit(self.request, self.gate, self.orders, self, place, lambda _gate: busy)
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        for _ in tuple(self.will_do):
            self.gate.explicit_boundary()

    def fits(self) -> Callable[[], bool]:
        return lambda: self.will_do.pop(0)

    def leave(self) -> None:
        self.left += 1

    def is_due(self) -> bool:
        return self.is_due_now

    def reach_boundary(self) -> None:
        self._thread.start()

    def wait_until_parked(self) -> None:
        assert self.news.acquire(timeout=PATIENCE_S)
        assert self.gate.parked

    def goes_on(self) -> bool:
        self._thread.join(PATIENCE_S)
        return not self._thread.is_alive()

    def end(self) -> None:
        self.gate.withdraw()
        if self._thread.ident is not None:
            assert self.goes_on()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., _TrainingThread]]:
    all_made: list[_TrainingThread] = []

    def make(save: Callable[[int], object] = lambda fd: os.write(fd, b"state"), **more: str) -> _TrainingThread:
        all_made.append(_TrainingThread(tmp_path, save, **more))
        return all_made[-1]

    yield make
    for one in all_made:
        one.end()


def test_a_training_is_not_searched_before_its_state_is_requested(made: Callable[..., _TrainingThread]) -> None:
    training = made()
    training.departure.tick()
    assert training.departure.next_deadline() is None
    training.reach_boundary()
    assert training.goes_on()


def test_at_the_next_boundary_the_state_is_written_and_the_process_left(
    made: Callable[..., _TrainingThread], tmp_path: Path
) -> None:
    training = made()
    training.request.make()
    training.departure.tick()
    training.departure.tick()  # no worker has registered yet
    assert training.left == 0
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.left == 1
    assert (tmp_path / "latest.pt").read_bytes() == b"state"
    assert (tmp_path / "latest.pt").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["latest.pt"]


def test_a_launcher_reports_what_starts_over(
    made: Callable[..., _TrainingThread], capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher has no plan that could contain it."""
    training = made()
    training.begins_anew = ["log (TextIOWrapper) at train.py:3", "not searched: the 1,200 objects of players"]
    training.request.make()
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.left == 1
    output = capfd.readouterr().err
    assert "log (TextIOWrapper) at train.py:3; not searched: the 1,200 objects of players; hegm.keep keeps it" in output


def test_a_state_that_cannot_be_saved_is_reported_and_the_training_continues(
    made: Callable[..., _TrainingThread], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_fd: int) -> None:
        raise refusal("a loop over a list cannot be found again", "use hegm.keep for it")

    (tmp_path / "latest.pt").write_bytes(b"an earlier state")
    training = made(refuse)
    training.request.make()
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.goes_on()
    assert training.left == 0
    output = (tmp_path / "refused").read_text()
    assert output.endswith("a loop over a list cannot be found again; use hegm.keep for it")
    assert output in capfd.readouterr().err
    assert (tmp_path / "latest.pt").read_bytes() == b"an earlier state"
    assert sorted(os.listdir(tmp_path)) == ["latest.pt", "refused"]
    assert training.departure.next_deadline() is None


@pytest.mark.parametrize("failure", [MemoryError("no memory"), OSError(28, "No space left on device")])
def test_a_failure_in_the_middle_of_the_file_leaves_the_state_before_it(
    made: Callable[..., _TrainingThread], tmp_path: Path, failure: Exception
) -> None:
    def fail(fd: int) -> None:
        os.write(fd, b"half")
        raise failure

    (tmp_path / "latest.pt").write_bytes(b"an earlier state")
    training = made(fail)
    training.request.make()
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.goes_on()
    assert (tmp_path / "latest.pt").read_bytes() == b"an earlier state"
    assert sorted(os.listdir(tmp_path)) == ["latest.pt", "refused"]


def test_one_of_several_ranks_does_not_leave_the_others_alone(
    made: Callable[..., _TrainingThread], tmp_path: Path
) -> None:
    training = made(WORLD_SIZE="2")
    training.request.make()
    training.departure.tick()
    assert "one of 2 ranks" in (tmp_path / "refused").read_text()
    training.reach_boundary()
    assert training.goes_on()


def test_while_another_thread_is_busy_nothing_is_taken_from_under_it(
    made: Callable[..., _TrainingThread], tmp_path: Path
) -> None:
    training = made(busy="thread saver is at save.py:3")
    training.request.make()
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.left == 0
    assert training.departure.next_deadline() is not None  # the launcher checks again
    assert os.listdir(tmp_path) == []


def test_the_daemons_current_operation_comes_first_and_its_next_order_is_refused(
    made: Callable[..., _TrainingThread],
) -> None:
    training = made()
    training.orders.obey(Order(order=1, do="park", limit_s=PATIENCE_S), None)
    training.request.make()
    training.departure.tick()
    training.orders.obey(Order(order=2, do="withdraw"), None)
    assert [(report.order, report.result) for report in training.reports] == [(1, "failed"), (2, "done")]
    training.departure.tick()
    training.orders.obey(Order(order=3, do="park", limit_s=PATIENCE_S), None)
    assert "about to exit" in (training.reports[-1].message or "")
    training.reach_boundary()
    training.wait_until_parked()
    training.departure.tick()
    assert training.left == 1


def test_a_state_not_yet_restored_is_not_overwritten(made: Callable[..., _TrainingThread]) -> None:
    """A request that comes while a restarted script is on its way to its place would save what it began with."""
    training = made()
    training.is_due_now = True
    training.request.make()
    training.departure.tick()
    training.reach_boundary()
    assert training.goes_on()
    assert training.departure.next_deadline() is not None
    training.is_due_now = False
    training.departure.tick()
    assert training.gate.requested


def test_a_training_whose_park_was_withdrawn_is_parked_again(made: Callable[..., _TrainingThread]) -> None:
    training = made()
    training.request.make()
    training.departure.tick()
    training.gate.withdraw()
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()


def test_hegms_own_package_beside_ours_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    warn_of_another({"hegm": object(), "hegm.interface": object()})  # ours
    assert capfd.readouterr().err == ""
    warn_of_another({"hegm": object(), "hegm._config": object()})
    assert "pip uninstall hegm" in capfd.readouterr().err


def test_a_link_in_the_place_of_the_state_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"whole")
    (tmp_path / "latest.pt").symlink_to(tmp_path / "victim")
    write_whole(str(tmp_path / "latest.pt"), lambda fd: os.write(fd, b"state"))
    assert (tmp_path / "victim").read_bytes() == b"whole"
    assert (tmp_path / "latest.pt").read_bytes() == b"state"
    with pytest.raises(NotADirectoryError):
        write_whole(str(tmp_path / "victim" / "latest.pt"), lambda fd: os.write(fd, b"state"))


_TAKES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from hegmd.agent import hegm_signal as launcher_signal
launcher_signal.take()
print(launcher_signal.REQUEST.is_wanted, launcher_signal.REQUEST.is_taken(), flush=True)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGUSR1)
    print(launcher_signal.REQUEST.is_wanted == (sys.argv[2] == "early"), flush=True)
    os._exit(0)
os.wait()
os.kill(os.getpid(), signal.SIGUSR1)
print(launcher_signal.REQUEST.is_wanted)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
print(launcher_signal.REQUEST.is_taken())
"""


@pytest.mark.parametrize(("when", "first"), [("early", "True"), ("late", "False")])
def test_a_request_that_came_before_the_agent_is_kept(when: str, first: str) -> None:
    """Between the start of a Python and its agent the signal would end the worker, with the state in it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        words = [sys.executable, "-c", _TAKES, str(Path(__file__).parents[3]), when]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
            if when == "early":
                process.send_signal(signal.SIGUSR1)
            output, _errors = process.communicate(timeout=PATIENCE_S)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert output.split() == [first, "True", "True", "True", "False"]


def test_a_training_parked_at_an_unsuitable_boundary_gets_the_request_again_later(
    made: Callable[..., _TrainingThread], tmp_path: Path
) -> None:
    """A loop without a loader passes its boundaries in its body: the daemon refused it there, with a hint to retry."""
    training = made()
    training.will_do = [False, False, True]
    training.request.is_wanted = True
    training.departure.tick()
    training.reach_boundary()
    training.wait_until_parked()
    assert training.gate.count == 3
    training.departure.tick()
    assert training.left == 1
    assert (tmp_path / "latest.pt").read_bytes() == b"state"


def test_a_training_whose_parent_is_not_its_launcher_is_not_ended(
    made: Callable[..., _TrainingThread], tmp_path: Path
) -> None:
    """`bash -c 'python train.py; python upload.py'` continued with the upload, of a training that was half done."""
    training = made(HEGM_LAUNCHER=str(os.getpid()))
    training.request.is_wanted = True
    training.departure.tick()
    assert not training.gate.requested
    assert f"its parent, process {os.getppid()}," in (tmp_path / "refused").read_text()
    at_home = made(HEGM_LAUNCHER=str(os.getppid()))
    at_home.request.is_wanted = True
    at_home.departure.tick()
    assert at_home.gate.requested
