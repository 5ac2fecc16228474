"""The table that `make bench-gpu` ends with: what moves take, beside what they took, are to take, and the driver alone.

    PYTHONPATH=.:client python3 -m tests.gpu.rows_table FOLDER    (a folder of in_turn's --state)

Reads what the parts of the benchmark left in the folder, prints Markdown, and writes docs/measurements/gpu_rows.json,
from which `make docs` writes the table of docs/benchmarks.md. A row that was not measured has no figure. Measures
nothing itself.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import json
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu import image_record
from tests.gpu.bench_record import Record
from tests.gpu.bench_restart import Measurements
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_timing import Measured
from tests.patience import HANG_S

TRANSPARENT_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
RECORD = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "gpu_rows.json"
# The driver's calls in a move. Their duration cannot be changed.
DRIVER_PARTS = ("helper lock", "helper checkpoint", "helper restore", "helper unlock")
HEADS = ("what", "before", "now", "target", "driver_alone", "ratio")


@dataclass(frozen=True)
class Row:
    """One row in words: seconds, unless the text says otherwise. `now` and `driver_alone` are None if unknown.

    `ratio` is how many times the driver alone it is, or dd, or pinned copies, as `driver_alone` says.
    """

    what: str
    before: str
    now: str | None
    target: str
    driver_alone: str | None = None
    ratio: float | None = None


class Found:
    """The measurements of the parts."""

    def __init__(self, folder: Path) -> None:
        paths = [folder / f"bench-{part}.jsonl" for part in ("rows", "moves")]
        self.moves = [one for path in paths if path.exists() for one in Record(path).measured]
        images = folder / "bench-images.jsonl"
        self.images = image_record.Record(images).figures if images.exists() else []
        self.restart = Measurements(folder / "bench-restart.jsonl")

    def of(self, size_gib: int, action: str, carrier: str = "") -> list[Measured]:
        return [
            move for move in self.moves if (move.size_gib, move.action, move.carrier) == (size_gib, action, carrier)
        ]

    def image(self, action: str, carrier: str, of: Callable[[image_record.ImageRate], float | None]) -> float | None:
        """The median of the images of 8 GiB on disk."""
        key = (action, 8, "disk", carrier)
        return _median(of(image) for image in self.images if image.key == key)


def rows_of(found: Found) -> list[Row]:
    """The rows, in the order of what they are about."""
    return [
        _move(found, "migrate 32 GiB, peer, downtime", "0.81 to 1.01", "0.75", (32, "migrate", "peer")),
        _move(found, "migrate 100 GiB, peer, downtime", "1.43 to 1.61", "1.1", (100, "migrate", "peer")),
        _move(found, "migrate 32 GiB, worker, downtime", "9.4", "2.2", (32, "migrate", "worker")),
        _move(found, "migrate 32 GiB, host, downtime", "1.59", "1.45", (32, "migrate", "host")),
        _small(found),
        _plain(
            found, "suspend 32 GiB, request to free memory", "3.0 to 3.6", "1.2", (32, "suspend, until free", "host")
        ),
        _plain(found, "suspend 32 GiB, whole command", "", "", (32, "suspend, whole command", "host")),
        _plain(found, "migrate 32 GiB, whole command", "1.8 to 2.1", "1.3", (32, "migrate, whole command", "peer")),
        *_images(found),
        _plain(found, "daemon killed in mid-move", "2.6 to 3.2", "1.8", (32, "daemon killed in mid-move", "")),
        _plain(found, "swap of two 32 GiB jobs, downtime each", "", "1.4", (32, "swap", "")),
        *_states(found),
        _plain(found, "daemon start", "0.6", "0.35", (0, "daemon start", "")),
        _client(found),
    ]


def _move(found: Found, what: str, before: str, target: str, key: tuple[int, str, str]) -> Row:
    """A migration beside the driver's own calls in it."""
    several = found.of(*key)
    now_s = _median(one.took_s for one in several)
    own_s = _median(sum(one.parts.get(part, 0.0) for part in DRIVER_PARTS) for one in several if one.parts)
    return _row(what, before, now_s, target, own_s)


def _small(found: Found) -> Row:
    """A small job beside the same one by the driver alone, whose fixed part that is."""
    now_s = _median(one.took_s for one in found.of(0, "migrate", "peer"))
    own_s = _median(one.took_s for one in found.of(0, "migrate", "driver"))
    return _row("migrate 10 MiB, peer, downtime", "0.65", now_s, "0.5", own_s)


def _plain(found: Found, what: str, before: str, target: str, key: tuple[int, str, str]) -> Row:
    return _row(what, before, _median(one.took_s for one in found.of(*key)), target, None)


