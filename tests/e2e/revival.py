"""Restores a dumped job where it is started, such as in a pid namespace of its own, and waits for the job's end.

python -m tests.e2e.revival CRIU VERSION IMAGES NEEDS.json OUTPUT
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import anyio

from hegmd.images.criu import run
from hegmd.images.criu.needs import Needs
from hegmd.node.criu_program import Criu


async def revive(needs: Needs, program: str, version: str, images: str, output: str) -> None:
    folder = os.open(images, os.O_RDONLY | os.O_DIRECTORY)
    to = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    outlets = {outlet.key: to for outlet in needs.outlets}
    criu = Criu(program, version)
    revived = await run.restore(criu, folder, needs, log_dir_fd=folder, unit_name=None, outlets=outlets)
    ended = os.pidfd_open(revived.pid)
    await anyio.to_thread.run_sync(lambda: select.select([ended], [], []))


if __name__ == "__main__":
    program, version, images, needs_file, output = sys.argv[1:]
    needs = Needs.from_plain(json.loads(Path(needs_file).read_text()))
    anyio.run(revive, needs, program, version, images, output)
