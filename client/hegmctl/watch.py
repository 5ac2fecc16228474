"""Answers that continue: `ps --watch` and `events --follow`. Both survive a restart of the daemon.

They say once that they wait for the daemon. Every other error ends the command. On a terminal `--watch` redraws a
`screen`; elsewhere it appends.
"""

from __future__ import annotations

import sys
from time import localtime, sleep, strftime, time

from hegmctl.output import TextSink, is_dumb
from hegmd.errors import BUSY, CANCELLED, DISCONNECTED, NO_DAEMON, TIMEOUT, UNAVAILABLE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn, TypeVar

    from hegmctl.cli import Session
    from hegmctl.connection import Connection
    from hegmctl.output import Sink
    from hegmctl.screen import Screen
    from hegmctl.tables import Style
    from hegmd.protocol.record import Record
    from hegmd.protocol.snapshots import Event

    R = TypeVar("R", bound=Record)
    T = TypeVar("T")

# The errors during a restart of the daemon.
PASSING = (NO_DAEMON, DISCONNECTED, UNAVAILABLE, TIMEOUT, BUSY, CANCELLED)
RETRY_S = 1.0


def is_passing(error: HegmError) -> bool:
    """True if only the daemon is away. Some errors with the same codes are final: a lease that has ended, or a full
    standard output."""
    return error.code in PASSING and not error.facts.get("final")


class Reconnecting:
    """A connection that reconnects after the daemon was away. If the daemon is away at the start, that is an error."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connection: Connection | None = session.connect()
        self._away = False

    def ask(self, fetch: Callable[[Connection], T], tell: Callable[[str], None]) -> T | None:
        """Return the result of `fetch`, or None while the daemon is away; call `tell` at each change."""
        try:
            if self._connection is None:
                self._connection = self._session.connect()
                self._away = False
                tell("the daemon is back")
            return fetch(self._connection)
        except HegmError as error:
            if not is_passing(error):
                raise
            self.close()
            if not self._away:
                tell(f"waiting for the daemon: {error.message}")
            self._away = True
            return None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class Log:
    """Appends answers if there is no terminal to redraw."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def show(self, answer: R, view: Callable[[R, Style], list[str]]) -> None:
        """Append the answer; in text with the time above."""
        self._sink.element(answer, lambda shown, style: [strftime("%H:%M:%S", localtime()), *view(shown, style), ""])

    def tell(self, text: str) -> None:
        self._sink.note(text)

    def wait(self, seconds: float) -> None:
        sleep(seconds)


def watch(
    session: Session, interval_s: float, fetch: Callable[[Connection], R], view: Callable[[R, Style], list[str]]
) -> NoReturn:
    """Show the result of `fetch` at intervals, until interrupted or until an error."""
    sink = session.sink
    daemon = Reconnecting(session)
    try:
        if isinstance(sink, TextSink) and sink.style.columns is not None and not is_dumb():
            from hegmctl.screen import Screen

            with Screen(sys.stdout, sink.style, f"hegmctl {' '.join(sys.argv[1:])}") as screen:
                _repeat(daemon, interval_s, fetch, view, screen)
        _repeat(daemon, interval_s, fetch, view, Log(sink))
    finally:
        daemon.close()


def _repeat(
    daemon: Reconnecting,
    interval_s: float,
    fetch: Callable[[Connection], R],
    view: Callable[[R, Style], list[str]],
    place: Screen | Log,
) -> NoReturn:
    while True:
        found = daemon.ask(fetch, place.tell)
        if found is not None:
            place.show(found, view)
        place.wait(interval_s if found is not None else min(interval_s, RETRY_S))


def follow(
    session: Session,
    since: int,
    kinds: Iterable[str],
    view: Callable[[Event, Style], list[str]],
    run: str | None = None,
) -> NoReturn:
    """Show events as they come, until interrupted.

    A daemon counts its events from its start, and names that start in `welcome`. After it was away, the same daemon is
    asked for the events after the last one shown, and a new one for all events. If a daemon does not name its start,
    the time of an event tells whether it is new.
    """
    kinds = tuple(kinds)
    last_seq = 0
    newest_utc = time()
    known_run: str | None = None

    def take(connection: Connection) -> None:
        nonlocal last_seq, newest_utc, known_run
        here, before, known_run = connection.welcome.run, known_run, connection.welcome.run
        first_time = before is None
        goes_on = bool(here) and here == before
        since_seq, counted_in = (since, run) if first_time else (max(since, last_seq + 1) if goes_on else 0, None)
        for event in connection.events(since_seq, follow=True, kinds=kinds, run=counted_in):
            if first_time or here or event.seq > last_seq > 0 or event.time_utc > newest_utc:
                session.sink.element(event, view)
                last_seq, newest_utc = event.seq, event.time_utc

    daemon = Reconnecting(session)
    try:
        while True:
            daemon.ask(take, session.sink.note)
            sleep(RETRY_S)
    finally:
        daemon.close()
