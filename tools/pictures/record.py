"""Record `make demo` in a terminal of its own, with the time of each output: `python -m tools.pictures.record`.

Writes docs/pictures/recordings/demo.json, from which `make pictures` draws the terminal pictures. Run it again when
the output of hegmctl has changed. It takes a minute or two and needs no GPU.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import time

from tools.pictures.records import ROOT

COLUMNS, ROWS = 94, 30
RECORDING = ROOT / "docs" / "pictures" / "recordings" / "demo.json"
PARTS = ("contrib/demo/demo.py", "contrib/demo/moving.py")


def without_this_machine(text: str) -> str:
    """Replace the path of this checkout, also where a table has cut it short."""
    place = str(ROOT)
    cut = "|".join(re.escape(place[:length]) for length in range(len(place), 1, -1))
    return re.sub(rf"(?:{cut})…", "~/heg…", text.replace(place, "~/hegmd"))


def run(words: list[str]) -> list[tuple[float, str]]:
    """Run a program in a pseudo-terminal. Returns what it printed, with seconds since its start."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(COLUMNS))
        os.execv(words[0], words)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    began, printed = time.monotonic(), []
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # EIO: the program has ended
            data = b""
        if not data:
            break
        printed.append((round(time.monotonic() - began, 3), data.decode(errors="replace")))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise SystemExit(f"record: {' '.join(words)} ended with status {status}")
    return printed


def main() -> None:
    os.chdir(ROOT)
    events = [(0.0, "\x1b[1m$ make demo\x1b[0m\r\n")]
    for part in PARTS:
        start = events[-1][0]
        events += [(round(start + at, 3), without_this_machine(text)) for at, text in run([sys.executable, part])]
    RECORDING.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    RECORDING.write_text(f'{{"columns": {COLUMNS}, "rows": {ROWS}, "events": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
