"""Every way in which hegmd and hegmctl can fail, and what each failure looks like from outside.

One hierarchy: an error is a code, a message that says what failed on which job or device, and a hint that names the
operator's next step. All three reach the user verbatim, as text or JSON, and the code decides the exit status of
hegmctl. Standard library only, and little of that: this module is on the path of every `hegmctl` call and of every
worker's agent, so it must import in no time on Python 3.9 (which is why the codes are plain objects, not an Enum).
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Code:
    """A type of failure: its name on the wire, the exit status of hegmctl, and its meaning."""

    __slots__ = ("exit_status", "meaning", "name")

    def __init__(self, name: str, exit_status: int, meaning: str) -> None:
        self.name = name
        self.exit_status = exit_status
        self.meaning = meaning

    def __repr__(self) -> str:
        return f"<Code {self.name}>"


INTERNAL = Code("internal", 1, "a bug in hegmd or hegmctl; the log has the traceback under the reference given")
USAGE = Code("usage", 2, "the command line is wrong; no request was sent to the daemon")
NO_DAEMON = Code("no-daemon", 3, "no daemon answers at the socket")
DENIED = Code("denied", 4, "the caller is not allowed to do this")
NOT_FOUND = Code("not-found", 5, "no such process, GPU, key or operation")
REFUSED = Code("refused", 6, "understood and allowed, but not possible now; nothing was changed")
INCOMPATIBLE = Code("incompatible", 7, "daemon and caller have no protocol version or operation in common")
TIMEOUT = Code("timeout", 8, "no answer within the limit")
BUSY = Code("busy", 9, "a limit on clients or requests is reached; trying again later can work")
BAD_CONFIG = Code("bad-config", 10, "the configuration cannot be used; the previous one stays in effect")
BAD_REQUEST = Code("bad-request", 11, "the request does not have the form that the protocol defines")
DISCONNECTED = Code("disconnected", 12, "the connection ended before the answer was complete")
EXTERNAL = Code("external", 13, "another program failed")
UNAVAILABLE = Code("unavailable", 14, "a driver, library or device does not answer")
ATTENTION = Code("attention", 15, "the answer is complete and reports something that needs attention")
CANCELLED = Code("cancelled", 16, "cancelled by the caller")
# The same as in shells, env and nohup, for scripts that check it.
NOT_EXECUTABLE = Code("not-executable", 126, "the command exists and cannot be executed")
NO_COMMAND = Code("no-command", 127, "the command that was to be run was not found")

CODES: tuple[Code, ...] = (
    INTERNAL,
    USAGE,
    NO_DAEMON,
    DENIED,
    NOT_FOUND,
    REFUSED,
    INCOMPATIBLE,
    TIMEOUT,
    BUSY,
    BAD_CONFIG,
    BAD_REQUEST,
    DISCONNECTED,
    EXTERNAL,
    UNAVAILABLE,
    ATTENTION,
    CANCELLED,
    NOT_EXECUTABLE,
    NO_COMMAND,
)


def code_named(name: str) -> Code:
    """Return the code of that wire name. A newer daemon's unknown name is kept, with the exit status of `internal`."""
    for code in CODES:
        if code.name == name:
            return code
    return Code(name, INTERNAL.exit_status, "a code that this version does not know")


class HegmError(Exception):
    """A failure that is reported to a person or a program. `facts` are plain values for other programs."""

    def __init__(self, code: Code, message: str, hint: str, facts: Mapping[str, object] | None = None) -> None:
        if not message or not hint:
            raise Bug("an error was raised without a message or a hint", facts={"code": code.name})
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.facts: dict[str, object] = dict(facts or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.code.name}); {self.hint}"


class Refused(HegmError):
    """The request was understood and nothing was changed."""

    def __init__(self, message: str, hint: str, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(REFUSED, message, hint, facts)


class PeerError(HegmError):
    """The other end of a connection broke the protocol; the connection cannot continue."""


class ExternalError(HegmError):
    """Another program failed: its command, how it ended, and the end of its output."""

    def __init__(self, message: str, hint: str, *, argv: Sequence[str], status: int | None, output_tail: str) -> None:
        facts = {"argv": list(argv), "status": status, "output_tail": output_tail}
        super().__init__(EXTERNAL, message, hint, facts)
        self.argv = tuple(argv)
        self.status = status
        self.output_tail = output_tail


class Bug(HegmError):
    """Something that cannot happen happened. Never caught to be hidden: it reaches the log with its traceback."""

    def __init__(self, message: str, *, facts: Mapping[str, object] | None = None) -> None:
        super().__init__(INTERNAL, message, "report this with the daemon's log around it", facts)
