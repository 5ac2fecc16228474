"""The variables of a training while they are read, at the head of its loop or elsewhere, and after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from hegmd.agent import addresses
from hegmd.agent.state.script.capture_points import CapturePointCheck

ROOT = Path(__file__).parents[5]


def test_a_survey_of_a_job_parked_at_the_head_of_its_loop_unset_its_variables() -> None:
    """A job with --recover that was suspended at the boundary of a snapshot ended with UnboundLocalError when resumed.

    Up to Python 3.12, CPython sets the variables of a traced function from a copy, which the survey had emptied.
    """
    surveyed: list[list[int]] = []
    check = CapturePointCheck(lambda: surveyed.append(addresses.numbers()))

    def train() -> int:
        total, address = 0, 1 << 40
        for step in range(4):
            total += step
            if step == 1:
                check.will_do(sys._getframe())
        return total + address

    assert train() == 6 + (1 << 40)
    assert len(surveyed) == 1
    assert 1 << 40 in surveyed[0]


class Pause:
    """An awaitable that lets other coroutines run once."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_training_that_awaits_after_its_steps_was_never_protected(*, is_closed: bool) -> None:
    """No snapshot was taken, and no reason was given. A closed coroutine is not traced any longer."""
    parked: list[int] = []
    check = CapturePointCheck(lambda: parked.append(1))

    async def train() -> None:
        for step in range(4):
            if step == 1:
                check.will_do(sys._getframe())
            await Pause()

    tool, training = sys.gettrace(), train()
    for _ in range(2):
        training.send(None)
    if is_closed:
        training.close()
    else:
        training.send(None)
        training.close()
    assert (len(parked), sys.gettrace()) == (0 if is_closed else 1, tool)


# After the second step the agent reads the training: by note_place, by capture.capture, or by the latter under a trace
# at the head of the loop. The script ends well if the loss is freed.
# In a process of its own: reading the state looks through all objects of the process.
STEPS = """
import gc, sys, weakref

from hegmd.agent.state import capture
from hegmd.agent.state.script.baseline import note_place
from hegmd.agent.state.script.capture_points import CapturePointCheck

class Loss:  # a real one holds its graph, and GPU memory
    def __init__(self):
        pass

def train(read):
    read_step = []
    for step in range(3):
        loss = Loss()
        if step == 1:
            frame = sys._getframe()
            if read == "place":
                note_place(("a place", read), [frame])
            elif read == "trace":
                CapturePointCheck(lambda: capture.capture(0, sys._getframe(2))).will_do(frame)
            else:
                capture.capture(0, frame)
            read_step.append(weakref.ref(loss))
            del frame
    gc.collect()  # what the search for objects leaves behind
    return [one() is None for one in read_step]

sys.exit(train(sys.argv[1]) != [True])
"""


@pytest.mark.parametrize("read", ["place", "state", "trace"])
def test_the_loss_of_a_step_was_kept_once_the_variables_had_been_read(read: str) -> None:
    """Up to Python 3.12 a copy of the variables remained in the function, with the tensors of that step."""
    script = subprocess.run([sys.executable, "-c", STEPS, read], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (script.returncode, script.stderr) == (0, "")


# A dry run finds the training anywhere in the body of its loop.
WITHIN = """
import sys

from hegmd.agent.state import capture
from hegmd.agent.state.script.capture_points import note_step

def train():
    for step in range(3):
        if step == 0:
            note_step(sys._getframe())
        if step == 2:
            return capture.capture(0, sys._getframe())[0]["own"]["unseen"]

sys.exit("; ".join(train()) or 0)
"""


def test_a_plan_made_within_the_body_of_a_loop_said_that_changes_were_not_searched() -> None:
    """The record of a loop without a loader is that of its head."""
    script = subprocess.run([sys.executable, "-c", WITHIN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (script.returncode, script.stderr) == (0, "")


# The loop that trains goes over a generator of the script, and another one evaluates over one between its steps.
GENERATED = """
import sys

from hegmd.agent.state.script.capture_points import CapturePointCheck, note_step

check, parks = CapturePointCheck(lambda: None), []

class Loader:
    def __init__(self):
        self.given = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.given += 1
        if self.given == 3:
            parks.append(check.will_do(sys._getframe(1)))
        if self.given == 5:
            raise StopIteration
        return self.given

def batches():
    for number in Loader():
        yield number

def train():
    for _epoch in range(1):
        for _batch in batches():
            note_step(sys._getframe())
        for _batch in batches():
            pass

train()
sys.exit(parks != [True, False])
"""


def test_a_training_over_a_generator_of_the_script_waited_for_its_first_snapshot_without_a_reason() -> None:
    """Each boundary was in the generator's own loop, which counted as one that only evaluates."""
    script = subprocess.run([sys.executable, "-c", GENERATED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (script.returncode, script.stderr) == (0, "")
