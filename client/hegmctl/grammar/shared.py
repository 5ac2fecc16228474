"""Options that several commands have, so that they mean the same and say it in the same words everywhere.

An option of one command alone belongs beside that command. Holds data only.
"""

from __future__ import annotations

from hegmctl.grammar.words import TEXT, Option

DRY_RUN = Option("-n", "--dry-run", doc="only show what would be done, or every reason why it cannot be")
NO_WAIT = Option("--no-wait", doc="do not wait for the end; `hegmctl op` shows it")
WAIT = Option("--wait", doc="wait for the end, which is what is done anyway")
# Of whatever is carried out by the daemon, and can be looked at before or left to it.
IN_HAND = (DRY_RUN, WAIT, NO_WAIT)
CARRIER = Option(
    "--carrier",
    kind=TEXT,
    metavar="CARRIER",
    choices=("peer", "host", "worker", "driver"),
    doc="how the bytes go: peer (GPU to GPU), host (the pool, by hegmd), worker (the pool, by the job) or driver; "
    "else the fastest that can. One that cannot is refused, with the reason",
)
