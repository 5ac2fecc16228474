"""Starts `hegmctl top`, or reports what is missing: textual, or a terminal that can be redrawn."""

from __future__ import annotations

import os
import sys

from hegmctl.output import TextSink, is_dumb
from hegmd.errors import UNAVAILABLE, USAGE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.cli import Session

INTERVAL_S = 5.0


def top(session: Session) -> int:
    sink = session.sink
    if not isinstance(sink, TextSink):
        raise HegmError(USAGE, "top is a screen and prints no JSON", "run: hegmctl jobs --json")
    if sink.style.columns is None or is_dumb() or not (sys.stdin.isatty() and os.isatty(2)):
        raise HegmError(USAGE, "top needs a terminal that can be redrawn", "run: hegmctl jobs, or hegmctl ps --watch")
    os.environ.pop("NO_COLOR", None)  # textual takes an empty one for a request, and ignores --color
    if not sink.style.colour:
        os.environ["NO_COLOR"] = "1"
    session.connect().close()  # a missing daemon is an error, not an empty screen
    try:
        from hegmctl.top.app import TopApp
    except ModuleNotFoundError as error:
        raise HegmError(
            UNAVAILABLE,
            f"top needs the package {error.name}, which is not installed",
            f"run: {sys.executable} -m pip install 'hegmd[top]'",
        ) from error
    from hegmctl.top.feed import Feed
    from hegmctl.top.picture import Picture

    feed = Feed(session.connect, session.arguments.seconds("interval") or INTERVAL_S)
    TopApp(feed, Picture(unicode=sink.style.ellipsis == "…")).run()
    return 0
