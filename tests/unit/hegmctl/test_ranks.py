"""The launcher of ranks: its folder, and what it asks the daemon."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from hegmctl.ranks import SILENT_S, Launcher, fresh_folder
from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.protocol.messages import RankStart

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_folder_of_a_launcher_that_was_killed_stayed_until_the_next_boot(tmp_path: Path) -> None:
    """The next launcher removes it once no rank has it; those in use, and other files, stay."""
    left, used = fresh_folder(str(tmp_path)), fresh_folder(str(tmp_path))
    (Path(left[0]) / "generation-1").touch()
    (tmp_path / "hegm-rank-files-other").touch()
    rank_fd = os.dup(left[1])
    os.close(left[1])  # as by SIGKILL of the launcher; a rank lives
    third = fresh_folder(str(tmp_path))
    os.close(rank_fd)
    fourth = fresh_folder(str(tmp_path))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"hegm-rank-files-other", *(os.path.basename(path) for path, _ in (used, third, fourth))}
    for _, fd in (used, third, fourth):
        os.close(fd)


# Another launcher removes the first folder just before this one opens it.
MEETING = """
import os, sys
from hegmctl.ranks import fresh_folder

removed = []

def remove(event, arguments):
    if event == "open" and not removed and str(arguments[0]).startswith(sys.argv[1]):
        removed.append(arguments[0])
        os.rmdir(arguments[0])

sys.addaudithook(remove)
path, _fd = fresh_folder(sys.argv[1])
sys.exit(not removed or path in removed or os.listdir(sys.argv[1]) != [os.path.basename(path)])
"""


def test_a_launcher_failed_if_another_removed_its_folder_before_it_was_opened(tmp_path: Path) -> None:
    """The folder was not locked yet, so the other took it for one of a killed launcher."""
    ran = subprocess.run([sys.executable, "-c", MEETING, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_rank_was_started_in_a_suspended_job_while_the_daemon_was_restarted() -> None:
    """The connection was refused for a moment. Without a daemon that has ever answered, ranks start at once."""
    refused = HegmError(UNAVAILABLE, "it does not accept a connection", "see its log")
    answers: list[RankStart | HegmError] = []

    @contextmanager
    def connect(_limit_s: float | None) -> Iterator[Any]:
        if isinstance(answer := answers.pop(0), HegmError):
            raise answer
        yield SimpleNamespace(call=lambda *_: answer)

    launcher = Launcher(1, ["true"], {"HEGM_RUN": "run-1"}, connect=cast("Any", connect), say=lambda _text: None)
    try:
        answers += [refused, RankStart(may_start=False), refused, RankStart(may_start=False), refused, refused, refused]
        assert [launcher._may_start() for _ in range(5)] == [True, False, False, False, False]
        assert launcher._silent_since is not None
        launcher._silent_since -= SILENT_S
        assert [launcher._may_start() for _ in range(2)] == [True, True]  # it does not come back
    finally:
        launcher._close()
        os.close(launcher._board_fd)
