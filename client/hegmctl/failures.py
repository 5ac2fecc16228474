"""What it means when a conversation with the daemon goes wrong, in words; for both library faces."""

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
    """The daemon ends the connection because it stops."""


def silent(path: str, what: str, timeout_s: float | None) -> HegmError:
    """No answer in time. `what` was being done."""
    limit = "" if timeout_s is None else f" within {timeout_s:g} s"
    return HegmError(
        TIMEOUT,
        f"{path}: no answer to {what}{limit}",
        "give it longer with --timeout, or see what the daemon is doing: `journalctl -u hegmd`",
        {"timeout_s": timeout_s},
    )


def gone(path: str, what: str = "") -> HegmError:
    """The connection ended, with the answer to `what` outstanding if that is given."""
    before = f" before it answered {what}" if what else ""
    # To ask again would be refused, or move back what has been moved: a daemon that starts goes on from its journal.
    request = REQUESTS.get(what)
    begins = request is not None and request.event is not None and request.changes_state
    next_step = "what was begun goes on, see `hegmctl ops`" if begins else "try again"
    return HegmError(
        DISCONNECTED,
        f"{path}: the daemon ended the connection{before}",
        f"{next_step}; `journalctl -u hegmd` tells why it went away",
    )


def broken(path: str, error: HegmError, welcome: Welcome | None) -> HegmError:
    """What answers does not keep to the protocol: it is another program, or another version of hegmd."""
    if welcome is None:
        return HegmError(
            NO_DAEMON,
            f"what answers at {path} is not hegmd: {error.message}",
            "name the daemon's socket with --socket",
        )
    return HegmError(
        INCOMPATIBLE,
        f"hegmd {welcome.daemon_version} said what hegmctl {__version__} does not understand: {error.message}",
        _same_release(welcome.daemon_version),
    )


def refused_hello(error: HegmError) -> HegmError:
    """The daemon's own reason for not letting the caller in, with our version where that is the reason."""
    if error.code.name != INCOMPATIBLE.name:
        return error
    return HegmError(
        INCOMPATIBLE,
        f"{error.message}; this is hegmctl {__version__}",
        error.hint,
        {**error.facts, "hegmctl": __version__},
    )


def with_versions(error: HegmError, welcome: Welcome) -> HegmError:
    """The daemon's error; one about versions names both and says which of the two is behind."""
    if error.code.name != INCOMPATIBLE.name:
        return error
    versions = {"hegmctl": __version__, "hegmd": welcome.daemon_version}
    message = f"{error.message} (hegmctl {__version__}, hegmd {welcome.daemon_version})"
    return HegmError(INCOMPATIBLE, message, _same_release(welcome.daemon_version), {**error.facts, **versions})


def not_offered(capability: str, welcome: Welcome) -> HegmError:
    """The request needs what this daemon does not offer."""
    return Refused(
        f"hegmd {welcome.daemon_version} on {welcome.node} was not started for {capability}",
        _NEEDED_START.get(capability, "`hegmctl version` lists what it can do"),
        {"capability": capability, "offered": list(welcome.capabilities)},
    )


def _same_release(daemon_version: str) -> str:
    ours, theirs = _order(__version__), _order(daemon_version)
    if theirs < ours:
        return "the daemon is older: after an upgrade, `systemctl restart hegmd` starts the new one"
    if theirs > ours:
        return "hegmctl is older: use the one that came with the daemon"
    return "bring hegmctl and hegmd to the same release"


def _order(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("."):
        if not (part.isascii() and part.isdigit()):
            break
        parts.append(int(part))
    return tuple(parts)
