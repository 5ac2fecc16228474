"""A process that exits for a restart: all its output is in its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.agent.state.save_and_exit import LEFT_STATUS
from tests.patience import HANG_S

LEAVING = """
import io, sys
from hegmd.agent.state.save_and_exit import leave
folder = sys.argv[1]
text = open(folder + "/text", "w")
text.write("text")
binary = open(folder + "/binary", "wb")
binary.write(b"binary")
both = open(folder + "/both", "w+b")
both.write(b"both")
nested = io.TextIOWrapper(open(folder + "/nested", "wb"))
nested.write("nested")
leave()
"""


def test_a_process_that_leaves_flushes_every_file(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", LEAVING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (LEFT_STATUS, "")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        name: name for name in ("text", "binary", "both", "nested")
    }


SNAPSHOTS = """
import _thread, gc, os, sys, weakref
from hegmd.agent.signals import HeldSignals
from hegmd.agent.state.save_and_exit import flush_changed

def flush_in_a_park():
    with HeldSignals(lambda _number: None):
        flush_changed()
    while _thread._count():  # the thread of this park closes its pipe when it ends
        os.sched_yield()

searches = []
search = gc.get_objects
gc.get_objects = lambda: searches.append(1) or search()
text = open(sys.argv[1] + "/text", "w")
for number in range(3):
    text.write(f"{number}\\n")
    flush_in_a_park()
    print(len(searches), os.path.getsize(sys.argv[1] + "/text"))
text.close()
text = open(sys.argv[1] + "/text", "a")
text.write("again, by the same descriptor")
flush_in_a_park()
print(len(searches), os.path.getsize(sys.argv[1] + "/text"))
"""


def test_a_snapshot_searched_all_objects_for_files_again_though_none_was_opened(tmp_path: Path) -> None:
    """The pipe that holds signals back during each park counted as a new file: 0.07 s of each pause."""
    ran = subprocess.run([sys.executable, "-c", SNAPSHOTS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout.split("\n")) == ("", ["1 2", "1 4", "1 6", "2 35", ""])


COLLECTIONS = """
import gc, traceback
from hegmd.agent.state import capture, save_and_exit

collections = []
gc.callbacks.append(
    lambda _phase, _info: collections.extend(
        frame.name for frame in traceback.extract_stack() if frame.filename == capture.__file__
    )
)
gc.set_threshold(1, 1, 1)
for is_on in (True, False):
    gc.enable() if is_on else gc.disable()
    try:
        save_and_exit.snapshot(None, 0, print)
    except save_and_exit.SaveObstacles as error:
        print(collections, len(error.refusals), gc.isenabled())
"""


def test_the_garbage_collector_searched_all_objects_while_a_snapshot_held_the_training() -> None:
    """In every third snapshot of 257 layers that took 0.2 s of a pause of 0.3 s."""
    ran = subprocess.run([sys.executable, "-c", COLLECTIONS], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout.split("\n")) == ("", ["[] 2 True", "[] 2 False", ""])


HELD = """
import _thread, gc, os, sys, weakref
from hegmd.agent import departing
from hegmd.agent.state.capture import capture
from hegmd.agent.state.code import source_check
from hegmd.agent.thread_stacks import thread_stacks

class Model:
    def __init__(self):
        self.steps = 0

def train():
    model = Model()
    for step in range(3):
        model.steps += 1
        if step == 1:
            known.append(weakref.ref(model))
            if sys.argv[1] == "own":
                capture(_thread.get_ident(), sys._getframe())
            waits.release()
            goes.acquire()

def refuse():
    os.environ["HEGM_ALLOW_RESTART"] = "1"
    try:
        departing.snapshot(None, 0, print)
    except Exception as error:
        known.append(weakref.ref(error))  # its traceback leads to the state

known, waits, goes = [], _thread.allocate_lock(), _thread.allocate_lock()
waits.acquire(), goes.acquire()
gc.disable()
ident = _thread.start_new_thread(train, ())
waits.acquire()
{
    "capture": lambda: capture(ident),
    "own": lambda: None,
    "refused": refuse,
    "refusals": lambda: list(source_check.refusals()),
    "stacks": lambda: thread_stacks(ident),
}[sys.argv[1]]()
goes.release()
while _thread._count():
    os.sched_yield()
print([reference() for reference in known if reference() is not None])
"""


@pytest.mark.parametrize("act", ["capture", "own", "refused", "refusals", "stacks"])
def test_the_variables_of_a_training_were_kept_until_the_garbage_collector_ran(act: str) -> None:
    """A frame, or an error whose traceback has it, was in a variable of that frame: tensors stayed after their use."""
    words = [sys.executable, "-c", HELD, act]
    ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (ran.stderr, ran.stdout) == ("", "[]\n")
