"""A job's size before its boundary is not its size at the boundary: no way of its bytes may depend on the first one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hegmd.errors import Bug, HegmError
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark
from hegmd.images.dump_files import used_bytes
from hegmd.images.files.folder import find
from hegmd.images.manifests import pool_bytes_in
from hegmd.images.rendezvous import Rendezvous
from hegmd.images.restore_job import JobRestorer
from hegmd.memory.pool import Key, Memory, Pool
from hegmd.memory.sizes import HUGE_PAGE_BYTES, MIB, TABLE_BYTES, storages_in, whole_size
from hegmd.protocol.images import ImageFile, ImageWorker, Manifest
from hegmd.protocol.operations import HOST, WORKER
from hegmd.workers.workers import Workers
from tests.cells import in_one_test
from tests.unit.images.files.directory import MANIFEST, built, ignore
from tests.unit.migration.operations import worker
from tests.unit.moving_node import running
from tests.unit.pools import keep_in, opened
from tests.wide import quick_first

# Before the boundary and at it. The first pair is the one of the image that could never be restored.
SIZES = [(8_388_608, 6_410_240), (6_410_240, 8_388_608), (1, 9 * MIB), (9 * MIB, 1), (3 * MIB, 3 * MIB)]


@in_one_test("whole_bytes", [0, 1, TABLE_BYTES, 5 * MIB + 1, 6 * MIB, 12 * MIB, 14 * MIB, 32 << 30])
def test_a_segment_has_the_size_of_its_purpose(whole_bytes: int) -> None:
    found = whole_size(storages_in(whole_bytes))
    assert found >= whole_bytes
    assert found - whole_bytes < HUGE_PAGE_BYTES or whole_bytes < TABLE_BYTES
    assert storages_in(whole_size(4321)) >= 4321


class Opened:
    """An image as a restore opens it, read here."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path

    async def read_bytes(self, name: str, into_fd: int, _on_progress: object) -> None:
        (file,) = self.manifest.byte_files
        with find(str(self._path)) as folder:
            folder.byte_file(name, self.manifest.id).read(file.size_bytes, file.sum, into_fd, ignore)


def _image(path: Path, size_bytes: int, memory: Memory, written_bytes: int, carrier: str = WORKER) -> Any:
    """Return an image of a process with that many bytes at its boundary, of whose segment so much was written."""
    worker = ImageWorker(pid=4711, gpus=(), carrier=carrier, size_bytes=size_bytes, rest_bytes=0, bytes=("4711.0",))
    data = os.pread(memory.fd, written_bytes, 0)
    return Opened(path, built(path, data, MANIFEST.replace(workers=(worker,)), size_bytes=written_bytes))


@pytest.mark.thorough
@pytest.mark.parametrize("carrier", [WORKER, HOST])
@pytest.mark.parametrize("as_earlier_builds", [False, True])
@pytest.mark.parametrize(("before_bytes", "size_bytes"), quick_first(SIZES, 2))
async def test_an_image_of_a_job_that_had_another_size_before_its_boundary_was_refused_for_ever(
    tmp_path: Path, before_bytes: int, size_bytes: int, carrier: str, *, as_earlier_builds: bool
) -> None:
    """Issue 14, row 2. Earlier builds wrote all reserved memory: such an image can be restored too."""
    pool, key, data = opened(keep_in(tmp_path / "here")), Key("7", "4711"), os.urandom(size_bytes)
    await pool.take(key, before_bytes)
    memory = await pool.take(key, size_bytes)  # as the machine does after the count; a sufficient size stays
    os.pwrite(memory.fd, data, 0)
    member = worker(pid=4711, size_bytes=size_bytes, carrier=carrier)
    written_bytes = memory.size_bytes if as_earlier_builds else used_bytes(member, memory)
    assert as_earlier_builds or written_bytes == whole_size(size_bytes)
    image = _image(tmp_path / "image", size_bytes, memory, written_bytes, carrier)
    there = opened(keep_in(tmp_path / "there"))
    (saved_worker,) = image.manifest.workers
    await _reviving(tmp_path, there)._read(image, "4711.0", key, saved_worker, ignore)
    back = there.memory(key)
    assert os.pread(back.fd, size_bytes, 0) == data
    assert there.held_for(key) >= size_bytes
    assert os.pread(back.fd, MARK_BYTES, back.size_bytes - MARK_BYTES) == bytes(MARK_BYTES)
    pool.close()
    there.close()


