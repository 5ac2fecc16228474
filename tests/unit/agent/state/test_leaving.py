"""A process that exits for a restart: all its output is in its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hegmd.agent.state.save_and_exit import LEFT_STATUS

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
