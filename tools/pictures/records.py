"""Read the measurements in docs/measurements, and pick the figures that pictures and tables show."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "docs" / "measurements"
PHASES = ("park", "out", "checkpoint", "restore", "in")


def record(name: str) -> dict[str, Any]:
    """One file of docs/measurements: title, machine, date, revision, command and rows."""
    loaded: dict[str, Any] = json.loads((MEASUREMENTS / f"{name}.json").read_text())
    return loaded


def rows(name: str, **wanted: object) -> list[dict[str, Any]]:
    """The rows of a record whose fields have the wanted values. Raises LookupError when no row has them."""
    found = [row for row in record(name)["rows"] if all(row.get(key) == value for key, value in wanted.items())]
    if not found:
        raise LookupError(f"{name}.json has no row with {wanted}")
    return found


@dataclass(frozen=True)
class Bar:
    """One bar of the downtime chart. `low_s` and `high_s` are the extremes of the measured rounds, where known."""

    label: str
    seconds: float
    low_s: float
    high_s: float
    ours: bool

    def figure(self) -> str:
        return f"{self.seconds:.2f} s" if self.seconds < 10 else f"{self.seconds:.0f} s"


def _bar(label: str, row: dict[str, Any], key: str = "downtime_s", *, ours: bool) -> Bar:
    return Bar(label, row[key], row.get("min_s", row[key]), row.get("max_s", row[key]), ours)


def migration_bars() -> list[Bar]:
    """Downtime of a training of 32 GiB that goes to another GPU: ours, the driver alone, and a script's own file."""
    old = {"size_gib": 32, "command": "migrate"}
    (peer,) = rows("moves", **old, carrier="peer", gpus="gpu0 to 1", revision="b1f0cd0")
    (host,) = rows("moves_2026-11-21", **old, carrier="host", gpus="gpu0 to 1")
    (driver,) = rows("moves_2026-11-21", **old, carrier="driver")
    saved = [row["downtime_s"] for row in rows("save_and_reload")]
    return [
        _bar("hegmd, carrier peer", peer, ours=True),
        _bar("hegmd, carrier host", host, ours=True),
        _bar("CUDA driver alone", driver, ours=False),
        Bar("torch.save and restart", statistics.median(saved), min(saved), max(saved), ours=False),
    ]


def restart_bars() -> list[Bar]:
    """From the request to the next step of a restarted script that makes 810 million parameters on the CPU."""
    (ours,) = rows("restart_phases", prestart_and_revision="always, b1f0cd0", training="made on the CPU")
    (theirs,) = rows("restart_phases", training="made on the CPU, by HeGM 0.3.3")
    key = "request_to_next_step_s"
    return [_bar("hegmd, prestarted", ours, key, ours=True), _bar("HeGM 0.3.3", theirs, key, ours=False)]


@dataclass(frozen=True)
class Timeline:
    """A migration by phase: seconds of preparation while the job trains, then those in which it does not."""

    label: str
    prepare_s: float
    phases: tuple[tuple[str, float], ...]
    downtime_s: float


def timelines() -> list[Timeline]:
    """A migration of 32 GiB by carrier peer, and one by carrier host."""
    wanted = {"size_gib": 32, "command": "migrate", "gpus": "gpu0 to 1"}
    (peer,) = rows("move_phases", **wanted, carrier="peer", revision="b1f0cd0")
    (whole,) = rows("moves", **wanted, carrier="peer", revision="b1f0cd0")
    (host,) = rows("moves_2026-11-21", **wanted, carrier="host")
    return [
        Timeline(label, row["arm_s"], tuple((name, row[f"{name}_s"]) for name in PHASES), downtime)
        for label, row, downtime in (
            ("carrier peer", peer, whole["downtime_s"]),
            ("carrier host", host, host["downtime_s"]),
        )
    ]
