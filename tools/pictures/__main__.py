"""`make pictures`: draw every picture of docs/pictures that is not fresh, in both themes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

from tools.pictures import drawings, sharing_chart, terminal, views
from tools.pictures.gallery import GALLERY, RECORDING, Picture
from tools.pictures.themes import THEMES, Theme


def drawer(picture: Picture) -> Callable[[Theme], str]:
    """The function that draws a picture. The plotting library is imported only for a chart."""
    if picture.code == "charts":
        charts = importlib.import_module("tools.pictures.charts")
        return getattr(charts, picture.name)
    drawn: dict[str, Callable[[Theme], str]] = {
        "demo": partial(terminal.demo, recording=RECORDING),
        "migrate": partial(terminal.migrate, recording=RECORDING),
        "top": views.top,
        "operation": views.operation,
        "sharing": sharing_chart.sharing,
        "processes": drawings.processes,
        "migration": drawings.migration,
        "holders": drawings.holders,
    }
    return drawn[picture.name]


def main() -> None:
    for picture in GALLERY:
        for theme in THEMES:
            if "--all" in sys.argv or not picture.is_fresh(theme):
                picture.path(theme).write_text(picture.stamped(drawer(picture)(theme)))
                print(picture.path(theme).name)


if __name__ == "__main__":
    main()
