"""The state that a process was started with: read once, and released when it is restored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hegmd.agent.state.storage import state_file
from tests.patience import HANG_S

ROOT = Path(__file__).parents[5]
PUTS_BACK = """
import os
from hegmd.agent.state.values import inherited as given
given.claim()
number = int(os.environ["NUMBER"])
print(given.state()["epoch"], os.fstat(number).st_size > 0)
if "TAKES" in os.environ:
    os.dup2(os.open("/dev/null", os.O_RDONLY), number)
for _ in range(2):
    given.forget()
with open("/proc/self/maps") as maps:
    is_mapped = "restart-4" in maps.read()
print(given.is_there(), given.state(), os.path.exists(f"/proc/self/fd/{number}"), is_mapped)
"""


def _puts_back(tmp_path: Path, **more: str) -> list[str]:
    state = os.open(tmp_path / "restart-4", os.O_RDWR | os.O_CREAT)
    try:
        state_file.write(state, {"epoch": 7})
        environ = {"PYTHONPATH": str(ROOT), "HEGM_STATE_FD": str(state), "NUMBER": str(state), **more}
        words = [sys.executable, "-c", PUTS_BACK]
        return subprocess.check_output(words, env=environ, pass_fds=(state,), text=True, timeout=HANG_S).splitlines()
    finally:
        os.close(state)


def test_the_memory_of_a_state_that_was_put_back_stayed_as_long_as_its_process(tmp_path: Path) -> None:
    """The agent kept the descriptor open: the pool had released memory that was still in use."""
    assert _puts_back(tmp_path) == ["7 True", "False None False False"]


def test_a_descriptor_that_the_script_opened_under_that_number_stays_open(tmp_path: Path) -> None:
    assert _puts_back(tmp_path, TAKES="it") == ["7 True", "False None True False"]


def test_the_lock_is_closed_for_an_image_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    """A recovered job's image had the daemon's file open, and could not be restored once that was gone."""
    lock = os.open(tmp_path / "restart-j7.lock", os.O_RDWR | os.O_CREAT)
    script = f"""
import os
from hegmd.agent.state.values import inherited as given
given.claim()
given.close_lock()
is_open = os.path.exists("/proc/self/fd/{lock}")
os.dup2(os.open({str(tmp_path / "own")!r}, os.O_RDWR | os.O_CREAT), {lock})
given.close_lock()
given.note_past()
print(is_open, os.fstat({lock}).st_size)
"""
    environ = {"PYTHONPATH": str(ROOT), "HEGM_STATE": "none", "HEGM_STATE_LOCK_FD": str(lock)}
    try:
        words = [sys.executable, "-c", script]
        told = subprocess.check_output(words, env=environ, pass_fds=(lock,), text=True, timeout=HANG_S)
    finally:
        os.close(lock)
    assert told.split() == ["False", "0"]
