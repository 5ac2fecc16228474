"""The figures and results of the run over images, a line of JSON each, so that a later call continues from there.

Owns the file and the Markdown that is made of it.
"""

# ruff: noqa: T201 - printing is what these programs are for

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hegmd.protocol.messages import StoryReply
from tests.gpu.moves_timing import phases_s

GIB = 1 << 30
# The carriers that an operator can ask for; by the driver all video memory goes into the process, and so through CRIU.
HOST, DRIVER = "host", "driver"
# As a share of dd's rate on the same disk at that time: below this, something other than the disk is the limit.
MIN_SHARE = 0.8
# Log lines of the daemon about images and CRIU, by the name of the part.
LOGGED = {
    "dump": re.compile(r"\bCRIU dumped process \d+ in ([\d.]+) ms"),
    "write": re.compile(r"\bimage \S+: wrote \d+ bytes in ([\d.]+) ms"),
    "read back": re.compile(r"\bimage \S+: wrote .* and had read them back after ([\d.]+) ms"),
    "verify": re.compile(r"\bimage \S+: completed in ([\d.]+) ms"),
    "check": re.compile(r"\bimage \S+: checked CRIU's files in ([\d.]+) ms"),
    "read": re.compile(r"\bimage \S+: read \d+ bytes in ([\d.]+) ms"),
    "criu": re.compile(r"\bCRIU restored process \d+ in ([\d.]+) ms"),
}
# The phases of the operation that are parts of their own, where they belong to the way out or back.
OUT = ("reserving", "counting", "quiescing", "measuring", "offloading", "checkpointing", "leaving", "settling")
PHASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "checkpoint": {"suspend": OUT, "end": ("ending",)},
    "leave-running": {"suspend": OUT, "driver": ("restoring",), "reload": ("reloading",)},
    "restore": {"driver": ("restoring",), "reload": ("reloading",)},
}
PARTS = ("suspend", "dump", "write", "read back", "verify", "end", "check", "read", "criu", "driver", "reload")


@dataclass(frozen=True)
class ImageRate:
    """One way into an image or out of it: how fast its bytes were written, and how fast dd was, the better of just
    before and just after."""

    action: str
    size_gib: int
    place: str
    carrier: str
    took_s: float
    parts: Mapping[str, float]
    written_bytes_per_s: float | None = None
    dd_bytes_per_s: float | None = None
    parked_s: float | None = None

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.action, self.size_gib, self.place, self.carrier

    @property
    def share_of_dd(self) -> float | None:
        """Return the share of dd's rate at which the video memory was written; None if none was, or there was no dd."""
        if self.written_bytes_per_s is None or self.dd_bytes_per_s is None:
            return None
        return self.written_bytes_per_s / self.dd_bytes_per_s


def parts_of(action: str, story: StoryReply, log: Iterable[str], since_utc: float) -> dict[str, float]:
    """Return the duration of each part, from the operation's record and the log. Concurrent parts do not add up."""
    spent = phases_s(story, since_utc)
    parts = {
        name: sum(spent.get(phase, 0.0) for phase in phases)
        for name, phases in PHASES[action].items()
        if not spent.keys().isdisjoint(phases)
    }
    lines = list(log)
    for name, logged in LOGGED.items():
        took_ms = [float(found[1]) for found in map(logged.search, lines) if found]
        if took_ms:
            parts[name] = max(took_ms) / 1e3
    return parts


