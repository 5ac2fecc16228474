"""The two themes in which each picture is drawn: GitHub's own colours for pages, so that a picture has no frame."""

from __future__ import annotations

from dataclasses import dataclass

SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Theme:
    """Colours by what they are for."""

    name: str
    page: str
    panel: str
    line: str
    text: str
    quiet: str
    ours: str
    theirs: str
    good: str
    warm: str
    violet: str


LIGHT = Theme(
    "light",
    "#ffffff",
    "#f6f8fa",
    "#d1d9e0",
    "#1f2328",
    "#59636e",
    "#0969da",
    "#a3adb8",
    "#1a7f37",
    "#9a6700",
    "#8250df",
)
DARK = Theme(
    "dark", "#0d1117", "#151b23", "#3d444d", "#f0f6fc", "#9198a1", "#4493f8", "#656c76", "#3fb950", "#d29922", "#ab7df8"
)
THEMES = (LIGHT, DARK)
