"""Meeting places: what agents that have stepped aside find there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.agent.aside import Aside
from hegmd.errors import Refused
from hegmd.meeting import MeetingPlaces

TOKEN, OTHER = "a" * 32, "b" * 32


def test_an_agent_stays_is_called_and_is_left_to_its_usual_socket(tmp_path: Path) -> None:
    places = MeetingPlaces(tmp_path / "hegmd.sock")
    place = Path(places.hold(TOKEN))
    assert place.stat().st_size == 0
    places.call(TOKEN)
    assert Aside(str(place), 60.0).wait() == str(tmp_path / "hegmd.sock")
    places.leave(TOKEN)
    assert Aside(str(place), 60.0).wait() is None
    places.leave(TOKEN)


def test_who_waits_for_a_daemon_that_was_killed_is_let_go_by_the_next_one(tmp_path: Path) -> None:
    place = Path(MeetingPlaces(tmp_path / "hegmd.sock").hold(TOKEN))
    MeetingPlaces(tmp_path / "hegmd.sock").open()
    assert not place.exists()


def test_places_of_another_daemon_are_made_where_its_agents_look(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "aside"
    assert MeetingPlaces(tmp_path / "hegmd.sock").hold(TOKEN, folder) == str(folder / TOKEN)


def test_nobody_can_list_tokens_and_whoever_knows_one_can_read_its_place(tmp_path: Path) -> None:
    places = MeetingPlaces(tmp_path / "hegmd.sock")
    place = Path(places.hold(TOKEN))
    assert place.parent.stat().st_mode & 0o777 == 0o711
    assert place.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("token", ["", "../../etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "/x"])
def test_a_token_that_an_agent_has_made_up_leads_nowhere(tmp_path: Path, token: str) -> None:
    with pytest.raises(Refused, match="no token"):
        MeetingPlaces(tmp_path / "hegmd.sock").hold(token)
