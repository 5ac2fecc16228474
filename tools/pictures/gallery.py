"""The list of pictures: what each is drawn from, and whether the committed file is fresh. Needs no plotting library."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from tools.pictures.records import MEASUREMENTS, ROOT
from tools.pictures.themes import Theme

PICTURES = ROOT / "docs" / "pictures"
HERE = Path(__file__).parent
RECORDING = PICTURES / "recordings" / "demo.json"
TOP, STORY = PICTURES / "recordings" / "top.json", PICTURES / "recordings" / "move.json"
# The product's own code that draws a timeline.
DRAWN_BY = (ROOT / "client" / "hegmctl" / "timeline.py", ROOT / "client" / "hegmctl" / "timeline_svg.py")
_DIGEST = re.compile(r"<!-- drawn from ([0-9a-f]{64}) -->")


@dataclass(frozen=True)
class Picture:
    """One picture. `code` is the module that draws it, `inputs` the files whose figures or words it shows."""

    name: str
    code: str
    inputs: tuple[Path, ...] = ()

    def path(self, theme: Theme) -> Path:
        return PICTURES / f"{self.name}-{theme.name}.svg"

    def digest(self) -> str:
        """A digest of all that the picture depends on: code, themes and inputs."""
        code = [HERE / name for name in (f"{self.code}.py", "themes.py", "records.py")]
        content = [path.read_bytes() for path in (*code, *self.inputs)]
        return hashlib.sha256(b"\0".join([self.name.encode(), *content])).hexdigest()

    def stamped(self, svg: str) -> str:
        """The SVG with the digest of what it was drawn from."""
        return f"{svg.rstrip()}\n<!-- drawn from {self.digest()} -->\n"

    def is_fresh(self, theme: Theme) -> bool:
        """True where the committed file was drawn from the inputs and the code of today."""
        found = _DIGEST.search(self.path(theme).read_text()) if self.path(theme).exists() else None
        return found is not None and found[1] == self.digest()


def _measured(*names: str) -> tuple[Path, ...]:
    return tuple(MEASUREMENTS / f"{name}.json" for name in names)


GALLERY = (
    Picture("downtime", "charts", _measured("moves", "moves_2026-11-21", "save_and_reload", "restart_phases")),
    Picture("timeline", "charts", _measured("moves", "moves_2026-11-21", "move_phases")),
    Picture("demo", "terminal", (RECORDING,)),
    Picture("migrate", "terminal", (RECORDING,)),
    Picture("top", "views", (TOP,)),
    Picture("operation", "views", (STORY, *DRAWN_BY)),
    Picture("sharing", "sharing_chart", _measured("sharing_simulation")),
    Picture("processes", "drawings"),
    Picture("migration", "drawings"),
    Picture("holders", "drawings"),
)
