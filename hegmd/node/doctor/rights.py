"""May this user do that with that file, by its mode.

Computed instead of tried, so that a check can be made for a user that the process is not, and opens no device. Access
lists (ACLs) are honoured through the kernel where the facts are about this very process.
"""

from __future__ import annotations

import os
from pathlib import Path

from hegmd.node.doctor.facts import NodeFacts

READ_WRITE = os.R_OK | os.W_OK


def may_use(facts: NodeFacts, path: Path, bits: int) -> bool:
    """Whether the user may do what the bits say, such as READ_WRITE. Raises OSError when there is no such file."""
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
