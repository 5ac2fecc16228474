"""`python -m tests.chaos`: every kill there is, with the bytes in flight held by a keeper and then by files.

Prints each kill and how the operation ended, and in the end the figures. `--victim` and `--state` choose some.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from time import monotonic

from tests.chaos.campaign import Campaign
from tests.chaos.cells import BOTH, CLIENT, DAEMON, FAULTS, KEEPER, VICTIMS, every_cell
from tests.chaos.node import Node

#: Those that end daemons first: the others then find, in one daemon, whatever is left behind each time.
VICTIMS_OF = {"nameless": (DAEMON, BOTH, CLIENT, KEEPER), "named": (DAEMON, *FAULTS)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--victim", choices=(*VICTIMS, *FAULTS), action="append")
    parser.add_argument("--state", action="append")
    parser.add_argument("--memory", choices=tuple(VICTIMS_OF), action="append")
    asked = parser.parse_args()
    for memory in asked.memory or VICTIMS_OF:
        victims = asked.victim or VICTIMS_OF[memory]
        cells = [cell for cell in every_cell(victims) if not asked.state or cell.state in asked.state]
        folder = Path(tempfile.mkdtemp(prefix="hegm-", dir="/tmp"))
        began = monotonic()
        try:
            with Node(folder, nameless=memory == "nameless") as node:
                tally = Campaign(node, with_torch=3, by_hand=1, say=print).run(cells)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        killed = ", ".join(f"{victim} {count}" for victim, count in tally.kills.items())
        ends = ", ".join(f"{end} {count}" for end, count in tally.ends.items())
        print(
            f"{memory}: {tally.rounds} rounds, {tally.kills.total()} killed or struck ({killed}) in"
            f" {monotonic() - began:.0f} s; {ends}; {tally.steps} steps, each as in an undisturbed run"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
