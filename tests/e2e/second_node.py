"""Restores a job under its own daemon: `python -m tests.e2e.second_node FOLDER IMAGE PID`.

Waits for the job's end. Started as the first process of a fresh pid namespace, it is a node where the job's process
numbers are free.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from tests.e2e.handed_job import ENDS_WITHIN_S, daemon_with_criu
from tests.e2e.moved_job import environment
from tests.patience import HANG_S


def main(folder: Path, image: str, pid: int) -> int:
    """The exit status of the restore, or 1 when the job does not end."""
    with daemon_with_criu(folder) as daemon:
        words = [sys.executable, "-m", "hegmctl", "restore", "--truncate-outputs", image]
        status = subprocess.run(words, env=environment(daemon.socket_path), timeout=HANG_S, check=False).returncode
        if status:
            sys.stdout.write(daemon.log_text()[-4000:])
            return status
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return 0
        return 0 if select.select([pidfd], [], [], ENDS_WITHIN_S)[0] else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
