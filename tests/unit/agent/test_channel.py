"""The agent's connection: how long it waits before it calls again, and what it tells of its environment."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from hegmd.agent.channel import (
    BATCH_LOOK_S,
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    Channel,
    _DaemonConnection,
    look_within_s,
    next_pause_s,
    periodic_images,
)
from hegmd.agent.quiesce import Gate
from hegmd.agent.trap import NoCollection
from hegmd.errors import DENIED, HegmError
from hegmd.protocol.messages import Hello
from tests.cells import in_one_test
from tests.patience import HANG_S
from tests.unit.hegmctl.fake_daemon import FakeDaemon, failing

ROOT = Path(__file__).parents[3]
PATIENCE_S = HANG_S
# A process that has put a state back and makes batches one by one, with the agent's connection in a thread of its own.
RESTARTED = """
import os, threading
from hegmd.agent.channel import Channel
from hegmd.agent.quiesce import Gate
from hegmd.agent.state.values import inherited as given
given.claim()
gate = Gate()
channel = Channel(gate, os.environ)
given.forget()
channel.note_restarted("4")
threading.Thread(target=channel.run, daemon=True).start()
while input():
    gate.count += 1
"""


def test_without_a_daemon_the_progress_of_a_restarted_training_is_noted(tmp_path: Path) -> None:
    """Otherwise it would be restarted from its old state, whenever and however it ends."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    state = os.open(tmp_path / "state", os.O_RDWR | os.O_CREAT)
    environ = {"PYTHONPATH": str(ROOT), "HEGM_SOCKET": str(tmp_path / "nobody")}
    environ.update(HEGM_STATE_FD=str(state), HEGM_STATE_LOCK_FD=str(lock))
    process = subprocess.Popen(
        [sys.executable, "-c", RESTARTED], env=environ, stdin=subprocess.PIPE, pass_fds=(state, lock), text=True
    )
    assert process.stdin is not None
    try:
        process.stdin.write("batch\n")  # which is asked for where the state is put back, and not made yet
        process.stdin.flush()
        assert _until(lambda: os.pread(lock, 9, 0), b"back")
        process.stdin.write("batch\n")
        process.stdin.flush()
        assert _until(lambda: os.pread(lock, 9, 0), b"back\0\0\0\0+")
    finally:
        process.communicate("\n", timeout=PATIENCE_S)
        os.close(lock)
        os.close(state)


def test_a_connection_that_the_daemon_refused_stayed_until_the_collector_ran(socket_path: Path) -> None:
    """Its error and the frame that raised it kept one another."""
    refusing = failing(HegmError(DENIED, "the daemon serves another user", "nothing"))
    with FakeDaemon(socket_path, {Hello: refusing}), NoCollection():
        channel = Channel(Gate(), {"HEGM_SOCKET": str(socket_path)})
        refused = False
        try:
            channel._attend()
        except HegmError as error:
            refused = error.code is DENIED
        channel.hang_up()
        channel.close_in_child()
        assert refused
        assert not any(type(found) is _DaemonConnection for found in gc.get_objects())


# A process that does not find a loop of its state, whose script is the file of the argument.
EDITED_SCRIPT = """
import sys
from hegmd.agent.state.code.loop_shadows import Shadows
from hegmd.agent.state.session import PendingRestore
from hegmd.agent.state.values import inherited as given
given.claim()
due = PendingRestore()
due._state = {"place": {"files": {sys.argv[1]: 0}}}
shadows = next(found for found in sys.meta_path if isinstance(found, Shadows))
shadows._rest_of((3, 10), 5)
"""


