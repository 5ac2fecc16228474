"""The architecture drawings, as plain SVG: processes and sockets, the life of a migration, and where the bytes are.

Each drawing is a function of the theme. Boxes and arrows are placed by hand on a canvas 820 units wide.
"""

from __future__ import annotations

from html import escape

from tools.pictures.themes import MONO, SANS, Theme

WIDTH = 820
HEAD_SIZE, TEXT_SIZE = 14, 12
LINE = 16


class Canvas:
    """Collects shapes and writes them as one SVG document."""

    def __init__(self, theme: Theme, height: int, title: str) -> None:
        self.theme = theme
        self._height = height
        self._title = title
        self._shapes: list[str] = []

    def text(self, x: float, y: float, words: str, **style: str) -> None:
        """One line of text with its baseline at `y`. Style: size, colour, anchor, weight, mono."""
        size, colour = style.get("size", str(TEXT_SIZE)), style.get("colour", self.theme.text)
        family = MONO if "mono" in style else SANS
        self._shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{family}" font-size="{size}" fill="{colour}"'
            f' text-anchor="{style.get("anchor", "start")}" font-weight="{style.get("weight", "normal")}">'
            f"{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, lines: list[str], *, colour: str, height: float = 0) -> None:
        """A box with a bold first line; its height follows the number of lines unless given."""
        height = height or 18 + LINE * len(lines)
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"'
            f' fill="{self.theme.panel}" stroke="{colour}" stroke-width="1.5"/>'
        )
        for number, line in enumerate(lines):
            style = {"weight": "600", "size": str(HEAD_SIZE)} if number == 0 else {"colour": self.theme.quiet}
            self.text(x + 10, y + 21 + LINE * number, line, **style)

    def area(self, x: float, y: float, width: float, height: float, label: str) -> None:
        """A dashed frame around what belongs together."""
        self._shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="none"'
            f' stroke="{self.theme.line}" stroke-dasharray="5 4"/>'
        )
        self.text(x + 10, y + height - 10, label, colour=self.theme.quiet, size="12")

    def arrow(self, points: list[tuple[float, float]], label: str = "", *, both: bool = False, at: str = "") -> None:
        """A line through the points with a head at its end, or at both. `at` places the label: "x,y,anchor"."""
        path = " ".join(f"{'L' if n else 'M'}{x:g} {y:g}" for n, (x, y) in enumerate(points))
        heads = 'marker-end="url(#head)"' + (' marker-start="url(#head)"' if both else "")
        self._shapes.append(f'<path d="{path}" fill="none" stroke="{self.theme.quiet}" stroke-width="1.4" {heads}/>')
        if label:
            x, y, anchor = at.split(",")
            self.text(float(x), float(y), label, colour=self.theme.quiet, size="11", anchor=anchor)

    def bar(self, x: float, y: float, width: float, colour: str, words: str) -> None:
        """A filled bar with its words inside, for spans of time."""
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="24" rx="4" fill="{colour}"/>')
        # The grey of the theme lies between page and text: words in the page's colour are hard to read on it.
        written = self.theme.text if colour == self.theme.theirs else self.theme.page
        self.text(x + width / 2, y + 16, words, colour=written, size="11", anchor="middle", weight="600")

    def strip(self, x: float, y: float, width: float, colour: str) -> None:
        """A filled bar of a chart."""
        self._shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:.1f}" height="15" rx="2" fill="{colour}"/>')

    def column(self, x: float, top: float, bottom: float) -> None:
        self._shapes.append(
            f'<path d="M{x:g} {top:g} V{bottom:g}" stroke="{self.theme.line}" stroke-width="1" stroke-dasharray="2 4"/>'
        )

    def svg(self) -> str:
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            f' orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{self.theme.quiet}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<defs>{head}</defs>\n"
            f'<rect width="{WIDTH}" height="{self._height}" fill="{self.theme.page}"/>\n'
            + "\n".join(self._shapes)
            + "\n</svg>\n"
        )


