"""The file in which leases, the queue and the list of suspended jobs outlive the daemon.

It is rewritten at each change, with a checksum: beside the old one, synced, and then put in its place, so that a
crash leaves the one or the other. A damaged file is kept under another name, and no lease number of it is used again:
the jobs that it names stay suspended until their users resume them. A file of a newer version is left alone, and the
daemon does not start. Blocks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import zlib
from pathlib import Path

from hegmd.errors import INCOMPATIBLE, UNAVAILABLE, HegmError
from hegmd.sharing.records import SharingState
from hegmd.system.state_dir import replace_file

logger = logging.getLogger(__name__)

# Since version 2 a job may be placed on several GPUs. An older daemon would take their list for the name of one.
VERSION = 2
NAME, DAMAGED_NAME = "sharing", "sharing.damaged"
# hegmd never writes a larger file.
MAX_BYTES = 16 << 20
_HEAD = re.compile(rb"HEGMSHARING(\d{1,6}) ([0-9a-f]{8})")
_NEXT = re.compile(rb'"next_lease": ?(\d{1,15})')
_NUMBER = re.compile(rb'"number": ?(\d{1,15})')


def load(folder: Path) -> SharingState:
    """Return the last written state; an empty state if nothing was.

    Raises HegmError if it cannot be read now, or is of a newer version: the next save would replace it.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return SharingState()
    except OSError as error:
        raise HegmError(
            UNAVAILABLE,
            f"the leases and the queue are not known: {path} cannot be read: {error.strerror}",
            f"start hegmd again; if that fails too, move the file away: mv {path} {path}.unread",
            {"path": str(path)},
        ) from None
    head, _, body = data.partition(b"\n")
    found = _HEAD.fullmatch(head)
    if found is not None and int(found[1]) > VERSION:
        raise HegmError(
            INCOMPATIBLE,
            f"{path} was written by a newer hegmd: its version is {int(found[1])}, and this one knows {VERSION}",
            f"start the newer hegmd; or give up its leases and its queue: mv {path} {path}.newer",
            {"path": str(path)},
        )
    try:
        if found is None or len(data) > MAX_BYTES or int(found[2], 16) != zlib.crc32(body):
            raise ValueError("its checksum does not match")
        return SharingState.from_plain(json.loads(body), NAME)
    except (ValueError, HegmError) as error:
        logger.error("%s is damaged, and kept as %s: %s; its leases have ended", path, DAMAGED_NAME, error)
        with contextlib.suppress(OSError):
            path.replace(folder / DAMAGED_NAME)
        numbers = [*map(int, _NEXT.findall(data)), *(int(number) + 1 for number in _NUMBER.findall(data))]
        return SharingState(next_lease=max(numbers, default=1))


def save(folder: Path, state: SharingState) -> None:
    """Have exactly this on disk. Raises OSError; the file is then unchanged."""
    body = json.dumps(state.to_plain()).encode()
    replace_file(folder / NAME, b"HEGMSHARING%d %08x\n" % (VERSION, zlib.crc32(body)) + body)