def test_the_lock_says_that_a_rank_ended_as_its_script_was_edited(tmp_path: Path) -> None:
    """torchrun hides the status of a rank: the daemon took the snapshot for one that cannot be restored."""
    (tmp_path / "edited.py").write_text("edited = True")
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    environ = {"PYTHONPATH": str(ROOT), "HEGM_STATE_LOCK_FD": str(lock), "HEGM_STATE": str(tmp_path / "state")}
    words = [sys.executable, "-c", EDITED_SCRIPT, str(tmp_path / "edited.py")]
    ended = subprocess.run(words, env=environ, pass_fds=(lock,), check=False, capture_output=True, timeout=PATIENCE_S)
    assert ended.returncode == 98, ended.stderr
    assert os.pread(lock, 9, 0) == b"edit"
    os.close(lock)


def test_the_lock_says_that_a_rank_found_its_state_damaged(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    (tmp_path / "state").write_bytes(b"no state")
    environ = {"PYTHONPATH": str(ROOT), "HEGM_STATE_LOCK_FD": str(lock), "HEGM_STATE": str(tmp_path / "state")}
    script = "from hegmd.agent.state.values import inherited\ninherited.claim()\ninherited.state()"
    words = [sys.executable, "-c", script]
    ended = subprocess.run(words, env=environ, pass_fds=(lock,), check=False, capture_output=True, timeout=PATIENCE_S)
    assert b"DamagedStateFile" in ended.stderr
    assert os.pread(lock, 9, 0) == b"\0\0\0\0torn"
    os.close(lock)


def _until(look: Callable[[], bytes], wanted: bytes) -> bool:
    deadline = monotonic() + PATIENCE_S
    while look() != wanted and monotonic() < deadline:
        select.poll().poll(5)
    return look() == wanted


def test_daemons_killed_in_sequence_left_a_job_parked_for_seconds() -> None:
    """Each connection had been of use and did not last, and the next came later and later."""
    assert next_pause_s(MAX_PAUSE_S, 0.5, was_of_use=True) == FIRST_PAUSE_S


def test_a_parked_job_found_the_next_daemon_late() -> None:
    """After a kill it tried at 0.7, 1.5 and 3.1 s, while a daemon serves after 0.4 s."""
    assert next_pause_s(4 * FIRST_PAUSE_S, 0.0, was_of_use=False, is_parked=True) == FIRST_PAUSE_S


def test_the_progress_of_a_restarted_training_is_noted_at_once() -> None:
    """A training that failed within these 5 s was started again from its old state."""
    assert look_within_s(MAX_PAUSE_S, awaits_batch=True) == BATCH_LOOK_S
    assert look_within_s(0.1, awaits_batch=True) == 0.1
    assert look_within_s(MAX_PAUSE_S, awaits_batch=False) == MAX_PAUSE_S


@in_one_test(
    ("text", "wish"),
    [
        ("600:3:/images", (600.0, 3, "/images")),
        ("0.5:1:/a:b", (0.5, 1, "/a:b")),
        *((text, None) for text in (None, "", "600:3", "often:3:/images", "600:three:/images")),
    ],
)
def test_an_unreadable_request_for_scheduled_images_is_ignored(
    text: str | None, wish: tuple[float, int, str] | None
) -> None:
    read = periodic_images(text)
    assert wish == (None if read is None else (read.every_s, read.keep, read.path))


def test_without_a_daemon_it_connects_less_and_less_often() -> None:
    pauses_s = [FIRST_PAUSE_S]
    while pauses_s[-1] < MAX_PAUSE_S:
        pauses_s.append(next_pause_s(pauses_s[-1], 0.0, was_of_use=False))
    assert pauses_s == sorted(set(pauses_s))
    assert len(pauses_s) > 4
    assert next_pause_s(MAX_PAUSE_S, 0.0, was_of_use=False) == MAX_PAUSE_S
    assert next_pause_s(MAX_PAUSE_S, MAX_PAUSE_S + 1, was_of_use=False) == FIRST_PAUSE_S


def test_a_signal_pending_for_a_parked_thread_is_reported_to_the_orders() -> None:
    channel = Channel(Gate(), {})
    try:
        channel._pass_signal(signal.SIGTERM)
        assert channel._orders._signal == signal.SIGTERM
    finally:
        channel.close_in_child()
