"""Meeting places: what agents that have stepped aside find there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmd.agent.disconnected import RendezvousWait
from hegmd.errors import HegmError, Refused
from hegmd.images.rendezvous import Rendezvous

TOKEN, OTHER = "a" * 32, "b" * 32


def test_an_agent_stays_is_called_and_is_left_to_its_usual_socket(tmp_path: Path) -> None:
    places = Rendezvous(tmp_path / "hegmd.sock")
    place = Path(places.hold(TOKEN))
    assert place.stat().st_size == 0
    places.call(TOKEN)
    assert RendezvousWait(str(place), 60.0).wait() == str(tmp_path / "hegmd.sock")
    places.leave(TOKEN)
    assert RendezvousWait(str(place), 60.0).wait() is None
    places.leave(TOKEN)


def test_an_agent_that_waits_for_a_killed_daemon_is_released_by_the_next(tmp_path: Path) -> None:
    place = Path(Rendezvous(tmp_path / "hegmd.sock").hold(TOKEN))
    Rendezvous(tmp_path / "hegmd.sock").open()
    assert not place.exists()


def test_places_of_another_daemon_are_made_where_its_agents_look(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "aside"
    assert Rendezvous(tmp_path / "hegmd.sock").hold(TOKEN, folder) == str(folder / TOKEN)


def test_tokens_cannot_be_listed_and_the_owner_of_one_can_read_its_file(tmp_path: Path) -> None:
    places = Rendezvous(tmp_path / "hegmd.sock")
    place = Path(places.hold(TOKEN))
    assert place.parent.stat().st_mode & 0o777 == 0o711
    assert place.stat().st_mode & 0o777 == 0o644


def test_a_rendezvous_from_an_image_is_not_created_through_a_link(tmp_path: Path) -> None:
    """The image was made under a socket in /tmp. Any user may own that folder now, and root wrote there."""
    places = Rendezvous(tmp_path / "hegmd.sock")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(HegmError, match="cannot be created"):
        places.hold(TOKEN, tmp_path / "link" / "aside")
    assert list((tmp_path / "real").iterdir()) == []
    (tmp_path / "real" / TOKEN).touch()
    places.leave(TOKEN, tmp_path / "link")
    assert (tmp_path / "real" / TOKEN).exists()


def test_the_mode_of_a_folder_out_of_an_image_was_changed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    Rendezvous(tmp_path / "hegmd.sock").hold(TOKEN, tmp_path / "elsewhere")
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root, to have folders of others")
@pytest.mark.parametrize(("owner", "mode"), [(65534, 0o755), (0, 0o777), (0, 0o1777)])
def test_a_directory_that_others_may_write_is_not_used_as_rendezvous(owner: int, mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "others"
    folder.mkdir()
    folder.chmod(mode)
    os.chown(folder, owner, owner)
    with pytest.raises(Refused, match="which other users than root can write"):
        Rendezvous(tmp_path / "hegmd.sock").hold(TOKEN, folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("token", ["", "../../etc/passwd", "a" * 31, "A" * 32, "a" * 32 + "/x"])
def test_a_token_that_an_agent_has_made_up_leads_nowhere(tmp_path: Path, token: str) -> None:
    with pytest.raises(Refused, match="no token"):
        Rendezvous(tmp_path / "hegmd.sock").hold(token)
