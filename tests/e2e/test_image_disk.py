"""An image on a disk that is too small for it: a real one, in a mount namespace of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.mounting import NAMESPACE, why_no_mounts
from tests.unit.hegmctl.running import environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

PROGRAM = Path(__file__).with_name("sandboxed") / "small_disk.py"


def test_a_full_disk_leaves_no_image_and_nothing_of_one(tmp_path: Path) -> None:
    why = why_no_mounts()
    if why is not None:
        pytest.skip(why)
    script = 'mount -t tmpfs -o size=32m,mode=700 hegm "$1" && exec "$2" "$3" "$1"'
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", str(tmp_path), sys.executable, str(PROGRAM)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    code, message, hint = seen["bytes"]
    assert code == "refused"
    assert message == f"{tmp_path}/image cannot be written: No space left on device"
    assert f"df -h {tmp_path}" in hint
    assert seen["left"] == ["state"]
    assert seen["zeros"] is None
