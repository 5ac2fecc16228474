"""The charts, by matplotlib: downtime as bars, and a migration by phase. The figures come from `records`."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tools.pictures import records
from tools.pictures.themes import Theme

mpl.use("svg")


def _figure(theme: Theme, height: float) -> Figure:
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "hegmd",
            "font.family": "sans-serif",
            "font.size": 11,
            "text.color": theme.text,
            "xtick.color": theme.quiet,
            "ytick.color": theme.text,
            "axes.labelcolor": theme.quiet,
        }
    )
    return Figure(figsize=(8.2, height), facecolor=theme.page, layout="constrained")


def _svg(figure: Figure) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None})
    return written.getvalue()


def _bare(axes: Any, theme: Theme) -> None:
    axes.set_facecolor(theme.page)
    axes.tick_params(length=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _bars(axes: Any, theme: Theme, bars: list[records.Bar], title: str) -> None:
    places = range(len(bars))
    axes.barh(
        places,
        [bar.seconds for bar in bars],
        height=0.62,
        color=[theme.ours if bar.ours else theme.theirs for bar in bars],
    )
    for place, bar in zip(places, bars, strict=True):
        if bar.high_s > bar.low_s:
            axes.plot([bar.low_s, bar.high_s], [place, place], color=theme.text, linewidth=1.2)
        weight = "bold" if bar.ours else "normal"
        axes.text(max(bar.seconds, bar.high_s) + 0.6, place, bar.figure(), va="center", fontweight=weight)
    axes.set_yticks(list(places), [bar.label for bar in bars])
    axes.set_xlim(0, 55)
    axes.set_xticks([])
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=theme.text)
    _bare(axes, theme)


def downtime(theme: Theme) -> str:
    """How long a job does not train: two groups of bars on one scale."""
    figure = _figure(theme, 3.9)
    moved, restarted = records.migration_bars(), records.restart_bars()
    upper, lower = figure.subplots(2, 1, height_ratios=[len(moved) + 0.7, len(restarted) + 0.7])
    _bars(upper, theme, moved, "Downtime: 32 GiB training to another H200")
    _bars(lower, theme, restarted, "Restart of a 12.9 GB training: request to next step")
    return _svg(figure)


def timeline(theme: Theme) -> str:
    """A migration of 32 GiB by phase, at one scale; time 0 is where the job stops."""
    figure = _figure(theme, 3.0)
    axes = figure.subplots()
    colours = {
        "park": theme.quiet,
        "out": theme.ours,
        "checkpoint": theme.warm,
        "restore": theme.violet,
        "in": theme.ours,
    }
    for row, line in enumerate(records.timelines()):
        axes.barh(row, line.prepare_s, left=-line.prepare_s, height=0.42, color=theme.good, alpha=0.45)
        axes.text(
            -line.prepare_s / 2, row, "prepare" if line.prepare_s > 0.3 else "", ha="center", va="center", fontsize=9
        )
        start = 0.0
        for name, seconds in line.phases:
            axes.barh(row, seconds, left=start, height=0.42, color=colours[name], edgecolor=theme.page, linewidth=0.8)
            start += seconds
        axes.text(start + 0.04, row, f"{line.downtime_s:.2f} s", va="center", fontweight="bold")
        axes.text(-2.32, row - 0.36, line.label, fontsize=11, fontweight="bold")
    names = {
        "checkpoint": "checkpoint, by the driver",
        "restore": "restore, by the driver",
        "out": "tensor bytes out, in",
    }
    marks = [
        Patch(color=colours[name], label=names.get(name, name)) for name in ("park", "out", "checkpoint", "restore")
    ]
    axes.legend(
        handles=marks, loc="upper right", ncols=4, fontsize=9, frameon=False, borderaxespad=0, columnspacing=1.2
    )
    axes.axvline(0, ymax=0.8, color=theme.quiet, linewidth=1, linestyle=(0, (3, 3)))
    axes.set_xlim(-2.35, 2.75)
    axes.set_ylim(1.4, -0.95)
    axes.set_yticks([])
    axes.set_xlabel("seconds; the job trains until 0, and again after the last phase")
    axes.set_title("Migration of 32 GiB by phase", loc="left", fontsize=12, fontweight="bold", color=theme.text)
    _bare(axes, theme)
    return _svg(figure)
