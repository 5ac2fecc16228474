"""The protocol between a service manager and the daemon (systemd's), without its library.

Owns the variables that systemd sets for a service (`NOTIFY_SOCKET`, `LISTEN_*`, `WATCHDOG_*`), the descriptors that it
passes (the listening socket, and what an earlier daemon left in the descriptor store), and the datagram socket for
reports. Callers decide when the daemon is ready, what it stores, and what it does about a lost watchdog.

`take_offer` reads the environment once and removes what it read, so that no child process takes itself for the service.
Without a service manager the offer is empty and reports do nothing. Reports never raise and never wait long: a full
queue of the manager must not stop the daemon. Storing descriptors raises, because the caller relies on it. The protocol
is that of sd_notify(3) and sd_listen_fds(3), systemd 246 or newer.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import select
import socket
import stat
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from hegmd.errors import UNAVAILABLE, USAGE, Bug, HegmError

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

FIRST_PASSED_DESCRIPTOR = 3
# SCM_MAX_FD of the kernel.
DESCRIPTORS_PER_MESSAGE = 253
# A report waits this long for the manager's queue. PID 1 empties it within microseconds unless it is stuck.
SEND_LIMIT_S = 0.5

_TAKEN_VARIABLES = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "FDSTORE",
)


def under_systemd(environ: Mapping[str, str]) -> bool:
    """Return True if a service manager started this process and expects reports. Call it before `take_offer`."""
    return bool(environ.get("NOTIFY_SOCKET"))


class Offer(NamedTuple):
    """The descriptors and variables that the service manager passed to this process."""

    notify_address: str | None
    watchdog_limit_s: float | None
    """The manager acts when it has heard nothing for this long; report at least twice as often. None: no watchdog."""
    descriptor_names: tuple[str, ...]
    """The name of each passed descriptor, in the order of their numbers, which start at 3."""
    keeps_descriptors: bool = False
    """Whether there is a descriptor store behind the address."""

    def manager(self) -> ServiceManager:
        """The way to report. Raises HegmError when the address is not of a kind that this system has."""
        return ServiceManager(self.notify_address)

    def descriptors(self, first: int = FIRST_PASSED_DESCRIPTOR) -> PassedDescriptors:
        """Take ownership of the passed descriptors. To be called once: they are closed in children from now on."""
        return PassedDescriptors(self.descriptor_names, first)


def take_offer(environ: MutableMapping[str, str], pid: int) -> Offer:
    """Read what the manager passed to the process `pid` and remove it from `environ`.

    Removes and ignores what was meant for another process, whose child did not clean up. Raises HegmError for a
    variable that is not valid.
    """
    environment = {name: environ.pop(name) for name in _TAKEN_VARIABLES if name in environ}
    return Offer(
        notify_address=environment.get("NOTIFY_SOCKET") or None,
        watchdog_limit_s=_watchdog_limit_s(environment, pid),
        descriptor_names=_descriptor_names(environment, pid),
        keeps_descriptors=bool(environment.get("NOTIFY_SOCKET")) and _has_store(environment, environ),
    )


def _has_store(environment: Mapping[str, str], environ: Mapping[str, str]) -> bool:
    """Return True if the unit has a descriptor store. systemd says so from 254 on; before, a unit with an invocation id
    counts."""
    if "FDSTORE" in environment:
        return _number(environment, "FDSTORE") > 0
    return "INVOCATION_ID" in environ


def _watchdog_limit_s(environment: Mapping[str, str], pid: int) -> float | None:
    if "WATCHDOG_USEC" not in environment:
        return None
    if "WATCHDOG_PID" in environment and _number(environment, "WATCHDOG_PID") != pid:
        return None
    limit_us = _number(environment, "WATCHDOG_USEC")
    if limit_us == 0:
        raise _misunderstood("WATCHDOG_USEC", "0")
    return limit_us / 1e6


def _descriptor_names(environment: Mapping[str, str], pid: int) -> tuple[str, ...]:
    if "LISTEN_FDS" not in environment or "LISTEN_PID" not in environment or _number(environment, "LISTEN_PID") != pid:
        return ()
    count = _number(environment, "LISTEN_FDS")
    if "LISTEN_FDNAMES" not in environment:
        return ("unknown",) * count
    names = tuple(environment["LISTEN_FDNAMES"].split(":")) if count else ()
    if len(names) != count:
        raise _misunderstood("LISTEN_FDNAMES", f"{environment['LISTEN_FDNAMES']} for {count} descriptors")
    return names


def _number(environment: Mapping[str, str], name: str) -> int:
    if not (environment[name].isascii() and environment[name].isdigit()):
        raise _misunderstood(name, environment[name])
    return int(environment[name])


def _misunderstood(name: str, value: str) -> HegmError:
    return HegmError(
        USAGE,
        f"the environment variable {name} is not valid: {value!r}",
        "start hegmd by its systemd unit, or unset the variable to start it by hand",
        {"variable": name, "value": value},
    )


class PassedDescriptors:
    """Owns the descriptors passed at the start until they are taken. Closing it closes the rest."""

    def __init__(self, names: Sequence[str], first: int = FIRST_PASSED_DESCRIPTOR) -> None:
        self._held: dict[str, list[int]] = {}
        for descriptor, name in enumerate(names, start=first):
            try:
                os.set_inheritable(descriptor, False)
            except OSError as error:
                raise _misunderstood("LISTEN_FDS", f"{len(names)}, but {descriptor} is not open") from error
            self._held.setdefault(name, []).append(descriptor)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names that still have descriptors here."""
        return tuple(self._held)

    def take(self, name: str) -> list[int]:
        """Return all descriptors of that name, oldest first; the caller closes them."""
        return self._held.pop(name, [])

    def take_listeners(self, name: str) -> list[socket.socket]:
        """Return the descriptors of that name as listening Unix stream sockets.

        Raises HegmError, and keeps all of them, if one is something else (an error in the socket unit).
        """
        for descriptor in self._held.get(name, []):
            if not _is_unix_listener(descriptor):
                raise HegmError(
                    USAGE,
                    f"descriptor {descriptor}, passed as {name!r}, is not a listening Unix stream socket",
                    "hegmd.socket must have a ListenStream= with a path, and Accept=no",
                    {"descriptor": descriptor, "name": name},
                )
        return [socket.socket(fileno=descriptor) for descriptor in self.take(name)]

    def close(self) -> None:
        while self._held:
            _, descriptors = self._held.popitem()
            for descriptor in descriptors:
                os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_unix_listener(descriptor: int) -> bool:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return False
    looked_at = socket.socket(fileno=descriptor)
    try:
        return (
            looked_at.family == socket.AF_UNIX
            and looked_at.type == socket.SOCK_STREAM
            and looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        )
    finally:
        looked_at.detach()