def processes(theme: Theme) -> str:
    """Which processes there are, and over which socket they speak."""
    canvas = Canvas(theme, 470, "The processes of hegmd on one node, and the sockets between them")
    canvas.box(20, 40, 170, ["hegmctl", "command line"], colour=theme.line)
    canvas.box(20, 110, 170, ["your program", "Python library", "or any language"], colour=theme.line)
    canvas.box(20, 196, 170, ["Prometheus", "textfile or port"], colour=theme.line)
    canvas.box(
        330,
        40,
        230,
        ["hegmd", "inventory, plans, journal,", "pool, permissions;", "makes no CUDA context"],
        colour=theme.ours,
        height=206,
    )
    canvas.text(340, 140, "state directory", size="12", weight="600")
    canvas.text(340, 156, "operations.journal", size="11", colour=theme.quiet, mono="1")
    canvas.text(340, 182, "host pool", size="12", weight="600")
    canvas.text(340, 198, "/dev/shm or hugetlbfs", size="11", colour=theme.quiet, mono="1")
    canvas.text(340, 224, "descriptors of GPU memory", size="12", weight="600")
    canvas.arrow([(190, 66), (330, 66)], "/run/hegm/hegmd.sock", both=True, at="260,59,middle")
    canvas.arrow([(190, 140), (330, 140)], "msgpack frames", both=True, at="260,133,middle")
    canvas.arrow([(330, 222), (190, 222)], "metrics", at="260,215,middle")
    canvas.box(640, 40, 160, ["GPU helper", "calls libcuda;", "killable at any", "time"], colour=theme.violet)
    canvas.arrow([(560, 80), (640, 80)], both=True)
    canvas.text(600, 72, "calls", colour=theme.quiet, size="11", anchor="middle")
    canvas.box(640, 164, 160, ["descriptor store", "systemd, or the", "process hegm-keeper"], colour=theme.violet)
    canvas.arrow([(560, 198), (640, 198)], "fds", both=True, at="600,190,middle")
    canvas.area(20, 296, 540, 160, "the job, as its own user")
    canvas.box(40, 326, 160, ["hegmctl run", "supervisor, with", "--allow-restart"], colour=theme.line)
    canvas.box(
        280,
        326,
        260,
        ["python train.py", "the script, unchanged", "agent: a thread that counts", "batches and copies tensors"],
        colour=theme.good,
    )
    canvas.arrow([(200, 360), (280, 360)], "starts", at="240,353,middle")
    canvas.arrow([(445, 326), (445, 246)], "agent's connection: orders, descriptors", both=True, at="455,278,start")
    canvas.arrow([(120, 326), (120, 268), (345, 268), (345, 246)])
    canvas.text(130, 262, "restart requests", colour=theme.quiet, size="11")
    canvas.box(640, 326, 160, ["CUDA driver", "lock, checkpoint,", "restore, unlock"], colour=theme.warm)
    canvas.arrow([(800, 80), (811, 80), (811, 360), (800, 360)])
    canvas.arrow([(640, 360), (540, 360)])
    canvas.box(640, 410, 160, ["criu", "for images only"], colour=theme.line)
    canvas.arrow([(640, 435), (560, 435)])
    return canvas.svg()


STEPS: tuple[tuple[str, int, str, str], ...] = (
    ("plan", 0, "check the request; a plan, or every reason against it", "train"),
    ("reserving", 0, "reserve GPU memory, and memory for the bytes", "train"),
    ("quiescing", 1, "agent parks the training thread between two batches", "down"),
    ("offloading", 1, "copy all tensor bytes off the GPU, then free them", "down"),
    ("checkpointing", 2, "driver checkpoints what is left of the process", "down"),
    ("restoring", 2, "driver restores it on the target GPU", "down"),
    ("reloading", 1, "agent allocates again; copy the bytes back", "down"),
    ("releasing", 1, "the training thread continues", "train"),
    ("verifying", 1, "the next batch boundary: only now it is done", "train"),
    ("tidying", 0, "release reservations and pool memory", "train"),
)


