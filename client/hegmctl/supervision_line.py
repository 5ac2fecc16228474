"""A supervisor's connection to the daemon, which orders come by: made in no time, and read without waiting."""

from __future__ import annotations

import fcntl
import os
from time import monotonic

from hegmctl.wire import NO_DESCRIPTORS, Descriptors, Wire
from hegmd import __version__
from hegmd.errors import HegmError
from hegmd.protocol.connection import ClientConnection, Failure, Progress, Reply
from hegmd.protocol.messages import SUPPORTED_VERSIONS, Hello, Request, Supervise, SuperviseReport, SupervisorOrder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CONNECT_S = 2.0
# How long to wait for the daemon before closing the connection: unread reports would be lost.
SETTLE_S = 1.0


class SupervisionConnection:
    """A connection to the daemon, on which orders come. Incoming data raises SIGIO in this process."""

    def __init__(self, path: str, offer: Supervise) -> None:
        self._wire = Wire.connect(path, monotonic() + CONNECT_S)
        self._protocol = ClientConnection()
        self._offer = offer
        self._offered: int | None = None
        #: Reports of before the daemon's welcome: it takes them only after that and the offer.
        self._later: list[SuperviseReport] = []
        self._unanswered: set[int] = set()
        #: True if the daemon has refused the offer, and did not merely disconnect.
        self.declined = False
        try:
            fcntl.fcntl(self._wire.fileno(), fcntl.F_SETOWN, os.getpid())
            flags = fcntl.fcntl(self._wire.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(self._wire.fileno(), fcntl.F_SETFL, flags | fcntl.FASYNC)
            self._send(Hello(versions=SUPPORTED_VERSIONS, name="hegmctl-run", program_version=__version__))
        except BaseException:
            self._wire.close()
            raise

    def ask(self, report: SuperviseReport) -> None:
        """Send a report, or have it follow the offer. Raises OSError."""
        if self._offered is None:
            self._later.append(report)
        else:
            self._send(report)

    def _send(self, request: Request) -> int:
        number, frame = self._protocol.request(request)
        self._wire.send(frame, (), monotonic() + CONNECT_S)
        if not isinstance(request, Supervise):
            self._unanswered.add(number)
        return number

    def close(self) -> None:
        self._wire.close()

    def settle(self) -> None:
        """Wait briefly until the daemon has received all reports. Ignores orders that come meanwhile."""
        deadline = monotonic() + SETTLE_S
        try:
            while self._unanswered and (data := self._wire.receive(deadline)):
                self._protocol.feed(data)
                while (message := self._protocol.next_event()) is not None:
                    self._take(message, lambda _order, _fds: None)
        except (OSError, HegmError):
            pass  # it has ended, or does not answer

    def read(self, hear: Callable[[SupervisorOrder, Descriptors], object]) -> None:
        """Handle all received data without waiting. Raises OSError and HegmError at the end of the connection."""
        while True:
            try:
                data = self._wire.receive(monotonic())
            except TimeoutError:
                return
            if not data:
                raise ConnectionResetError("hegmd closed the connection")
            self._protocol.feed(data)
            while (message := self._protocol.next_event()) is not None:
                self._take(message, hear)

    def _take(
        self, message: Reply | Failure | Progress, hear: Callable[[SupervisorOrder, Descriptors], object]
    ) -> None:
        if message.id is not None:
            self._unanswered.discard(message.id)
        if self._offered is None and self._protocol.welcome is not None:
            self._offered = self._send(self._offer)
            while self._later:
                self._send(self._later.pop(0))
        if isinstance(message, Failure):
            self.declined = message.id is not None and message.id == self._offered
            if self.declined or message.id is None or self._protocol.welcome is None:
                raise message.error
            return
        with self._wire.take(message.fds) or NO_DESCRIPTORS as fds:
            if isinstance(message, Progress) and isinstance(message.event, SupervisorOrder):
                hear(message.event, fds)
            elif message.id == self._offered:
                raise ConnectionResetError("hegmd has no more orders")
