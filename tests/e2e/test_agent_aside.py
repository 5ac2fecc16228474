"""A training whose agent steps aside: nothing of the daemon's is left in it, and it comes where it is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS, Training, undisturbed
from tests.e2e.scripted_daemon import PATIENCE_S, Gone, ScriptedDaemon
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]


def test_a_job_continues_under_a_daemon_at_another_socket(tmp_path: Path) -> None:
    need_torch()
    here, there, place = tmp_path / "here.sock", tmp_path / "there.sock", tmp_path / "place"
    place.touch()
    script = [str(SCRIPTS / "plain.py")]
    pool = os.memfd_create("pool", os.MFD_CLOEXEC)
    try:
        with Training(script, here) as training:
            with ScriptedDaemon(here) as daemon:
                agent = daemon.attended()
                token = agent.attended.token if agent.attended else ""
                agent.done("park", limit_s=PATIENCE_S)
                os.truncate(pool, agent.done("survey").size_bytes or 0)
                out = agent.done("offload", pool)
                agent.done("aside", path=str(place), limit_s=600.0)
                with pytest.raises(Gone):
                    agent.order("survey")
                assert _left_of_daemon(training.process.pid) == []
            with ScriptedDaemon(there) as other:
                (tmp_path / "new").write_text(str(there))
                os.replace(tmp_path / "new", place)
                back = other.attended()
                assert back.attended is not None
                assert (back.attended.token, back.attended.parked, back.attended.entrusted) == (token, True, True)
                assert back.attended.held_bytes == out.size_bytes
                assert not back.attended.revived
                back.done("reload", pool)
                back.done("release", limit_s=PATIENCE_S)
                status, output, errors = training.result()
    finally:
        os.close(pool)
    assert status == 0, errors
    assert output == undisturbed(script)


def _left_of_daemon(pid: int) -> list[str]:
    """Sockets and memory of the daemon that the process has open or mapped."""
    fds = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [name for name in (*fds, *maps) if "socket:" in name or "memfd:pool" in name]


def test_an_agent_of_a_running_training_does_not_disconnect(tmp_path: Path) -> None:
    with (
        ScriptedDaemon(tmp_path / "here.sock") as daemon,
        Training([str(SCRIPTS / "by_hand.py")], tmp_path / "here.sock") as training,
    ):
        agent = daemon.attended()
        agent.done("survey")  # it has come to a boundary by then
        refused = agent.order("aside", path=str(tmp_path / "place"))
        assert refused.result == "failed"
        assert "not parked" in (refused.message or "")
        agent.close()
        assert training.result()[0] == 0
