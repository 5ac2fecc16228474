"""The options of `hegmctl run` about starting a job again."""

from __future__ import annotations

from hegmctl.grammar.words import POSITIVE, TEXT, Option

RECOVERY = (
    Option(
        "--recover",
        kind=TEXT,
        metavar="INTERVAL",
        implied="auto",
        doc="stay as the command's parent, take a snapshot of the training into host memory at this interval, "
        "and start it again from the last one if it fails; default: 100 times what a snapshot costs",
    ),
    Option(
        "--ranks",
        kind=POSITIVE,
        metavar="NUMBER",
        doc="stay as the parent of this number of processes of the command, each with RANK and WORLD_SIZE, and recover "
        "the blocks of `hegm.recovery` in them: if one dies, the others wait for another in its place",
    ),
    Option(
        "--max-recoveries",
        kind=POSITIVE,
        metavar="NUMBER",
        doc="number of recoveries in all; in any case three in a row without progress are the last",
    ),
    Option(
        "--hang-limit",
        kind=TEXT,
        metavar="TIME",
        doc="after this time without a batch the training counts as hung, is killed and recovered; off for never; "
        "default: 5 times the longest time between two batches, and at least 60 s",
    ),
    Option(
        "--recover-from",
        kind=TEXT,
        metavar="CAUSE,...",
        doc="what is recovered from: signal, error, or both; default: both",
    ),
    Option(
        "--final-status",
        kind=TEXT,
        metavar="STATUS,...",
        doc="exit statuses of the command that are no failure; 0, SIGTERM and SIGINT never are",
    ),
    Option(
        "--truncate-outputs",
        doc="with --recover: cut files that the script appends to, and its output where that is a file, back to their "
        "length at the snapshot, and keep the rest in FILE.cut; without it, repeated steps repeat their output",
    ),
    Option(
        "-n",
        "--dry-run",
        doc="with --recover: start nothing, and say what would be recovered and how, and what prevents it",
    ),
    Option("--restart-tries", kind=POSITIVE, metavar="NUMBER", doc="number of start attempts per target; default: 2"),
)
