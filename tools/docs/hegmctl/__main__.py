"""`python -m tools.docs.hegmctl man|completions DIRECTORY`, and `python -m tools.docs.hegmctl json|stub FILE`."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from tools.docs.hegmctl.completions import completions
from tools.docs.hegmctl.json_reference import refreshed
from tools.docs.hegmctl.library_stub import stub
from tools.docs.hegmctl.manual import manual_pages

USAGE = "usage: python -m tools.docs.hegmctl man|completions DIRECTORY, or json|stub FILE"


def main(words: list[str]) -> int:
    """Write the requested pages; return the exit status."""
    if len(words) != 2 or words[0] not in ("man", "completions", "json", "stub"):
        print(USAGE, file=sys.stderr)
        return 2
    what, place = words[0], Path(words[1])
    if what == "json":
        place.write_text(refreshed(place.read_text()))
        return 0
    if what == "stub":
        place.write_text(stub())
        return 0
    # A page bears a date, and the same sources are to give the same package.
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", "0")) or time.time()
    day = time.strftime("%Y-%m-%d", time.gmtime(seconds))
    place.mkdir(parents=True, exist_ok=True)
    for name, text in (manual_pages(day) if what == "man" else completions()).items():
        (place / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
