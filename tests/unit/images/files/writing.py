"""A daemon that writes an image for as long as it lives: `python -m tests.unit.images.files.writing FOLDER`.

Prints the pid of its writing process once that works.
"""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path

import anyio

from hegmd.images.files.images import Images
from hegmd.system.programs import Rights

SIZE_BYTES = 16 << 20


async def write(folder: Path) -> None:
    memory = os.memfd_create("piece")
    os.ftruncate(memory, SIZE_BYTES)
    async with anyio.create_task_group() as tasks:
        images = Images(folder / "state", in_unit=False)
        await tasks.start(images.run)
        lent = await images.lend(str(folder / "image"), Rights(os.geteuid(), os.getegid()))
        for number in itertools.count():
            await lent.write_bytes(f"{number}", memory, SIZE_BYTES)
            if not number:
                sys.stdout.write(f"{lent.hand_pid}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(write, Path(sys.argv[1]))
