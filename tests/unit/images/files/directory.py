"""Small images made in place, and ways to harm them."""

from __future__ import annotations

import os
from pathlib import Path

from hegmd.images.files.folder import make, summed
from hegmd.images.files.signature import Key, written
from hegmd.protocol.images import ImageFile, ImageProcess, Manifest

CHUNK_BYTES = 8 << 20
BLOCK_BYTES = 4096
SIZE_BYTES = CHUNK_BYTES + BLOCK_BYTES + 17
KEY = Key(b"k" * 32)
CRIU_FILES = {"core-4711.img": b"core" * 300, "pages-1.img": b"", "inventory.img": b"i" * BLOCK_BYTES}
MANIFEST = Manifest(
    id="a" * 32, root_pid=4711, processes=(ImageProcess(pid=4711, parent_pid=None, uid=0, command="python train.py"),)
)


def ignore(_done_bytes: int, _size_bytes: int = 0) -> None:
    """Discard the progress."""


def built(
    path: Path, data: bytes | None = None, manifest: Manifest = MANIFEST, *, size_bytes: int = SIZE_BYTES
) -> Manifest:
    """An image at that path, of these bytes or any."""
    memory = os.memfd_create("piece")
    try:
        os.pwrite(memory, os.urandom(size_bytes) if data is None else data, 0)
        with make(str(path)) as folder:
            for name, content in CRIU_FILES.items():
                with open(os.open(name, os.O_WRONLY | os.O_CREAT, 0o666, dir_fd=folder.criu_fd), "wb") as file:
                    file.write(content)
            file_of_bytes = folder.byte_file("4711.0", manifest.id)
            stored = file_of_bytes.write(memory, size_bytes, ignore)
            manifest = manifest.replace(
                criu_files=tuple(summed(folder.criu_fd, ignore)),
                byte_files=(
                    ImageFile(name="4711.0", size_bytes=size_bytes, stored_bytes=stored.stored_bytes, sum=stored.sum),
                ),
            )
            text = written(manifest)
            folder.publish(text, sealed(text))
    finally:
        os.close(memory)
    return manifest


def sealed(manifest: bytes) -> bytes:
    """The seal of those bytes."""
    return KEY.seal(manifest)


def rewritten(path: Path, manifest: bytes) -> None:
    """Give the image another manifest, with a sum that fits."""
    (path / "manifest.json").write_bytes(manifest)
    (path / "seal").write_bytes(sealed(manifest))


def flip(path: Path, place: int) -> None:
    """Change one bit."""
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << place % 8]))
