"""The attendant of what CRIU makes: how it ends itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hegmd.images import criu
from hegmd.images.criu import parent
from tests.patience import HANG_S

TENDED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import parent
status = parent.tend(os.open(os.devnull, os.O_WRONLY), 0, ["--", "/bin/sh", "-c", "exit 5"])
print(status, signal.getsignal(signal.SIGALRM) is signal.SIG_IGN)
"""


def test_an_attendant_whose_end_took_long_was_killed_by_its_own_alarm() -> None:
    """On a busy machine its status was 142 in place of that of CRIU: Python gives its handlers up before it ends."""
    words = [sys.executable, "-SE", "-c", TENDED, str(Path(criu.__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "5 True\n"


STUCK = """
import os, sys
sys.path.insert(0, sys.argv[1])
import parent
root = os.fork()
if root == 0:
    os._exit(9)
told = os.open(os.devnull, os.O_WRONLY)
print(parent.tend(told, root, ["--", "/bin/cat", sys.argv[2]], root_grace_s=0.01) == parent.JOB_ENDED)
"""


def test_criu_waited_for_a_quarter_of_an_hour_for_a_job_whose_first_process_had_been_killed(tmp_path: Path) -> None:
    """Issue 16, outcome 3: the launcher was killed after it had its memory back, and CRIU did not notice its end."""
    os.mkfifo(endless := tmp_path / "endless")
    words = [sys.executable, "-SE", "-c", STUCK, str(Path(criu.__file__).parent), str(endless)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "True\n"


RANK_KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
import parent
root, rank = os.getpid(), os.fork()
if rank == 0:
    os._exit(9)
words = ["--ranks", str(rank), "--", "/bin/cat", sys.argv[2]]
told = os.open(os.devnull, os.O_WRONLY)
print(parent.tend(told, root, words, rank_grace_s=0.01) == parent.JOB_ENDED)
"""


def test_criu_waited_15_minutes_for_a_job_with_a_killed_rank(tmp_path: Path) -> None:
    """Issue 16, outcome 3: the code checked only the first process."""
    os.mkfifo(endless := tmp_path / "endless")
    words = [sys.executable, "-SE", "-c", RANK_KILLED, str(Path(criu.__file__).parent), str(endless)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert done.stdout == "True\n"


def test_criu_waited_15_minutes_for_a_killed_rank_that_its_parent_had_reaped() -> None:
    """The launcher of the job reaps it: it is no zombie, but gone. Before CRIU has made it, it is not there either."""
    has_ended = parent.Ends()
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as rank:
        assert not has_ended(rank.pid)
        rank.kill()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(rank.pid)
        rank.wait()
        assert has_ended(rank.pid)
    assert not parent.Ends()(rank.pid)
