"""The launcher of ranks: its folder, and what it asks the daemon."""

from __future__ import annotations

import os
from pathlib import Path

from hegmctl.ranks import fresh_folder


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
