"""Run with a small file system of its own at the directory that is named: images that do not fit, and one that does.

Prints what it saw as JSON. The parent made the file system, of SIZE_BYTES.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import anyio

from hegmd.errors import HegmError
from hegmd.images.files.catalogue import verify
from hegmd.images.files.images import Images
from hegmd.images.files.open_image import ImageWriter
from hegmd.protocol.images import Manifest
from hegmd.system.programs import Rights

SIZE_BYTES = 32 << 20
SELF = Rights(os.geteuid(), os.getegid())


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "state").mkdir()
    result = anyio.run(_images, folder)
    verify(str(folder / "image"), lambda _done_bytes, _size_bytes: None)
    sys.stdout.write(json.dumps(result))


async def _images(folder: Path) -> dict[str, object]:
    path = str(folder / "image")
    facts: dict[str, object] = {}
    async with anyio.create_task_group() as tasks:
        images = Images(folder / "state", in_unit=False)
        await tasks.start(images.run)
        facts["bytes"] = await _refused(images, path, bytes_of=2 * SIZE_BYTES, criu_bytes=1)
        facts["left"] = sorted(os.listdir(folder))
        # A file too large for the disk, but whose non-zero blocks fit, is written.
        facts["zeros"] = await _refused(images, path, bytes_of=-4 * SIZE_BYTES, criu_bytes=SIZE_BYTES // 2)
        tasks.cancel_scope.cancel()
    return facts


async def _refused(images: Images, path: str, *, bytes_of: int, criu_bytes: int) -> list[str] | None:
    """The code and the message of what was refused. A negative number of bytes is of so many zeros."""
    lent = await images.lend(path, SELF)
    try:
        _dump(lent, criu_bytes)
        await lent.write_bytes("1.0", _memory(bytes_of), abs(bytes_of))
        await lent.finish(Manifest())
    except HegmError as error:
        await lent.discard()
        return [error.code.name, error.message, error.hint]
    return None


def _dump(lent: ImageWriter, size_bytes: int) -> None:
    fd = os.open("pages-1.img", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=lent.criu_dir_fd)
    os.write(fd, os.urandom(size_bytes))
    os.close(fd)


def _memory(size_bytes: int) -> int:
    fd = os.memfd_create("piece")
    os.ftruncate(fd, abs(size_bytes))
    for place in range(0, max(size_bytes, 0), 1 << 20):
        os.pwrite(fd, os.urandom(1 << 20), place)
    return fd


if __name__ == "__main__":
    main()
