"""Images on disks that are not as one thinks: real ones, in mount namespaces of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.mounting import NAMESPACE, why_no_mounts
from tests.unit.hegmctl.running import environment

pytestmark = [pytest.mark.e2e]

PROGRAM = Path(__file__).with_name("sandboxed") / "small_disk.py"


# Waits until what an earlier daemon left in private is gone.
SERVED = """
import sys, anyio
from pathlib import Path
from hegmd.images.files.images import Images
async def serve():
    async with anyio.create_task_group() as tasks:
        await tasks.start(Images(Path(sys.argv[1]), in_unit=False).run)
        while list(Path(sys.argv[1], "images").iterdir()):
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
anyio.run(serve)
"""


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
    result = json.loads(done.stdout)
    code, message, hint = result["bytes"]
    assert code == "refused"
    assert message == f"{tmp_path}/image cannot be written: No space left on device"
    assert f"df -h {tmp_path}" in hint
    assert result["left"] == ["state"]
    assert result["zeros"] is None


def test_a_daemon_starts_over_an_earlier_ones_state_in_a_container(tmp_path: Path) -> None:
    """An overlay refuses to rename a folder of its lower layer (EXDEV): hegmd never came up there again."""
    why = why_no_mounts()
    if why is not None:
        pytest.skip(why)
    script = """set -e
        mkdir -p "$1/lower/images/ab" "$1/state"
        mount -t tmpfs hegm "$1/state" && mkdir "$1/state/upper" "$1/state/work"
        mount -t overlay -o "lowerdir=$1/lower,upperdir=$1/state/upper,workdir=$1/state/work" hegm "$1/state"
        exec "$2" -c "$3" "$1/state"
    """
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", str(tmp_path), sys.executable, SERVED],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
