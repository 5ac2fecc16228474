"""Whose code a frame runs: the script's, or ours and Python's, wherever ours is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
_TELLS = """
import hegm
from hegmd.agent import quiesce
from hegmd.agent.restart import places
assert "/site-packages/" in quiesce.__file__
print(places.is_of_script(quiesce.stand.__code__), places.is_of_script(hegm.boundary.__code__))
print(places.is_of_script((lambda: 0).__code__), places.is_users_module(hegm))
"""


def test_an_agent_among_installed_packages_was_taken_for_a_part_of_the_script(tmp_path: Path) -> None:
    """Every training of an installed hegmd was refused: its agent waits in a while loop, as packages of others may."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for name in ("hegmd", "hegm"):
        (packages / name).symlink_to(ROOT / name)
    words = [sys.executable, "-c", _TELLS]
    environ = {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["False", "False", "True", "False"], "")
