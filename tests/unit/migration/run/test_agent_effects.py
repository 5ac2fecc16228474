"""Orders to an agent that is late."""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import TIMEOUT, HegmError
from hegmd.migration.machine import effects
from hegmd.migration.machine.events import Surveyed
from hegmd.migration.machine.operation import Limits
from hegmd.migration.run.agent_effects import AgentEffects
from hegmd.protocol.messages import AgentReport
from tests.unit.migration.operations import operation, worker


class LateAgent:
    """An agent that does not answer its first surveys in time, and every part of it that an effect asks for."""

    boundary = 7

    def __init__(self, late: int) -> None:
        self.late = late
        self.orders: list[str] = []

    async def order(self, do: str, **how: Any) -> AgentReport:
        self.orders.append(do)
        self.late -= 1
        if self.late >= 0:
            raise HegmError(TIMEOUT, f"the agent has not answered a {do}", "wait")
        return AgentReport(order=1, result="done", size_bytes=10)

    def worker(self, _member: object) -> LateAgent:
        return self

    def method(self, _member: object) -> LateAgent:
        return self

    def subject(self, _op: object, _member: object) -> None: ...

    def note_size(self, _subject: object, _size_bytes: int) -> None: ...


async def survey(late: int, *, park_s: float = 20.0, **values: Any) -> Surveyed:
    return await ordered(LateAgent(late), park_s=park_s, **values)


async def ordered(cast: Any, *, park_s: float = 20.0, **values: Any) -> Surveyed:
    op = operation(worker("a", **values), limits=Limits(park_s=park_s))
    effect = effects.Survey(number=1, cause=1, worker="a")
    found = await AgentEffects(cast).survey(op, op.workers[0], effect, lambda *_: None)
    assert isinstance(found, Surveyed)
    return found


async def test_a_late_survey_on_a_busy_node_does_not_roll_the_job_back() -> None:
    """«has not answered a survey within 6.0 s», of a rank that trained at a load of 35; the operation had 60 s."""
    assert (await survey(2)).boundary == 7


async def test_an_unanswering_agent_is_asked_until_the_limit_and_a_parked_one_once() -> None:
    with pytest.raises(HegmError):
        await survey(1, park_s=0.0)
    with pytest.raises(HegmError):
        await survey(1, is_parked=True)


async def test_ranks_were_held_up_for_their_bytes_only_to_count_their_batches() -> None:
    """A survey waits for a boundary: 0.36 s of each operation on ranks whose step took 0.3 s."""
    running, parked = LateAgent(0), LateAgent(0)
    await ordered(running)
    await ordered(parked, is_parked=True)
    assert (running.orders, parked.orders) == (["count"], ["survey"])
