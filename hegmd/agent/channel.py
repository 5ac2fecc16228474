"""The agent's connection: a blocking socket in a thread that outlives every daemon.

Connects, says hello, attends, passes orders to `orders` and sends back their reports. When the connection ends, it
reconnects with the same token, and never gives up. While a thread of the script waits for the daemon, a daemon that
answers nothing counts as ended, since a stopped one keeps its connections. The thread is a raw one: no list of
`threading` shows it, and the interpreter's exit does not wait for it. It raises nothing, and does not touch the script.

Longer than 400 lines because one thread serves connection, gate and limits: all that can wake it is here.
"""

from __future__ import annotations

import os
import platform
import select
import signal
import socket
import struct
import sys
from time import monotonic

from .. import __version__
from ..errors import HegmError
from ..protocol.connection import ClientConnection, Failure, Progress, Reply
from ..protocol.messages import SUPPORTED_VERSIONS, AgentAttend, AgentReport, Hello, Order, Ping, Request
from ..protocol.operations import PeriodicImages
from . import hegm_launcher, torch_state
from .hegm_signal import LAUNCHER, REQUEST
from .lending import Lending
from .notes import note
from .orders import Orders
from .quiesce import Gate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SYSTEM_SOCKET = "/run/hegm/hegmd.sock"
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
BATCH_LOOK_S = 0.25
# A daemon that accepts no connection or no bytes for this long counts as ended.
PATIENCE_S = 10.0
# The same for one that sends nothing while a thread of the script waits for it. It is pinged at the half of this time.
SILENCE_LIMIT_S = 60.0
_RECEIVE_BYTES = 65_536
_MAX_FDS = 16
# Boundaries from the restore of a state until its first batch is made: that batch is requested, and then the next.
_BATCH = 1
_FD = struct.Struct("i")


def socket_path(environ: Mapping[str, str]) -> str:
    """Return the daemon's socket: the configured path, else the node's if permitted, else the user's own."""
    named = environ.get("HEGM_SOCKET")
    if named:
        return named
    runtime_dir = environ.get("XDG_RUNTIME_DIR")
    if runtime_dir and not os.access(SYSTEM_SOCKET, os.W_OK):
        own = f"{runtime_dir}/hegm/hegmd.sock"
        if os.path.exists(own):
            return own
    return SYSTEM_SOCKET


def look_within_s(left_s: float, *, awaits_batch: bool) -> float:
    """Return the part of a pause after which to look up: no event reports the first batch of a restarted training."""
    return min(left_s, BATCH_LOOK_S) if awaits_batch else left_s


def next_pause_s(pause_s: float, lasted_s: float, *, was_of_use: bool, is_parked: bool = False) -> float:
    """Return the pause after a connection: longer each time, except after one that gave an order or lasted.

    A daemon that gave an order works. A process that is parked for a daemon does not train until the next one is there,
    so it tries often, and does not wait longer because daemons are killed often.
    """
    is_short = is_parked or was_of_use or lasted_s > MAX_PAUSE_S
    return FIRST_PAUSE_S if is_short else min(pause_s * 2, MAX_PAUSE_S)


