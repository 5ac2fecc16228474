"""`make bench-chaos`: lives of many seeds on all cores, at what rate, and every seed that broke a promise.

`python -m tests.simulation.chaos [SEEDS [FIRST]]`. A broken promise is reported with the seed's story, once for each
kind; `python -m tests.simulation.seeds SEED` tells it again, of those of restarts with `restart` before it, of those of
ranks with `ranks`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator

from tests.simulation.seeds import live, live_ranks, live_restarts

SEEDS = 100_000
CHUNK = 200


def live_many(first: int) -> tuple[int, int, int, list[tuple[int, str, str]]]:
    """Operations, crashes and events in the lives of a chunk, and what was broken: seed, promise, story."""
    operations = crashes = lines = 0
    broken: list[tuple[int, str, str]] = []
    logging.disable()  # the real parts' log; a seed's record is printed alone
    for seed in range(first, first + CHUNK):
        life = live_restarts(seed) if is_of_restarts(seed) else live_ranks(seed) if is_of_ranks(seed) else live(seed)
        operations += len(life.daemon.ops)
        crashes += life.daemon.crashes
        lines += len(life.daemon.story)
        if life.violation is not None:
            broken.append((seed, life.violation, str(life)))
    return operations, crashes, lines, broken


def is_of_restarts(seed: int) -> bool:
    """Whether that life is one of jobs that are moved by restart: one in ten is."""
    return seed % 10 == 0


def is_of_ranks(seed: int) -> bool:
    """Whether that life is one of jobs whose ranks have communicators: one in ten is."""
    return seed % 10 == 1


def _kind(violation: str) -> str:
    """The broken promise, without the process."""
    return re.sub(r"\d+", "N", violation)


def _report(broken: list[tuple[int, str, str]]) -> Iterator[str]:
    kinds = Counter(_kind(violation) for _, violation, _ in broken)
    reported_kinds: set[str] = set()
    for seed, violation, story in sorted(broken):
        if _kind(violation) not in reported_kinds:
            reported_kinds.add(_kind(violation))
            yield f"\n{story}\n"
            yield f"{kinds[_kind(violation)]} seeds such as {seed}: {violation}"


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else SEEDS
    first = int(arguments[1]) if len(arguments) > 1 else 0
    began = time.monotonic()
    totals = Counter[str]()
    broken: list[tuple[int, str, str]] = []
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.Pool(cores) as pool:
        for operations, crashes, lines, found in pool.imap_unordered(live_many, range(first, first + count, CHUNK)):
            totals.update(operations=operations, crashes=crashes, lines=lines)
            broken += found
    took_s = time.monotonic() - began
    for line in _report(broken):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(
        f"{count} lives from seed {first} on, {totals['operations']} operations, {totals['crashes']} ends of a daemon, "
        f"{totals['lines']} events: {took_s:.0f} s on {cores} cores, {count / took_s:.0f} lives a second; "
        f"promises broken in {len(broken)}\n"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
