"""Whether a script can be read again, asked by scripts that are started in one way or another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_S

ASKS = (
    "import threading\nfrom hegmd.agent.state.code.source_check import refusals\n"
    "print([found.what for found in refusals()])\n"
)


def run(*words: str, read: str | None = None, folder: Path | None = None, **more: str) -> str:
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}
    done = subprocess.run(
        [sys.executable, *words],
        input=read,
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("words", [("-",), (), ("/dev/stdin",)])
def test_a_script_read_from_a_pipe_is_not_restarted(words: tuple[str, ...]) -> None:
    """It was restarted, read an empty input, and ended with 0 as if the training were over."""
    assert "which cannot be read again" in run(*words, read=ASKS)


def test_a_deleted_script_is_refused_before_its_training_exits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import os\nos.unlink({str(script)!r})\n{ASKS}")
    assert f"{script} cannot be read again: No such file or directory" in run(str(script))


def test_existing_scripts_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import os\nos.chdir('/')\n{ASKS}")
    assert run("train.py", folder=tmp_path) == "[]\n"
    assert run("-m", "train", folder=tmp_path) == "[]\n"
    assert run("-c", ASKS) == "[]\n"


@pytest.mark.parametrize(
    ("before", "after", "is_refused"),
    [("# above\n", "", True), ("", "# below\n", False), ("", "", False), ("1 +\n", "", True)],
)
def test_a_script_edited_above_its_place_is_refused(tmp_path: Path, before: str, after: str, is_refused: bool) -> None:
    """It was restarted, and ended in the new process, where its loop was at another line."""
    script = tmp_path / "train.py"
    text = f"import os, pathlib\npathlib.Path(__file__).write_text(os.environ['EDITED'])\n{ASKS}"
    script.write_text(text)
    printed = run(str(script), EDITED=f"{before}{text}{after}")
    assert (f"{script} was edited after the script began" in printed) is is_refused


# A FIFO replaces the file of a running function. Reading it blocks, as on a network file system that hangs: no process
# writes to it.
HANGS = """
import os, sys
from hegmd.agent.state.code.source_check import refusals
def train():
    for path in sys.argv[1:]:
        os.unlink(path)
        os.mkfifo(path)
    for _ in range(3):
        print([found.what for found in refusals()])
"""


def test_a_training_stayed_parked_while_the_file_system_of_its_script_hung(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import steps\nsteps.train()\n")
    (tmp_path / "steps.py").write_text(HANGS)
    assert run(str(tmp_path / "train.py"), str(tmp_path / "steps.py")) == "[]\n" * 3