class Channel:
    """Owns the thread, its socket and the pipe that wakes it."""

    def __init__(self, gate: Gate, environ: Mapping[str, str], unknown: Sequence[str] | None = None) -> None:
        self._gate = gate
        self._environ = environ
        self._unknown = unknown
        self._orders = Orders(gate)
        self.lending = Lending(gate, self._orders)
        self._token = os.urandom(16).hex()
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._socket: socket.socket | None = None
        self._elsewhere: str | None = None
        self._is_alone = False  # no daemon has answered at the last try
        self._is_revived = False
        self._restarted: str | None = None
        #: The boundary at which the state was restored, until the training has continued from there.
        self._back_at: int | None = None
        self._departure = self._launched_departure()
        gate.on_change = self.wake
        gate.on_signal = self._pass_signal

    def _launched_departure(self) -> hegm_launcher.ProcessExit | None:
        """Return the departure that a launcher can request by a signal, if there is a launcher."""
        if not os.environ.get(LAUNCHER):
            return None
        hegm_launcher.warn_of_another(sys.modules)
        REQUEST.on_change = self.wake
        return hegm_launcher.ProcessExit(
            REQUEST, self._gate, self._orders, hegm_launcher.StatePackage(self._gate), os.environ
        )

    def wake(self) -> None:
        """Let the thread check the gate. From any thread."""
        try:
            os.write(self._waker, b"\0")
        except OSError as error:  # full, which wakes as well; or closed in a child
            if error.errno is None:  # a TimeoutError that another thread of the script raised in this one
                raise

    def note_restarted(self, operation: str | None, step: int | None = None) -> None:
        """Record that the state of that operation is restored in this process, and notify the daemon at once. Called in
        the training thread. `step` is the step of the snapshot, if the state is a snapshot.
        """
        self._orders.snapshots.note_restored(step, self._gate.count)
        self._restarted = operation
        self._back_at = self._gate.count
        self._orders.changed_by_itself = True
        self.wake()

    def close_in_child(self) -> None:
        """Close what a forked child inherited. The parent's connection stays open."""
        for fd in (self._woken, self._waker):
            try:
                os.close(fd)
            except OSError:
                pass
        if self._socket is not None:
            self._socket.close()
        self._orders.snapshots.close_in_child()

    def run(self) -> None:
        """Run the agent's thread: connect, serve, and start again."""
        pause_s = FIRST_PAUSE_S
        while True:
            began, obeyed = monotonic(), self._orders.obeyed
            try:
                self._attend()
            except (OSError, HegmError) as error:
                note(f"no connection: {error}")
            except Exception as error:  # noqa: BLE001 - the edge: a thread that dies would leave the script parked
                note(f"the connection failed: {error!r}")
            was_of_use = self._orders.changed_by_itself or self._orders.obeyed > obeyed
            self.hang_up()
            self._stay_disconnected()
            lasted_s, is_parked = monotonic() - began, self._orders.awaits_daemon
            pause_s = next_pause_s(pause_s, lasted_s, was_of_use=was_of_use, is_parked=is_parked)
            self._pause(pause_s)

    def _pass_signal(self, number: int) -> None:
        if number == signal.SIGUSR1 and self._departure is not None and REQUEST.is_taken():
            REQUEST.make()  # its handler waits for the parked thread; it is no reason to reload
        else:
            self._orders.note_signal(number)
        self.wake()

    def hang_up(self) -> None:
        """Close the connection; a parked process waits for the next one."""
        try:
            self.lending.disconnect()
            self._orders.end()
        finally:
            connected, self._socket = self._socket, None
            if connected is not None:
                connected.close()

    def _stay_disconnected(self) -> None:
        """Stay without a connection after the order `aside`, until there is a daemon to reconnect to."""
        aside, self._orders.aside = self._orders.aside, None
        if aside is not None:
            self._elsewhere = aside.wait() or self._elsewhere
            self._is_revived = self._is_revived or aside.is_revived()

    def _pause(self, pause_s: float) -> None:
        """Wait before the next try, and watch what is parked."""
        until = monotonic() + pause_s
        while (left_s := until - monotonic()) > 0:
            self._wait(None, look_within_s(left_s, awaits_batch=self._back_at is not None))
            self._look_after()
            self._note_past()

    def _note_past(self) -> None:
        """Without a daemon, record when a restarted training has made a batch."""
        if self._is_alone and self._back_at is not None and self._gate.count > self._back_at + _BATCH:
            from .state.values import inherited

            self._back_at = None
            inherited.note_past()

    def _wait(self, connected: socket.socket | None, longest_s: float | None) -> bool:
        """Wait until data comes, the gate reports, or a deadline passes. Returns True if the socket can be read."""
        deadlines = [self._orders.next_deadline(), self.lending.next_deadline]
        if self._departure is not None:
            deadlines.append(self._departure.next_deadline())
        for deadline in filter(None, deadlines):
            left_s = max(0.0, deadline - monotonic())
            longest_s = left_s if longest_s is None else min(left_s, longest_s)
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        if connected is not None:
            poll.register(connected, select.POLLIN)
        ready = [fd for fd, _ in poll.poll(None if longest_s is None else longest_s * 1000 + 1)]
        if self._woken in ready:
            os.read(self._woken, 4096)
        return connected is not None and connected.fileno() in ready

    def _attend(self) -> None:
        """Serve one connection from its start to its end."""
        is_welcome = False
        try:
            self._socket = self._connected()
            connection = _DaemonConnection(self._socket, self._orders, self.lending)
            try:
                connection.serve(self)
            finally:
                is_welcome = connection.is_welcome
        finally:
            self._is_alone = not is_welcome

    def _connected(self) -> socket.socket:
        """Return a connection to the daemon at the given or the usual socket. Raises OSError."""
        if self._elsewhere is not None:
            try:
                return _connect(self._elsewhere)
            except OSError as error:
                note(f"no daemon at {self._elsewhere}: {error}")
        return _connect(socket_path(self._environ))

    def describe(self) -> AgentAttend:
        """Return the description of this process for `attend`; made at each connection, since it changes."""
        framework = torch_state.version()
        return AgentAttend(
            token=self._token,
            framework=framework[0] if framework else None,
            framework_version=framework[1] if framework else None,
            python_version=platform.python_version(),
            job=self._environ.get("HEGM_JOB") or None,
            run=self._environ.get("HEGM_RUN") or None,
            rank=_number(self._environ, "RANK"),
            world_size=_number(self._environ, "WORLD_SIZE"),
            gpu=self._environ.get("HEGM_GPU") or None,
            images=periodic_images(self._environ.get("HEGM_IMAGES")),
            size_bytes=self._orders.known_bytes,
            communicators=self._orders.known_communicators,
            boundary=self._gate.count,
            parked=self._gate.parked,
            held_bytes=self._orders.held_bytes,
            entrusted=self._orders.entrusted,
            mark=self._orders.mark,
            revived=self._is_revived,
            driver_restored=self._orders.driver_restored,
            restarted=self._restarted,
            unknown=None if self._unknown is None else tuple(self._unknown),
        )

    def note_welcome(self) -> None:
        self._is_alone = False

    @property
    def awaits_daemon(self) -> bool:
        """True while a thread of the script waits until the daemon does something."""
        return self._orders.awaits_daemon or self.lending.awaits_answer

    def next_turn(self, connected: socket.socket, until: float | None) -> bool:
        """Wait for an event or that instant, and handle what is pending. Returns True if the socket can be read."""
        is_readable = self._wait(connected, None if until is None else max(0.0, until - monotonic()))
        self._look_after()
        return is_readable

    def _look_after(self) -> None:
        self._orders.tick()
        self.lending.tick(alone=self._is_alone)
        if self._departure is not None:
            self._departure.tick()