class ServiceManager:
    """The daemon's reports to the service manager. Without an address, every report does nothing.

    A report returns True if the manager has it in its queue. None raises; a failed one is logged.
    """

    def __init__(self, address: str | None) -> None:
        self._socket: socket.socket | None = None
        self._address = ""
        if address is None:
            return
        if address[0] not in "/@" or len(address) < 2:
            raise _misunderstood("NOTIFY_SOCKET", address)
        # A leading @ means the null byte of an abstract socket name.
        self._address = "\0" + address[1:] if address[0] == "@" else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @property
    def present(self) -> bool:
        return self._socket is not None

    # -- state reports -------------------------------------------------------------------------------------------------

    def ready(self, status: str = "") -> bool:
        """Report that the daemon serves: after the start and after each reload."""
        return self._report("READY=1", *_status(status))

    def reloading(self) -> bool:
        """Report a reload of the configuration, which `ready` ends. The time identifies it for Type=notify-reload."""
        return self._report("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> bool:
        return self._report("STOPPING=1", *_status(status))

    def status(self, text: str) -> bool:
        """Report one line for `systemctl status`."""
        return self._report(f"STATUS={_one_line(text)}")

    def alive(self) -> bool:
        """Feed the watchdog. Does not wait: the next report comes soon."""
        return self._report("WATCHDOG=1", limit_s=0)

    # -- descriptor store ----------------------------------------------------------------------------------------------

    def store(self, name: str, descriptors: Iterable[int]) -> bool:
        """Put copies into the descriptor store, which passes them as `name` to the next daemon.

        True: the manager has them in its queue, where they outlive this process; `barrier` waits until it has handled
        them. False: there is no manager, and nothing is stored. Beyond FileDescriptorStoreMax= of the unit, the manager
        drops descriptors and only logs it. Raises HegmError if they could not be sent; some may be stored then.
        """
        wanted = list(descriptors)
        if self._socket is None:
            return False
        # Without FDPOLL=0 the manager drops a descriptor that polls as hung up, as one of a device may.
        lines = ("FDSTORE=1", f"FDNAME={_checked_name(name)}", "FDPOLL=0")
        for start in range(0, len(wanted), DESCRIPTORS_PER_MESSAGE):
            self._hand_over(lines, wanted[start : start + DESCRIPTORS_PER_MESSAGE], self._socket)
        return True

    def unstore(self, name: str) -> bool:
        """Remove everything under `name` from the store."""
        return self._report("FDSTOREREMOVE=1", f"FDNAME={_checked_name(name)}")

    def barrier(self, limit_s: float) -> bool:
        """Wait until the manager has handled every report so far; False after the limit.

        Blocks: call it in a thread. Raises HegmError if the manager cannot be reached.
        """
        if self._socket is None:
            return True
        # The manager closes its end of this pipe when it handles the message, which must have no other field.
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self._hand_over(("BARRIER=1",), [theirs], self._socket)
            finally:
                os.close(theirs)
            poll = select.poll()
            poll.register(ours, 0)
            return bool(poll.poll(limit_s * 1000))
        finally:
            os.close(ours)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # -- sending -------------------------------------------------------------------------------------------------------

    def _report(self, *lines: str, limit_s: float = SEND_LIMIT_S) -> bool:
        if self._socket is None:
            return False
        try:
            self._send(lines, (), self._socket, limit_s)
        except OSError as error:
            log.warning("the service manager does not take %s: %s", lines[0], error.strerror or error)
            return False
        return True

    def _hand_over(self, lines: Sequence[str], descriptors: Sequence[int], to: socket.socket) -> None:
        try:
            self._send(lines, descriptors, to, SEND_LIMIT_S)
        except OSError as error:
            raise HegmError(
                UNAVAILABLE,
                f"the service manager does not take {len(descriptors)} descriptors: {error.strerror or error}",
                "run: systemctl status hegmd; and read the journal of the service manager",
                {"errno": error.errno, "descriptors": len(descriptors)},
            ) from error

    def _send(self, lines: Sequence[str], descriptors: Sequence[int], to: socket.socket, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not self._sent_without_wait(lines, descriptors, to):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise OSError(errno.EAGAIN, "its queue is full")
            _wait_writable(self._address, left_s)

    def _sent_without_wait(self, lines: Sequence[str], descriptors: Sequence[int], to: socket.socket) -> bool:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            to.sendmsg(["\n".join(lines).encode()], ancillary, socket.MSG_NOSIGNAL, self._address)
        except BlockingIOError:
            return False
        return True


def _wait_writable(address: str, limit_s: float) -> None:
    # Only a connected datagram socket can be polled for space at its receiver. Ours stays unconnected, so that a
    # manager that
    # re-executes and binds again is reached. So a second one serves for the rare wait.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as waiter:
        waiter.connect(address)
        poll = select.poll()
        poll.register(waiter, select.POLLOUT)
        poll.poll(limit_s * 1000)


def _status(text: str) -> tuple[str, ...]:
    return (f"STATUS={_one_line(text)}",) if text else ()


def _one_line(text: str) -> str:
    # A line break would end the value and start another variable.
    return " ".join(text.split())


def _checked_name(name: str) -> str:
    # sd_notify(3): printable ASCII without a colon, which separates names in LISTEN_FDNAMES.
    if not (0 < len(name) <= 255 and name.isascii() and name.isprintable() and ":" not in name):
        raise Bug("not a name for the descriptor store", facts={"name": name})
    return name
