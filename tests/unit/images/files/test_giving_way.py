"""The processes that write an image leave the processors to the job while it trains."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.unit.images.files.test_images import MANIFEST, SELF, SIZE_BYTES, dump, room


@pytest.fixture
def memory() -> Iterator[int]:
    """Bytes to write."""
    fd = os.memfd_create("piece")
    os.pwrite(fd, os.urandom(SIZE_BYTES), 0)
    yield fd
    os.close(fd)


@pytest.mark.thorough
async def test_the_writer_of_an_image_yields_the_processors_to_the_job(tmp_path: Path, memory: int) -> None:
    own = os.getpriority(os.PRIO_PROCESS, os.getpid())
    assert await nicenesses(tmp_path / "one", memory, beside=False) == {own}
    assert await nicenesses(tmp_path / "other", memory, beside=True) == {max(10, own)}


async def nicenesses(folder: Path, memory_fd: int, *, beside: bool) -> set[int]:
    """Return the nice values of both writing processes, and of the threads of the caller's."""
    async with room(folder) as images:
        lent = await images.lend(str(folder / "image"), SELF, apart=True, beside=beside)
        children = psutil.Process().children()
        hands = [child for child in children if "hegmd.images.files.child" in child.cmdline()]
        assert len(hands) == 2
        nice_values = {hand.nice() for hand in hands}
        dump(lent)
        before = os.listdir(f"/proc/{lent.hand_pid}/task")
        read_niceness = partial(niceness, lent.hand_pid, before)
        await lent.write_bytes("4711.0", memory_fd, SIZE_BYTES, lambda _: nice_values.update(read_niceness()))
        await lent.finish(MANIFEST)
    return nice_values


def niceness(pid: int | None, before: Collection[str]) -> set[int]:
    """Return the nice value of each thread that the process has now and did not have then."""
    found: set[int] = set()
    for name in set(os.listdir(f"/proc/{pid}/task")) - set(before):
        with contextlib.suppress(ProcessLookupError):
            found.add(os.getpriority(os.PRIO_PROCESS, int(name)))
    return found
