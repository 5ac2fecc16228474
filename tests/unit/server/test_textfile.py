"""The file for node_exporter: whole or absent, renewed, and removed when no daemon renews it."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import threading
from pathlib import Path

import anyio
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.server.textfile import Textfile, write_whole


class Figures:
    """Metrics that count how often they were asked for, and can be waited for."""

    def __init__(self) -> None:
        self.calls = 0
        self._again = anyio.Event()
        self.error: HegmError | None = None

    async def render(self) -> str:
        self.calls += 1
        self._again.set()
        if self.error is not None:
            raise self.error
        return f"hegmd_x {self.calls}\n"

    async def next(self) -> None:
        """Until they are asked for once more: what came of the time before can be seen then."""
        self._again = anyio.Event()
        await self._again.wait()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hegmd.prom"


async def test_the_file_is_renewed_at_the_interval_and_taken_away_at_the_end(path: Path) -> None:
    figures = Figures()
    async with anyio.create_task_group() as tasks:
        await tasks.start(Textfile(path, 0.001, figures.render).run)
        for _ in range(3):
            await figures.next()
        written = await anyio.Path(path).read_text()
        tasks.cancel_scope.cancel()
    assert re.fullmatch(r"hegmd_x \d+\n", written)
    assert list(path.parent.iterdir()) == []


async def test_a_reload_moves_the_file_stops_it_and_starts_it_again(path: Path) -> None:
    figures = Figures()
    textfile = Textfile(None, 60, figures.render)
    other = path.with_name("other.prom")
    async with anyio.create_task_group() as tasks:
        await tasks.start(textfile.run)
        for first, then in ((path, other), (other, path)):
            textfile.configure(first, 0.001)
            await figures.next()
            await figures.next()
            assert first.exists()
            assert not then.exists()
        textfile.configure(None, 0.001)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert list(path.parent.iterdir()) == []


async def test_a_reload_that_changes_nothing_writes_nothing(path: Path) -> None:
    figures = Figures()
    textfile = Textfile(None, 60, figures.render)
    async with anyio.create_task_group() as tasks:
        await tasks.start(textfile.run)
        textfile.configure(None, 60)
        await anyio.wait_all_tasks_blocked()
        assert figures.calls == 0
        tasks.cancel_scope.cancel()


async def test_a_write_error_is_reported_once_and_so_is_its_end(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    figures = Figures()
    missing = path.parent / "missing" / "hegmd.prom"
    textfile = Textfile(missing, 0.001, figures.render)
    async with anyio.create_task_group() as tasks:
        await tasks.start(textfile.run)
        for _ in range(4):
            await figures.next()
        assert textfile.failures >= 3
        missing.parent.mkdir()
        for _ in range(3):
            await figures.next()
        figures.error = HegmError(UNAVAILABLE, "no figures", "wait")
        for _ in range(3):
            await figures.next()
        tasks.cancel_scope.cancel()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", f"metrics cannot be written to {missing}: No such file or directory"),
        ("INFO", f"metrics are written to {missing} again"),
        ("ERROR", f"metrics cannot be written to {missing}: no figures (unavailable); wait"),
    ]


@pytest.mark.thorough
async def test_a_disk_that_hangs_holds_up_nothing_and_gets_no_second_writer(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    figures = Figures()
    free = threading.Event()
    writers: list[Path] = []

    def hang(path: Path, text: str) -> None:
        writers.append(path)
        free.wait()

    textfile = Textfile(path, 0.001, figures.render, write=hang, write_deadline_s=0.01)
    async with anyio.create_task_group() as tasks:
        await tasks.start(textfile.run)
        for _ in range(4):
            await figures.next()
        tasks.cancel_scope.cancel()
    free.set()
    assert writers == [path]
    assert [record.getMessage() for record in caplog.records] == [
        f"metrics cannot be written to {path}: not written after 0.01 s"
    ]


def test_a_file_is_replaced_as_a_whole(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("mine")
    fresh = path.with_name(f".{path.name}.new")
    fresh.symlink_to(target)
    path.symlink_to(target)
    old_mask = os.umask(0o077)
    try:
        write_whole(path, "hegmd_x 1\n")
    finally:
        os.umask(old_mask)
    assert target.read_text() == "mine"
    assert not path.is_symlink()
    assert path.read_text() == "hegmd_x 1\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert not fresh.is_symlink()


def test_a_file_that_cannot_be_renamed_leaves_nothing_behind(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, "hegmd_x 1\n")
    assert [found.name for found in path.parent.iterdir()] == [path.name]


async def test_a_directory_closed_by_the_sandbox_is_reported_with_the_remedy(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def barred(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    figures = Figures()
    textfile = Textfile(path, 0.001, figures.render, write=barred)
    async with anyio.create_task_group() as tasks:
        await tasks.start(textfile.run)
        for _ in range(3):
            await figures.next()
        tasks.cancel_scope.cancel()
    assert "ReadWritePaths=" in caplog.records[0].getMessage()


async def test_when_no_thread_is_to_be_had_the_file_is_written_again_later(path: Path) -> None:
    """The error ended the daemon, and the daemon would have waited for ever for a write that had not begun."""
    figures = Figures()
    textfile = Textfile(path, 0.001, figures.render)
    before = threading.stack_size(1 << 46)  # more than there are addresses, so that no thread can start
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(textfile.run)
            await figures.next()
            await figures.next()
            assert textfile.failures
            assert os.listdir(path.parent) == []
            threading.stack_size(before)
            await figures.next()
            await figures.next()
            assert path.name in os.listdir(path.parent)
            tasks.cancel_scope.cancel()
    finally:
        threading.stack_size(before)
