"""A whole `hegmctl gpus` imports nothing that is slow to import.

The time itself is a benchmark (`make bench`); this holds its cause, which does not depend on how busy the machine is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.house.test_portability import TOO_SLOW_FOR_THE_CLIENT

pytestmark = pytest.mark.e2e

# Runs the command within an interpreter that then tells what it loaded, beyond what any Python script has.
TOLD = """
import sys
before = set(sys.modules)
from hegmctl.cli import run
status = run(sys.argv[1:])
loaded = sorted(set(sys.modules) - before)
import json
print(json.dumps(loaded), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize("command", [["gpus"], ["ps"], ["gpus", "--json"]], ids=" ".join)
def test_an_answer_is_had_without_a_slow_import(socket_dir: Path, command: list[str]) -> None:
    with RunningDaemon(socket_dir) as daemon:
        done = subprocess.run(
            [sys.executable, "-c", TOLD, *command],
            env=os.environ | {"HEGM_SOCKET": str(daemon.socket_path)},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "hegmctl.connection" in loaded
    allowed = {"json", "re", "enum"} if "--json" in command else set()  # json itself is made of the other two
    assert loaded & (TOO_SLOW_FOR_THE_CLIENT - allowed) == set()
