"""Whether a user may open a file, from its mode.

Computed and not tried, so that a check works for another user and opens no device. For this very process, the kernel
also applies access lists (ACLs).
"""

from __future__ import annotations

import os
from pathlib import Path

from hegmd.node.doctor.facts import NodeFacts

READ_WRITE = os.R_OK | os.W_OK


def may_use(facts: NodeFacts, path: Path, bits: int) -> bool:
    """Return True if the user has the access of the bits, such as READ_WRITE. Raises OSError if the file does not
    exist."""
    if facts.uid == os.geteuid():
        return os.access(path, bits, effective_ids=True)
    status = path.stat()
    if facts.uid == 0:
        return True
    if status.st_uid == facts.uid:
        granted = status.st_mode >> 6
    elif status.st_gid in facts.gids:
        granted = status.st_mode >> 3
    else:
        granted = status.st_mode
    return granted & bits == bits
