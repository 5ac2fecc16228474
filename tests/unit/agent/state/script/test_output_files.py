"""The files that a recovered process cuts back to their length at the snapshot, and those that it leaves alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.state.script import output_files

HOLDS = "import sys; held = open(sys.argv[1], 'a'); print('holds', flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request of a supervisor, which is the parent of these tests."""
    monkeypatch.setenv(output_files.WISH, str(os.getppid()))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    made = tmp_path / "log"
    made.write_text("one\n")
    return made


def lengths(log: Path) -> list[Any]:
    """Return the stored length of that file. The output of the tests may be in another file."""
    return [saved for saved in output_files.lengths() if saved[0] == str(log)]


def test_a_file_that_has_grown_is_cut_and_written_on_from_there(log: Path) -> None:
    """Through descriptors that append, and through those that keep their own offset, as redirected output does."""
    with log.open("a") as appending, log.open("w") as own_place:
        own_place.write("one\n")
        own_place.flush()
        saved = lengths(log)
        assert [path for path, *_ in saved] == [str(log)]
        print("two", file=appending, flush=True)
        own_place.seek(0, os.SEEK_END)
        print("two again", file=own_place, flush=True)
        output_files.cut_back(saved)
        assert log.read_text() == "one\n"
        print("three", file=own_place, flush=True)
        print("four", file=appending, flush=True)
    assert log.read_text() == "one\nthree\nfour\n"


def test_the_lines_of_another_job_that_closes_the_file_each_time_are_not_lost(log: Path) -> None:
    """Nothing tells them from those of this job, and they were gone."""
    cut = log.with_name("log.cut")
    cut.write_text("of an earlier recovery\n")
    with log.open("a") as mine:
        saved = lengths(log)
        print("two", file=mine, flush=True)
        with log.open("a") as other:
            print("another job's", file=other)
        output_files.cut_back(saved)
    assert log.read_text() == "one\n"
    assert cut.read_text() == "of an earlier recovery\ntwo\nanother job's\n"
    assert not [path for path in output_files._appended if path.endswith(".cut")]


def test_a_file_is_not_truncated_if_its_rest_cannot_be_saved(log: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.with_name("log.cut").symlink_to("elsewhere")
    with log.open("a") as mine:
        saved = lengths(log)
        print("two", file=mine, flush=True)
        output_files.cut_back(saved)
    assert log.read_text() == "one\ntwo\n"
    assert "was not cut back" in capfd.readouterr().err
    assert not log.with_name("elsewhere").exists()


def test_a_file_opened_for_each_line_is_found_too(log: Path) -> None:
    """In a process of its own, since no audit hook can be taken back."""
    program = (
        "from hegmd.agent.state.script import output_files as files; import sys\n"
        "files.follow()\n"
        "for _ in range(2):\n"
        "    with open(sys.argv[1], 'a') as log: log.write('two\\n')\n"
        "    saved = files.lengths()\n"
        "    with open(sys.argv[1], 'a') as log: log.write('three\\n')\n"
        "    files.cut_back(saved)\n"
    )
    environ = {**os.environ, output_files.WISH: str(os.getpid())}
    subprocess.run([sys.executable, "-c", program, str(log)], env=environ, check=True)
    assert log.read_text() == "one\ntwo\ntwo\n"


def _replaced(log: Path) -> None:
    log.unlink()
    log.write_text("another file\n")


def _rewritten(log: Path) -> None:
    log.write_text("six\nseven\n")


def _shorter(log: Path) -> None:
    log.write_text("o")


def _linked(log: Path) -> None:
    log.rename(log.with_name("other"))
    with log.with_name("other").open("a") as other:
        other.write("two\n")
    log.symlink_to("other")


def _gone(log: Path) -> None:
    log.unlink()


@pytest.mark.parametrize("change", [_replaced, _rewritten, _shorter, _linked, _gone])
def test_only_the_same_file_with_more_at_its_end_is_truncated(log: Path, change: Callable[[Path], None]) -> None:
    with log.open("a"):
        saved = lengths(log)
    change(log)
    before = log.read_text() if log.exists() else None
    output_files.cut_back(saved)
    assert (log.read_text() if log.exists() else None) == before


def test_a_file_changed_in_the_middle_is_not_an_output_file(log: Path) -> None:
    with log.open("r+b"), log.open("rb"), log.open("wb") as behind:
        behind.write(b"one\n")
        behind.flush()
        behind.seek(0)
        assert lengths(log) == []


@pytest.fixture
def second_process(log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the job's that is neither this one's child nor on its line, once its parent has ended."""
    starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {HOLDS!r}, sys.argv[1]])"
    made = subprocess.Popen([sys.executable, "-c", starts, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert made.stdout is not None
    assert made.stdin is not None
    assert made.stdout.readline() == b"holds\n"
    made.wait()
    yield made
    made.stdin.close()
    made.stdout.read()
    made.stdout.close()


def test_a_file_that_another_process_also_writes_is_left_unchanged_and_reported(
    log: Path, second_process: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    assert second_process.returncode == 0
    with log.open("a") as mine:
        saved = lengths(log)
        print("two", file=mine, flush=True)
        output_files.cut_back(saved)
    assert log.read_text() == "one\ntwo\n"
    assert "writes to it as well" in capfd.readouterr().err


def test_without_the_wish_nothing_is_cut(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with log.open("a") as mine:
        saved = lengths(log)
        print("two", file=mine, flush=True)
        monkeypatch.delenv(output_files.WISH)
        output_files.cut_back(saved)
    assert log.read_text() == "one\ntwo\n"