class _DaemonConnection:
    def __init__(self, connected: socket.socket, orders: Orders, lending: Lending) -> None:
        self._socket = connected
        self._orders = orders
        self._lending = lending
        self._protocol = ClientConnection()
        self._fds: list[int] = []
        self._is_broken = False
        self._attend_id: int | None = None
        self._silence_limit_s = _silence_limit_s()
        #: When to ping, or to give up after a ping, while a thread waits for the daemon.
        self._due: float | None = None
        self._has_pinged = False

    @property
    def is_welcome(self) -> bool:
        return self._protocol.welcome is not None

    def serve(self, channel: Channel) -> None:
        """Serve until the daemon leaves, dismisses us or answers nothing. Raises OSError and HegmError."""
        try:
            self._ask(Hello(versions=SUPPORTED_VERSIONS, name="hegm-agent", program_version=__version__, role="agent"))
            limit_s = min(PATIENCE_S, self._silence_limit_s)
            until = monotonic() + limit_s
            while not self.is_welcome:
                if channel.next_turn(self._socket, until):
                    self._read()
                    self._take_all()
                elif monotonic() >= until:
                    raise TimeoutError(f"hegmd has not answered for {limit_s:g} s")
            channel.note_welcome()
            self._orders.begin(self._report)
            self._attend_id = self._ask(channel.describe())
            self._lending.connect(self._ask)
            while not self._is_broken and not self._orders.changed_by_itself and self._orders.aside is None:
                self._watch(is_awaited=channel.awaits_daemon)
                if channel.next_turn(self._socket, self._due):
                    self._due = None
                    self._read()
                    if not self._take_all():
                        return
        finally:
            for fd in self._fds:
                os.close(fd)

    def _watch(self, *, is_awaited: bool) -> None:
        """Ping a silent daemon that a thread of the script waits for. Raises TimeoutError if it stays silent."""
        now = monotonic()
        if not is_awaited:
            self._due = None
        elif self._due is None:
            self._due, self._has_pinged = now + self._silence_limit_s / 2, False
        elif now < self._due:
            return
        elif not self._has_pinged:
            self._ask(Ping())
            self._due, self._has_pinged = now + self._silence_limit_s / 2, True
        elif not _is_readable(self._socket):  # this thread itself may have been busy or stopped
            raise TimeoutError(f"hegmd has not answered for {self._silence_limit_s:g} s: it may be stopped")

    def _ask(self, request: Request) -> int:
        request_id, frame = self._protocol.request(request)
        self._socket.sendall(frame)
        return request_id

    def _report(self, report: AgentReport) -> None:
        """Send a report. If the daemon has ended, the next one learns it from `agent.attend`."""
        try:
            self._ask(report)
        except OSError as error:
            note(f"a report was not sent: {error}")
            self._is_broken = True

    def _read(self) -> None:
        data, ancillary, _flags, _address = self._socket.recvmsg(
            _RECEIVE_BYTES, socket.CMSG_SPACE(_MAX_FDS * _FD.size), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                whole = len(payload) - len(payload) % _FD.size
                self._fds.extend(fd for (fd,) in _FD.iter_unpack(payload[:whole]))
        if not data:
            raise ConnectionResetError("the daemon closed the connection")
        self._protocol.feed(data)

    def _take_all(self) -> bool:
        """Handle all complete messages. Returns True while the daemon sends orders."""
        while (message := self._protocol.next_event()) is not None:
            if isinstance(message, Progress) and isinstance(message.event, Order):
                fds, self._fds = self._fds[: message.fds], self._fds[message.fds :]
                for unwanted in fds[1:]:
                    os.close(unwanted)
                fd = fds[0] if fds else None
                if not self._lending.postpones(message.event, fd):
                    self._orders.obey(message.event, fd)
            elif isinstance(message, Failure):
                if message.id is None or message.id == self._attend_id or self._protocol.welcome is None:
                    errors = [message.error]
                    del message  # a variable with the error would keep this frame, and the connection
                    raise errors.pop()
                if not self._lending.take_answer(message.id, message.error):
                    note(f"the daemon did not take a report: {message.error}")
            elif isinstance(message, Reply):
                if message.id == self._attend_id:
                    return False
                self._lending.take_answer(message.id, message.reply)
        return True


def _connect(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connected.settimeout(PATIENCE_S)
        connected.connect(path)
    except BaseException:
        connected.close()
        raise
    return connected


def _is_readable(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLIN)
    return bool(poll.poll(0))


def _silence_limit_s() -> float:
    try:
        return float(os.environ["HEGM_SILENCE_LIMIT_S"])
    except (KeyError, ValueError):
        return SILENCE_LIMIT_S


def periodic_images(text: str | None) -> PeriodicImages | None:
    """Parse the value that `hegmctl run` sets: seconds, number and directory, separated by colons."""
    try:
        every, keep, path = (text or "").split(":", 2)
        return PeriodicImages(every_s=float(every), keep=int(keep), path=path)
    except ValueError:
        return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a whole number from the environment, where torchrun puts them, or None."""
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        return None
