"""The daemon that a disconnected agent returns to: what the rendezvous says, and who may write it."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from hegmd.agent.disconnected import LOOK_EVERY_S, RendezvousWait
from tests.patience import HANG_S


class DisconnectedAgent:
    """An agent that is aside, in a thread of its own."""

    def __init__(self, aside: RendezvousWait) -> None:
        self.found: list[str | None] = []
        self._thread = Thread(target=lambda: self.found.append(aside.wait()))
        self._thread.start()

    def result(self) -> str | None:
        self._thread.join(HANG_S)
        return self.found[0]


def test_an_agent_waits_at_an_empty_rendezvous_and_goes_where_it_is_sent(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.touch()
    looking = DisconnectedAgent(RendezvousWait(str(place), 60.0))
    (tmp_path / "new").write_text("/run/other.sock\n")
    assert not looking.found
    os.replace(tmp_path / "new", place)
    assert looking.result() == "/run/other.sock"


def test_without_the_rendezvous_it_connects_to_the_usual_socket(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.touch()
    looking = DisconnectedAgent(RendezvousWait(str(place), 60.0))
    place.unlink()
    assert looking.result() is None


def test_it_continues_after_its_limit(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.touch()
    assert RendezvousWait(str(place), LOOK_EVERY_S).wait() is None


@pytest.mark.thorough
def test_no_descriptor_of_the_place_is_open_while_it_stays(tmp_path: Path) -> None:
    """An open file would be in the image, and have to be there wherever that is restored."""
    place = tmp_path / "place"
    place.touch()
    looking = DisconnectedAgent(RendezvousWait(str(place), 60.0))
    try:
        for _ in range(2000):
            assert str(place) not in {_target(fd) for fd in os.listdir("/proc/self/fd")}
    finally:
        place.unlink()
        looking.result()


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("/run/evil.sock")
    (tmp_path / "place").symlink_to(tmp_path / "elsewhere")
    assert RendezvousWait(str(tmp_path / "place"), 60.0).wait() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
def test_a_report_of_another_user_is_ignored(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.write_text("/run/evil.sock")
    os.chown(place, 12345, 12345)
    assert RendezvousWait(str(place), 60.0).wait() is None
