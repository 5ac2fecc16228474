"""Fills a GPU until BYTES are left for a snapshot's shadow: `leave_room.py GPU BYTES`.

Begins at the first line on its standard input, keeps the memory until EOF, and takes more once the job has freed some.
Prints `held BYTES` when there is just that room.
"""

from __future__ import annotations

import select
import sys

LOOK_S = 0.1
# Less is not worth another allocation: a shadow has that much less room than it should.
TOLERANCE_BYTES = 32 << 20
BORDER_BYTES = 2 << 20


def main() -> None:
    import torch

    from hegmd.agent.state.storage.shadow import SHARE_LEFT_FREE

    gpu, room_bytes = int(sys.argv[1]), int(sys.argv[2])
    torch.cuda.init()
    held = [torch.empty(1, dtype=torch.uint8, device=f"cuda:{gpu}")]  # the context is there before memory is looked for
    held_bytes = 0
    if not sys.stdin.readline():
        return
    while True:
        free_bytes, total_bytes = torch.cuda.mem_get_info(gpu)
        surplus_bytes = free_bytes - int(total_bytes * SHARE_LEFT_FREE) - room_bytes + TOLERANCE_BYTES
        if surplus_bytes >= TOLERANCE_BYTES:
            size_bytes = surplus_bytes // BORDER_BYTES * BORDER_BYTES
            held.append(torch.empty(size_bytes, dtype=torch.uint8, device=f"cuda:{gpu}"))
            held_bytes += size_bytes
            sys.stdout.write(f"held {held_bytes}\n")
            sys.stdout.flush()
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            return


if __name__ == "__main__":
    main()
