"""One run of hegmctl: what was asked for, where answers go, and the way to the daemon."""

from __future__ import annotations

from hegmctl.connection import TIMEOUT_S, Connection, connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmctl.arguments import Arguments
    from hegmctl.output import Sink


class Session:
    """What every command works with."""

    def __init__(self, arguments: Arguments, sink: Sink) -> None:
        self.arguments = arguments
        self.sink = sink

    def connect(self, timeout_s: float = TIMEOUT_S, *, socket: str | None = None) -> Connection:
        """Connect as the options say, or to that socket; `timeout_s` holds where they say none. Raises HegmError."""
        given_s = self.arguments.seconds("timeout")
        return connect(socket or self.arguments.text("socket"), timeout_s=timeout_s if given_s is None else given_s)
