"""The owner of a frame's code: the script, or we and Python, wherever it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hegmd.agent.state.code.position import look_into

ROOT = Path(__file__).parents[5]
_TELLS = """
import hegm
from hegmd.agent import quiesce
from hegmd.agent.state.code import position as places
assert "/site-packages/" in quiesce.__file__
print(places.is_of_script(quiesce.wait_at_lock.__code__), places.is_of_script(hegm.boundary.__code__))
print(places.is_of_script((lambda: 0).__code__), places.is_users_module(hegm))
"""


def test_an_agent_among_installed_packages_is_not_part_of_the_script(tmp_path: Path) -> None:
    """Every training of an installed hegmd was refused: its agent waits in a while loop, as packages of others may."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    for name in ("hegmd", "hegm"):
        (packages / name).symlink_to(ROOT / name)
    words = [sys.executable, "-c", _TELLS]
    environ = {"PYTHONPATH": str(packages), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(words, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["False", "False", "True", "False"], "")


def test_the_count_in_a_bar_that_is_switched_off_was_forgotten() -> None:
    """Issue 14, row 6: such a bar hands on what it goes over; a restarted script counted its batches from 0."""
    bar = "def bar(over):\n    yield from over\n"
    names: dict[str, Any] = {}
    exec(compile(bar, "/usr/lib/python3/dist-packages/tqdm/std.py", "exec"), names)
    found: list[dict[str, Any]] = []

    def items() -> Iterator[str]:
        yield "first"
        found.append(look_into(shown, 0, loader_of))
        yield "second"

    of_loader = items()

    def loader_of(iterator: object) -> int | None:
        return 7 if iterator is of_loader else None

    shown = names["bar"](enumerate(of_loader))
    assert list(shown) == [(0, "first"), (1, "second")]
    counted = {"kind": "enumerate", "index": 1, "of": {"kind": "loader", "number": 7, "given": 0}}
    assert found == [{"kind": "through", "of": counted}]
