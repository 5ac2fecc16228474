"""The comparison of restarts waits for a launcher's lock, and for nothing that a script may not say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.bench.restarts import _Launched

# A launcher whose worker logs something after its last batch, leaves, and is waited for by its lock.
LOGGED = """
import fcntl, os, sys, termios
print("batch 1", flush=True)
print("a log", flush=True)
while any(fcntl.ioctl(1, termios.FIONREAD, bytes(4))):
    pass
os.mkdir(os.path.join(sys.argv[1], str(os.getpid())))
lock = os.path.join(sys.argv[1], str(os.getpid()), "lock")
open(lock, "w").close()
while os.path.exists(lock):
    pass
print("batch 2", flush=True)
"""


def test_two_minutes_passed_where_a_log_was_the_last_line_before_a_training_left(tmp_path: Path) -> None:
    """The line counted as another batch's, which the test awaited before it looked for the lock."""
    argv = [sys.executable, "-S", "-c", LOGGED, str(tmp_path)]
    with _Launched(argv, dict(os.environ), tmp_path) as launched:
        assert launched.read_until(1)
        assert launched.take_lock()
        assert launched.read_until(2)
        assert launched.lines == ["batch 1", "batch 2"]
