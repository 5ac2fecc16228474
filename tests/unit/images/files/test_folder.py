"""Directories of images: whole or not there, and nothing in one is mistaken for what it is not.

Longer than 400 lines because each rule of the format has a directory that breaks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.errors import BUSY, DENIED, INCOMPATIBLE, NOT_FOUND, REFUSED, UNAVAILABLE, Code, HegmError
from hegmd.images.files import catalogue
from hegmd.images.files.folder import find, free_bytes_at, make
from hegmd.images.files.lock import lock_alone
from hegmd.images.files.signature import load_key
from tests.huge import huge_memory
from tests.unit.images.files.directory import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    MANIFEST,
    SIZE_BYTES,
    built,
    flip,
    ignore,
    rewritten,
)
from tests.wide import quick_first

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")


def refusal(path: Path, code: Code) -> str:
    with pytest.raises(HegmError) as refused:
        catalogue.verify(str(path), ignore)
    assert refused.value.code is code, refused.value
    return refused.value.message


def test_an_image_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = built(tmp_path / "image")
    counts: list[tuple[int, int]] = []
    verified = catalogue.verify(str(tmp_path / "image"), lambda done, size: counts.append((done, size)))
    assert catalogue.read(str(tmp_path / "image")) == manifest
    assert verified.size_bytes == catalogue.size_of(manifest) == counts[-1][0] == counts[-1][1]
    assert verified.stored_bytes >= SIZE_BYTES


@pytest.mark.parametrize("size_bytes", [0, 1, BLOCK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 1])
@pytest.mark.parametrize("byte", [b"\0", b"x"])
def test_bytes_of_any_length_round_trip(tmp_path: Path, size_bytes: int, byte: bytes) -> None:
    manifest = built(tmp_path / "image", byte * size_bytes, size_bytes=size_bytes)
    (file,) = manifest.byte_files
    assert file.stored_bytes == (size_bytes if byte != b"\0" else 0)
    fd = os.memfd_create("into")
    os.pwrite(fd, b"\xff" * (size_bytes + 1), 0)  # old content must not be visible between the zeros
    with find(str(tmp_path / "image")) as folder:
        folder.byte_file(file.name, manifest.id).read(size_bytes, file.sum, fd, ignore)
    assert os.pread(fd, size_bytes + 1, 0) == byte * size_bytes + b"\xff"
    os.close(fd)


def test_huge_pages_which_know_no_write_are_read_into(tmp_path: Path) -> None:
    size_bytes = (2 << 20) + 5
    with huge_memory(size_bytes) as memory:
        data = os.urandom(size_bytes)
        manifest = built(tmp_path / "image", data, size_bytes=size_bytes)
        (file,) = manifest.byte_files
        with find(str(tmp_path / "image")) as folder:
            folder.byte_file(file.name, manifest.id).read(size_bytes, file.sum, memory, ignore)
        assert os.pread(memory, size_bytes, 0) == data


@pytest.mark.thorough
def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    end_of_bytes = BLOCK_BYTES + SIZE_BYTES
    table = (end_of_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES
    places = [("bytes/4711.0", place) for place in (0, 9, 20, 30, 50, 72, BLOCK_BYTES, end_of_bytes - 1)]
    places += [("bytes/4711.0", table + place) for place in range(0, 20, 3)]
    places += [("criu/core-4711.img", 7), ("criu/inventory.img", BLOCK_BYTES - 1)]
    places += [("manifest.json", place) for place in (0, 40, 400)]
    places += [("seal", place) for place in range((path / "seal").stat().st_size)]
    for name, place in places:
        flip(path / name, place)
        refusal(path, UNAVAILABLE)
        flip(path / name, place)
    catalogue.verify(str(path), ignore)


@pytest.mark.parametrize("name", ["bytes/4711.0", "criu/core-4711.img", "manifest.json", "seal"])
@pytest.mark.parametrize("kept_bytes", quick_first([60, 0, BLOCK_BYTES], 1))
def test_a_truncated_file_is_reported(tmp_path: Path, name: str, kept_bytes: int) -> None:
    path = tmp_path / "image"
    built(path)
    os.truncate(path / name, min(kept_bytes, (path / name).stat().st_size - 80))
    assert "damaged" in refusal(path, UNAVAILABLE)


@pytest.mark.thorough
def test_missing_and_unknown_keys_are_named(tmp_path: Path) -> None:
    built(tmp_path / "short")
    (tmp_path / "short" / "criu" / "pages-1.img").unlink()
    assert "criu/pages-1.img is missing" in refusal(tmp_path / "short", UNAVAILABLE)
    built(tmp_path / "more")
    (tmp_path / "more" / "criu" / "files.img").touch()
    assert "files.img, which is not in the manifest" in refusal(tmp_path / "more", UNAVAILABLE)
    built(tmp_path / "bare")
    (tmp_path / "bare" / "seal").unlink()
    assert "is not a finished image: it has no" in refusal(tmp_path / "bare", NOT_FOUND)
    assert "No such file" in refusal(tmp_path / "nowhere", NOT_FOUND)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["criu/core-4711.img", "bytes/4711.0", "manifest.json", "seal", "criu", "bytes", ""])
def test_no_link_is_followed_in_an_image_nor_to_one(tmp_path: Path, name: str) -> None:
    path = tmp_path / "image"
    built(path)
    linked = path / name
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HegmError):
        catalogue.verify(str(path), ignore)


@pytest.mark.thorough
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    for name in ("criu/core-4711.img", "manifest.json", "bytes/4711.0"):
        path = tmp_path / name.replace("/", "-")
        built(path)
        (path / name).unlink()
        os.mkfifo(path / name)
        with pytest.raises(HegmError):
            catalogue.verify(str(path), ignore)


@pytest.mark.thorough
def test_the_bytes_of_another_image_are_not_used(tmp_path: Path) -> None:
    manifest = built(tmp_path / "one")
    built(tmp_path / "other", manifest=manifest.replace(id="b" * 32))
    built(tmp_path / "twin")
    shutil.copy(tmp_path / "other" / "bytes" / "4711.0", tmp_path / "one" / "bytes" / "4711.0")
    assert f"it belongs to {'b' * 32}/4711.0" in refusal(tmp_path / "one", UNAVAILABLE)
    shutil.copy(tmp_path / "twin" / "bytes" / "4711.0", tmp_path / "one" / "bytes" / "4711.0")
    assert "its checksums differ from those of the manifest: the file was replaced" in refusal(
        tmp_path / "one", UNAVAILABLE
    )


def test_a_manifest_of_a_later_version_of_something_else_or_of_nonsense_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image"
    plain = built(path).to_plain()
    rewritten(path, json.dumps({**plain, "version": 2, "hegmd_version": "9.1"}).encode())
    assert "has version 2; this hegmd reads versions up to 1" in refusal(path, INCOMPATIBLE)
    rewritten(path, json.dumps({**plain, "format": "tar"}).encode())
    assert "is not an image of hegmd" in refusal(path, REFUSED)
    for text in (b"[" * 100_000, b"{", b"{}", b"\xff", json.dumps({**plain, "workers": 1}).encode()):
        rewritten(path, text)
        assert refusal(path, REFUSED if text == b"{}" else UNAVAILABLE)
    rewritten(path, json.dumps({**plain, "of_the_future": 1}).encode())
    catalogue.verify(str(path), ignore)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["../../seal", "/etc/passwd", "", ".", "..", "a/b", "-rf", "x" * 200])
def test_a_name_in_a_manifest_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    path = tmp_path / "image"
    manifest = built(path)
    (file,) = manifest.byte_files
    rewritten(path, json.dumps(manifest.replace(byte_files=(file.replace(name=name),)).to_plain()).encode())
    assert "is not a file name that an image can have" in refusal(path, REFUSED)


def refused_making(path: Path | str, code: Code) -> str:
    with pytest.raises(HegmError) as refused:
        make(str(path))
    assert refused.value.code is code, refused.value
    return refused.value.message


@pytest.mark.thorough
def test_no_existing_file_is_overwritten(tmp_path: Path) -> None:
    built(tmp_path / "image")
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("image", "file", "link", "loop"):
        assert "already exists" in refused_making(tmp_path / name, REFUSED)
    refused_making(tmp_path / "nowhere" / "image", NOT_FOUND)
    refused_making(tmp_path / "file" / "image", REFUSED)
    for path in ("image", "", "/"):
        assert "cannot be the directory of an image" in refused_making(path, REFUSED)
    assert sorted(os.listdir(tmp_path)) == ["empty", "file", "image", "link", "loop"]
    built(tmp_path / "empty")
    catalogue.verify(str(tmp_path / "empty"), ignore)


def test_the_suggested_command_removed_another_directory_for_a_name_with_a_space(tmp_path: Path) -> None:
    built(tmp_path / "old train")
    with pytest.raises(HegmError) as refused:
        make(str(tmp_path / "old train"))
    assert f"hegmctl images rm '{tmp_path}/old train'" in refused.value.hint


def test_a_name_that_is_too_long_is_reported_as_such(tmp_path: Path) -> None:
    assert "has 201 bytes; the name of an image has at most 200" in refused_making(tmp_path / ("x" * 201), REFUSED)


@pytest.mark.thorough
def test_an_image_within_another_left_that_one_damaged(tmp_path: Path) -> None:
    """It was no longer whole, and the job that it was of could not be restored: also by way of a link."""
    image = tmp_path / "image"
    built(image)
    (tmp_path / "link").symlink_to(image / "criu")
    for within in (image / "other", image / "criu" / "other", tmp_path / "link" / "other"):
        for operation in (free_bytes_at, make):
            with pytest.raises(HegmError, match="which could then not be restored") as refused:
                operation(str(within))
            assert refused.value.code is REFUSED
    assert catalogue.verify(str(image), ignore)


def test_a_directory_created_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    with make(str(tmp_path / "image")) as folder:
        built(tmp_path / "image")
        before = catalogue.read(str(tmp_path / "image"))
        with pytest.raises(HegmError, match="already exists"):
            folder.publish(b"{}", b"")
    assert catalogue.read(str(tmp_path / "image")) == before


def states(path: Path) -> list[tuple[str, str]]:
    return [(image.state, image.command or "") for image in catalogue.look_into(str(path))]


def test_remains_of_a_killed_writer_are_recognised_and_removed(tmp_path: Path) -> None:
    with make(str(tmp_path / "image")) as folder:
        (tmp_path / folder.name / "criu" / "core-4711.img").write_bytes(b"half")
        assert states(tmp_path) == [("in-use", "")]
        assert catalogue.sweep(str(tmp_path / "image")) == []
        with pytest.raises(HegmError) as refused:
            catalogue.remove(str(tmp_path / folder.name))
        assert refused.value.code is BUSY
    assert states(tmp_path) == [("left-over", "")]
    (tmp_path / ".image.hegm-new-01234567").mkdir()  # killed before anything was in it
    assert catalogue.sweep(str(tmp_path / "other")) == []
    assert len(catalogue.sweep(str(tmp_path / "image"))) == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.thorough
def test_an_image_is_restored_by_one_caller_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    with find(str(path)) as one, find(str(path)) as other:
        one.lock()
        with pytest.raises(HegmError) as refused:
            other.lock()
        assert refused.value.code is BUSY
        assert states(path) == [("in-use", "python train.py")]
        with pytest.raises(HegmError, match="is being written, restored or removed"):
            catalogue.remove(str(path))
    assert states(path) == [("whole", "python train.py")]
    with find(str(path)) as other:
        other.lock()


def test_listing_images_does_not_block_a_restore(tmp_path: Path) -> None:
    """A listing takes a shared lock for a moment to find other locks: at that moment a restore was refused."""
    path = tmp_path / "lock"
    path.touch()
    lister, restorer = (os.open(path, os.O_RDWR | os.O_CLOEXEC) for _ in range(2))
    try:
        fcntl.flock(lister, fcntl.LOCK_SH)
        with pytest.raises(HegmError, match="is being written, restored or removed"):
            lock_alone(restorer, str(path), within_s=0)
        lock_alone(restorer, str(path), within_s=60, pause=lambda: fcntl.flock(lister, fcntl.LOCK_UN))
        with pytest.raises(BlockingIOError):
            fcntl.flock(lister, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(lister)
        os.close(restorer)


@pytest.mark.thorough
def test_the_newest_whole_images_of_a_series_stay_and_nothing_else_is_touched(tmp_path: Path) -> None:
    stamps = [f"2026010{day}T000000Z" for day in range(1, 5)]
    for name in (*(f"job-a.{stamp}" for stamp in stamps), f"job-b.{stamps[0]}", "job-a.mine", "other"):
        built(tmp_path / name)
    (tmp_path / f"job-a.{stamps[1]}" / "manifest.json").write_bytes(b"broken")
    (tmp_path / "job-a.20260109T000000Z").mkdir()  # no image at all
    with held(tmp_path / f"job-a.{stamps[0]}"):
        assert catalogue.trim(str(tmp_path), "job-a", 2) == []
    gone = catalogue.trim(str(tmp_path), "job-a", 2)
    assert gone == [str(tmp_path / f"job-a.{stamps[0]}")]
    assert catalogue.trim(str(tmp_path), "job-a", 0) == []
    left = {f"job-a.{stamp}" for stamp in stamps[1:]} | {"job-a.20260109T000000Z"}
    assert set(os.listdir(tmp_path)) == left | {f"job-b.{stamps[0]}", "job-a.mine", "other"}


@contextlib.contextmanager
def held(image: Path) -> Iterator[None]:
    """A restore holds the image."""
    folder = find(str(image))
    try:
        folder.lock()
        yield
    finally:
        folder.close()


@pytest.mark.thorough
def test_only_images_are_removed(tmp_path: Path) -> None:
    built(tmp_path / "image")
    (tmp_path / "image" / "thesis.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "image")
    for name, why in (
        ("image", "thesis.txt"),
        ("folder", "is not an image"),
        ("link", "a link"),
        ("nowhere", "No such"),
    ):
        with pytest.raises(HegmError, match=why):
            catalogue.remove(str(tmp_path / name))
    (tmp_path / "image" / "thesis.txt").unlink()
    catalogue.verify(str(tmp_path / "image"), ignore)
    (tmp_path / "image" / "manifest.json").write_bytes(b"broken as it is, it can be removed")
    catalogue.remove(str(tmp_path / "image"))
    assert sorted(os.listdir(tmp_path)) == ["folder", "link"]


def owning(path: Path) -> HegmError | None:
    with find(str(path)) as folder:
        try:
            folder.require_own(os.geteuid())
        except HegmError as error:
            return error
    return None


@pytest.mark.parametrize("name", quick_first(["", "criu/core-4711.img", "criu", "bytes", "manifest.json", "seal"], 2))
def test_an_image_that_others_can_write_is_not_restored(tmp_path: Path, name: str) -> None:
    path = tmp_path / "image"
    built(path)
    assert owning(path) is None
    mode = (path / name).stat().st_mode
    (path / name).chmod(mode | 0o020)
    refused = owning(path)
    assert refused is not None
    assert refused.code is REFUSED
    (path / name).chmod(mode)
    if os.geteuid() == 0:
        os.chown(path / name, 65534, 65534)
        refused = owning(path)
        assert refused is not None
        assert refused.code is DENIED


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "image.key"
    manifest = b"manifest"
    seal = load_key(path, make=True).seal(manifest)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path, make=True).has_signed(manifest, seal)
    assert not load_key(path, make=False).has_signed(b"another", seal)
    assert not load_key(path, make=False).has_signed(manifest, b"")
    assert not load_key(path, make=False).has_signed(manifest, "hmac-sha256 é".encode())
    assert not load_key(tmp_path / "other.key", make=True).has_signed(manifest, seal)
    assert sorted(os.listdir(tmp_path)) == ["image.key", "other.key"]


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [("ab" * 32, 0o640, "not private"), ("ab" * 31, 0o600, "hexadecimal"), ("x" * 64, 0o600, "hexadecimal")],
)
def test_a_key_that_is_not_secret_is_refused(tmp_path: Path, text: str, mode: int, why: str) -> None:
    path = tmp_path / "image.key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(HegmError, match=why):
        load_key(path, make=True)
    with pytest.raises(HegmError, match="cannot be read: No such file"):
        load_key(tmp_path / "nowhere.key", make=False)


def test_a_path_to_a_file_is_not_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(HegmError, match="folder is not an image: it has no criu and bytes"):
        catalogue.read(str(tmp_path / "folder"))
    with pytest.raises(HegmError, match="No such file"):
        catalogue.read(str(tmp_path / "nowhere"))


def test_the_free_space_of_a_disk_was_counted_in_bytes_and_not_in_blocks(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    # Other programs write meanwhile: half of what is free is more than the number of blocks.
    assert free_bytes_at(str(tmp_path / "image")) > status.f_bavail * status.f_frsize // 2 > status.f_bavail


def test_the_list_of_images_names_the_host_that_wrote_one(tmp_path: Path) -> None:
    built(tmp_path / "image", b"x", MANIFEST.replace(host="node7"), size_bytes=1)
    assert [image.host for image in catalogue.look_into(str(tmp_path))] == ["node7"]