def _images(found: Found) -> list[Row]:
    """Images of 8 GiB: beside the driver and CRIU alone. The target follows from what dd writes to that disk."""
    rate = found.image("checkpoint", image_record.HOST, lambda one: one.dd_bytes_per_s)
    target = "8 GiB / R + 2.5" if rate is None else f"{8 * (1 << 30) / rate + 2.5:.1f} (R = {rate / 1e9:.2f} GB/s)"
    rows: list[Row] = []
    for action, before, aim in (("checkpoint", "15.2", target), ("restore", "6.9", "3.5")):
        ours, driver = (
            found.image(action, carrier, lambda one: one.took_s) for carrier in (image_record.HOST, image_record.DRIVER)
        )
        rows.append(_row(f"image of 8 GiB on disk, {action}", before, ours, aim, driver))
    return rows


def _states(found: Found) -> list[Row]:
    """A restart's state beside copies of pinned memory, GB/s."""
    rows: list[Row] = []
    for what, copy, before in (("written", "out", "0.61 of pinned"), ("put back", "in", "0.68 of pinned")):
        rate = _median(restart["rates"][what] for restart in found.restart.restarts if what in restart["rates"])
        pinned = found.restart.pinned.get(copy)
        rows.append(
            Row(
                f"restart: state {what}",
                before,
                None if rate is None else f"{rate / 1e9:.1f} GB/s",
                "0.9 of pinned",
                None if pinned is None else f"{pinned / 1e9:.1f} GB/s",
                None if rate is None or not pinned else round(rate / pinned, 2),
            )
        )
    return rows


def _client(found: Found) -> Row:
    """`hegmctl gpus` beside Python that does nothing."""
    now_s, pass_s = (_median(one.took_s for one in found.of(0, name)) for name in ("hegmctl gpus", "python -c pass"))
    return _row("hegmctl gpus, beside python -c pass", "1.9 times", now_s, "1.9 times", pass_s)


def _row(what: str, before: str, now_s: float | None, target: str, alone_s: float | None) -> Row:
    ratio = None if now_s is None or not alone_s else round(now_s / alone_s, 2)
    return Row(what, before, _seconds(now_s), target, _seconds(alone_s), ratio)


def _seconds(took_s: float | None) -> str | None:
    return None if took_s is None else f"{took_s:.3f}" if took_s < 10 else f"{took_s:.1f}"


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def markdown(rows: Iterable[Row]) -> str:
    """The table as it is printed."""
    lines = ["| " + " | ".join(HEADS).replace("_", " ") + " |", "|" + "---|" * len(HEADS)]
    for row in rows:
        cells = [getattr(row, head) for head in HEADS]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def record_of(rows: Iterable[Row], machine: str, command: str, revision: str) -> dict[str, Any]:
    """Return the record for docs/measurements."""
    return {
        "title": "What moves take on two GPUs, in seconds unless the row says otherwise; medians",
        "machine": machine,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "revision": revision,
        "command": command,
        "rows": [{head: getattr(row, head) for head in HEADS} for row in rows],
    }


def text_of(record: dict[str, Any]) -> str:
    """The record as JSON, with a line for each row."""
    rows = ",\n  ".join(json.dumps(row) for row in record["rows"])
    heads = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items() if key != "rows"]
    return "{\n" + ",\n".join([*heads, f' "rows": [\n  {rows}\n ]']) + "\n}\n"


def machine_name() -> str:
    """The GPUs and the node, in words."""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpus = _output(words).splitlines() or ["no GPU"]
    pages = re.search(r"\[(\w+)\]", TRANSPARENT_PAGES.read_text()) if TRANSPARENT_PAGES.exists() else None
    kernel = f"kernel {platform.release()}, transparent huge pages {pages[1] if pages else 'unknown'}"
    node = f"{kernel}, Python {platform.python_version()}"
    return f"{len(gpus)} x {gpus[0]}, {platform.machine()}, {node}"


def _output(words: list[str]) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def show_rows(folder: Path, command: str) -> None:
    """Print the table; write the record if a row has a figure, so that an earlier one is not lost for nothing.

    Over the stub driver, where figures say nothing, the record goes into the folder.
    """
    path = folder / RECORD.name if on_stub() else RECORD
    rows = rows_of(Found(folder))
    print("\n" + markdown(rows))
    if not any(row.now for row in rows):
        print("\nnothing was measured, so no record is written")
        return
    revision = _output(["git", "-C", str(RECORD.parent), "rev-parse", "--short", "HEAD"]) or "unknown"
    path.write_text(text_of(record_of(rows, machine_name(), command, revision)))
    print(f"\n{path} is written; run: make docs")


if __name__ == "__main__":
    show_rows(Path(sys.argv[1]), "python3 -m tests.gpu.in_turn bench")
