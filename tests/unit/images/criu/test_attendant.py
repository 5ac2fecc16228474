"""The attendant of what CRIU makes: how it ends itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hegmd.images import criu
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
