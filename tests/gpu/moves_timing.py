"""What took how long in an operation: by its story, and by what the daemon logged of the copies and the driver's calls.

Pure: a story and log lines go in, figures come out.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from hegmd.protocol.messages import StoryReply

GIB = 1 << 30
# What the links of two H200 give at best.
LINK_BYTES_PER_S = {"peer": 394e9, "host": 55.4e9, "worker": 55.4e9}
# The columns of the split, and the phases that they are. A copy is within out and in, the lock within checkpoint.
SPLIT = {
    "arm": ("arming",),
    "park": ("quiescing", "measuring"),
    "out": ("evacuating",),
    "checkpoint": ("checkpointing",),
    "restore": ("restoring",),
    "in": ("refilling",),
    "release": ("releasing",),
}
_COPIED = re.compile(r"copied (out|in): Copied\(copied_bytes=(\d+), open_s=([\d.e-]+), copy_s=([\d.e-]+)")
_LOCKED = re.compile(r"^(\S+)\s.*lock of process (\d+)\b")


@dataclass(frozen=True)
class Measured:
    """One operation."""

    size_gib: int
    action: str
    carrier: str
    took_s: float
    estimate_s: float | None
    split: Mapping[str, float]

    @property
    def key(self) -> tuple[int, str, str]:
        return self.size_gib, self.action, self.carrier


def phases_s(story: StoryReply, since_utc: float) -> dict[str, float]:
    """How long it was in each phase, from that moment on."""
    spent: dict[str, float] = {}
    for line, later in pairwise(line for line in story.story if line.utc >= since_utc):
        spent[line.phase] = spent.get(line.phase, 0.0) + later.utc - line.utc
    return spent


def split_of(story: StoryReply, log: Iterable[str], pid: int, since_utc: float) -> dict[str, float]:
    """By the columns of SPLIT, with copies and lock as far as they were logged."""
    spent = phases_s(story, since_utc)
    split = {name: sum(spent.get(phase, 0.0) for phase in phases) for name, phases in SPLIT.items()}
    lines = list(log)
    for found in filter(None, map(_COPIED.search, lines)):
        name = f"copy {found[1]}"
        split[name] = split.get(name, 0.0) + float(found[4])
    checkpointing = next(
        (line.utc for line in story.story if line.phase == "checkpointing" and line.utc >= since_utc), 0
    )
    for found in filter(None, map(_LOCKED.search, lines)):
        if int(found[2]) == pid and checkpointing and " unlock " not in found[0]:
            split["lock"] = max(0.0, datetime.fromisoformat(found[1]).timestamp() - checkpointing)
            break
    return split


def table(measured: Sequence[Measured]) -> str:
    """Medians, as Markdown."""
    columns = ["arm", "park", "lock", "out", "copy out", "checkpoint", "restore", "in", "copy in", "release"]
    head = ["GiB", "what", "carrier", "times", "s", "least to most", "estimate", "link limit", *columns]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    groups: dict[tuple[int, str, str], list[Measured]] = {}
    for one in measured:
        groups.setdefault(one.key, []).append(one)
    for (size_gib, action, carrier), several in groups.items():
        took = [one.took_s for one in several]
        middle_s = statistics.median(took)
        cells = [
            str(size_gib),
            action,
            carrier,
            str(len(several)),
            f"{middle_s:.3f}",
            f"{min(took):.3f} to {max(took):.3f}",
        ]
        cells += [_estimate(several, middle_s), _limit(size_gib, action, carrier)]
        cells += [_median([one.split[column] for one in several if column in one.split]) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _estimate(several: Sequence[Measured], took_s: float) -> str:
    """The plan's, the last one's, and how far off it was."""
    estimate_s = several[-1].estimate_s
    return "" if estimate_s is None else f"{estimate_s:.2f} ({estimate_s / took_s - 1:+.0%})"


def _limit(size_gib: int, action: str, carrier: str) -> str:
    """The least that the copies can take: of a migration two through the pool, or one straight to the other GPU."""
    if carrier not in LINK_BYTES_PER_S:
        return ""
    times = 2 if action == "migrate" and carrier != "peer" else 1
    return f"{times * size_gib * GIB / LINK_BYTES_PER_S[carrier]:.3f}"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""
