"""The file of audit records: who may be at it, what rotation and a full or dead disk do to it."""

from __future__ import annotations

import logging
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.telemetry.audit_file import AuditFile
from tests.patience import HANG_S

Opener = Callable[[Path | None], AuditFile]


@pytest.fixture
def opened() -> Iterator[Opener]:
    made: list[AuditFile] = []

    def opener(path: Path | None) -> AuditFile:
        made.append(AuditFile(path))
        return made[-1]

    yield opener
    for file in made:
        file.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@contextmanager
def at_most(size_bytes: int) -> Iterator[None]:
    """A disk on which files cannot grow beyond that, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_are_appended_to_a_file_that_only_its_owner_may_touch(opened: Opener, path: Path) -> None:
    path.write_bytes(b"before\n")
    path.chmod(0o640)
    file = opened(path)
    file.append(b"one\n")
    file.append(b"two\n")
    assert file.flush()
    assert path.read_bytes() == b"before\none\ntwo\n"
    fresh = path.with_name("fresh")
    opened(fresh)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o600


def test_closing_writes_waiting_records_and_can_be_repeated(path: Path) -> None:
    file = AuditFile(path)
    for number in range(500):
        file.append(b"%d\n" % number)
    file.close()
    file.close()
    assert path.read_bytes().split() == [b"%d" % number for number in range(500)]


def test_a_link_is_not_followed(opened: Opener, path: Path) -> None:
    target = path.with_name("target")
    target.write_bytes(b"")
    path.symlink_to(target)
    with pytest.raises(HegmError, match="cannot be opened"):
        opened(path)


def test_files_that_others_could_change_are_refused_with_a_hint(opened: Opener, path: Path) -> None:
    fifo, loose, foreign = (path.with_name(name) for name in ("fifo", "loose", "foreign"))
    os.mkfifo(fifo)
    loose.touch()
    loose.chmod(0o622)
    refused = {fifo: "is not a regular file", loose: "has mode 0622", Path("/dev/null"): "is not a regular"}
    if os.getuid() == 0:
        foreign.touch()
        os.chown(foreign, 12345, 0)
        refused[foreign] = "belongs to uid 12345"
    for wrong, why in refused.items():
        with pytest.raises(HegmError, match=why) as caught:
            opened(wrong)
        assert caught.value.code is BAD_CONFIG


def test_a_missing_directory_is_an_error_at_the_start(opened: Opener, path: Path) -> None:
    with pytest.raises(HegmError, match="No such file or directory"):
        opened(path / "below")


def test_a_moved_file_is_replaced_by_a_new_one_without_a_request(opened: Opener, path: Path) -> None:
    file = opened(path)
    file.append(b"one\n")
    assert file.flush()
    path.rename(path.with_suffix(".1"))
    file.append(b"two\n")
    assert file.flush()
    path.unlink()
    file.append(b"three\n")
    assert file.flush()
    assert path.with_suffix(".1").read_bytes() == b"one\n"
    assert path.read_bytes() == b"three\n"


def test_a_reload_switches_to_another_file_to_none_and_back(opened: Opener, path: Path) -> None:
    file = opened(None)
    other = path.with_name("other")
    for number, there in enumerate((None, path, None, other)):
        file.reopen(there)
        file.append(b"%d\n" % number)
    assert file.flush()
    assert (path.read_bytes(), other.read_bytes()) == (b"1\n", b"3\n")
    assert file.lost == 0


def test_a_new_file_that_cannot_be_opened_leaves_the_old_one_in_use(
    opened: Opener, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(path)
    later = path.with_name("later") / "audit.jsonl"
    file.reopen(later)
    file.append(b"one\n")
    file.append(b"two\n")
    assert file.flush()
    assert path.read_bytes() == b"one\ntwo\n"
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    later.parent.mkdir()
    file.append(b"three\n")
    assert file.flush()
    assert later.read_bytes() == b"three\n"


def test_a_line_that_was_cut_off_by_a_crash_does_not_spoil_the_next(opened: Opener, path: Path) -> None:
    path.write_bytes(b'{"op":"rel')
    path.chmod(0o600)
    file = opened(path)
    file.append(b"{}\n")
    file.append(b"{}\n")
    assert file.flush()
    assert path.read_bytes() == b'{"op":"rel\n{}\n{}\n'


def test_a_full_disk_is_reported_once_and_so_is_its_end(
    opened: Opener, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = opened(path)
    with at_most(10):
        for line in (b"1234567\n", b"cut off here\n", b"lost\n", b"lost too\n"):
            file.append(line)
        assert file.flush()
        assert path.read_bytes() == b"1234567\ncu"
    file.append(b"room again\n")
    file.append(b"and more\n")
    assert file.flush()
    assert path.read_bytes() == b"1234567\ncu\nroom again\nand more\n"
    assert file.lost == 3
    messages = [(record.levelname, record.getMessage().split(str(path))[0]) for record in caplog.records]
    assert messages == [("ERROR", "audit records are missing from "), ("WARNING", "3 audit records are missing from ")]


def test_a_disk_that_hangs_costs_lines_and_never_time(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stuck, free = threading.Event(), threading.Event()

    class Hanging(AuditFile):
        def _append(self, line: bytes) -> None:
            stuck.set()
            free.wait()
            super()._append(line)

    file = Hanging(path, waiting_lines=3)
    file.append(b"0\n")
    assert stuck.wait(HANG_S)
    for number in range(1, 6):
        file.append(b"%d\n" % number)
    assert file.lost == 2
    assert not file.flush(0.01)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    free.set()
    file.close()
    assert path.read_bytes() == b"0\n1\n2\n3\n"
