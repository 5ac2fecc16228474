"""`hegmctl images`: without a daemon, and with the caller's own rights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmctl.images import manifest_text, removed_text, seen_text, verified_text
from hegmctl.tables import Style
from hegmd.errors import NOT_FOUND, REFUSED
from hegmd.images.files import catalogue
from hegmd.images.files.folder import make
from hegmd.protocol.images import ImageRemoved, ImageSeen, ImagesSeen, ImageVerified
from tests.unit.hegmctl.running import NOBODY, as_nobody, command, environment
from tests.unit.images.files.directory import MANIFEST, built, flip

PIPE = Style()


def hegmctl(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("images", *words, "--json"),
        env=environment("/nowhere.sock"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def error(done: subprocess.CompletedProcess[str]) -> tuple[int, str]:
    return done.returncode, json.loads(done.stderr)["error"]["message"]


@pytest.mark.thorough
def test_an_image_is_listed_shown_verified_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "image"
    manifest = built(path)
    listed = hegmctl("ls", str(tmp_path))
    assert [(image["state"], image["path"]) for image in json.loads(listed.stdout)["images"]] == [("whole", str(path))]
    assert json.loads(hegmctl("show", str(path)).stdout) == {"schema": 1, **manifest.to_plain()}
    assert (
        json.loads(hegmctl("verify", str(path)).stdout)["size_bytes"]
        == json.loads(listed.stdout)["images"][0]["size_bytes"]
    )
    assert error(hegmctl("rm", str(path))) == (
        2,
        f"{path} would be lost permanently, and there is no terminal to confirm it",
    )
    assert path.exists()
    assert json.loads(hegmctl("rm", "--yes", str(path)).stdout)["paths"] == [str(path)]
    assert json.loads(hegmctl("ls", str(tmp_path)).stdout)["images"] == []
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
def test_broken_images_and_remains_are_reported_with_an_exit_status(tmp_path: Path) -> None:
    built(tmp_path / "broken")
    (tmp_path / "broken" / "criu" / "pages-1.img").unlink()
    make(str(tmp_path / "job")).close()
    built(tmp_path / "flipped")
    flip(tmp_path / "flipped" / "bytes" / "4711.0", 1 << 20)
    done = hegmctl("ls", str(tmp_path))
    assert done.returncode == 15
    states = {Path(image["path"]).name.partition("-")[0]: image["state"] for image in json.loads(done.stdout)["images"]}
    assert states == {".job.hegm": "left-over", "broken": "broken", "flipped": "whole"}
    status, message = error(hegmctl("verify", str(tmp_path / "flipped")))
    assert (status, message) == (14, "the byte file 4711.0 is damaged: chunk 0 of 2 does not match its checksum")
    assert error(hegmctl("rm", "--yes"))[0] == 2
    assert error(hegmctl("show", str(tmp_path / "nowhere")))[0] == 5


@pytest.fixture
def public() -> Iterator[Path]:
    folder = Path("/var/tmp") / f"hegmctl-images-{os.getpid()}"
    folder.mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.thorough
def test_images_of_other_users_are_neither_read_nor_removed(public: Path) -> None:
    built(public / "image")
    environ = environment("/nowhere.sock")
    for verb in (("show",), ("rm", "--yes")):
        done = as_nobody(*command("images", *verb, str(public / "image")), environ=environ)
        assert done.returncode == 4, done
    os.chown(public, NOBODY, NOBODY)
    (public / "image").rename(public / "theirs now, by name")  # the owner of the parent directory can do that
    done = as_nobody(*command("images", "rm", "--yes", str(public / "theirs now, by name")), environ=environ)
    assert done.returncode == 4, done
    assert (public / "theirs now, by name" / "manifest.json").exists()


def test_nothing_from_a_manifest_reaches_the_terminal_raw() -> None:
    evil = "\x1b[2J"
    image = ImageSeen(
        path=evil, state="broken", why=evil, size_bytes=None, stored_bytes=None, made_utc=None, host=evil, command=evil
    )
    process = MANIFEST.processes[0].replace(command=evil)
    lines = [
        *seen_text(ImagesSeen(images=(image,)), PIPE),
        *manifest_text(MANIFEST.replace(host=evil, kernel=evil, criu_version=evil, processes=(process,)), PIPE),
        *removed_text(ImageRemoved(paths=(evil,)), PIPE),
        *verified_text(ImageVerified(path=evil, size_bytes=1, stored_bytes=1, took_s=1.0), PIPE),
    ]
    assert not any("\x1b" in line for line in lines)


def test_unknown_values_are_not_shown_as_zero() -> None:
    image = ImageSeen(
        path="/x",
        state="left-over",
        why="w",
        size_bytes=None,
        stored_bytes=None,
        made_utc=None,
        host=None,
        command=None,
    )
    lines = seen_text(ImagesSeen(images=(image,)), PIPE)
    assert lines[1].split() == ["left-over", "-", "-", "-", "-", "-", "/x"]
    assert lines[3:] == ["/x: w", "Remove unfinished images with: hegmctl images rm DIR"]
    assert not any("1970" in line for line in manifest_text(MANIFEST, PIPE))
    assert seen_text(ImagesSeen(images=()), PIPE) == ["There is no image here."]


@pytest.mark.thorough
def test_removing_a_missing_image_asks_for_no_confirmation(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert error(hegmctl("rm", str(tmp_path / "nope"))) == (
        NOT_FOUND.exit_status,
        f"{tmp_path}/nope cannot be removed: No such file or directory",
    )
    status, message = error(hegmctl("rm", str(tmp_path / "folder")))
    assert (status, "is not an image" in message) == (REFUSED.exit_status, True)


def test_a_directory_that_was_removed_is_named_as_the_reason_that_a_path_in_it_is_none(tmp_path: Path) -> None:
    """Each command that takes a path ended with a traceback."""
    (gone := tmp_path / "gone").mkdir()
    within = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', str(gone)]
    ran = subprocess.run(
        [*within, *command("images", "ls", "--json")],
        env=environment("/nowhere.sock"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert error(ran) == (NOT_FOUND.exit_status, ". has no absolute path: the current directory was removed")


@pytest.mark.thorough
def test_images_from_before_the_clock_was_set_back_are_the_oldest(tmp_path: Path) -> None:
    """Each new image was removed as the oldest at once, and an hour of training had no image."""
    now_utc = 1_700_000_000.0
    ages_s = {"job.20231114T231300Z": -3600.0, "job.20231114T220300Z": 600.0, "job.20231114T221300Z": 0.0}
    for name, age_s in ages_s.items():
        built(tmp_path / name, manifest=MANIFEST.replace(made_utc=now_utc - age_s))
    gone = catalogue.trim(str(tmp_path), "job", 2, now_utc)
    assert gone == [str(tmp_path / "job.20231114T231300Z")]
