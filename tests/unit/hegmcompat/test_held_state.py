"""A state in memory: the same bytes come back where the folder is empty, and only where there is room is it held."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hegmcompat import held_state

BYTES = os.urandom(3 << 20)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "7" / "latest.pt"
    made.parent.mkdir(mode=0o700)
    made.write_bytes(BYTES)
    return made


def test_a_file_deleted_with_its_folder_is_written_again(path: Path) -> None:
    held = held_state.take(path)
    shutil.rmtree(path.parent)
    held.put_back()
    held.close()
    assert path.read_bytes() == BYTES
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_left_alone(path: Path) -> None:
    before = path.stat()
    held = held_state.take(path)
    held.put_back()
    held.close()
    assert path.stat() == before or path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_foreign_file_is_replaced_by_the_held_one(path: Path) -> None:
    held = held_state.take(path)
    path.unlink()
    path.write_bytes(b"of an earlier image")
    held.put_back()
    held.close()
    assert path.read_bytes() == BYTES


def test_without_free_memory_only_the_file_has_the_state(path: Path) -> None:
    held = held_state.take(path, available_bytes=len(BYTES) + (200 << 20))
    assert not held.is_held
    held.put_back()
    path.unlink()
    with pytest.raises(FileNotFoundError, match="not held"):
        held.put_back()


def test_a_link_does_not_count_as_a_state(path: Path) -> None:
    link = path.with_name("other.pt")
    link.symlink_to(path)
    with pytest.raises(OSError, match="it is a link"):
        held_state.take(link)
