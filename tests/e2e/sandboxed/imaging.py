"""Run in the daemon's place, within its sandbox: writes an image for a user and reads it again, as the daemon does.

Its arguments are the user's name and the image's path; what it saw goes to `seen.json` in the state directory.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
from pathlib import Path

import anyio

from hegmd.errors import HegmError
from hegmd.images.files.images import Images
from hegmd.protocol.images import Manifest
from hegmd.system.programs import Rights

STATE_DIR = Path("/var/lib/hegm")
SIZE_BYTES = 9 << 20


async def image(user: str, path: str) -> dict[str, object]:
    entry = pwd.getpwnam(user)
    rights = Rights(entry.pw_uid, entry.pw_gid, tuple(os.getgrouplist(user, entry.pw_gid)))
    data = os.urandom(SIZE_BYTES)
    memory, into = os.memfd_create("piece"), os.memfd_create("into")
    os.pwrite(memory, data, 0)
    os.ftruncate(into, SIZE_BYTES)
    images = Images(STATE_DIR, in_unit=True)
    async with anyio.create_task_group() as tasks:
        await tasks.start(images.run)
        lent = await images.lend(path, rights)
        hand = lent.hand_pid
        facts: dict[str, object] = {"groups": _status(hand, "Groups"), "capabilities": _status(hand, "CapBnd")}
        facts["unit"] = _read(f"/proc/{hand}/cgroup").strip().rpartition("/")[2]
        os.close(os.open("core-1.img", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=lent.criu_dir_fd))
        await lent.write_bytes("1.0", memory, SIZE_BYTES)
        await lent.finish(Manifest())
        opened = await images.open(path, rights)
        await opened.read_bytes("1.0", into)
        facts["criu"] = os.listdir(await opened.private_criu_dir())
        await opened.end()
        facts["same"] = os.pread(into, SIZE_BYTES, 0) == data
        try:
            await images.lend("/root/image", rights)
        except HegmError as error:
            facts["refused"] = error.code.name
        tasks.cancel_scope.cancel()
    return facts


def _read(path: str) -> str:
    return Path(path).read_text()


def _status(pid: int | None, name: str) -> str:
    (line,) = [line for line in _read(f"/proc/{pid}/status").splitlines() if line.startswith(f"{name}:")]
    return line.partition(":")[2].strip()


if __name__ == "__main__":
    (STATE_DIR / "seen.json").write_text(json.dumps(anyio.run(image, sys.argv[1], sys.argv[2])))