def _reviving(folder: Path, pool: Pool) -> JobRestorer:
    never: Any = None  # none of these is called
    by: dict[str, Any] = {"criu": never, "take_snapshot": never, "in_unit": False, "simulated": True, "by_owner": True}
    return JobRestorer(never, Rendezvous(folder / "hegmd.sock"), Workers(), pool, notes=never, **by)


def test_a_mark_at_the_end_of_the_reserved_memory_is_not_in_the_image(tmp_path: Path) -> None:
    """Bytes after those of the boundary belong to the segment and not to the job."""
    assert len(pack_mark(Mark("7.4711.bytes", 9))) == MARK_BYTES
    memory: Any = type("Piece", (), {"size_bytes": whole_size(8 * MIB)})()
    assert used_bytes(worker(size_bytes=MIB), memory) == whole_size(MIB) <= memory.size_bytes - MARK_BYTES
    assert used_bytes(worker(size_bytes=0), memory) == memory.size_bytes, "nobody has counted: all of it is written"


def test_a_bug_of_ours_is_not_reported_as_truncated_memory(tmp_path: Path) -> None:
    """Issue 14, row 2: only hegmd has ever had a descriptor of the memory that an image is read into."""
    memory = Memory(os.memfd_create("piece"), 8 * MIB, huge=False)
    os.truncate(memory.fd, memory.size_bytes)
    image = _image(tmp_path / "image", MIB, memory, memory.size_bytes)
    os.truncate(memory.fd, 6 * MIB)
    (file,) = image.manifest.byte_files
    with find(str(tmp_path / "image")) as folder:
        byte_file = folder.byte_file(file.name, image.manifest.id)
        with pytest.raises(Bug, match="6291456 bytes of memory were reserved for it"):
            byte_file.read(file.size_bytes, file.sum, memory.fd, ignore)
    memory.close()


def test_an_image_without_a_file_that_it_names_is_reported(tmp_path: Path) -> None:
    worker = ImageWorker(pid=7, gpus=(), carrier=WORKER, size_bytes=1, rest_bytes=0, bytes=("7.0",))
    with pytest.raises(HegmError, match=r"no file '7\.0' with the bytes of process 7"):
        pool_bytes_in(Manifest(workers=(worker,)), worker)
    file = ImageFile(name="7.0", size_bytes=14_680_064, stored_bytes=0, sum="")
    assert whole_size(pool_bytes_in(Manifest(workers=(worker,), byte_files=(file,)), worker)) == 14_680_064


@pytest.mark.thorough
@pytest.mark.parametrize("spill", ["asked", "always"])
@pytest.mark.parametrize(("before_bytes", "size_bytes"), quick_first(SIZES, 2))
async def test_a_job_whose_size_changes_at_its_boundary_resumes_complete(
    tmp_path: Path, before_bytes: int, size_bytes: int, spill: str
) -> None:
    """Issue 14, row 2, for suspend and for spill."""
    async with running(tmp_path, spill=spill) as node:
        agent = await node.attend(os.getpid(), os.urandom(before_bytes))
        agent.at_boundary = data = os.urandom(size_bytes)
        suspended = await node.operations.suspend([agent.pid], node.context())
        assert suspended.operation is not None
        await node.at_rest(suspended.operation.id)
        assert agent.data is None
        await node.operations.resume(agent.pid, None, node.context())
        assert agent.data == data