class Record:
    """Figures, cases, and sentences. `wrong` tells whether anything in this call went wrong."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.figures: list[ImageRate] = []
        self.cases: dict[str, str] = {}
        self._took_s: dict[str, float] = {}
        self.wrong = False
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            self._take(json.loads(line))

    def _take(self, result: dict[str, Any]) -> None:
        if "figure" in result:
            self.figures.append(ImageRate(**result["figure"]))
        else:
            self.cases[result["case"]] = result["wrong"]
            self._took_s[result["case"].partition(".")[0]] = result["took_s"]

    def _keep(self, result: dict[str, Any]) -> None:
        self._take(result)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(result) + "\n")

    def measure(self, figure: ImageRate) -> None:
        self._keep({"figure": asdict(figure)})
        parts = ", ".join(f"{name} {took_s:.3f}" for name, took_s in figure.parts.items())
        stood = "" if figure.parked_s is None else f", the job stood {figure.parked_s:.3f} s"
        what = f"{figure.size_gib} GiB {figure.action} {figure.carrier} {figure.place}"
        print(f"  {what}: {figure.took_s:.3f} s ({parts}){stood}{_share_told(figure)}", flush=True)

    def say(self, text: str, *, keep: bool = True) -> None:
        """A sentence; none is kept, whatever is asked."""
        del keep
        print(text, flush=True)

    def note(self, case: str, wrong: str, took_s: float) -> None:
        """How a case ended; nothing is wrong with an empty text."""
        self.wrong = self.wrong or bool(wrong)
        self._keep({"case": case, "wrong": wrong, "took_s": took_s})
        print(f"{case}: {'WRONG: ' + ' '.join(wrong.split()) if wrong else 'ok'}, {took_s:.1f} s in all", flush=True)

    def took_s(self, case: str) -> float | None:
        """How long that case, or the same once before, has taken; None where it was not tried."""
        return self._took_s.get(case.partition(".")[0])

    def is_done(self, case: str) -> bool:
        """Return whether it was tried. To repeat a failed one, delete its line in the file."""
        return case in self.cases

    def markdown(self) -> str:
        """Return the Markdown for docs/benchmarks.md."""
        rows = [f"| {case} | {wrong or 'ok'} |" for case, wrong in self.cases.items()]
        return "\n".join([table(self.figures), "", beside(self.figures), "", "| case | |", "|---|---|", *rows])


def table(figures: Sequence[ImageRate]) -> str:
    """Medians, in seconds, as Markdown."""
    head = ["GiB", "what", "where", "carrier", "times", "s", "least to most", "the job stood"]
    head += ["GB/s written", "of dd", *PARTS]
    lines = ["| " + " | ".join(head) + " |", "|---:|---|---|---|" + "---:|" * (len(head) - 4)]
    groups: dict[tuple[str, int, str, str], list[ImageRate]] = {}
    for figure in sorted(figures, key=lambda one: (one.carrier, one.place, one.size_gib, one.action)):
        groups.setdefault(figure.key, []).append(figure)
    for (action, size_gib, place, carrier), several in groups.items():
        took = [one.took_s for one in several]
        written = [one.written_bytes_per_s for one in several if one.written_bytes_per_s is not None]
        shares = [share for one in several if (share := one.share_of_dd) is not None]
        cells = [str(size_gib), action, place, carrier, str(len(several)), f"{statistics.median(took):.3f}"]
        cells += [f"{min(took):.3f} to {max(took):.3f}"]
        cells += [_median([one.parked_s for one in several if one.parked_s is not None])]
        cells += [_median([rate / 1e9 for rate in written], ".2f"), _median(shares, ".2f")]
        cells += [_median([one.parts[part] for one in several if part in one.parts]) for part in PARTS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def beside(figures: Sequence[ImageRate]) -> str:
    """Ours and the driver with CRIU alone side by side, medians in seconds, and what is aimed at; as Markdown."""
    head = ["GiB", "where", "checkpoint", "by driver and CRIU", "restore", "by driver and CRIU", "stood, left running"]
    head += [f"written, of dd (≥ {MIN_SHARE:g})"]
    lines = ["| " + " | ".join(head) + " |", "|---:|---|" + "---:|" * (len(head) - 2)]
    for size_gib, place in sorted(
        {(figure.size_gib, figure.place) for figure in figures}, key=lambda one: (one[1], one[0])
    ):
        here = [one for one in figures if (one.size_gib, one.place) == (size_gib, place)]
        cells = [str(size_gib), place]
        for action in ("checkpoint", "restore"):
            took = {
                alone: [one.took_s for one in here if one.action == action and (one.carrier == DRIVER) == alone]
                for alone in (False, True)
            }
            cells += [_median(took[False]), _median(took[True]) + _times(took[True], took[False])]
        cells += [_median([one.parked_s for one in here if one.parked_s is not None])]
        shares = [share for one in here if (share := one.share_of_dd) is not None]
        cells += [_median(shares, ".2f") + ("" if not shares or _is_enough(shares, place) else ", **under**")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _is_enough(shares: Sequence[float], place: str) -> bool:
    """On a tmpfs dd is one thread that copies, and nothing to be measured by."""
    return place != "disk" or statistics.median(shares) >= MIN_SHARE


def _times(slow: Sequence[float], fast: Sequence[float]) -> str:
    return f" ({statistics.median(slow) / statistics.median(fast):.1f} ×)" if slow and fast else ""


def _share_told(figure: ImageRate) -> str:
    if figure.written_bytes_per_s is None or figure.share_of_dd is None:
        return ""
    return f", written at {figure.written_bytes_per_s / 1e9:.2f} GB/s, {figure.share_of_dd:.2f} of dd"


def _median(values: Sequence[float], form: str = ".3f") -> str:
    return format(statistics.median(values), form) if values else ""
