"""The steps that an effect collects from all its tasks, up to a limit."""

from __future__ import annotations

import anyio
import anyio.to_thread

from hegmd.telemetry.step_timings import AGENT, COPIES, MOST_ALIKE, StepTiming, collected, note_step


async def test_an_effect_collects_the_steps_of_its_tasks_and_threads_and_of_no_other() -> None:
    note_step(AGENT, "before", 0.0, 1.0)

    async def beside() -> None:
        with collected() as others:
            note_step(AGENT, "other", 2.0, 3.0)
        assert [step.name for step in others.steps] == ["other"]

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beside)
        with collected() as found:
            async with anyio.create_task_group() as parts:
                parts.start_soon(_noted, "in a task", 2.0)
            await anyio.to_thread.run_sync(note_step, COPIES, "in a thread", 1.0, 3.0, 10)
    assert found.steps == [StepTiming(COPIES, "in a thread", 1.0, 3.0, 10), StepTiming(AGENT, "in a task", 2.0, 4.0)]


async def _noted(name: str, began: float) -> None:
    note_step(AGENT, name, began, 4.0)


def test_many_steps_of_one_name_become_one_long_step() -> None:
    with collected() as found:
        for number in range(MOST_ALIKE + 5):
            note_step(COPIES, "out", float(number), number + 0.5, 1)
        note_step(COPIES, "in", 100.0, 101.0, 7)
    assert len(found.steps) == MOST_ALIKE + 1
    last = found.steps[MOST_ALIKE - 1]
    assert (last.began, last.ended, last.size_bytes) == (MOST_ALIKE - 1.0, MOST_ALIKE + 4.5, 6)
    assert sum(step.size_bytes for step in found.steps if step.name == "out") == MOST_ALIKE + 5
