"""Images as the daemon has them: written by a hand with the caller's rights, and nothing taken for one that is none."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.external import Rights
from hegmd.image.images import Images, Lent
from hegmd.protocol.images import ImageProcess, Manifest

CHUNK_BYTES = 8 << 20
SIZE_BYTES = 2 * CHUNK_BYTES + 4096 + 17
SELF = Rights(os.geteuid(), os.getegid(), tuple(os.getgroups()))
NOBODY = Rights(65534, 65534)
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user takes root")
MANIFEST = Manifest(
    root_pid=4711, processes=(ImageProcess(pid=4711, parent_pid=None, uid=0, command="python train.py"),)
)


def images_in(state_dir: Path, key_file: Path | None = None) -> Images:
    state_dir.mkdir(exist_ok=True)
    return Images(state_dir, in_unit=False, key_file=key_file)


@contextlib.asynccontextmanager
async def room(state_dir: Path, key_file: Path | None = None) -> AsyncIterator[Images]:
    images = images_in(state_dir, key_file)
    async with anyio.create_task_group() as tasks:
        await tasks.start(images.run)
        yield images
        tasks.cancel_scope.cancel()


@pytest.fixture
def memory() -> Iterator[tuple[int, bytes]]:
    """Random bytes with a chunk of zeros in the middle."""
    data = os.urandom(CHUNK_BYTES) + bytes(CHUNK_BYTES) + os.urandom(SIZE_BYTES - 2 * CHUNK_BYTES)
    fd = os.memfd_create("piece")
    os.pwrite(fd, data, 0)
    yield fd, data
    os.close(fd)


@pytest.fixture
def others(tmp_path: Path) -> Iterator[Path]:
    """A directory of somebody else's, where they can get to it."""
    folder = Path("/var/tmp") / f"hegm-image-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, NOBODY.uid, NOBODY.gid)
    yield folder
    shutil.rmtree(folder)


def files_in(dir_fd: int) -> dict[str, bytes]:
    return {name: Path(f"/proc/self/fd/{dir_fd}/{name}").read_bytes() for name in os.listdir(dir_fd)}


def dump(lent: Lent) -> dict[str, bytes]:
    """What CRIU does, as far as this goes."""
    files = {"core-4711.img": os.urandom(1000), "pages-1.img": os.urandom(CHUNK_BYTES + 5), "empty.img": b""}
    for name, data in files.items():
        fd = os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=lent.criu_dir_fd)
        os.write(fd, data)
        os.close(fd)
    return files


async def made(images: Images, path: Path, memory_fd: int, rights: Rights = SELF) -> dict[str, bytes]:
    lent = await images.lend(str(path), rights)
    try:
        files = dump(lent)
        await lent.write_bytes("4711.0", memory_fd, SIZE_BYTES)
        await lent.finish(MANIFEST)
    finally:
        await lent.end()
    return files


async def opened_and_read(images: Images, path: Path, rights: Rights = SELF) -> tuple[bytes, dict[str, bytes]]:
    image = await images.open(str(path), rights)
    fd = os.memfd_create("into")
    os.pwrite(fd, b"\xff" * SIZE_BYTES, 0)  # what was there before must not shine through the zeros
    try:
        assert await image.read_bytes("4711.0", fd) == SIZE_BYTES
        await image.verify()
        criu_fd = await image.private_criu_dir()
        return os.pread(fd, SIZE_BYTES, 0), files_in(criu_fd)
    finally:
        os.close(fd)
        await image.end()


def entries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


async def test_what_is_written_comes_back(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    path = tmp_path / "image"
    async with room(tmp_path / "state") as images:
        files = await made(images, path, memory[0])
        assert await opened_and_read(images, path) == (memory[1], files)
    assert entries(path) == sorted(
        ["bytes", "bytes/4711.0", "criu", "lock", "manifest.json", "seal", *(f"criu/{name}" for name in files)]
    )
    for found in (path, *path.rglob("*")):
        assert found.stat().st_mode & 0o777 == (0o700 if found.is_dir() else 0o600), found
    manifest = json.loads((path / "manifest.json").read_bytes())
    assert manifest["format"] == "hegm-image"
    assert manifest["host"] == os.uname().nodename
    (bytes_of_it,) = manifest["byte_files"]
    assert bytes_of_it["stored_bytes"] == SIZE_BYTES - CHUNK_BYTES
    assert (path / "bytes" / "4711.0").stat().st_blocks * 512 < SIZE_BYTES - CHUNK_BYTES // 2, "zeros take room on disk"


@needs_root
async def test_another_users_image_is_theirs_and_criu_never_meets_their_directory(
    tmp_path: Path, others: Path, memory: tuple[int, bytes]
) -> None:
    path, private = others / "image", tmp_path / "state" / "images"
    async with room(tmp_path / "state") as images:
        lent = await images.lend(str(path), NOBODY)
        assert Path(os.readlink(f"/proc/self/fd/{lent.criu_dir_fd}")).parent == private
        files = dump(lent)
        await lent.write_bytes("4711.0", memory[0], SIZE_BYTES)
        await lent.finish(MANIFEST)
        assert {found.stat().st_uid for found in (path, *path.rglob("*"))} == {NOBODY.uid}
        assert list(private.iterdir()) == []
        assert await opened_and_read(images, path, NOBODY) == (memory[1], files)
        assert list(private.iterdir()) == []


async def test_a_discarded_image_leaves_nothing(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    async with room(tmp_path / "state") as images:
        lent = await images.lend(str(tmp_path / "here" / ".." / "image"), SELF)
        dump(lent)
        await lent.write_bytes("4711.0", memory[0], SIZE_BYTES)
        await lent.discard()
    assert entries(tmp_path) == ["state", "state/image.key", "state/images"]


async def refusal(images: Images, path: Path, rights: Rights = SELF) -> HegmError:
    with pytest.raises(HegmError) as refused:
        await opened_and_read(images, path, rights)
    return refused.value
