"""The agent's thread continues after any error in its work."""

from __future__ import annotations

from time import monotonic

import pytest

from hegmd.agent.channel import Channel
from hegmd.agent.lifecycle import PAUSE_S, attend
from hegmd.agent.quiesce import Gate


class _Broken(Channel):
    """A connection that can neither attend nor close."""

    def run(self) -> None:
        raise MemoryError("no room for a connection")

    def hang_up(self) -> None:
        raise SystemExit("raised in here by somebody")


@pytest.mark.thorough
def test_an_agent_that_could_not_disconnect_ended_and_left_its_job_parked() -> None:
    """And what failed each time was tried again without a pause, which took the job's processor."""
    began = monotonic()
    channel = _Broken(Gate(), {})
    attend(channel)
    channel.close_in_child()
    assert monotonic() - began >= PAUSE_S
