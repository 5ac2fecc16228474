"""How fast the bytes of GPUs go into an image and come back, beside what the same disk does with `dd` at that moment.

The same child process as in the daemon writes and reads. The benchmark judges the share of the disk's own speed, from
the best of several alternating runs. The time until an image is whole is longer, since all of it is read back first.
HEGM_BENCH_IMAGE_DIR names another disk.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from hegmd.images.files.images import Images
from hegmd.protocol.images import Manifest
from hegmd.system.programs import Rights
from tests.bench.report import Row

SIZE_BYTES = 1 << 30
ROUNDS = 5
# As a share of `dd`'s rate: below this, something other than the disk is the limit. A row's budget is a maximum, hence
# the inverse.
MIN_PART = 0.8
SELF = Rights(os.geteuid(), os.getegid())


def run() -> list[Row]:
    disk = Path(os.environ.get("HEGM_BENCH_IMAGE_DIR", "/var/tmp"))
    places = [("disk", disk), ("tmpfs", Path("/dev/shm"))]
    return [row for name, place in places if os.access(place, os.W_OK) for row in anyio.run(_rows, name, place)]


async def _rows(name: str, place: Path) -> list[Row]:
    folder = Path(tempfile.mkdtemp(dir=place, prefix="hegm-bench-"))
    try:
        return await _measured(name, folder)
    finally:
        shutil.rmtree(folder)


async def _measured(name: str, folder: Path) -> list[Row]:
    memory, into, zeros = memory_of(random=True), memory_of(random=False), memory_of(random=False)
    best = {"dd": 0.0, "written": 0.0, "whole": 0.0, "verified": 0.0, "read": 0.0, "zeros": 0.0}

    def took(what: str, took_s: float) -> None:
        best[what] = max(best[what], SIZE_BYTES / took_s / 1e9)

    async with anyio.create_task_group() as tasks:
        images = Images(_made(folder / "state"), in_unit=False)
        await tasks.start(images.run)
        for _ in range(ROUNDS):
            took("dd", await anyio.to_thread.run_sync(dd_s, folder, memory))
            await _one_round(images, str(folder / "image"), (memory, into, zeros), took)
        tasks.cancel_scope.cancel()
    for fd in (memory, into, zeros):
        os.close(fd)
    return [
        Row(f"{name}: dd oflag=direct", best["dd"], "GB/s"),
        Row(f"{name}: bytes written", best["written"], "GB/s"),
        Row(f"{name}: dd over bytes written", best["dd"] / best["written"], "times", _budget(name)),
        Row(f"{name}: written, read back and named", best["whole"], "GB/s"),
        Row(f"{name}: verified", best["verified"], "GB/s"),
        Row(f"{name}: read into memory", best["read"], "GB/s"),
        Row(f"{name}: zeros", best["zeros"], "GB/s"),
    ]


async def _one_round(
    images: Images, path: str, memories: tuple[int, int, int], took: Callable[[str, float], None]
) -> None:
    memory, into, zeros = memories
    lent = await images.lend(path, SELF)
    began = time.perf_counter()
    await lent.write_bytes("1.0", memory, SIZE_BYTES)
    took("written", time.perf_counter() - began)
    await lent.finish(Manifest())
    took("whole", time.perf_counter() - began)
    image = await images.open(path, SELF)
    began = time.perf_counter()
    await image.verify()
    took("verified", time.perf_counter() - began)
    began = time.perf_counter()
    await image.read_bytes("1.0", into, lambda _done_bytes: None)
    took("read", time.perf_counter() - began)
    await image.end()
    await anyio.to_thread.run_sync(shutil.rmtree, path)
    lent = await images.lend(path, SELF)
    began = time.perf_counter()
    await lent.write_bytes("1.0", zeros, SIZE_BYTES)
    took("zeros", time.perf_counter() - began)
    await lent.discard()


def _budget(name: str) -> float | None:
    """A file system in memory is not judged by `dd`, which there is one thread that copies."""
    return 1 / MIN_PART if name == "disk" else None


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def memory_of(*, random: bool, size_bytes: int = SIZE_BYTES) -> int:
    """Return memory by descriptor, like the pool's. The caller closes it."""
    fd = os.memfd_create("piece")
    os.posix_fallocate(fd, 0, size_bytes)
    if random:
        block = os.urandom(8 << 20)
        for place in range(0, size_bytes, len(block)):
            os.pwrite(fd, block, place)
    return fd


def dd_s(folder: Path, memory: int, size_bytes: int = SIZE_BYTES) -> float:
    """How long dd takes from the same memory: zeros are something else to a virtual disk."""
    target = folder / "dd"
    argv = [
        "dd",
        f"if=/proc/{os.getpid()}/fd/{memory}",
        f"of={target}",
        "bs=8M",
        f"count={size_bytes >> 23}",
        "conv=fsync",
    ]
    for flags in (["oflag=direct"], []):  # a tmpfs of older kernels knows no O_DIRECT
        done = subprocess.run(
            [*argv, *flags],
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        target.unlink(missing_ok=True)
        if done.returncode == 0:
            break
    found = re.search(r"copied, ([\d.e-]+) s", done.stderr)
    if found is None:
        print(done.stderr, file=sys.stderr)
        raise RuntimeError("dd does not say how long it took")
    return float(found[1])
