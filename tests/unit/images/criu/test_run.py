"""Restores by something in CRIU's place: that fails, or calls finished what is not there."""

from __future__ import annotations

import os
import select
import shlex
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu.needs import Needs
from hegmd.images.criu.run import restore
from hegmd.node.criu_program import Criu
from tests.patience import HANG_S

NOBODY = 1 << 22  # no process has that number
# A substitute for CRIU that leaves a process behind, which holds the pipe open until it ends.
LEAVES = "#!/bin/sh\nexec 8>{fifo}\nsleep 1000 &\nexit 0\n"


FAILS = "#!/bin/sh\necho 'Error (criu/x.c:1): the moon is full' > /proc/self/fd/9/restore.log\nexit 1\n"


async def _restored_by(program: Path) -> None:
    """Restore the image from its own folder with that substitute for CRIU."""
    folder = os.open(program.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        await restore(Criu(str(program), "4.2"), folder, Needs(pids=(NOBODY,)), log_dir_fd=folder, unit_name=None)
    finally:
        os.close(folder)


async def test_the_hint_named_a_criu_log_that_was_already_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was reported to be kept with an image that is removed, or that it was never in."""
    program = tmp_path / "criu"
    program.write_text(FAILS)
    program.chmod(0o755)
    with pytest.raises(HegmError, match="the moon is full"):
        await _restored_by(program)
    assert "the end of CRIU's log:\nError (criu/x.c:1): the moon is full" in caplog.text


@pytest.mark.thorough
async def test_processes_that_criu_created_are_removed_even_without_the_job_itself(tmp_path: Path) -> None:
    """With their parent, which waits for them; only those of the job's own numbers were ended."""
    fifo, program = tmp_path / "fifo", tmp_path / "criu"
    os.mkfifo(fifo)
    program.write_text(LEAVES.format(fifo=fifo))
    program.chmod(0o755)
    lives = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(lives, 0)
    try:
        with pytest.raises(HegmError, match=f"{NOBODY} does not exist"):
            await _restored_by(program)
        assert [kind for _, kind in poll.poll(HANG_S * 1000)] == [select.POLLHUP]
    finally:
        os.close(lives)


# Says which of a processor's features this program may use that it has to ask for, by way of another program.
SAYS = """
import ctypes, pathlib, sys
asked, got = int(sys.argv[1], 16), ctypes.c_uint64()
ctypes.CDLL(None).syscall(158, asked, ctypes.byref(got))
pathlib.Path(sys.argv[2]).write_text(str(got.value >> 18 & 1))
sys.exit(1)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64" or os.geteuid() != 0, reason="it is about x86-64, and root's CRIU")
async def test_a_job_that_multiplied_by_the_processors_tiles_was_ended_by_its_next_product_after_a_restore(
    tmp_path: Path,
) -> None:
    """CRIU does not request them again: the job inherits the right from its creator, as in a fork."""
    says, program, has, may = (tmp_path / name for name in ("says", "criu", "has", "may"))
    says.write_text(SAYS)
    python = shlex.quote(sys.executable)  # a clone may be below a folder with a space in its name
    commands = (f"{python} -IS {says} 0x1021 {has}", f"exec {python} -IS {says} 0x1022 {may}")
    program.write_text("\n".join(["#!/bin/sh", *commands, ""]))
    program.chmod(0o755)
    with pytest.raises(HegmError, match="status 1"):
        await _restored_by(program)
    assert may.read_text() == has.read_text()


KILLS = "#!/bin/sh\nexec 8>{fifo}\nkill -9 $PPID\nread said < {never}\n"


async def test_criu_kept_running_after_its_parent_was_killed(tmp_path: Path) -> None:
    """The restore had failed, and a second one could be requested at the same time."""
    fifo, never, program = tmp_path / "fifo", tmp_path / "never", tmp_path / "criu"
    os.mkfifo(fifo)
    os.mkfifo(never)
    program.write_text(KILLS.format(fifo=fifo, never=never))
    program.chmod(0o755)
    lives = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(lives, 0)
    try:
        with pytest.raises(HegmError, match="CRIU's restore failed with status -9"):
            await _restored_by(program)
        assert [kind for _, kind in poll.poll(HANG_S * 1000)] == [select.POLLHUP]
    finally:
        with suppress(OSError):
            os.close(os.open(never, os.O_WRONLY | os.O_NONBLOCK))  # the reader continues
        os.close(lives)
