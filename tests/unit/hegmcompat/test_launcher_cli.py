"""The desk that acts when a command with two desks exits: the file's if it has a new state; else the daemon's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmcompat.launcher import Launcher
from hegmcompat.launcher_cli import CombinedAuthority
from hegmcompat.surroundings import read_surroundings
from hegmctl.supervisor import GiveUp, Start


class _Daemon:
    """A desk that records its messages and answers as the test says."""

    def __init__(self, *, expects: bool = False) -> None:
        self.received: list[str] = []
        self.expects = expects
        self.start: Start | None = None

    def turn(self, now: float, pid: int | None) -> float | None:
        self.received.append(f"turn {pid}")
        return now + 5.0

    def ended(self, status: int, *, sent_signal: int | None) -> bool:
        self.received.append(f"ended {status}")
        return self.expects and sent_signal is None

    def next_start(self) -> Start | GiveUp | None:
        return self.start

    def expected(self) -> None:
        return None

    def is_ready(self, pid: int | None) -> None:
        raise AssertionError(f"process {pid} was made ready")

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        self.received.append(f"started {pid}")

    def not_started(self, why: str) -> None:
        self.received.append(f"not started {why}")

    def close(self) -> None:
        self.received.append("closed")


class _TwoDesks:
    """The two desks of one command, which has been started."""

    def __init__(self, folder: Path, daemon: _Daemon) -> None:
        self.met = 0
        self.daemon = daemon
        surroundings = read_surroundings({"HEGM_CHECKPOINT_DIR": str(folder), "HEGM_POLL_INTERVAL": "1"})
        self.files = Launcher(surroundings, ["true"], environ={"HEGM_SOCKET": "/nobody"}, debug=lambda _text: None)
        self.desks = CombinedAuthority(self.files, self._meet)
        self.files.first()
        self.state = folder / str(os.getpid()) / "latest.pt"
        self.lock = self.state.with_name("lock")
        self.desks.started(4711)

    def _meet(self) -> _Daemon:
        self.met += 1
        return self.daemon


@pytest.fixture
def both(tmp_path: Path) -> Iterator[_TwoDesks]:
    made = _TwoDesks(tmp_path, _Daemon())
    yield made
    made.desks.close()


def test_both_desks_learn_of_a_start_and_the_earlier_time_counts(both: _TwoDesks) -> None:
    assert both.desks.turn(100.0, 4711) == 105.0
    assert both.daemon.received == ["started 4711", "turn 4711"]


def test_a_state_in_the_file_is_held_behind_a_lock_without_a_connection(both: _TwoDesks) -> None:
    both.state.write_bytes(b"state")
    assert both.desks.ended(99, sent_signal=None)
    assert both.daemon.received == ["started 4711", "ended 99", "closed"]
    assert both.lock.exists()
    assert both.desks.turn(100.0, None) == 101.0
    assert both.desks.next_start() is None
    both.lock.unlink()
    both.desks.turn(101.0, None)
    wanted = both.desks.next_start()
    assert isinstance(wanted, Start)
    assert wanted.environ["HEGM_STATE"] == str(both.state)
    both.desks.started(4712)
    assert both.met == 2
    assert both.desks.next_start() is None


def test_a_worker_that_saved_its_state_before_its_start_was_reported_counts_as_saved(both: _TwoDesks) -> None:
    """The launcher took its time stamp after the start, so the state of a quick worker counted as old."""
    both.state.write_bytes(b"state")
    assert both.desks.ended(99, sent_signal=None)
    both.lock.unlink()
    both.desks.turn(101.0, None)
    both.state.unlink()
    both.state.write_bytes(b"a later state")
    both.desks.started(4712)
    assert both.desks.ended(99, sent_signal=None)


def test_a_worker_that_left_for_the_daemon_is_the_daemons(tmp_path: Path) -> None:
    both = _TwoDesks(tmp_path, _Daemon(expects=True))
    assert both.desks.ended(99, sent_signal=None)
    assert not both.lock.exists()
    assert os.listdir(tmp_path / ".workers") == []
    both.daemon.start = Start(["elsewhere"], {})
    assert both.desks.next_start() is both.daemon.start
    both.desks.not_started("no such file")
    assert both.daemon.received[-1] == "not started no such file"


def test_started_by_the_daemon_it_also_continues_from_its_file(tmp_path: Path) -> None:
    """Started again with what it had at first, it would be back on the GPU that it was moved away from."""
    both = _TwoDesks(tmp_path, _Daemon(expects=True))
    both.desks.ended(99, sent_signal=None)
    elsewhere = {"HIP_VISIBLE_DEVICES": "GPU-1", "HEGM_STATE_FD": "7", "HEGM_RESTART": "12"}
    both.daemon.start = Start(["python-for-amd", "train.py"], elsewhere)
    both.desks.next_start()
    both.desks.started(4712)
    both.daemon.expects, both.daemon.start = False, None
    both.state.write_bytes(b"state")
    both.desks.ended(99, sent_signal=None)
    both.lock.unlink()
    both.desks.turn(101.0, None)
    wanted = both.desks.next_start()
    assert isinstance(wanted, Start)
    assert list(wanted.command) == ["python-for-amd", "train.py"]
    lock = str(wanted.keep[0])
    assert dict(wanted.environ) == {
        "HIP_VISIBLE_DEVICES": "GPU-1",
        "HEGM_STATE": str(both.state),
        "HEGM_STATE_LOCK_FD": lock,
    }
    both.desks.close()


def test_a_state_in_the_file_counts_whatever_the_daemon_expects(tmp_path: Path) -> None:
    both = _TwoDesks(tmp_path, _Daemon(expects=True))
    both.state.write_bytes(b"state")
    assert both.desks.ended(99, sent_signal=None)
    assert both.lock.exists()
    both.desks.close()
    assert not both.lock.exists()


def test_an_unexpected_exit_is_final(both: _TwoDesks) -> None:
    assert not both.desks.ended(3, sent_signal=None)
    both.desks.close()
    assert both.daemon.received == ["started 4711", "ended 3", "closed"]


def test_the_daemons_start_request_has_no_state_of_the_files(both: _TwoDesks) -> None:
    both.state.write_bytes(b"state")
    assert "HEGM_STATE" not in both.files.environ
    assert both.files.environ["HEGM_ALLOW_RESTART"] == "1"
