"""A job that holds video memory: `hold_vram.py GPU BYTES`. Says when it has it, gives it back when told, ends at EOF.

Prints `held SECONDS`, then for each line on its standard input frees it and prints `freed SECONDS`; the seconds are of
the monotonic clock, which all processes of a machine share, right after the driver's call had returned.
"""

from __future__ import annotations

import sys
import time


def main() -> None:
    import torch

    gpu, held_bytes = int(sys.argv[1]), int(sys.argv[2])
    torch.empty(1, device=f"cuda:{gpu}")  # the context is there before the clock counts
    held = torch.empty(held_bytes, dtype=torch.uint8, device=f"cuda:{gpu}")
    _say("held")
    for _ in sys.stdin:
        del held
        torch.cuda.empty_cache()
        _say("freed")


def _say(word: str) -> None:
    sys.stdout.write(f"{word} {time.monotonic()}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
