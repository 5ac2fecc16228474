"""Errors of the conversation with the daemon, with explanations; for both libraries."""

from __future__ import annotations

from hegmd import __version__
from hegmd.errors import DISCONNECTED, INCOMPATIBLE, NO_DAEMON, TIMEOUT, HegmError, Refused
from hegmd.protocol.requests import REQUESTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hegmd.protocol.messages import Welcome

_NEEDED_START = {
    "simulate": "start a daemon with simulated GPUs, `hegmd --simulate 2x8GiB --socket PATH`, and name it with --socket"
}


class Stopping(HegmError):
    """The daemon closes the connection because it stops."""


def silent(path: str, what: str, timeout_s: float | None) -> HegmError:
    """Return the error for a missing answer. `what` was requested."""
    limit = "" if timeout_s is None else f" within {timeout_s:g} s"
    return HegmError(
        TIMEOUT,
        f"{path}: no answer to {what}{limit}",
        "try a longer --timeout, or run: journalctl -u hegmd",
        {"timeout_s": timeout_s},
    )


def gone(path: str, what: str = "") -> HegmError:
    """Return the error for a closed connection, with the request that has no answer, if any."""
    before = f" before it answered {what}" if what else ""
    # A repeated request would be refused, or undo the first one: a restarted daemon continues from its journal.
    request = REQUESTS.get(what)
    begins = request is not None and request.event is not None and request.changes_state
    next_step = "run: hegmctl ops; an operation that was started continues" if begins else "try again"
    return HegmError(
        DISCONNECTED,
        f"{path}: the daemon ended the connection{before}",
        f"{next_step}; read the log: journalctl -u hegmd",
    )


def broken(path: str, error: HegmError, welcome: Welcome | None) -> HegmError:
    """Return the error for an answer outside the protocol: from another program, or another version of hegmd."""
    if welcome is None:
        return HegmError(
            NO_DAEMON,
            f"the program that answers at {path} is not hegmd: {error.message}",
            "name the daemon's socket with --socket",
        )
    return HegmError(
        INCOMPATIBLE,
        f"hegmd {welcome.daemon_version} sent a reply that hegmctl {__version__} does not understand: {error.message}",
        _same_release(welcome.daemon_version),
    )


def refused_hello(error: HegmError) -> HegmError:
    """Return the daemon's reason for refusing the caller, with our version if that is the reason."""
    if error.code.name != INCOMPATIBLE.name:
        return error
    return HegmError(
        INCOMPATIBLE,
        f"{error.message}; this is hegmctl {__version__}",
        error.hint,
        {**error.facts, "hegmctl": __version__},
    )


def with_versions(error: HegmError, welcome: Welcome) -> HegmError:
    """Return the daemon's error. An error about versions names both, and which program is older."""
    if error.code.name != INCOMPATIBLE.name:
        return error
    versions = {"hegmctl": __version__, "hegmd": welcome.daemon_version}
    message = f"{error.message} (hegmctl {__version__}, hegmd {welcome.daemon_version})"
    return HegmError(INCOMPATIBLE, message, _same_release(welcome.daemon_version), {**error.facts, **versions})


def not_offered(capability: str, welcome: Welcome) -> HegmError:
    return Refused(
        f"hegmd {welcome.daemon_version} on {welcome.node} does not support {capability}",
        _NEEDED_START.get(capability, "run: hegmctl version"),
        {"capability": capability, "offered": list(welcome.capabilities)},
    )


def _same_release(daemon_version: str) -> str:
    client, daemon = _order(__version__), _order(daemon_version)
    if daemon < client:
        return "run: systemctl restart hegmd; the daemon is older than hegmctl"
    if daemon > client:
        return "use the hegmctl of the daemon's release: this one is older"
    return "bring hegmctl and hegmd to the same release"


def _order(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("."):
        if not (part.isascii() and part.isdigit()):
            break
        parts.append(int(part))
    return tuple(parts)
