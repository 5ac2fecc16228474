"""`hegmctl top` and an operation's timeline as pictures. `python -m tools.pictures.views` records the node they show.

The node is simulated and its trainings are real: three of them, one of which is migrated. It takes a minute and needs
no GPU. The drawings are the product's own: the lines of `top`, and the SVG of `op --timeline`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hegmctl.connection import connect
from hegmctl.timeline_svg import svg_of
from hegmctl.top.feed import row_of
from hegmctl.top.picture import Line, NodeView, Picture
from hegmd.protocol.messages import Jobs, JobsReply, Operations, OperationsReply, Story, StoryReply
from tools.pictures.gallery import STORY, TOP
from tools.pictures.records import ROOT
from tools.pictures.themes import MONO, Theme

COLUMNS, ROWS = 100, 20
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE = 7.82, 17, 13
MARGIN = 14
LOOKS, LOOK_S = 20, 1.0
NAMES = ("bert", "resnet", "llama-sft")
GPU = '[[gpu]]\nmemory = "{}GiB"\nname = "Simulated"\nutilisation_percent = {}\n'
PERCENT = (87, 64, 3, 41)


def top(theme: Theme) -> str:
    """The screen of `hegmctl top`."""
    lines: list[Line] = json.loads(TOP.read_text())["lines"]
    colours = {"green": theme.good, "cyan": theme.ours, "yellow": theme.warm, "red": "#cf222e", "dim": theme.quiet}
    width, height = COLUMNS * CELL_WIDTH + 2 * MARGIN, ROWS * CELL_HEIGHT + 2 * MARGIN
    texts: list[str] = []
    for number, line in enumerate(lines):
        y = MARGIN + FONT_SIZE + number * CELL_HEIGHT
        if any(style == "reverse" for _, style in line):
            texts.append(
                f'<rect x="{MARGIN}" y="{y - FONT_SIZE}" width="{width - 2 * MARGIN:.0f}" height="{CELL_HEIGHT}"'
                f' fill="{theme.line}"/>'
            )
        spans = "".join(f"<tspan{_look(style, colours)}>{escape(text)}</tspan>" for text, style in line)
        texts.append(f'<text x="{MARGIN}" y="{y}" xml:space="preserve">{spans}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
        "<title>hegmctl top</title>\n"
        f'<rect width="{width:.0f}" height="{height:.0f}" rx="8" fill="{theme.panel}" stroke="{theme.line}"/>\n'
        f'<g font-family="{MONO}" font-size="{FONT_SIZE}" fill="{theme.text}">\n'
        + "\n".join(texts)
        + "\n</g>\n</svg>\n"
    )


def _look(style: str, colours: dict[str, str]) -> str:
    if style == "bold":
        return ' font-weight="700"'
    return f' fill="{colours[style]}"' if style in colours else ""


def operation(theme: Theme) -> str:
    """The timeline of the migration."""
    reply = StoryReply.from_plain(json.loads(STORY.read_text()), "the recording")
    return svg_of(reply, theme=theme.name, now_utc=0.0)


# ---- recording -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _node(folder: Path) -> Iterator[Path]:
    spec, socket = folder / "gpus.toml", folder / "hegmd.sock"
    spec.write_text("".join(GPU.format(8, percent) for percent in PERCENT))
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
        "HEGM_SOCKET": str(socket),
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "hegmd", "--simulate", str(spec), "--state-dir", str(folder / "state")]
    started = [subprocess.Popen([*words, "--socket", str(socket)], env=environ)]
    try:
        while not socket.exists():
            time.sleep(0.1)
        for number, name in enumerate(NAMES):
            run = [sys.executable, "-m", "hegmctl", "run", "--name", name, "--gpu", f"gpu{number}", "--"]
            training = [sys.executable, "contrib/demo/train.py", "100000"]
            started.append(subprocess.Popen([*run, *training], env=environ, cwd=ROOT, stdout=subprocess.DEVNULL))
        yield socket
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        _node(Path(folder)) as socket,
        connect(str(socket), timeout_s=60) as hegmd,
    ):
        picture = Picture()
        for number in range(LOOKS):
            jobs = hegmd.call(Jobs(), JobsReply).jobs
            while not number and sum(job.state == "training" for job in jobs) < len(NAMES):
                time.sleep(LOOK_S)
                jobs = hegmd.call(Jobs(), JobsReply).jobs
            operations = hegmd.call(Operations(), OperationsReply).operations
            picture.take(NodeView(time.time(), "node1", hegmd.gpus().gpus, [row_of(job) for job in jobs], operations))
            if number == LOOKS // 2:
                hegmd.migrate("bert", to="gpu3")
            time.sleep(LOOK_S)
        for event in hegmd.events(kinds=("operation", "gpu", "process")):
            picture.happened(event)
        story = hegmd.call(Story(id="1"), StoryReply)
    lines = ",\n".join(json.dumps(line, ensure_ascii=False) for line in picture.lines(COLUMNS, ROWS))
    TOP.write_text(f'{{"lines": [\n{lines}\n]}}\n')
    STORY.write_text(json.dumps(story.to_plain(), indent=1) + "\n")


if __name__ == "__main__":
    main()
