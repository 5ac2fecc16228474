"""The durations of an operation's parts: from its record, and from the daemon's log of the copies and the driver's
calls.

Pure: a story and log lines go in, figures come out.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from hegmd.protocol.messages import StoryReply
from tests.gpu.moves_parts import is_within_order

GIB = 1 << 30
# The maximum rate of the links of two H200.
LINK_BYTES_PER_S = {"peer": 394e9, "host": 55.4e9, "worker": 55.4e9}
# The columns of the split, and the phases that they are. Copies over the link are within out and in, or beside the
# driver's checkpoint and restore; the lock is within checkpoint.
SPLIT = {
    "arm": ("reserving",),
    "park": ("counting", "quiescing", "measuring"),
    "out": ("offloading",),
    "checkpoint": ("checkpointing",),
    "restore": ("restoring",),
    "in": ("reloading",),
    "release": ("releasing",),
    "verify": ("verifying",),
}
COLUMNS = ("arm", "park", "out", "copy out", "lock", "checkpoint", "restore", "in", "copy in", "release", "verify")
NAMED = {phase for phases in SPLIT.values() for phase in phases}
_COPIED = re.compile(
    r"copied (out|in)(?: during the \w+)?: CopyReport\(copied_bytes=(\d+), open_s=([\d.e-]+), copy_s=([\d.e-]+)"
)
# The number of parts shown: the longest ones.
LARGEST = 16
# Targets in seconds, on two H200 with NVLink.
BUDGETS_S = {
    (32, "migrate", "peer"): 0.8,
    (32, "suspend", "host"): 1.0,
    (32, "resume", "host"): 0.9,
    (100, "migrate", "peer"): 1.1,
}
_LOCKED = re.compile(r"^(\S+)\s.*lock of process (\d+)\b")


@dataclass(frozen=True)
class Measured:
    """One operation. `where` is the GPU, or both; `split` in seconds, `rates` in bytes a second of the copies.

    `parts` is whose each moment was that it stood for (`moves_parts`).
    """

    size_gib: int
    action: str
    carrier: str
    where: str
    took_s: float
    estimate_s: float | None
    split: Mapping[str, float]
    rates: Mapping[str, float]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, str, str, str]:
        return self.size_gib, self.action, self.carrier, self.where


def phases_s(story: StoryReply, since_utc: float) -> dict[str, float]:
    """How long it was in each phase, from that moment on."""
    spent: dict[str, float] = {}
    for line, later in pairwise(line for line in story.story if line.utc >= since_utc):
        spent[line.phase] = spent.get(line.phase, 0.0) + later.utc - line.utc
    return spent


def split_of(story: StoryReply, log: Iterable[str], pid: int, since_utc: float) -> dict[str, float]:
    """Return the columns of SPLIT and the rest, with copies and lock as far as they were logged."""
    spent = phases_s(story, since_utc)
    split = {
        name: sum(spent.get(phase, 0.0) for phase in phases)
        for name, phases in SPLIT.items()
        if not spent.keys().isdisjoint(phases)
    }
    split["other"] = sum(took_s for phase, took_s in spent.items() if phase not in NAMED)
    lines = list(log)
    for direction, _, copy_s in _copies(lines):
        name = f"copy {direction}"
        split[name] = split.get(name, 0.0) + copy_s
    checkpointing = next(
        (line.utc for line in story.story if line.phase == "checkpointing" and line.utc >= since_utc), 0
    )
    for found in filter(None, map(_LOCKED.search, lines)):
        if int(found[2]) == pid and checkpointing and " unlock " not in found[0]:
            split["lock"] = max(0.0, datetime.fromisoformat(found[1]).timestamp() - checkpointing)
            break
    return split


def rates_of(log: Iterable[str]) -> dict[str, float]:
    """Bytes a second while copying, by direction; of several rounds all together."""
    sums: dict[str, tuple[int, float]] = {}
    for direction, copied_bytes, copy_s in _copies(log):
        before = sums.get(direction, (0, 0.0))
        sums[direction] = before[0] + copied_bytes, before[1] + copy_s
    return {direction: copied_bytes / copy_s for direction, (copied_bytes, copy_s) in sums.items() if copy_s}


def _copies(log: Iterable[str]) -> list[tuple[str, int, float]]:
    """Direction, bytes and seconds of each copy that was logged."""
    return [(found[1], int(found[2]), float(found[4])) for found in filter(None, map(_COPIED.search, log))]


def table(measured: Sequence[Measured]) -> str:
    """Medians, as Markdown."""
    head = ["GiB", "what", "carrier", "where", "times", "s", "budget", "least to most", "estimate", "link limit"]
    head += ["GB/s out, of the link", "GB/s in", *COLUMNS, "other"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|---|" + "---:|" * (len(head) - 4)]
    for (size_gib, action, carrier, where), several in groups(measured).items():
        took = [one.took_s for one in several]
        middle_s = statistics.median(took)
        cells = [str(size_gib), action, carrier, where, str(len(several)), f"{middle_s:.3f}"]
        cells += [_budget(BUDGETS_S.get((size_gib, action, carrier)), middle_s)]
        cells += [
            f"{min(took):.3f} to {max(took):.3f}",
            _estimate(several, middle_s),
            _limit(size_gib, action, carrier),
        ]
        cells += [_rate(several, "out", carrier), _rate(several, "in", "" if carrier == "peer" else carrier)]
        cells += [
            _median([one.split[column] for one in several if column in one.split]) for column in (*COLUMNS, "other")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parts_table(measured: Sequence[Measured]) -> str:
    """Return the parts of the downtime as Markdown: medians in milliseconds; parts of an order have a dot."""
    head = ["GiB", "what", "carrier", "where", "in all", "whose each moment was, ms"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for (size_gib, action, carrier, where), several in groups(measured).items():
        names = {name for one in several for name in one.parts}
        medians = {name: statistics.median([one.parts.get(name, 0.0) for one in several]) for name in names}
        whole_ms = statistics.median(
            [sum(took_s for name, took_s in one.parts.items() if not is_within_order(name)) * 1e3 for one in several]
        )
        largest = sorted(names, key=lambda name: -medians[name])[:LARGEST]
        text = ", ".join(f"{name} {medians[name] * 1e3:.1f}" for name in largest)
        lines.append(f"| {size_gib} | {action} | {carrier} | {where} | {whole_ms:.0f} | {text} |")
    return "\n".join(lines)


def groups(measured: Sequence[Measured]) -> dict[tuple[int, str, str, str], list[Measured]]:
    """Those that are repetitions of one another, in order."""
    found: dict[tuple[int, str, str, str], list[Measured]] = {}
    for one in sorted(measured, key=lambda one: one.key):
        found.setdefault(one.key, []).append(one)
    return found


def _budget(budget_s: float | None, took_s: float) -> str:
    return "" if budget_s is None else f"{budget_s:g}, {'**over**' if took_s > budget_s else 'ok'}"


def _rate(several: Sequence[Measured], direction: str, carrier: str) -> str:
    """Return the rate of the copies, and its share of the link's; a reload by peer crosses none."""
    rates = [one.rates[direction] for one in several if direction in one.rates]
    if not rates:
        return ""
    rate = statistics.median(rates)
    limit = LINK_BYTES_PER_S.get(carrier)
    return f"{rate / 1e9:.1f}" + (f", {rate / limit:.1%}" if limit else "")


def _estimate(several: Sequence[Measured], took_s: float) -> str:
    """The plan's median, and how far off it was."""
    estimates = [one.estimate_s for one in several if one.estimate_s is not None]
    if not estimates:
        return ""
    estimate_s = statistics.median(estimates)
    return f"{estimate_s:.2f} ({estimate_s / took_s - 1:+.0%})"


def _limit(size_gib: int, action: str, carrier: str) -> str:
    """The least that the copies can take: of a migration two through the pool, or one straight to the other GPU."""
    if carrier not in LINK_BYTES_PER_S:
        return ""
    times = 2 if action == "migrate" and carrier != "peer" else 1
    return f"{times * size_gib * GIB / LINK_BYTES_PER_S[carrier]:.3f}"


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f}" if values else ""