def migration(theme: Theme) -> str:
    """The phases of a migration, who acts in each, and where the job does not train."""
    top, step = 62, 34
    canvas = Canvas(theme, top + step * len(STEPS) + 66, "The phases of a migration: who acts, and when the job trains")
    columns = ("hegmd", "agent in the job", "CUDA driver")
    left = (110, 220, 350)
    colours = (theme.ours, theme.good, theme.warm)
    bottom = top + step * len(STEPS)
    for x, name in zip(left, columns, strict=True):
        canvas.text(x + 45, 40, name, size="12", weight="600", anchor="middle")
        canvas.column(x + 45, 50, bottom)
    canvas.text(20, 40, "job", size="12", weight="600")
    for number, (phase, column, words, state) in enumerate(STEPS):
        y = top + step * number
        colour = theme.good if state == "train" else theme.theirs
        canvas.bar(20, y, 62, colour, "trains" if state == "train" else "parked")
        canvas.bar(left[column] - 5, y, 100, colours[column], phase)
        canvas.text(470, y + 16, words, size="11.5")
    y = bottom + 22
    canvas.text(
        20,
        y,
        "Each phase is in the journal before it begins. A failure or a cancel before restoring rolls back:",
        size="12",
    )
    canvas.text(
        20,
        y + 18,
        "the same phases bring the job back to its first GPU. After a crash the next daemon inspects",
        size="12",
    )
    canvas.text(20, y + 36, "every process and continues from what it finds.", size="12")
    return canvas.svg()


def _held(canvas: Canvas, y: float, label: str, spans: list[tuple[float, float, str, str]]) -> None:
    canvas.text(20, y + 16, label, size="12", weight="600")
    for start, end, words, colour in spans:
        canvas.bar(214 + start * 99, y, (end - start) * 99 - 4, colour, words)


def holders(theme: Theme) -> str:
    """Who holds a job's tensor bytes in each part of a migration, a suspension and an image."""
    canvas = Canvas(theme, 545, "Who holds the tensor bytes, and when")
    phases = ("trains", "offload", "checkpoint", "restore", "reload", "trains")
    job, pool, video, disk = theme.good, theme.ours, theme.violet, theme.warm

    def section(y: float, title: str, names: tuple[str, ...]) -> None:
        canvas.text(20, y, title, size="14", weight="600")
        for number, name in enumerate(names):
            canvas.text(214 + 99 * number + 47, y, name, size="11", colour=theme.quiet, anchor="middle")

    section(30, "migrate, carrier peer", phases)
    _held(canvas, 42, "the job", [(0, 2, "its own GPU memory", job), (4, 6, "its own GPU memory", job)])
    _held(canvas, 72, "GPU memory, by descriptor", [(1, 5, "hegmd and the descriptor store", video)])
    section(135, "migrate, carrier host", phases)
    _held(canvas, 147, "the job", [(0, 2, "its own GPU memory", job), (4, 6, "its own GPU memory", job)])
    _held(canvas, 177, "GPU memory, by descriptor", [(1, 3, "staging copy", video), (3, 5, "staging copy", video)])
    _held(canvas, 207, "host pool", [(2, 5, "hegmd; a file with a name, or the store", pool)])
    section(270, "suspend, then resume", ("trains", "offload", "suspended", "suspended", "reload", "trains"))
    _held(canvas, 282, "the job", [(0, 2, "its own GPU memory", job), (4, 6, "its own GPU memory", job)])
    _held(canvas, 312, "host pool", [(1, 5, "hegmd; the agent has a descriptor too", pool)])
    _held(canvas, 342, "disk, with --spill", [(2.6, 5, "in place of the pool", disk)])
    section(405, "checkpoint, then restore", ("trains", "offload", "image only", "image only", "reload", "trains"))
    _held(canvas, 417, "the job", [(0, 2, "its own GPU memory", job), (4, 6, "its own GPU memory", job)])
    _held(canvas, 447, "host pool", [(1, 2, "hegmd", pool), (4, 5, "hegmd", pool)])
    _held(canvas, 477, "image directory", [(1.5, 6, "bytes/ and criu/, read back before the job ends", disk)])
    canvas.text(20, 530, "Bytes are freed at one place only after the copy at the next one is complete.", size="12")
    return canvas.svg()
