"""Images as the daemon uses them: written by a process with the caller's rights, and no other file accepted as one."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import psutil
import pytest

from hegmd.errors import BUSY, DENIED, HegmError, Refused
from hegmd.gpu_helper.calls import HelperLost
from hegmd.images.files.catalogue import look_into, sweep
from hegmd.images.files.images import Images
from hegmd.images.files.open_image import ImageWriter
from hegmd.images.files.private_directory import PrivateDirectory
from hegmd.protocol.images import ImageProcess, Manifest
from hegmd.system.programs import Rights
from tests.patience import HANG_S
from tests.unit.images.files.directory import flip

ROOT = Path(__file__).resolve().parents[4]
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
    """A directory of another user that this user can enter."""
    folder = Path("/var/tmp") / f"hegm-image-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, NOBODY.uid, NOBODY.gid)
    yield folder
    shutil.rmtree(folder)


def files_in(dir_fd: int) -> dict[str, bytes]:
    return {name: Path(f"/proc/self/fd/{dir_fd}/{name}").read_bytes() for name in os.listdir(dir_fd)}


def dump(lent: ImageWriter) -> dict[str, bytes]:
    """Write the files of a CRIU dump, as far as these tests need them."""
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
    os.pwrite(fd, b"\xff" * SIZE_BYTES, 0)  # old content must not be visible between the zeros
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


@pytest.mark.thorough
async def test_written_bytes_are_read_back(tmp_path: Path, memory: tuple[int, bytes]) -> None:
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
@needs_root
async def test_an_image_that_any_user_could_have_written_is_restored_for_root_only(
    tmp_path: Path, others: Path, memory: tuple[int, bytes]
) -> None:
    path = others / "image"
    async with room(tmp_path / "other node") as images:
        files = await made(images, path, memory[0], NOBODY)
    async with room(tmp_path / "state") as images:
        refused = await refusal(images, path, NOBODY)
        assert refused.code is DENIED
        assert "not signed with this node's key" in refused.message
        shutil.copytree(path, tmp_path / "own")
        for copied in (tmp_path / "own").rglob("*"):
            os.chown(copied, SELF.uid, SELF.gid)
        assert (await opened_and_read(images, tmp_path / "own"))[1] == files
    async with room(tmp_path / "second node", tmp_path / "other node" / "image.key") as images:
        assert (await opened_and_read(images, path, NOBODY))[1] == files


@pytest.mark.thorough
@needs_root
async def test_criu_reads_the_signed_bytes_for_a_user(tmp_path: Path, others: Path, memory: tuple[int, bytes]) -> None:
    path = others / "image"
    async with room(tmp_path / "state") as images:
        await made(images, path, memory[0], NOBODY)
        flip(path / "criu" / "core-4711.img", 500)
        image = await images.open(str(path), NOBODY)
        with pytest.raises(HegmError, match=r"criu/core-4711\.img of .* does not match its checksum"):
            await image.private_criu_dir()
        await image.end()


@pytest.mark.thorough
@needs_root
async def test_a_caller_gets_nowhere_that_they_could_not_get_by_themselves(
    tmp_path: Path, others: Path, memory: tuple[int, bytes]
) -> None:
    async with room(tmp_path / "state") as images:
        (others / "root's").mkdir()
        (others / "link").symlink_to(others / "root's")
        for name in ("root's/image", "link/image", "/root/image"):
            with pytest.raises(HegmError) as refused:
                await images.lend(str(others / name), NOBODY)
            assert refused.value.code is DENIED
        await made(images, others / "root's" / "image", memory[0])
        assert (await refusal(images, others / "root's" / "image", NOBODY)).code is DENIED
        os.chown(others / "root's", 0, 4711)
        (others / "root's").chmod(0o770)
        await made(images, others / "root's" / "theirs", memory[0], Rights(NOBODY.uid, NOBODY.gid, (4711,)))
        assert (await refusal(images, others / "root's" / "theirs")).message.endswith(
            "belongs to uid 65534, not to uid 0"
        )


@pytest.mark.thorough
async def test_a_request_without_disk_space_is_refused_before_a_job_stops(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    much_bytes = 2 * status.f_blocks * status.f_frsize
    (tmp_path / "taken").write_bytes(b"")
    async with room(tmp_path / "state") as images:
        await images.require_space(str(tmp_path / "image"), SELF, criu_bytes=1, bytes_of_gpus=1)
        for name, size_bytes, why in (("image", much_bytes, "MiB free, and"), ("taken", 1, "already exists")):
            with pytest.raises(HegmError, match=why):
                await images.require_space(str(tmp_path / name), SELF, criu_bytes=1, bytes_of_gpus=size_bytes)
    assert entries(tmp_path) == ["state", "state/image.key", "state/images", "taken"]


@pytest.mark.thorough
@needs_root
async def test_free_space_is_read_with_the_callers_rights(tmp_path: Path, others: Path) -> None:
    async with room(tmp_path / "state") as images:
        await images.require_space(str(others / "image"), NOBODY, criu_bytes=1, bytes_of_gpus=1)
        os.chmod(others, 0o500)
        for path in (others / "image", tmp_path / "image", others / "nowhere" / "image"):
            with pytest.raises(HegmError):
                await images.require_space(str(path), NOBODY, criu_bytes=1, bytes_of_gpus=1)


@pytest.mark.thorough
async def test_an_image_is_restored_by_one_at_a_time_and_free_again_after(
    tmp_path: Path, memory: tuple[int, bytes]
) -> None:
    async with room(tmp_path / "state") as images:
        await made(images, tmp_path / "image", memory[0])
        one = await images.open(str(tmp_path / "image"), SELF)
        assert (await refusal(images, tmp_path / "image")).code is BUSY
        await one.end()
        await opened_and_read(images, tmp_path / "image")


@pytest.mark.thorough
async def test_a_killed_image_writer_leaves_files_that_are_known_as_remains(
    tmp_path: Path, memory: tuple[int, bytes]
) -> None:
    async with room(tmp_path / "state") as images:
        lent = await images.lend(str(tmp_path / "image"), SELF)
        (pid,) = hands_here()
        started = anyio.Event()

        async def write() -> None:
            with pytest.raises(HelperLost):
                await lent.write_bytes("4711.0", memory[0], SIZE_BYTES, lambda _done_bytes: started.set())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(write)
            await started.wait()
            os.kill(pid, signal.SIGKILL)
        await lent.discard()
        assert [image.state for image in look_into(str(tmp_path))] == ["left-over"]
        (left,) = await images.sweep(str(tmp_path / "image"), SELF)
        assert "hegm-new" in left
    assert entries(tmp_path) == ["state", "state/image.key", "state/images"]


@pytest.mark.thorough
async def test_an_image_cancelled_while_it_is_written_leaves_nothing(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    async with room(tmp_path / "state") as images:
        lent = await images.lend(str(tmp_path / "image"), SELF)
        async with anyio.create_task_group() as tasks:

            async def write(name: str) -> None:
                await lent.write_bytes(name, memory[0], SIZE_BYTES, lambda _done_bytes: tasks.cancel_scope.cancel())

            for number in range(4):
                tasks.start_soon(write, f"4711.{number}")
        assert tasks.cancel_scope.cancelled_caught
        await lent.discard()
    assert entries(tmp_path) == ["state", "state/image.key", "state/images"]


@pytest.mark.thorough
async def test_criu_gets_no_damaged_file(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    async with room(tmp_path / "state") as images:
        await made(images, tmp_path / "image", memory[0])
        flip(tmp_path / "image" / "criu" / "pages-1.img", CHUNK_BYTES)
        image = await images.open(str(tmp_path / "image"), SELF)
        with pytest.raises(HegmError, match=r"criu/pages-1\.img does not match its checksum"):
            await image.private_criu_dir()
        await image.end()


@pytest.mark.thorough
def test_a_killed_daemon_ends_its_child_and_leaves_no_image(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    words = [sys.executable, "-m", "tests.unit.images.files.writing", str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as daemon:
        assert daemon.stdout is not None
        hand = os.pidfd_open(int(daemon.stdout.readline()))
        daemon.kill()
    assert select.select([hand], [], [], HANG_S)[0], "it still runs"
    os.close(hand)
    assert [image.state for image in look_into(str(tmp_path))] == ["left-over"]
    assert len(sweep(str(tmp_path / "image"))) == 1
    assert not (tmp_path / "image").exists()


@pytest.mark.thorough
async def test_truncated_memory_harms_only_the_writer_process(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    async with room(tmp_path / "state") as images:
        lent = await images.lend(str(tmp_path / "image"), SELF)
        os.ftruncate(memory[0], 4096)
        with pytest.raises(HegmError, match="were expected"):
            await lent.write_bytes("4711.0", memory[0], SIZE_BYTES)
        await lent.discard()
        assert entries(tmp_path) == ["state", "state/image.key", "state/images"]


async def test_private_files_of_an_earlier_daemon_are_removed_in_the_background(tmp_path: Path) -> None:
    """The files may have many GB: the daemon removed them before it answered any request."""
    private = tmp_path / "state" / "images"
    (private / "ab").mkdir(parents=True)
    images = images_in(tmp_path / "state")
    (private / "of this one").mkdir()
    async with anyio.create_task_group() as tasks:
        await tasks.start(images.run)
        while (private / "ab").exists():
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert [path.name for path in private.iterdir()] == ["of this one"]


def hands_here() -> list[int]:
    """The hands that this process has started."""
    return [child.pid for child in psutil.Process().children() if "hegmd.images.files.child" in child.cmdline()]


def test_private_directories_are_accessible_to_the_daemon_only(tmp_path: Path) -> None:
    images_in(tmp_path / "state")
    assert (tmp_path / "state" / "images").stat().st_mode & 0o777 == 0o700


@pytest.mark.thorough
async def test_bytes_that_an_image_does_not_have_are_not_read(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    async with room(tmp_path / "state") as images:
        await made(images, tmp_path / "image", memory[0])
        image = await images.open(str(tmp_path / "image"), SELF)
        try:
            with pytest.raises(Refused, match=r"has no byte file '4712.0'"):
                await image.read_bytes("4712.0", memory[0])
        finally:
            await image.end()


def test_an_unusable_state_directory_is_reported_with_its_disk(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(HegmError, match="images cannot be created: Not a directory"):
        Images(tmp_path / "state", in_unit=False)
    with pytest.raises(HegmError, match=r"state/[0-9a-f]{16} cannot be created: Not a directory"):
        PrivateDirectory(tmp_path / "state")


async def test_missing_private_files_of_criu_are_named(tmp_path: Path) -> None:
    private = PrivateDirectory(tmp_path)
    try:
        with pytest.raises(HegmError, match=r"cannot be read: .*gone.img"):
            private.open_files(["gone.img"])
    finally:
        await private.close()
