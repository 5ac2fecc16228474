"""What the simulator of sharing found, as bars: three policies on the same trace. Plain SVG, from the record."""

from __future__ import annotations

from tools.pictures import records
from tools.pictures.drawings import Canvas
from tools.pictures.themes import Theme

# What is shown, its field in the record, and how a figure is written.
GROUPS = (
    ("GPUs computing while jobs arrive", "utilisation_percent", "{:.0f} %", 1.0),
    ("Arrival of a job to its end, mean", "mean_turnaround_min", "{:.0f} min", 1.0),
    ("Production job waits for its first batch, median", "production_wait_p50_s", "{:.1f} min", 60.0),
    ("Request for room waits, median", "room_wait_p50_s", "{:.1f} min", 60.0),
)
_LEFT, _WIDTH, _ROW = 110, 560, 24


def figure(value: float, form: str, per: float) -> str:
    """Return a figure of the record as the picture shows it."""
    return form.format(value / per)


def sharing(theme: Theme) -> str:
    """Four groups of three bars, each group on its own scale."""
    rows = records.record("sharing_simulation")["rows"]
    canvas = Canvas(theme, 20 + len(GROUPS) * (40 + _ROW * len(rows)), "Sharing GPUs: what a simulation gained")
    y = 28.0
    for title, field, form, per in GROUPS:
        canvas.text(20, y, title, weight="600", size="13")
        most = max(row[field] for row in rows) or 1.0
        for row in rows:
            y += _ROW
            width = max(2.0, _WIDTH * row[field] / most)
            colour = theme.ours if row["policy"] == "sharing" else theme.theirs
            canvas.text(_LEFT - 10, y + 2, row["policy"], anchor="end", colour=theme.quiet)
            canvas.strip(_LEFT, y - 10, width, colour)
            weight = "600" if row["policy"] == "sharing" else "normal"
            canvas.text(_LEFT + width + 8, y + 2, figure(row[field], form, per), weight=weight)
        y += 40
    return canvas.svg()
