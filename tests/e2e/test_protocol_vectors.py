"""A client in another language, with a msgpack package from the npm registry, against the real daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.patience import HANG_S

pytestmark = pytest.mark.e2e

REPO = Path(__file__).parents[2]
# The set-up may have put node beside the interpreter.
NODE = shutil.which("node", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
CLIENT = REPO / "tests" / "e2e" / "node_client"


def test_node_plays_every_vector(socket_dir: Path) -> None:
    assert NODE, "node is missing: tools/setup.sh installs it"
    with RunningDaemon(socket_dir) as daemon:
        played = subprocess.run(
            [NODE, "client.mjs", str(REPO / "docs" / "protocol-vectors"), str(daemon.socket_path)],
            cwd=CLIENT,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
    assert played.returncode == 0, played.stdout + played.stderr
    assert " 0 failed" in played.stdout
    assert "conversations.json" in played.stdout
